"""Numbers for charts: runs grouped by what they measured, repeats put together, and speed-up against a named baseline.

Speed-up S(k) = T(k0) / T(k), where k0 is the group's fewest workers and T the mean time of the runs that reached what
they were to reach; efficiency = S(k) * k0 / k; price index = price increase / performance increase = (k / k0) / S(k)^2,
so that below 1 more workers pay. Of runs that had a time to spend, there is no speed-up: what counts is how far they
came. Intervals are those of results/statistics.py.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model.methods import OWN
from mlbench_cli.results.analysis.comparability import UNKNOWN, ComparisonKey, conditions_of, key_of, title_of
from mlbench_cli.results.analysis.program_metrics import (
    MetricEstimates,
    MetricSummary,
    estimate_metrics,
    program_metrics,
)
from mlbench_cli.results.analysis.statistics import MAX_FIGURE, Estimate, estimate, ratio
from mlbench_cli.results.analysis.throughput import throughput_of
from mlbench_cli.results.archive.conditions import LABELS, Conditions
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.util.csv_text import format_csv
from mlbench_cli.util.text import shorten
from task_images.contract import ALL_CATEGORIES

SUCCESSFUL = ("goal_reached", "budget_spent", "completed")
IN_DOUBT = "in_doubt"  # instead of the outcome of a run whose evidence the judge doubts


@dataclass(frozen=True)
class Measurement:
    """One archive's numbers, in seconds. `parts` are rank 0's by category and add up to `seconds`.

    `seconds` counts from the first training step to the goal or the end; for a task that reports no result
    (`whole_run`) it is the time of the whole run. `value` is the goal's metric at the end of the training; `throughput`
    is samples of all ranks per second of training, waiting for data included and validation left out.
    `compiling` is the part of `seconds` in which torch compiled the model, if it did.
    `goodput` (bits per second, all ranks sending if that was measured) and `round_trip` (seconds) are those of the
    network between several network stacks; None if the ranks shared one, or nothing was measured. `metrics` are those
    that the program reported; `title` names the task, or the experiment and the command.
    """

    name: str
    source: str
    workers: int
    outcome: str
    seconds: float
    parts: Mapping[str, float]
    key: ComparisonKey
    conditions: Conditions
    value: float | None = None
    throughput: float | None = None
    goodput: float | None = None
    round_trip: float | None = None
    compiling: float | None = None
    metrics: Mapping[str, MetricSummary] = field(default_factory=dict)
    title: str = ""

    @property
    def whole_run(self) -> bool:
        """Whether `seconds` is the time of the whole run, because the task reports no result."""
        return bool(self.key.measure)

    @property
    def good(self) -> bool:
        """Whether the run succeeded, so that its time counts."""
        return self.outcome in SUCCESSFUL


@dataclass(frozen=True)
class Point:
    """All runs of a group with one number of workers: repeats. Only `good` ones count; without any, `bad` ones stand
    alone.
    """

    workers: int
    good: tuple[Measurement, ...]
    bad: tuple[Measurement, ...]

    @property
    def share(self) -> str:
        """ "2 of 5 reached it" (the goal), or "2 of 5 ended", if some did not, whose times do not count; else empty."""
        if not self.good or not self.bad:
            return ""
        what = "reached it" if self.good[0].outcome == "goal_reached" else "ended"
        return f"{len(self.good)} of {len(self.good) + len(self.bad)} {what}"

    @property
    def shown(self) -> tuple[Measurement, ...]:
        """The runs that stand for the point: the successful ones, or all others if there are none."""
        return self.good or self.bad

    @property
    def labels(self) -> tuple[str, ...]:
        """Conditions of the runs that are shown, such as "crowded", each once."""
        found = {label for run in self.shown for label in run.conditions.labels}
        return tuple(label for label in LABELS if label in found)

    @cached_property
    def seconds(self) -> Estimate:
        """Mean and interval of the time, in seconds."""
        return estimate([run.seconds for run in self.shown])

    @cached_property
    def value(self) -> Estimate | None:
        """The goal's metric at the end; None unless every run has told it."""
        return _estimate([run.value for run in self.shown])

    @cached_property
    def throughput(self) -> Estimate | None:
        """Mean and interval of samples per second; None if no run reported them."""
        return _estimate([run.throughput for run in self.shown])

    @cached_property
    def metrics(self) -> dict[str, MetricEstimates]:
        """The metrics that every run reported, each with the estimates of its last, best and mean value."""
        return estimate_metrics(run.metrics for run in self.shown)

    @cached_property
    def without_compiling(self) -> Estimate | None:
        """Mean and interval of the time less that of torch.compile, in seconds; None if nothing was compiled."""
        return _estimate([None if run.compiling is None else run.seconds - run.compiling for run in self.shown])

    @cached_property
    def goodput(self) -> Estimate | None:
        """Mean and interval of the network's bits per second; None unless every run has measured them."""
        return _estimate([run.goodput for run in self.shown])

    @cached_property
    def round_trip(self) -> Estimate | None:
        """Mean and interval of the network's round trip in seconds; None unless every run has measured it."""
        return _estimate([run.round_trip for run in self.shown])

    @cached_property
    def parts(self) -> dict[str, float]:
        """Mean seconds by category."""
        known = [name for name in ALL_CATEGORIES if any(name in run.parts for run in self.shown)]
        return {name: estimate([run.parts.get(name, 0.0) for run in self.shown]).mean for name in known}


@dataclass(frozen=True)
class Group:
    """Runs with equal keys: they differ in nothing but the number of workers and the seed.

    `label` says what sets the group apart from others; `facts` are the key's, as texts.
    """

    task: str
    label: str
    key: ComparisonKey
    points: tuple[Point, ...]
    min_runs: int = 1  # fewest runs of a size that reached what they were to reach, for a speed-up

    @cached_property
    def facts(self) -> dict[str, str]:
        """What all runs of the group share, as texts."""
        return self.key.facts()

    @property
    def titles(self) -> list[str]:
        """What the runs are for people, each once: the task, or experiments with their command."""
        return list(dict.fromkeys(run.title or self.task for point in self.points for run in point.shown))

    @property
    def metric(self) -> str:
        """Name of the goal's metric, empty if there is no goal."""
        return self.facts["metric"]

    @cached_property
    def after_time(self) -> bool:
        """Whether the runs had a time to spend, so that what counts is the metric that they came to."""
        return any(run.outcome == "budget_spent" for point in self.points for run in point.good)

    @cached_property
    def baseline(self) -> Point | None:
        """The successful point with the fewest workers; None without one, and if the runs measure throughput."""
        if self.after_time:
            return None
        return next((point for point in self.points if self.has_enough(point) and point.seconds.mean > 0), None)

    def has_enough(self, point: Point) -> bool:
        """Whether so many runs of this size succeeded that a mean of their times may stand for all."""
        return len(point.good) >= self.min_runs

    def speedup(self, point: Point) -> Estimate | None:
        """How many times faster than the baseline; None for a point without enough good runs."""
        if self.baseline is None or not self.has_enough(point):
            return None
        if point is self.baseline:
            return Estimate(len(point.good), 1.0)
        return ratio(self.baseline.seconds, point.seconds)

    @property
    def has_speedup(self) -> bool:
        """Whether at least two points have a speed-up, so that a line can be drawn."""
        return sum(self.speedup(point) is not None for point in self.points) > 1


@dataclass(frozen=True)
class Series:
    """Groups in the order of task and label. `common` are the facts that all groups share."""

    groups: tuple[Group, ...]
    common: Mapping[str, str] = field(default_factory=dict)

    @property
    def tasks(self) -> list[str]:
        """The tasks of all groups, each once."""
        return list(dict.fromkeys(group.task for group in self.groups))

    @property
    def bad(self) -> list[Measurement]:
        """The runs that did not succeed."""
        return [run for group in self.groups for point in group.points for run in point.bad]

    def to_csv(self) -> str:
        """One line per group and number of workers; seconds are means over the runs that count.

        Behind the fixed columns, each metric that the programs reported has three: its last, best and mean value.
        """
        points = [(group, point) for group in self.groups for point in group.points]
        names = list(dict.fromkeys(name for _, point in points for name in point.metrics))
        header = [*_HEADER, *(f"{name} {figure}" for name in names for figure in ("last", "best", "mean"))]
        return format_csv([header, *([*_row(group, point), *_metric_cells(point, names)] for group, point in points)])


def collect(archives: Iterable[Archive], min_runs: int = 1) -> Series:
    """The series of verified archives; an archive that is given twice counts once. `min_runs`: see Group.

    Raises UsageError for two archives of one run that differ.
    """
    return group_runs(map(measure, drop_duplicates(archives)), min_runs)


def group_runs(runs: Iterable[Measurement], min_runs: int = 1) -> Series:
    """The series of runs that were measured before, each of which is there once."""
    cells: dict[ComparisonKey, list[Measurement]] = {}
    # A run that failed early did not report its goal or data; it joins those with its settings that did.
    for run in sorted(runs, key=lambda run: (run.whole_run, run.name, run.source)):
        kin = (key for key in cells if not run.good and run.whole_run and key.covers(run.key))
        cells.setdefault(next(kin, run.key), []).append(run)
    facts = [key.facts() for key in cells]
    tasks = {fact["task"] for fact in facts}
    varying = {name for task in tasks for name in _varying([fact for fact in facts if fact["task"] == task])}
    groups = [_group(key, varying, runs, min_runs) for key, runs in cells.items()]
    common = {name: facts[0][name] for name in facts[0] if name not in _varying(facts)} if facts else {}
    return Series(tuple(sorted(groups, key=lambda group: (group.task, group.label))), common)


def drop_duplicates(archives: Iterable[Archive]) -> list[Archive]:
    """Each run once, by its id. Raises UsageError for two archives of one run that differ."""
    found: dict[str, Archive] = {}
    for archive in archives:
        earlier = found.setdefault(archive.run["id"], archive)
        if earlier is not archive and (earlier.run, earlier.result) != (archive.run, archive.result):
            raise UsageError(
                f"{earlier.path} and {archive.path} are archives of one run, {archive.run['name']}, but differ.",
                hint="Keep the one you trust; a signature shows who made it (mlbench verify --signers).",
            )
    return list(found.values())


def measure(archive: Archive) -> Measurement:
    """The numbers of one archive."""
    result, key = archive.result, key_of(archive)
    reported = result["task_seconds"]["wall"]
    parts = {name: _bound(spread["rank0"]) for name, spread in result["timings"].items() if name in ALL_CATEGORIES}
    seconds = _bound(max(reported or 0.0, sum(parts.values())) or result["wall_seconds"] or 0.0)
    parts["other"] = parts.get("other", 0.0) + seconds - sum(parts.values())
    whole_run = bool(key.measure)
    rate = None if whole_run else throughput_of(result)
    goal = result["goal"]
    value = None if not goal else goal["value"] if goal["last"] is None else goal["last"]
    network: Mapping[str, Any] = result.get("network") or {}
    apart = network.get("networks") not in (None, 1)
    return Measurement(
        archive.run["name"],
        str(archive.path),
        result["workers"],
        outcome_of(result),
        seconds,
        parts,
        key,
        conditions_of(archive),
        value=None if value is None else _bound(value),
        throughput=None if rate is None else _bound(rate[0]),
        goodput=network["together_bits_per_second"] or network["alone_bits_per_second"] if apart else None,
        round_trip=network["rtt_seconds"] if apart else None,
        compiling=_read_compiling(result, seconds),
        metrics=program_metrics(archive),
        title=title_of(archive),
    )


def _read_compiling(result: Mapping[str, Any], seconds: float) -> float | None:
    spent = (result.get("details") or {}).get("compile_seconds")
    return min(float(spent), seconds) if isinstance(spent, int | float) and spent >= 0 else None


def _bound(value: float) -> float:
    """A figure whose square and sums are still floats: a task may report any."""
    return max(-MAX_FIGURE, min(MAX_FIGURE, value))


def outcome_of(result: Mapping[str, Any]) -> str:
    """The outcome in the sense of a chart: a run that had a goal and did not prove it has not "completed", and a run
    whose evidence the judge doubts has no figures."""
    if result.get("doubts"):
        return IN_DOUBT
    if result["outcome"] == "completed" and result["goal"]:
        return "goal_missed"
    return str(result["outcome"])


def _varying(facts: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for fact in facts for name in fact)
    return [name for name in names if len({fact.get(name, "") for fact in facts}) > 1]


def _group(key: ComparisonKey, varying: Container[str], runs: Sequence[Measurement], min_runs: int) -> Group:
    facts = key.facts()
    shown = [name for name in facts if name != "task" and (name in varying or name == "backend")]
    points = []
    for workers in sorted({run.workers for run in runs}):
        here = [run for run in runs if run.workers == workers]
        points.append(
            Point(workers, tuple(run for run in here if run.good), tuple(run for run in here if not run.good))
        )
    label = ", ".join(filter(None, (describe(name, facts[name]) for name in shown)))
    return Group(key.task, label, key, tuple(points), min_runs)


def describe(name: str, value: str) -> str:
    """A fact in a few words, empty if there is nothing to say."""
    if not value:
        return ""
    if value == UNKNOWN:
        return f"{name} unknown"
    if name.startswith("parameter "):
        return f"{name.removeprefix('parameter ')}={shorten(value, 40)}"
    if name.startswith("setting "):
        return "" if name == "setting goal" else f"{name.removeprefix('setting ')}={shorten(value, 40)}"
    words = {
        "method": f"{value} method" if value == OWN else value,
        "preset": f"preset {value}" if value != "custom" else "",
        "cluster": "on this machine" if value == "local" else value,
        "code": f"code {value}",
        "image": f"image {shorten(value, 40)}",
        "data": f"data {value}",
        "division": f"{value} division" if value != "none" else "no division",
        "judge": f"judge {value}",
        "processes_per_worker": f"{value} process{'' if value == '1' else 'es'} per worker",
        "gpus_per_worker": f"{value} GPU{'' if value == '1' else 's'} per worker",
        "cpus": f"{value} CPU{'' if value == '1' else 's'} per rank",
        "goal": f"goal {value}",
        "metric": "",
        "budget": f"{value} s to spend",
    }
    return words.get(name, value)


def _estimate(values: Sequence[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return estimate(known) if known and len(known) == len(values) else None


_HEADER = [
    *(
        "task",
        "group",
        "backend",
        "device",
        "preset",
        "goal",
        "synthetic",
        "functional_only",
        "network",
        "network_bits_per_second",
        "network_rtt_seconds",
        "conditions",
        "workers",
        "runs",
        "runs_left_out",
        "outcomes",
    ),
    *("seconds_mean", "seconds_low", "seconds_high", "seconds_min", "seconds_max"),
    *(f"{name}_seconds" for name in ALL_CATEGORIES),
    *("baseline_workers", "baseline_seconds", "speedup", "speedup_low", "speedup_high", "efficiency", "price_index"),
    *("metric", "metric_mean", "metric_low", "metric_high"),
    *("samples_per_second", "samples_per_second_low", "samples_per_second_high", "archives"),
]


def _row(group: Group, point: Point) -> Iterator[Any]:
    facts, speedup, baseline = group.facts, group.speedup(point), group.baseline
    outcomes = sorted({run.outcome for run in (*point.good, *point.bad)})
    yield from (group.task, group.label, facts["backend"], facts["device"], facts["preset"], facts["goal"])
    yield from (
        "yes" if facts["synthetic"] else "no",
        "yes" if facts["label"] else "no",
        facts["network"],
        _figures(point.goodput)[0],
        _figures(point.round_trip)[0],
        " ".join(point.labels),
        point.workers,
        len(point.good),
        len(point.bad),
        " ".join(outcomes),
    )
    every = [run.seconds for run in point.shown]
    parts = (point.parts.get(name) for name in ALL_CATEGORIES)
    yield from (*_figures(point.seconds), *map(_figure, (min(every), max(every), *parts)))
    if baseline is None or speedup is None:
        yield from [""] * 7
    else:
        growth = point.workers / baseline.workers
        yield from (baseline.workers, _figure(baseline.seconds.mean), *_figures(speedup))
        yield from (_figure(speedup.mean / growth), _figure(growth / speedup.mean**2))
    yield from (group.metric, *_figures(point.value), *_figures(point.throughput))
    yield " ".join(run.name for run in (*point.good, *point.bad))


def _metric_cells(point: Point, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        found = point.metrics.get(name)
        each = (found.last, found.best, found.mean) if found else (None, None, None)
        yield from (_figures(estimate)[0] for estimate in each)


def _figures(found: Estimate | None) -> tuple[str, str, str]:
    """Mean, low and high; empty if there is none."""
    return (_figure(found.mean), _figure(found.low), _figure(found.high)) if found else ("", "", "")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
