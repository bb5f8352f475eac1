"""From a calibration to steps at other sizes, on other networks and with other methods, each with an interval."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypedDict

from mlbench_cli.errors import UsageError
from mlbench_cli.model.network import NetworkShape, format_rate, format_seconds
from mlbench_cli.simulator.calibration import HOW, Calibration
from mlbench_cli.simulator.collectives import Collectives, GlooCollectives, NcclCollectives, Topology
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.simulator.step import Step, simulate_step
from mlbench_cli.simulator.stragglers import find_slowdown
from task_images.comm.methods import Method
from task_images.comm.presets import resolve

MAX_RANKS = 10_000
MAX_GROWTH = 4  # times the calibrated ranks; further is extrapolated
# How much shorter and longer than predicted a step may be, for the model's own part: on the measured network and size,
# on others, beyond MAX_GROWTH. The widths are estimates. The last two are asymmetric because most steps that were
# checked took longer than predicted: late packets, and more ranks that wait for the slowest.
REPLAY_ERROR, OTHER_ERROR, FAR_ERROR = (0.05, 0.05), (0.10, 0.20), (0.15, 0.50)
INSIDE_LINKS = {"nvlink": Link(2e-6, 8 / 2.4e12), "pcie": Link(5e-6, 8 / 1e11)}
BUCKETS = ("1MiB", "4MiB", "25MiB", "100MiB")
ADVISED = ("wfbp", "fusion", "mgwfbp", "optfusion", "bytescheduler", "dear", "fp16")


class PredictionDocument(TypedDict):
    """A prediction as JSON: seconds of a step with their interval, and its parts."""

    method: str
    workers: int
    network: str
    step_seconds: float
    low_seconds: float
    high_seconds: float
    efficiency: float
    exposed_seconds: float
    sent_bytes: float
    messages: int
    samples_per_second: float
    basis: str


@dataclass(frozen=True)
class Scenario:
    """What is asked for. `network` None: that of the run; `nodes` and `per_node` None: one rank per node.

    `probed`: the link of another run's network, as its probe found it, in place of `network`.

    `buckets`: bytes of the method's messages, if they are known from a run with it.
    """

    ranks: int
    method: Method
    network: NetworkShape | None = None
    nodes: int | None = None
    per_node: int | None = None
    inside: str = "pcie"
    oversubscription: float = 1.0
    servers: int | None = None
    backend: str = "gloo"
    spread: float = 0.0  # of the ranks' computing times, see `stragglers`
    buckets: tuple[int, ...] = ()
    probed: Link | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is on another network than the calibrated run's."""
        return self.network is not None or self.probed is not None

    @property
    def network_text(self) -> str:
        """The network in a word."""
        if self.probed is not None:
            return f"{format_rate(8 / self.probed.beta)},{format_seconds(self.probed.alpha)} (probed)"
        return str(self.network or "as measured")


@dataclass(frozen=True)
class Prediction:
    """`step` at the medians; `low` and `high` seconds: the calibration's spread and the model's own error, added."""

    scenario: Scenario
    step: Step
    low: float
    high: float
    basis: str
    batch: int

    def to_dict(self) -> PredictionDocument:
        """The prediction as `mlbench predict -o json` prints it."""
        step = self.step
        return {
            "method": self.scenario.method.name,
            "workers": self.scenario.ranks,
            "network": self.scenario.network_text,
            "step_seconds": step.seconds,
            "low_seconds": self.low,
            "high_seconds": self.high,
            "efficiency": step.efficiency,
            "exposed_seconds": step.exposed,
            "sent_bytes": step.sent_bytes,
            "messages": step.messages,
            "samples_per_second": self.scenario.ranks * self.batch / step.seconds,
            "basis": self.basis,
        }


def predict(calibration: Calibration, link: Link, error: float, scenario: Scenario) -> Prediction:
    """The step of a scenario. `link` and its model `error` are those of the run. Raises UsageError for what the
    calibration does not support, with what to measure."""
    basis, (shorter, longer) = _judge(calibration, scenario)
    slower = find_slowdown(scenario.method, scenario.ranks, scenario.spread)
    shaped = scenario.network and Link(scenario.network.delay, scenario.network.seconds_per_byte)
    used = scenario.probed or shaped or link
    steps = [
        simulate_step(
            workload.scale(slower),
            scenario.method,
            _collectives(scenario, Link(used.alpha * factor, used.beta * factor, used.overhead * factor)),
            scenario.servers,
            scenario.buckets,
        )
        for workload, factor in (
            (calibration.low, 1 - min(error, 0.9)),
            (calibration.workload, 1.0),
            (calibration.high, 1 + error),
        )
    ]
    low, high = steps[0].seconds * (1 - shorter), steps[2].seconds * (1 + longer)
    return Prediction(scenario, steps[1], low, high, basis, calibration.batch)


def _judge(calibration: Calibration, scenario: Scenario) -> tuple[str, tuple[float, float]]:
    """How far the calibration carries a scenario: in a word, and as the model's relative error down and up. Raises
    UsageError."""
    if not 1 <= scenario.ranks <= MAX_RANKS:
        raise UsageError(f"{scenario.ranks} workers: a prediction is for 1 to {MAX_RANKS}.")
    if calibration.is_crowded:
        raise UsageError(
            f"The calibration had {calibration.ranks} ranks of {calibration.threads} threads on {calibration.cores:g} "
            "cores: its times mostly reflect the scheduler, so they carry no prediction.",
            hint="Measure with at most one thread for each core: fewer workers, or --num-cpus 1.",
        )
    if scenario.backend == "nccl" and not scenario.is_elsewhere:
        raise UsageError("NCCL on another topology needs its network.", hint="--network 100gbit,10us --topology 4x8")
    if not scenario.is_elsewhere and calibration.ranks < 2:
        raise UsageError("A run of one worker has no network.", hint="Name one: --network 10gbit,50us")
    if not scenario.is_elsewhere and scenario.ranks == calibration.ranks:
        return "replay", REPLAY_ERROR
    if scenario.ranks > MAX_GROWTH * calibration.ranks:
        if not scenario.is_elsewhere:
            raise UsageError(
                f"{scenario.ranks} workers are more than {MAX_GROWTH} times the {calibration.ranks} that were timed.",
                hint=f"Name the network that joins them: --network 10gbit,50us. {HOW}",
            )
        return "extrapolated", FAR_ERROR
    return "predicted", OTHER_ERROR


def _collectives(scenario: Scenario, link: Link) -> Collectives:
    per_node = scenario.per_node or 1
    nodes = scenario.nodes or scenario.ranks // per_node
    inside = INSIDE_LINKS[scenario.inside]
    if scenario.backend == "nccl":
        return NcclCollectives(Topology(nodes, per_node, inside, link, scenario.inside, scenario.oversubscription))
    # gloo knows no nodes: its ring is flat. One rank of a node sends to another node, so that ranks do not share links,
    # and all wait for the slowest link in every round.
    slowest = inside if nodes == 1 and per_node > 1 else link
    return GlooCollectives(
        scenario.ranks, replace(slowest, beta=slowest.beta * (scenario.oversubscription if nodes > 2 else 1.0))
    )


@dataclass(frozen=True)
class Advice:
    """One change and what it would gain: relative to the step as it is, per sample."""

    change: str
    command: str
    seconds: float
    gain: float


MIN_LATENCY = 1e-6  # seconds one way; calibrations resolve nothing shorter


def advise(calibration: Calibration, link: Link, error: float, scenario: Scenario) -> list[Advice]:
    """What would help most, best first. Changes that gain less than 1 %, or no more than the model's error, are left
    out: nobody can tell whether they would gain anything."""
    base = predict(calibration, link, error, scenario).step.seconds
    found = []
    for change, command, changed, work in _changes(scenario, link):
        workload = calibration if work == 1 else _with_more_work(calibration, work)
        seconds = predict(workload, link, error, changed).step.seconds
        gain = base * work / seconds - 1
        if gain >= 0.01 and gain > error:
            found.append(Advice(change, command, seconds, gain))
    return sorted(found, key=lambda advice: -advice.gain)


def _changes(scenario: Scenario, link: Link) -> Iterator[tuple[str, str, Scenario, float]]:
    for name in ADVISED:
        if name != scenario.method.name:
            yield f"method {name}", f"--method {name}", replace(scenario, method=resolve(name), buckets=()), 1.0
    for bucket in BUCKETS:
        method = replace(resolve("fusion"), plan=f"threshold:{bucket}")
        options = f"--method fusion --set comm.plan=threshold:{bucket}"
        yield f"buckets of {bucket}", options, replace(scenario, method=method, buckets=()), 1.0
    rate, delay = 8 / link.beta, max(link.alpha, MIN_LATENCY)
    if scenario.network is not None:
        rate, delay = scenario.network.rate, scenario.network.delay
    elif scenario.probed is not None:
        rate, delay = 8 / scenario.probed.beta, max(scenario.probed.alpha, MIN_LATENCY)
    faster = NetworkShape(float(f"{min(10 * rate, 1e14):.2g}"), float(f"{delay:.2g}"))
    yield f"a network of {faster}", f"--network {faster}", replace(scenario, network=faster, probed=None), 1.0
    yield "twice the samples in each step", "--set batch_size=…", scenario, 2.0


def _with_more_work(calibration: Calibration, factor: float) -> Calibration:
    """The same with `factor` times the computation in each step; the update costs the same."""
    workloads = [
        replace(workload.scale(factor), optimizer=workload.optimizer)
        for workload in (calibration.low, calibration.workload, calibration.high)
    ]
    low, middle, high = workloads
    return replace(calibration, workload=middle, low=low, high=high, batch=int(calibration.batch * factor))
