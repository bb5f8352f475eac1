"""Numbers for charts: runs grouped by what they measured, repeats put together, and speedup against a named baseline.

Speedup S(k) = T(k0) / T(k), where k0 is the group's fewest workers and T the mean time of the successful runs;
efficiency = S(k) * k0 / k; price index = price increase / performance increase = (k / k0) / S(k)^2, so that below 1
more workers pay. Runs with a time budget have no speedup: what counts is the metric that they reached. Means and
intervals are those of stats.py, and a speedup is the row of `mlbench compare` turned around.

The runs of an experiment's file are grouped by the settings that the file varies instead (`make_rows`). A speedup is
only given beside a baseline of one worker that was measured in the same experiment, by the same settings, or by the
same settings but for the method if a method has none of its own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from mlbench_cli.errors import UsageError
from mlbench_cli.model.goals import BEST, MEAN
from mlbench_cli.results.analysis.comparability import (
    ComparisonKey,
    Title,
    conditions_of,
    describe,
    key_of,
    title_of,
)
from mlbench_cli.results.analysis.figures import (
    BANDWIDTH,
    ROUND_TRIP,
    SECONDS,
    SUCCESSFUL,
    THROUGHPUT,
    UNCOMPILED,
    UNREACHED,
    Figure,
    figures,
    outcome_of,
    program_metrics,
)
from mlbench_cli.results.analysis.numbers import SAMPLES_PER_SECOND
from mlbench_cli.results.analysis.published import PublishedSeries
from mlbench_cli.results.analysis.sessions import Moment, find_sessions, moment_of, relate
from mlbench_cli.results.analysis.stats import Estimate, Ratio, estimate, ratio
from mlbench_cli.results.archive.conditions import Conditions
from mlbench_cli.results.archive.documents import LABELS
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.csv_text import format_csv
from mlbench_cli.util.text import list_some
from task_images.contract import ALL_CATEGORIES


class Measurement(Struct, frozen=True):
    """One run: its numbers (figures.py), and what it may be compared with. `title` names the task, or the experiment
    and the command; `metric` is the goal's, empty without a goal; `summary` says how the run ended;
    `diverged` has the metrics whose last value is "nan", "above 1e+100" or the like."""

    name: str
    source: str
    workers: int
    outcome: str
    figures: Mapping[str, Figure]
    key: ComparisonKey
    conditions: Conditions
    moment: Moment
    metric: str = ""
    title: Title | None = None
    summary: str = ""
    diverged: Mapping[str, str] = field(default_factory=dict)

    @property
    def whole_run(self) -> bool:
        """Whether its time is that of the whole run, because the task reports no result."""
        return bool(self.key.measure)

    @property
    def good(self) -> bool:
        """Whether the run succeeded, so that its figures count."""
        return self.outcome in SUCCESSFUL

    @property
    def is_unreached(self) -> bool:
        """Whether it has a goal and ended before it, so that its time to the goal is longer than anybody has seen."""
        return bool(self.metric) and self.outcome in UNREACHED

    def get(self, name: str) -> float | None:
        """The value of a figure; None if the run has none of that name."""
        found = self.figures.get(name)
        return None if found is None else found.value

    @property
    def seconds(self) -> float:
        """The time to the goal or the end."""
        return self.get(SECONDS) or 0.0

    @property
    def value(self) -> float | None:
        """The goal's metric at the end of the training."""
        return self.get(self.metric)


class Point(Struct, frozen=True, dict=True):
    """All runs of a group with one number of workers: repeats. Only `good` ones count; without any, `bad` ones stand
    alone. Of what others published there are no runs, but the mean and its deviation.
    """

    workers: int
    good: tuple[Measurement, ...] = ()
    bad: tuple[Measurement, ...] = ()
    published: Estimate | None = None
    deviation: float | None = None

    @property
    def share(self) -> str:
        """ "2 of 5 reached it" (the goal), or "2 of 5 ended", if some did not, whose times do not count; else empty."""
        if not self.good or not self.bad:
            return ""
        what = "reached it" if self.good[0].outcome == "goal_reached" else "ended"
        return f"{len(self.good)} of {len(self.good) + len(self.bad)} {what}"

    @property
    def is_partial(self) -> bool:
        """Whether some runs did not reach the goal: the mean of the others is that of the luckier ones."""
        return any(run.is_unreached for run in self.bad)

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
    def estimates(self) -> dict[str, Estimate]:
        """Mean and interval of every figure that all of its runs have in one unit."""
        names = [name for name in self.shown[0].figures if all(name in run.figures for run in self.shown)]
        each = {name: [run.figures[name] for run in self.shown] for name in names}
        return {
            name: estimate([figure.value for figure in found]) for name, found in each.items() if have_one_unit(found)
        }

    @property
    def seconds(self) -> Estimate:
        """Mean and interval of the time, in seconds."""
        return self.estimates.get(SECONDS) or Estimate(len(self.shown), 0.0)

    @property
    def value(self) -> Estimate | None:
        """The goal's metric at the end."""
        return self.estimates.get(self.shown[0].metric)

    @property
    def throughput(self) -> Estimate | None:
        """Samples per second; None if the programs report a throughput of another unit, which is among the metrics."""
        found = self.shown[0].figures.get(THROUGHPUT)
        is_other = found is not None and found.is_metric and found.unit != SAMPLES_PER_SECOND
        return None if is_other else self.estimates.get(THROUGHPUT)

    @property
    def metrics(self) -> dict[str, dict[str, Estimate]]:
        """The metrics that the programs reported by name, each with its "last", "best" and "mean"."""
        reported = [name for name, each in self.shown[0].figures.items() if each.is_metric]
        names = dict.fromkeys(name.removesuffix(BEST).removesuffix(MEAN) for name in reported)
        ends = {"last": "", "best": BEST, "mean": MEAN}
        each = {
            name: {which: found for which, end in ends.items() if (found := self.estimates.get(name + end))}
            for name in names
        }
        return {name: found for name, found in each.items() if found}

    @property
    def diverged(self) -> dict[str, str]:
        """`find_diverged` of the runs that are shown."""
        return find_diverged(self.shown)

    def unit_of(self, name: str) -> str:
        """The unit of a metric that the programs reported."""
        ends = ("", BEST, MEAN)
        return next((found.unit for end in ends if (found := self.shown[0].figures.get(name + end))), "")

    @property
    def without_compiling(self) -> Estimate | None:
        """The time less that of torch.compile, in seconds; None if nothing was compiled."""
        return self.estimates.get(UNCOMPILED)

    @property
    def parts(self) -> dict[str, float]:
        """Mean seconds by category, which add up to the mean time."""
        runs = [[run.get(name) or 0.0 for name in ALL_CATEGORIES] for run in self.shown]
        sums = {
            name: sum(column) / len(runs) for name, column in zip(ALL_CATEGORIES, zip(*runs, strict=True), strict=True)
        }
        total = sum(sums.values())
        return {name: self.seconds.mean * each / total for name, each in sums.items() if each and total > 0}

    @property
    def waiting(self) -> float | None:
        """The share of the time spent waiting for messages; None if it was not measured."""
        parts = self.parts
        return parts["communication"] / sum(parts.values()) if "communication" in parts else None


def relate_runs(old: Sequence[Measurement], new: Sequence[Measurement], name: str) -> Ratio | None:
    """New / old of a figure that all runs of both sides have; else None."""
    values = [[value for run in side if (value := run.get(name)) is not None] for side in (old, new)]
    if len(values[0]) < len(old) or len(values[1]) < len(new):
        return None
    sessions = find_sessions([run.moment for run in old], [run.moment for run in new])
    return relate(values[0], values[1], sessions)


class Group(Struct, frozen=True, dict=True):
    """Runs with equal keys: they differ in nothing but the number of workers and the seed.

    `label` says what sets the group apart from others; `facts` are the key's, as texts.
    """

    task: str
    label: str
    key: ComparisonKey
    points: tuple[Point, ...]
    min_runs: int = 1  # minimum number of successful runs of a size for a speedup

    @cached_property
    def facts(self) -> dict[str, str]:
        """The facts that all runs of the group share, as texts."""
        return self.key.facts()

    @property
    def titles(self) -> list[Title]:
        """Titles of the runs for people, each once: the task, or experiments with their command."""
        return list(dict.fromkeys(run.title or Title(self.task) for point in self.points for run in point.shown))

    @property
    def metric(self) -> str:
        """Name of the goal's metric, empty if there is no goal."""
        return self.facts["metric"]

    @cached_property
    def after_time(self) -> bool:
        """Whether the runs had a time budget, so that what counts is the metric that they reached."""
        return any(run.outcome == "budget_spent" for point in self.points for run in point.good)

    def order(self, point: Point) -> float:
        """What points are sorted by, the best first: the time, or after a time budget the value that was reached."""
        if not self.after_time or point.value is None:
            return point.seconds.mean
        return -point.value.mean if point.shown[0].figures[self.metric].higher_is_better else point.value.mean

    @cached_property
    def baseline(self) -> Point | None:
        """The successful point with the fewest workers; None without one, and if the runs measure throughput."""
        if self.after_time:
            return None
        return next((point for point in self.points if self.has_enough(point) and point.seconds.mean > 0), None)

    def has_enough(self, point: Point) -> bool:
        """Whether at least `min_runs` runs of this size succeeded, so that their mean time is meaningful."""
        return len(point.good) >= self.min_runs

    def speedup(self, point: Point) -> Ratio | None:
        """How many times faster than the baseline; None for a point without enough good runs."""
        if self.baseline is None or not self.has_enough(point):
            return None
        if point is self.baseline:
            return Ratio(0.0, len(point.good))
        found = relate_runs(self.baseline.good, point.good, SECONDS)
        return None if found is None else found.inverse

    @property
    def has_speedup(self) -> bool:
        """Whether at least two points have a speedup, so that a line can be drawn."""
        return sum(self.speedup(point) is not None for point in self.points) > 1


class Series(Struct, frozen=True):
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
    groups = [Group(key.task, "", key, tuple(_points(found)), min_runs) for key, found in cells.items()]
    tasks = dict.fromkeys(group.task for group in groups)
    labeled = [each for task in tasks for each in label_groups([group for group in groups if group.task == task])]
    facts = [group.facts for group in groups]
    common = (
        {name: value for name, value in facts[0].items() if all(fact.get(name, "") == value for fact in facts)}
        if facts
        else {}
    )
    return Series(tuple(sorted(labeled, key=lambda group: (group.task, group.label))), common)


def _points(runs: Sequence[Measurement]) -> Iterator[Point]:
    for workers in sorted({run.workers for run in runs}):
        here = [run for run in runs if run.workers == workers]
        yield Point(workers, tuple(run for run in here if run.good), tuple(run for run in here if not run.good))


def have_one_unit(figures: Iterable[Figure]) -> bool:
    """Whether the values of a figure can be averaged. A run that reports no unit has that of the others."""
    return len({figure.unit for figure in figures if figure.unit}) <= 1


def find_diverged(runs: Sequence[Measurement]) -> dict[str, str]:
    """The last values that are no numbers, by metric: "nan", or of repeats "nan in 1 of 3 runs"."""
    names = dict.fromkeys(name for run in runs for name in run.diverged)
    lasts = {name: [run.diverged[name] for run in runs if name in run.diverged] for name in names}
    return {
        name: " and ".join(dict.fromkeys(found)) + (f" in {len(found)} of {len(runs)} runs" if len(runs) > 1 else "")
        for name, found in lasts.items()
    }


def drop_duplicates(archives: Iterable[Archive]) -> list[Archive]:
    """Each run once, by its id. Raises UsageError for two archives of one run that differ."""
    found: dict[str, Archive] = {}
    for archive in archives:
        earlier = found.setdefault(archive.run["id"], archive)
        if earlier is not archive and (earlier.run, earlier.result) != (archive.run, archive.result):
            raise UsageError(
                f"{earlier.path} and {archive.path} are archives of one run, {archive.name}, but differ.",
                hint="Keep the one you trust; a signature shows who made it (mlbench verify --signers).",
            )
    return list(found.values())


def measure(archive: Archive) -> Measurement:
    """The numbers of one archive."""
    result = archive.result
    return Measurement(
        archive.name,
        str(archive.path),
        result["workers"],
        outcome_of(result),
        figures(archive),
        key_of(archive),
        conditions_of(archive),
        moment_of(archive),
        metric=str(result["goal"]["metric"]) if result["goal"] else "",
        title=title_of(archive),
        summary=str(result["summary"]),
        diverged={name: found.diverged for name, found in program_metrics(archive).items() if found.diverged},
    )


# --- labels ---------------------------------------------------------------------------------------------------------

# Distinguishing settings in the order of labels. Digests and versions come last, because they rarely explain a
# difference.
_TELLING = ("method", "network", "backend", "device", "command", "cluster", "processes_per_worker", "gpus_per_worker")
_LAST = ("machine", "framework", "image", "code", "method_code", "judge", "data", "division")


def label_groups(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups, labeled by what tells them apart; a single group by its method."""
    facts = [group.facts for group in groups]
    telling = _choose_telling(facts)
    labels = [_describe_all(telling, fact) for fact in facts]
    if "code" in telling and all(group.key.command for group in groups):  # versions of a program: by their experiments
        rest = [name for name in telling if name != "code"]
        names = [list_some([title.name for title in group.titles]) for group in groups]
        named = [
            ", ".join(filter(None, (name, _describe_all(rest, fact)))) for name, fact in zip(names, facts, strict=True)
        ]
        labels = named if len(set(named)) == len(named) else labels
    return tuple(
        replace(group, label=label or describe("method", fact["method"]))
        for group, label, fact in zip(groups, labels, facts, strict=True)
    )


def _choose_telling(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings whose values tell the groups apart."""
    names = dict.fromkeys(name for fact in facts for name in fact if name not in ("metric", "setting goal"))
    order = [*_TELLING, *(name for name in names if name not in (*_TELLING, *_LAST)), *_LAST]
    chosen: list[str] = []
    told = 1
    for name in order:
        count = len({tuple(fact.get(each, "") for each in (*chosen, name)) for fact in facts})
        if count > told:
            chosen, told = [*chosen, name], count
    return chosen


def _describe_all(names: Sequence[str], facts: Mapping[str, str]) -> str:
    return ", ".join(filter(None, (describe(name, facts.get(name, "")) for name in names)))


# --- the table of series ----------------------------------------------------------------------------------------------

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
        _figures(point.estimates.get(BANDWIDTH))[0],
        _figures(point.estimates.get(ROUND_TRIP))[0],
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
        found = point.metrics.get(name, {})
        yield from (_figures(found.get(which))[0] for which in ("last", "best", "mean"))


def _figures(found: Estimate | Ratio | None) -> tuple[str, str, str]:
    """Mean, low and high; empty if there is none."""
    return (_figure(found.mean), _figure(found.low), _figure(found.high)) if found else ("", "", "")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


# --- the table of an experiment ---------------------------------------------------------------------------------------

METHOD = "method"
NO_COMMUNICATION = "noop"
GOAL = "goal"


class Row(Struct, frozen=True):
    """One combination of an experiment's settings, by number of workers, and the `figure` that it shows of its runs.

    `source` is None for the experiment's own rows, else who published it. `baseline` is the point of one worker that
    speedups are relative to; `exposed` the share of the time that communication takes, by number of workers.
    """

    settings: Mapping[str, str]
    figure: str
    unit: str
    points: Mapping[int, Point]
    source: str | None = None
    baseline: Point | None = None
    exposed: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_rate(self) -> bool:
        """Whether its figures are rates, of which more is better, and neither seconds nor what a training reached."""
        return self.unit.endswith(("/s", "_per_second"))

    @property
    def label(self) -> str:
        """The settings in a few words, for legends."""
        return ", ".join(value for value in self.settings.values() if value) or "run"

    def value(self, workers: int) -> Estimate | None:
        """The figure of the runs with this number of workers, or the published one; None if there is none."""
        point = self.points.get(workers)
        if point is None or not point.good:
            return None if point is None else point.published
        return point.estimates[self.figure]

    def problems(self, workers: int) -> list[str]:
        """Why runs of this size have no value, a sentence each."""
        bad = self.points[workers].bad if workers in self.points else ()
        return [f"{run.name}: {_find_problem(run, self.figure)}" for run in bad]

    def speedup(self, workers: int) -> Ratio | None:
        """Relative to one worker; None without a baseline or a value."""
        point, base = self.points.get(workers), self.baseline
        if point is None or base is None or workers == 1 or not (self.unit == SECONDS or self.is_rate):
            return None
        if point.published and base.published:
            found = ratio([base.published.mean], [point.published.mean])
        else:
            found = relate_runs(base.good, point.good, self.figure) if point.good and base.good else None
        return None if found is None else found.inverse if self.unit == SECONDS else found

    def efficiency(self, workers: int) -> float | None:
        """Speedup by number of workers; 1.0 is perfect scaling, None without a baseline of one worker."""
        found = self.speedup(workers)
        return None if found is None else found.mean / workers


def name_settings(runs: Sequence[tuple[str, Mapping[str, str]]]) -> list[dict[str, str]]:
    """The settings that distinguish the rows of runs, from their tasks and the points of their experiment: the task,
    the entry of the file (if several entries have the same task), the cluster, and the values of the matrix."""
    entries: dict[str, set[str]] = {}
    for task, point in runs:
        entries.setdefault(task, set()).add(point.get("runs", ""))
    has_series = any(len(found) > 1 for found in entries.values())
    named = []
    for task, point in runs:
        settings = {"task": task, **({"series": point.get("runs", "")} if has_series else {})}
        settings |= {"cluster": point["cluster"]} if "cluster" in point else {}
        rest = {
            key.removeprefix("set."): value for key, value in point.items() if key not in ("runs", "cluster", "seed")
        }
        named.append({**settings, **rest})
    return named


def make_rows(
    runs: Iterable[tuple[Mapping[str, str], Measurement]],
    metric: str | None = None,
    published: Sequence[PublishedSeries] = (),
) -> list[Row]:
    """The experiment's rows in order of appearance, from the settings of each run and its numbers; then published rows.

    `metric` names the figure that is shown: default is the throughput, else SECONDS, the time to the goal if there is
    one. GOAL is the last value of the goal's metric. The runs are the unit of the interval. The blocks of one run share
    its process and machine state, so they are no repeats: one run has no interval.
    """
    grouped: dict[tuple[tuple[str, str], ...], list[Measurement]] = {}
    for settings, run in runs:
        grouped.setdefault(tuple(settings.items()), []).append(run)
    rows = [_make_row(dict(settings), found, metric) for settings, found in grouped.items()]
    return [_complete(row, rows) for row in rows] + [_published_row(series) for series in published]


def _make_row(settings: Mapping[str, str], runs: Sequence[Measurement], metric: str | None) -> Row:
    named = [_figure_of(run, metric) for run in runs]
    name = next((name for name, run in zip(named, runs, strict=True) if _find_problem(run, name) is None), named[0])
    points = {}
    for workers in sorted({run.workers for run in runs}):
        here = [(run, _find_problem(run, name) is None) for run in runs if run.workers == workers]
        good, bad = (tuple(run for run, is_good in here if is_good is wanted) for wanted in (True, False))
        points[workers] = Point(workers, good, bad)
    found = next((run.figures[name] for run in runs if name in run.figures), None)
    unit = SECONDS if name == SECONDS else found.unit if found is not None and name == THROUGHPUT else name
    return Row(settings, name, unit if any(point.good for point in points.values()) else "", points)


def _figure_of(run: Measurement, metric: str | None) -> str:
    """The name of the figure that a run is valued by."""
    if metric == GOAL and run.metric:
        return run.metric
    return metric or (THROUGHPUT if THROUGHPUT in run.figures else SECONDS)


def _find_problem(run: Measurement, name: str) -> str | None:
    """Why a run has no value of that name; None if it has one."""
    if run.outcome not in (*SUCCESSFUL, "goal_missed") or (name == SECONDS and run.outcome == "goal_missed"):
        return run.summary
    return None if name in run.figures else f"it did not report {name}"


def _complete(row: Row, rows: Sequence[Row]) -> Row:
    """The row with its baseline and, beside a row without communication, the share of time that is exposed."""
    peers = [other for other in rows if other.figure == row.figure and _without_method(other) == _without_method(row)]
    baseline = next((each.points[1] for each in (row, *peers) if each.value(1) is not None), None)
    silent = next((other for other in peers if other.settings.get(METHOD) == NO_COMMUNICATION), None)
    exposed = {}
    if silent is not None and silent is not row and row.is_rate:
        for workers in row.points:
            value, least = row.value(workers), silent.value(workers)
            if workers > 1 and value and least:
                exposed[workers] = 1 - value.mean / least.mean
    return replace(row, baseline=baseline, exposed=exposed)


def _without_method(row: Row) -> dict[str, str]:
    return {key: value for key, value in row.settings.items() if key != METHOD}


def _published_row(series: PublishedSeries) -> Row:
    points = {
        rate.workers: Point(rate.workers, published=Estimate(1, rate.rate), deviation=rate.deviation)
        for rate in series.rates
    }
    settings = {"task": series.model, "network": series.network, METHOD: series.method, "source": series.source}
    return Row(settings, THROUGHPUT, f"{series.unit}/s", points, series.source, points.get(1))
