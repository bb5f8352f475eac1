"""What a run measured of itself: calibration.json of its rank 0, and the probe of its network."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.simulator.gloo import Link, ring_seconds
from mlbench_cli.simulator.workload import CodecCost, Tensor, Workload

FILE = "output/rank-0/calibration.json"
VERSION = 1
HOW = "Measure one: mlbench run NAME 2 --task TASK --calibrate"
MIN_BYTES = 65_536  # of collectives that the model is judged by
_STEPS = 40


@dataclass(frozen=True)
class StepSample:
    """All-reduces of one size: seconds of the slowest rank."""

    size: int
    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Calibration:
    """A run's measurements. `low` and `high` are the workload at p10 and p90, `workload` at the median."""

    ranks: int
    backend: str
    cores: float
    threads: int
    batch: int
    workload: Workload
    low: Workload
    high: Workload
    collectives: tuple[StepSample, ...]
    buckets: tuple[int, ...] = ()  # bytes of the run's own messages of a step, before its codec

    @property
    def is_crowded(self) -> bool:
        """Whether the ranks had fewer cores than threads to compute with."""
        return self.ranks * self.threads > self.cores


def parse_calibration(text: bytes) -> Calibration:
    """The calibration in a file. Raises UsageError that says what is wrong with it."""
    try:
        document = json.loads(text)
        if document["schema_version"] != VERSION:
            raise UsageError(f"{FILE} has version {document['schema_version']!r}; this mlbench reads {VERSION}.")
        low, middle, high = (_workload(document, number, name) for number, name in enumerate(("p10", "p50", "p90")))
        samples = [_sample(row) for row in document["collectives"]]
        return Calibration(
            int(document["ranks"]),
            str(document["backend"]),
            _amount(document["cores"]),
            int(document["threads"]),
            int(document["batch"]),
            middle,
            low,
            high,
            tuple(samples),
            tuple(int(_amount(size)) for size in document.get("buckets", ())),
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UsageError(f"{FILE} is not a calibration: {error!r}.", hint=HOW) from None


def find_link(calibration: Calibration, network: Mapping[str, Any] | None) -> tuple[Link, float]:
    """The ranks' link and the mean relative error of gloo's model with it on the run's own collectives.

    From the probe (`network` of result.json) if the ranks had separate networks; else fitted to the collectives.
    Raises UsageError if there is neither.
    """
    probed = read_probe(network)
    if probed is not None:
        return probed, model_error(calibration, probed)
    if len(calibration.collectives) < 2:
        raise UsageError("The run has measured neither collectives nor a network.", hint=HOW)
    link = _fit(calibration)
    return link, model_error(calibration, link)


def read_probe(network: Mapping[str, Any] | None) -> Link | None:
    """The ranks' link as the probe found it (`network` of result.json); None if they shared one network stack."""
    if not network or (network.get("networks") or 0) < 2 or not network.get("rtt_seconds"):
        return None
    rate = network.get("together_bits_per_second") or network.get("alone_bits_per_second")
    return Link(float(network["rtt_seconds"]) / 2, 8 / float(rate)) if rate else None


def model_error(calibration: Calibration, link: Link) -> float:
    """Mean relative error of the model's all-reduces of 64 KiB and more; 0 if none was measured."""
    errors = [
        abs(ring_seconds(calibration.ranks, sample.size, link) / sample.middle - 1)
        for sample in calibration.collectives
        if sample.size >= MIN_BYTES and sample.middle > 0
    ]
    return sum(errors) / len(errors) if errors else 0.0


def _fit(calibration: Calibration) -> Link:
    """The link with which the model gives the smallest and the largest all-reduce."""
    small = min(calibration.collectives, key=lambda sample: sample.size)
    large = max(calibration.collectives, key=lambda sample: sample.size)

    def seconds(sample: StepSample, alpha: float, beta: float) -> float:
        return ring_seconds(calibration.ranks, sample.size, Link(alpha, beta))

    alpha, beta = 1e-5, 1e-10
    for _ in range(6):
        alpha = solve(partial(seconds, small, beta=beta), small.middle, 0.0, 1.0)
        beta = solve(partial(seconds, large, alpha), large.middle, 1e-13, 1e-5)
    return Link(alpha, beta)


def solve(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a growing function has the value `target`, between `low` and `high`, by bisection."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2


def _workload(document: Mapping[str, Any], number: int, name: str) -> Workload:
    """The workload at one percentile; readiness never falls."""
    tensors, now = [], 0.0
    for row in document["tensors"]:
        now = max(now, _amount(row[f"ready_{name}"]))
        tensors.append(Tensor(str(row["name"]), int(row["bytes"]), now, int(row.get("rows", 0))))
    phases = {key: _phase(document[key], number) for key in ("forward", "backward", "optimizer")}
    return Workload(
        tuple(tensors),
        phases["forward"],
        max(phases["backward"], now),
        phases["optimizer"],
        _phase(document.get("data", (0.0,) * 3), number),
        _overlap(document.get("overlap")),
        tuple(map(read_codec, document.get("codecs", ()))),
    )


def read_codec(row: Mapping[str, Any]) -> CodecCost:
    """A row of the calibration's codecs. Raises ValueError, KeyError or TypeError if it is none."""
    size = max(1.0, _amount(row["bytes"]))
    return CodecCost(str(row["method"]), int(row["ranks"]), _amount(row["before"]) / size, _amount(row["after"]) / size)


def _overlap(document: Mapping[str, Any] | None) -> float:
    """Seconds that computation loses for each second of messages beside it; 0 if that was not measured."""
    if document is None:
        return 0.0
    alone, beside, communicated = (_amount(document[name]) for name in ("alone", "beside", "communicated"))
    return min(1.0, max(0.0, beside - alone) / communicated) if communicated else 0.0


def _sample(row: Mapping[str, Any]) -> StepSample:
    return StepSample(int(row["bytes"]), _amount(row["p10"]), _amount(row["p50"]), _amount(row["p90"]))


def _phase(values: Sequence[Any], number: int) -> float:
    return _amount(values[number])


def _amount(value: Any) -> float:
    if not is_finite_number(value) or value < 0:
        raise ValueError(f"{value!r} is not an amount")
    return float(value)
