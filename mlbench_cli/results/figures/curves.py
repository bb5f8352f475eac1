"""Figures over time: metrics, resource usage, step times and timelines."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from mlbench_cli.model.goals import Goal, is_finite_number
from mlbench_cli.results.analysis.comparability import key_of
from mlbench_cli.results.analysis.numbers import unit_of
from mlbench_cli.results.analysis.tables import MetricPoint, MetricTable, ResourceSample, read_number
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.look import MAX_LOOKS, Look, choose_shared_looks, look_of
from mlbench_cli.results.figures.model import Axis, Figure, Kind, Line, thin
from mlbench_cli.util.text import counted

MAX_RUNS = MAX_LOOKS  # in a figure over time: each has its own color and mark
MAX_RANK_LINES = 16  # in a figure of samples; for more ranks the spread is drawn
SPREAD_INTERVALS = 60
SAMPLED_FIELDS = (
    *("cpu_seconds", "rss_bytes", "received_bytes", "sent_bytes", "read_bytes", "write_bytes"),
    *("gpu_percent", "gpu_memory_bytes", "gpu_watts"),
)
MAX_RANKS = 7  # in a figure of a running run
MAX_OTHER = 8  # further metrics that get a figure
_RATES = ("learning_rate", "lr")
_TIME = "seconds of training"
_SINCE_START = "seconds since the start of the run"


class SampleColumns:
    """The resource samples of a rank: times in seconds since 1970, and the values of each drawn field."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._values: dict[str, list[float | None]] = {}

    def extend(self, columns: Mapping[str, Sequence[float]]) -> None:
        """Append samples; missing fields have no values."""
        before = len(self.times)
        self.times += columns["time"]
        for name in columns.keys() - self._values.keys() - {"time"}:
            self._values[name] = [None] * before
        missing = [None] * (len(self.times) - before)
        for name, values in self._values.items():
            values += columns.get(name, missing)

    def points(self, names: Sequence[str]) -> list[tuple[float, float]]:
        """(time, sum of these fields that have a value), in order of time."""
        columns = [self._values[name] for name in names if name in self._values]
        rows = zip(*columns, strict=True)
        if any(None in column for column in columns):
            known = ([value for value in row if value is not None] for row in rows)
            return sorted((time, sum(values)) for time, values in zip(self.times, known, strict=True) if values)
        return sorted(zip(self.times, map(sum, rows), strict=bool(columns)))

    def add(self, sample: ResourceSample) -> None:
        """Append one sample."""
        columns = {name: (value,) for name in SAMPLED_FIELDS if (value := getattr(sample, name)) is not None}
        self.extend({"time": (sample.time,), **columns})


class Sampled(Protocol):
    """A run with the samples of its ranks."""

    @property
    def name(self) -> str:
        """The run's name."""

    @property
    def resources(self) -> "Mapping[int, SampleColumns]":
        """The resource samples of each rank."""


@dataclass(frozen=True)
class LatestSamples:
    """The last samples of a run that is in progress."""

    name: str
    resources: Mapping[int, SampleColumns]

    @classmethod
    def of(cls, name: str, samples: Iterable[ResourceSample]) -> "LatestSamples":
        """From samples in order of time."""
        found: dict[int, SampleColumns] = {}
        for sample in samples:
            found.setdefault(sample.rank, SampleColumns()).add(sample)
        return cls(name, found)


@dataclass(frozen=True)
class RunData:
    """An archive with its metrics and samples, read once."""

    archive: Archive

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.archive.run["name"])

    @property
    def workers(self) -> int:
        """How many workers the run had."""
        return int(self.archive.result["workers"])

    @cached_property
    def goal(self) -> Goal | None:
        """The run's goal; None if it had none."""
        found = self.archive.result["goal"]
        return Goal(found["metric"], found["comparison"], found["threshold"]) if found else None

    @cached_property
    def metrics(self) -> MetricTable:
        """All metrics of the run as a table, in order of time."""
        points = (MetricPoint.parse(self.name, self.workers, row) for row in self.archive.metrics())
        return MetricTable(point for point in points if point is not None)

    @cached_property
    def resources(self) -> "dict[int, SampleColumns]":
        """The resource samples of each rank in order of time; for many ranks about one for each interval of the figure.

        Counters are cumulative, so rates over longer intervals are equally exact.
        """
        least = 0.0
        if int(self.archive.result["world_size"]) > MAX_RANK_LINES:
            least = float(self.archive.result["wall_seconds"] or 0.0) / SPREAD_INTERVALS
        found: dict[int, SampleColumns] = {}
        for row in self.archive.samples():
            sample = ResourceSample.parse(self.name, row)
            if sample is None:
                continue
            kept = found.setdefault(sample.rank, SampleColumns())
            if not kept.times or sample.time - kept.times[-1] >= least:
                kept.add(sample)
        return found

    @cached_property
    def phases(self) -> list[tuple[float, str, float | None, float | None]]:
        """(time, phase, epoch, step) of rank 0's phase events, in order."""
        return [
            (
                float(event["time"]),
                str(event.get("phase")),
                read_number(event.get("epoch")),
                read_number(event.get("step")),
            )
            for event in self.archive.events(0)
            if event["event"] == "phase" and event["rank"] == 0
        ]

    @cached_property
    def begun(self) -> float | None:
        """Start of the training in seconds since 1970; None if rank 0 did not report it."""
        return next((time for time, phase, _, _ in self.phases if phase == "training"), None)


# --- metrics --------------------------------------------------------------------------------------------------------


def metric_figures(runs: Sequence[RunData], prefix: str, *, with_others: bool = True) -> Iterator[Figure]:
    """Loss and the goal's metric with the goal, for runs of one job; with `with_others` also the learning rate and
    rank 0's other metrics."""
    # allreduce reports no curves.
    shown, caption = _limit([run for run in runs if run.archive.run["spec"]["task"] != "allreduce"])
    names = list(dict.fromkeys(point.name for run in shown for point in run.metrics if point.rank == 0))
    goal = next((run.goal for run in shown if run.goal), None)
    goal_names = [name for name in names if goal and name in goal.metric_names]
    losses = [name for name in names if name.endswith("loss") and name not in goal_names]
    rates = [name for name in names if name in _RATES]
    if losses:
        figure = _metric_figure(shown, f"{prefix}loss", "Loss over time", losses, "loss", caption)
        targets = {run.archive.result["details"].get("target_loss") for run in shown}
        target = next(iter(targets)) if len(targets) == 1 else None
        yield _with_line(figure, f"target: {target:g}", target) if is_finite_number(target) else figure
    if goal_names and goal:
        title = f"{goal.metric} over time"
        figure = _metric_figure(shown, f"{prefix}goal-metric", title, goal_names, goal.metric, caption)
        yield _with_goal(figure, goal)
    if not with_others:
        return
    if rates:
        yield _metric_figure(
            shown, f"{prefix}learning-rate", "Learning rate over time", rates, "learning rate", caption
        )
    others = [name for name in names if name not in {*losses, *goal_names, *rates}]
    for index, name in enumerate(others[:MAX_OTHER]):
        yield _metric_figure(shown, f"{prefix}metric-{index}", f"{name[:60]} over time", [name], name[:60], caption)


def _limit(runs: Sequence[RunData]) -> tuple[Sequence[RunData], str]:
    """The runs that a figure shows, and a caption if there are more."""
    return runs[:MAX_RUNS], f"The first {MAX_RUNS} of {len(runs)} runs." if len(runs) > MAX_RUNS else ""


def _metric_figure(
    runs: Sequence[RunData], key: str, title: str, names: Sequence[str], label: str, caption: str
) -> Figure:
    lines = []
    for run, (color, mark) in zip(runs, _looks_of(runs), strict=True):
        for number, name in enumerate(names):
            look: dict[str, Any] = {"color": color, "shape": mark + number}
            points = [point for point in run.metrics if point.name == name and point.rank == 0]
            if not points:
                continue
            xs, ys = thin(
                _times(run, points), [point.value if is_finite_number(point.value) else None for point in points]
            )
            if len(names) == 1:
                lines.append(Line(run.name, tuple(xs), tuple(ys), panel=_panel(run, runs), **look))
            else:
                lines.append(Line(f"{run.name}: {name}", tuple(xs), tuple(ys), panel=name, short=run.name, **look))
    y = Axis(label, unit=unit_of(names[0]))
    is_timed = all(point.seconds is not None for run in runs for point in run.metrics if point.name in names)
    x = Axis(_TIME if is_timed else "seconds since training began", from_zero=True)
    return Figure(key, title, x, y, tuple(lines), caption)


def _looks_of(runs: Sequence[RunData]) -> list[Look]:
    """The color and mark of each run, the same in every figure of a page: the color of its method if methods differ,
    with another mark for each of its runs; else a color for each run."""
    methods = [key_of(run.archive).facts().get("method", "") for run in runs]
    if len(set(methods)) == 1:
        return [look_of(index) for index in range(len(runs))]
    looks = choose_shared_looks(methods, methods)
    return [(color, mark + methods[:place].count(methods[place])) for place, (color, mark) in enumerate(looks)]


def _panel(run: RunData, runs: Sequence[RunData]) -> str:
    """The small multiple of a run among many: its number of workers if they differ."""
    return counted(run.workers, "worker") if len({each.workers for each in runs}) > 1 else ""


def _times(run: RunData, points: Sequence[MetricPoint]) -> list[float]:
    """Seconds of training if every point has them, else since the start of the training or the first point."""
    if all(point.seconds is not None for point in points):
        return [point.seconds or 0.0 for point in points]
    begun = points[0].time if run.begun is None else run.begun
    return [point.time - begun for point in points]


def _with_goal(figure: Figure, goal: Goal) -> Figure:
    return _with_line(figure, f"goal: {goal.threshold:g}", goal.threshold)


def _with_line(figure: Figure, label: str, y: float) -> Figure:
    xs = [x for line in figure.lines for x in line.xs]
    line = Line(label, (0.0, max(xs, default=1.0)), (y, y), reference=True)
    return replace(figure, lines=(*figure.lines, line))


def live_figures(points: Sequence[MetricPoint], goal: Goal | None) -> Iterator[Figure]:
    """A figure per metric reported so far, with a line for each of the first MAX_RANKS ranks."""
    for name in dict.fromkeys(point.name for point in points):
        own = [point for point in points if point.name == name]
        lines = []
        for rank in sorted({point.rank for point in own})[:MAX_RANKS]:
            found = [point for point in own if point.rank == rank]
            times = [point.time - points[0].time for point in found]
            xs, ys = thin(times, [point.value if is_finite_number(point.value) else None for point in found])
            lines.append(Line(f"rank {rank}", tuple(xs), tuple(ys)))
        axes = Axis("seconds since the first value", from_zero=True), Axis(name[:60], unit=unit_of(name))
        figure = Figure(name, f"{name[:60]} over time", *axes, tuple(lines))
        yield _with_goal(figure, goal) if goal and name in goal.metric_names else figure


# --- machines -------------------------------------------------------------------------------------------------------


class Resource(NamedTuple):
    """A resource: the sum of some fields of samples in `unit`, per second if `is_rate`."""

    key: str
    title: str
    label: str
    fields: tuple[str, ...]
    is_rate: bool
    unit: float


RESOURCES = (
    Resource("cpu", "CPU in use", "cores", ("cpu_seconds",), True, 1.0),
    Resource("memory", "Memory", "GiB", ("rss_bytes",), False, 2.0**30),
    Resource("network", "Network traffic", "MB/s, both ways", ("received_bytes", "sent_bytes"), True, 1e6),
    Resource("disk", "Disk traffic", "MB/s, both ways", ("read_bytes", "write_bytes"), True, 1e6),
    Resource("gpu", "GPU utilization", "%", ("gpu_percent",), False, 1.0),
    Resource("gpu-memory", "GPU memory", "GiB", ("gpu_memory_bytes",), False, 2.0**30),
    Resource("gpu-power", "GPU power", "W", ("gpu_watts",), False, 1.0),
)


def resource_figures(runs: Sequence[Sampled], prefix: str, since: str = _SINCE_START) -> Iterator[Figure]:
    """CPU, memory, traffic, disk and GPU over time, with a line per rank of each run."""
    for kind in RESOURCES:
        lines = [line for run in runs for line in _resource_lines(run, kind)]
        if any(y for line in lines for y in line.ys):
            axes = Axis(since, from_zero=True), Axis(kind.label, from_zero=True)
            yield Figure(f"{prefix}{kind.key}", f"{kind.title} per rank", *axes, tuple(lines), kind=Kind.STEPS)


def use_now(run: Sampled) -> dict[int, dict[str, float]]:
    """The current usage of each rank from its last samples: key of the resource -> value."""
    found: dict[int, dict[str, float]] = {}
    for kind in RESOURCES:
        for rank, points in _resource_curves(run, kind):
            found.setdefault(rank, {})[kind.key] = points[-1][1]
    return found


def _resource_lines(run: Sampled, kind: Resource) -> Iterator[Line]:
    curves = _resource_curves(run, kind)
    if len(run.resources) > MAX_RANK_LINES:
        yield from _spread_lines(run.name, [points for _, points in curves])
        return
    for rank, points in curves:
        xs, ys = thin([time for time, _ in points], [value for _, value in points], 400)
        color, mark = look_of(rank)
        label, short = f"{run.name}, rank {rank}", f"rank {rank}"
        yield Line(label, tuple(xs), tuple(ys), panel=run.name, short=short, color=color, shape=mark)


def _spread_lines(name: str, curves: Sequence[Sequence[tuple[float, float]]]) -> Iterator[Line]:
    """Minimum, median and maximum of the ranks' means in equal intervals of time."""
    end = max((points[-1][0] for points in curves), default=0.0)
    if end <= 0:
        return
    means: list[list[float]] = [[] for _ in range(SPREAD_INTERVALS)]
    per_second = SPREAD_INTERVALS * (1 - 1e-12) / end  # the last time is in the last interval
    for points in curves:
        sums, counts = [0.0] * SPREAD_INTERVALS, [0] * SPREAD_INTERVALS
        for time, value in points:
            place = int(time * per_second)
            sums[place] += value
            counts[place] += 1
        for place, count in enumerate(counts):
            if count:
                means[place].append(sums[place] / count)
    xs = tuple((place + 0.5) * end / SPREAD_INTERVALS for place, values in enumerate(means) if values)
    kinds: tuple[tuple[str, Callable[[Sequence[float]], float]], ...]
    kinds = ("least", min), ("median", statistics.median), ("greatest", max)
    for word, choose in kinds:
        color, mark = look_of(("least", "median", "greatest").index(word))
        ys = tuple(choose(values) for values in means if values)
        short = f"{word} of {len(curves)} ranks"
        yield Line(f"{name}, {short}", xs, ys, panel=name, short=short, color=color, shape=mark)


def _resource_curves(run: Sampled, kind: Resource) -> list[tuple[int, list[tuple[float, float]]]]:
    """(seconds since the first sample, value) by rank; ranks without values are left out."""
    start = min((min(samples.times) for samples in run.resources.values()), default=0.0)
    found = []
    for rank, samples in sorted(run.resources.items()):
        known = [(time - start, value / kind.unit) for time, value in samples.points(kind.fields)]
        if kind.is_rate:
            known = [
                (after[0], max(0.0, after[1] - before[1]) / (after[0] - before[0]))
                for before, after in pairwise(known)
                if after[0] > before[0]
            ]
        if known:
            found.append((rank, known))
    return found
