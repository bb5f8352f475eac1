"""From what an update took in finished runs to what it would take elsewhere, with an interval and its basis."""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import fmean
from typing import Any, NamedTuple, Self

from mlbench_cli.errors import UsageError
from mlbench_cli.model.network import NetworkShape
from mlbench_cli.model.run import LOCAL
from mlbench_cli.predict.cost import update_cost
from mlbench_cli.results.archive.evidence import read_amount
from task_images.methods.base import Method, MethodError, Sent
from task_images.methods.catalog import find_class, make_method

MAX_WORKERS = 100_000
FAR = 4  # times the ranks of the largest run; beyond that, predictions are extrapolated
FP32_BYTES = 4
HINT = "Predictions need a training of the catalog: mlbench tasks"


class Basis(StrEnum):
    """What a prediction rests on: a run of this very setting, the formula, or the formula far from any run.

    `spread`: an update is predicted to take between the figure divided by it and the figure times it. From
    `benchmarks/predict.py`: at least 90 % of the held-out runs of the published archives are within.
    """

    spread: float
    meaning: str

    MEASURED = "measured", 1.10, "as measured in this setting"
    SCALED = "scaled", 1.35, "measured computing, and the method's formula for its messages"
    EXTRAPOLATED = "extrapolated", 2.0, "the same, far beyond any run"

    def __new__(cls, value: str, spread: float, meaning: str) -> Self:
        basis = str.__new__(cls, value)
        basis._value_, basis.spread, basis.meaning = value, spread, meaning
        return basis


class Link(NamedTuple):
    """A link between two workers: bits per second, and seconds of a round trip."""

    rate: float
    round_trip: float

    @classmethod
    def of_shape(cls, shape: NetworkShape) -> "Link":
        """A link with the nominal values of `--network`."""
        return cls(shape.rate, 2 * shape.delay)


LOOPBACK = Link(2e10, 5e-5)  # between processes of one machine, about; it is not measured


class Measured(NamedTuple):
    """What an update took in one run, in seconds, on the mean of its ranks.

    computing       everything but communication and validation
    exposed, hidden communication that the update waited for, and that ran beside the computation
    messages, bytes handed to collectives by a rank
    samples         of all ranks in an update; `fixed_batch`: the same with any number of workers
    link            as the run's probe found it; None for one rank, or if the probe failed
    to_goal         updates until the goal; None if it was not reached
    per_hour        price of a worker; None if unknown
    """

    name: str
    task: str
    method: Method
    ranks: int
    ranks_per_worker: int
    computing: float
    exposed: float
    hidden: float
    messages: float
    bytes: float
    parameters: int
    samples: float
    fixed_batch: bool
    link: Link | None
    to_goal: float | None
    per_hour: float | None
    machine: str
    device: str

    @property
    def communication(self) -> float:
        """Seconds of communication in an update, hidden or not."""
        return self.exposed + self.hidden


def measure(run: Mapping[str, Any], result: Mapping[str, Any], environment: Mapping[str, Any]) -> Measured:
    """Read the documents of an archive. Raises UsageError with the reason if they do not tell what an update took."""
    try:
        return _measure(run, result, environment)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise UsageError(
            f"{run['name']} does not tell what an update took: its result is not as tasks write it ({error!s:.80}).",
            hint=HINT,
        ) from None


def _measure(run: Mapping[str, Any], result: Mapping[str, Any], environment: Mapping[str, Any]) -> Measured:
    name, spec, details, updates = str(run["name"]), run["spec"], result["details"], result.get("updates")
    phases = {phase: float(value["mean"]) for phase, value in (result.get("timings") or {}).items()}
    samples, spent = read_amount(details.get("global_batch")), sum(phases.values()) - phases.get("validation", 0.0)
    if not updates or spent <= 0 or not samples:
        raise UsageError(
            f"{name} does not tell what an update took: it reports no updates with their phases and batch size.",
            hint=HINT,
        )
    method, ranks = _method_of(name, spec), int(result["world_size"])
    if ranks > 1 and (method.mixed or "communication" not in phases):
        raise UsageError(
            f"{name} communicates inside the backward pass ({method.name}), so its computing time is unknown.",
            hint="Predict from a run with 1 worker, or with another method, e.g. --method bsp",
        )
    counted = details.get("communication") or {}
    per_update = {key: (read_amount(counted.get(key)) or 0.0) / updates for key in ("messages", "bytes")}
    if ranks == 1:  # it sent nothing: one message of all gradients, as the task's own method would
        per_update = {"messages": 1.0, "bytes": FP32_BYTES * (read_amount(details.get("parameters")) or 0.0)}
    exposed = phases.get("communication", 0.0) / updates
    computing = sum(seconds for phase, seconds in phases.items() if phase not in ("communication", "validation"))
    goal = result.get("goal") or {}
    workers, price = int(spec["workers"]), read_amount((spec.get("price") or {}).get("per_hour"))
    parameters = spec.get("parameters") or {}
    return Measured(
        name=name,
        task=str(result["task"]),
        method=method,
        ranks=ranks,
        ranks_per_worker=max(1, ranks // workers),
        computing=computing / updates,
        exposed=exposed,
        hidden=(read_amount(counted.get("hidden_seconds")) or 0.0) / updates,
        messages=per_update["messages"],
        bytes=per_update["bytes"],
        parameters=int(read_amount(details.get("parameters")) or 0),
        samples=float(samples),
        fixed_batch="global_batch" in parameters,
        link=_link_of(result, workers) if ranks > 1 else None,
        to_goal=float(updates) if goal.get("reached") else None,
        per_hour=None if price is None else float(price) / workers,
        machine=str(spec.get("cluster_kind") or ""),
        device=str((environment["ranks"].get("0") or {}).get("device_name") or "")
        if result.get("device") == "cuda"
        else "",
    )


def _method_of(name: str, spec: Mapping[str, Any]) -> Method:
    """The run's method; without one the task's own: one message after the backward pass, or torch's DDP."""
    given = spec.get("method") or {"name": "ddp" if str(spec.get("task")).endswith("_ddp") else "bsp"}
    if "file" in given:
        raise UsageError(
            f"{name} used a method from the file {given['file']}, which is not loaded.",
            hint="Install the method's package, and run the training with --method NAME.",
        )
    try:
        # Which collectives a method uses does not depend on options of other versions.
        known = find_class(str(given.get("name"))).list_options()
        return make_method({key: str(value) for key, value in given.items() if key == "name" or key in known})
    except MethodError as error:
        raise UsageError(f"The method of {name} is unknown here: {error.reason}.") from None


def _link_of(result: Mapping[str, Any], workers: int) -> Link | None:
    probe = result.get("network") or {}
    if not probe and (result.get("engine") == LOCAL.provider or workers == 1):
        return LOOPBACK
    rate = probe.get("together_bits_per_second") or probe.get("alone_bits_per_second")
    trip = probe.get("rtt_seconds")
    return Link(float(rate), float(trip)) if rate and trip is not None else None


class Prediction(NamedTuple):
    """An update with `workers`: computing, communication that it waits for, and the sum with its interval.

    global_batch        samples of all ranks in an update
    seconds_to_goal     with as many samples as in the runs; None without a goal. `is_lower_bound`: at least that, since
                        a larger batch needs more
    price_usd           of the time to the goal, or of an hour without a goal; None if unknown
    """

    method: str
    workers: int
    update_seconds: float
    low_seconds: float
    high_seconds: float
    computing_seconds: float
    exposed_seconds: float
    samples_per_second: float
    global_batch: float
    seconds_to_goal: float | None
    is_lower_bound: bool
    price_usd: float | None
    basis: Basis


def predict(
    runs: Sequence[Measured], workers: int, link: Link | None = None, per_hour: float | None = None
) -> Prediction:
    """An update of `workers` from `runs`, which are repeats or sizes of one setting.

    `link` is that of the runs unless given; `per_hour` is the price of a worker, None if unknown. Raises UsageError if
    the runs cannot tell.
    """
    if not 1 <= workers <= MAX_WORKERS:
        raise UsageError(f"--workers takes numbers from 1 to {MAX_WORKERS}.")
    ranks = workers * runs[0].ranks_per_worker
    nearest = min({one.ranks for one in runs}, key=lambda known: (abs(math.log(known / ranks)), -known))
    same = [one for one in runs if one.ranks == nearest]
    base = same[0]
    share = ranks / base.ranks
    per_rank = 1 / share if base.fixed_batch else 1.0
    samples = base.samples if base.fixed_batch else base.samples * share
    computing = fmean(one.computing for one in same) * per_rank
    exposed = fmean(_waits(one, ranks, link, computing) for one in same)
    seconds = computing + exposed
    if ranks == base.ranks and link is None:
        basis = Basis.MEASURED
    else:
        is_far = ranks > FAR * base.ranks or (base.ranks == 1 and ranks > 1)
        basis = Basis.EXTRAPOLATED if is_far else Basis.SCALED
    reached = [one.samples * one.to_goal for one in runs if one.to_goal is not None and one.samples == base.samples]
    to_goal = fmean(reached) / samples * seconds if reached else None
    price = None if per_hour is None else per_hour * workers * (1.0 if to_goal is None else to_goal / 3600)
    return Prediction(
        method=base.method.name,
        workers=workers,
        update_seconds=seconds,
        low_seconds=seconds / basis.spread,
        high_seconds=seconds * basis.spread,
        computing_seconds=computing,
        exposed_seconds=exposed,
        samples_per_second=samples / seconds,
        global_batch=samples,
        seconds_to_goal=to_goal,
        is_lower_bound=to_goal is not None and samples > base.samples,
        price_usd=price,
        basis=basis,
    )


def _waits(one: Measured, ranks: int, link: Link | None, computing: float) -> float:
    """Seconds that an update of `ranks` waits for communication.

    The formula's time on the link, plus what `one` took beyond the formula on its own link: compression, copies, and
    ranks that wait for each other. As much as `one` hid behind its computation is hidden again; if it hid nearly all,
    up to the whole computing time may be.
    """
    if ranks < 2:
        return 0.0
    if link is None and ranks == one.ranks:
        return one.exposed
    known = one.link
    target = link or known
    if target is None:
        raise UsageError(
            f"No network was measured in {one.name}.",
            hint="Name one, e.g. --network 10gbit,50us, or predict from a run with several workers",
        )
    overhead = 0.0
    if known is not None:
        overhead = max(0.0, one.communication - _on_link(one, one.ranks, known))
    total = _on_link(one, ranks, target) + overhead
    hides_all = one.hidden > 0 and one.exposed < 0.1 * one.hidden
    window = computing if hides_all else one.hidden
    return max(0.0, total - window)


def _on_link(one: Measured, ranks: int, link: Link) -> float:
    """Seconds of an update's messages among `ranks`: a round trip each round, since receivers ask for their parts, and
    the bytes of the busiest link."""
    cost = update_cost(one.method, Sent(one.messages, one.bytes, one.parameters), ranks)
    return cost.rounds * link.round_trip + 8 * cost.volume / link.rate
