"""The numbers of a run: `figures(archive)` is the only place that computes them.

    seconds        from the first training step to the goal or the end; of a program that reports no result, of the run
    run, training  the whole run; training alone
    computation... rank 0's time by category; with "other" they add up to `seconds`
    throughput     samples per second of all ranks
    METRIC         every metric that the program reports: its last value, "METRIC best" and "METRIC mean"; one with the
                   name of another figure is "reported METRIC"

and cost, bytes sent, energy, the network between machines, and the curves of collectives, each where it was measured.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.model.goals import Goal, is_finite_number
from mlbench_cli.results.analysis import collectives, energy
from mlbench_cli.results.analysis.numbers import unit_of
from mlbench_cli.results.analysis.program_metrics import MetricSummary, MetricTally
from mlbench_cli.results.analysis.stats import MAX_FIGURE
from mlbench_cli.results.archive.files import Archive
from task_images.contract import ALL_CATEGORIES

SECONDS = "seconds"
THROUGHPUT = "throughput"
COST = "cost"
SENT = "bytes sent"  # by rank 0, as its method counts them
UNCOMPILED = "seconds without compiling"
BANDWIDTH, ROUND_TRIP = "network bandwidth", "network round trip"
TIMES = (SECONDS, "run", "training")
SUCCESSFUL = ("goal_reached", "budget_spent", "completed")
UNREACHED = ("goal_missed", "deadline")  # of a run with a goal: it would have needed more time, nobody knows how much
IN_DOUBT = "in_doubt"  # instead of the outcome of a run whose evidence the judge doubts


class Figure(Struct, frozen=True):
    """One number of a run. `higher_is_better` is None if it is unknown; `is_metric`: the program reported it."""

    value: float
    unit: str = ""
    higher_is_better: bool | None = False
    is_metric: bool = False

    @property
    def is_time(self) -> bool:
        """Whether it is seconds of the run, of which rows say "faster" and "slower"."""
        return self.unit == "s" and not self.is_metric and self.higher_is_better is False


def figures(archive: Archive) -> dict[str, Figure]:
    """Every number of a run by its name, whatever became of the run: times first, then rates, then metrics."""
    own = {
        name: replace(found, value=_bound(found.value))
        for name, found in _own_figures(archive)
        if math.isfinite(found.value)
    }
    reported = {
        name: Figure(value, summary.unit, summary.higher_is_better, is_metric=True)
        for metric, summary in program_metrics(archive).items()
        for name, value in summary.figures(metric)
        if name not in own
    }
    return {**own, **reported}


_known: "WeakKeyDictionary[Archive, dict[str, MetricSummary]]" = WeakKeyDictionary()


def program_metrics(archive: Archive) -> dict[str, MetricSummary]:
    """The figures of every metric that rank 0 reported, by the names that they have everywhere."""
    if archive not in _known:
        tally = MetricTally()
        for row in archive.metrics():
            name, value = row.get("name"), row.get("value")
            if row.get("rank") == 0 and isinstance(name, str) and (is_finite_number(value) or isinstance(value, str)):
                tally.take(name, value if isinstance(value, str) else float(value), row.get("unit"))
        goal = archive.result["goal"]
        found = tally.summarize(Goal(goal["metric"], goal["comparison"], goal["threshold"]) if goal else None)
        taken = {name for name, _ in _own_figures(archive)} - {goal["metric"] if goal else None}
        _known[archive] = {f"reported {name}" if name in taken else name: each for name, each in found.items()}
    return _known[archive]


def _own_figures(archive: Archive) -> Iterator[tuple[str, Figure]]:
    result = archive.result
    seconds, details = seconds_of(result), result.get("details") or {}
    if seconds is not None:
        yield SECONDS, Figure(seconds, "s")
    for name, value in (("run", result["wall_seconds"]), ("training", result["task_seconds"]["training"])):
        if value is not None:
            yield name, Figure(value, "s")
    compiling = details.get("compile_seconds")
    if seconds is not None and is_finite_number(compiling) and compiling >= 0:
        yield UNCOMPILED, Figure(seconds - min(float(compiling), seconds), "s")
    for name, value in _parts(result, seconds or 0.0):
        yield name, Figure(value, "s")
    goal = result["goal"]
    value = None if not goal else goal["value"] if goal["last"] is None else goal["last"]
    if goal and value is not None:
        yield goal["metric"], Figure(value, unit_of(goal["metric"]), goal["comparison"] == ">=")
    rate = None if reports_nothing(result) else throughput_of(result)
    if rate is not None:
        yield THROUGHPUT, Figure(rate[0], f"{rate[1]}/s", True)
    price: Mapping[str, Any] = result.get("price") or {}
    if is_finite_number(price.get("amount")):
        yield COST, Figure(float(price["amount"]), str(price.get("currency") or ""))
    communication = details.get("communication")
    counts = communication if isinstance(communication, Mapping) else {}
    sent = counts.get("wire_bytes", counts.get("bytes"))
    if is_finite_number(sent) and sent > 0:
        yield SENT, Figure(float(sent), "B")
    for name, joules in energy.figures_of(archive).items():
        yield name, Figure(joules, "J")
    network: Mapping[str, Any] = result.get("network") or {}
    if network.get("networks") not in (None, 1):
        bits = network["together_bits_per_second"] or network["alone_bits_per_second"]
        if bits is not None:
            yield BANDWIDTH, Figure(bits, "bit/s", True)
        if network["rtt_seconds"] is not None:
            yield ROUND_TRIP, Figure(network["rtt_seconds"], "s")
    for name, value in collectives.figures_of(archive).items():
        yield name, Figure(value, unit_of(name), not name.endswith("alpha us"))


def seconds_of(result: Mapping[str, Any]) -> float | None:
    """From the first training step to the goal or the end, as the task reports it; else the time of the whole run."""
    reported = result["task_seconds"]["wall"] or 0.0
    known = sum(_bound(spread["rank0"]) for name, spread in result["timings"].items() if name in ALL_CATEGORIES)
    found = max(reported, known) or result["wall_seconds"]
    return None if found is None else _bound(found)


def listed_seconds(result: Mapping[str, Any]) -> float | None:
    """The time of a run in lists of runs: its figure `seconds`; of a failed run only what its task reported."""
    return seconds_of(result) if outcome_of(result) in SUCCESSFUL else result["task_seconds"]["wall"]


def reports_nothing(result: Mapping[str, Any]) -> bool:
    """Whether the program reports no result, so that its time is that of the whole run."""
    return result["task_seconds"]["wall"] is None and not result["timings"]


def _parts(result: Mapping[str, Any], seconds: float) -> Iterator[tuple[str, float]]:
    """Rank 0's seconds by category; "other" is what is left."""
    timings = result["timings"]
    if not timings:
        return
    parts = {name: _bound(timings[name]["rank0"]) for name in ALL_CATEGORIES if name in timings}
    parts["other"] = parts.get("other", 0.0) + seconds - sum(parts.values())
    yield from parts.items()


def throughput_of(result: Mapping[str, Any]) -> tuple[float, str] | None:
    """The samples per second of all ranks, and what they are; None if the run counted none.

    With the throughput protocol it is the mean of the timed blocks. Otherwise it is all samples over the seconds of
    training: with waiting for data, without validation.
    """
    details, samples = result.get("details") or {}, result.get("samples")
    protocol = details.get("throughput_protocol")
    rates = protocol.get("rates") if isinstance(protocol, Mapping) else None
    if isinstance(protocol, Mapping) and isinstance(rates, list) and rates and all(map(is_finite_number, rates)):
        return math.fsum(map(_bound, rates)) / len(rates), str(protocol.get("unit", "samples"))
    timings = {name: spread["rank0"] for name, spread in (result.get("timings") or {}).items()}
    wall = (result.get("task_seconds") or {}).get("wall") or math.fsum(timings.values())
    training = wall - timings.get("validation", 0.0)
    return (samples / training, "samples") if samples and training > 0 else None


def outcome_of(result: Mapping[str, Any]) -> str:
    """The outcome for comparisons: a run that had a goal and did not prove it has not "completed", and a run whose
    evidence the judge doubts has no figures."""
    if result.get("doubts"):
        return IN_DOUBT
    if result["outcome"] == "completed" and result["goal"]:
        return "goal_missed"
    return str(result["outcome"])


def _bound(value: float) -> float:
    """A figure whose square and sums are still floats: a task may report any."""
    return max(-MAX_FIGURE, min(MAX_FIGURE, value))
