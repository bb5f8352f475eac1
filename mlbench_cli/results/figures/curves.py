"""Charts over time: metrics with their target, the learning rate, and resource usage."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.model.goals import Goal, is_finite_number, name_metric
from mlbench_cli.results.analysis.numbers import unit_of
from mlbench_cli.results.analysis.tables import MetricPoint, ResourceSample
from mlbench_cli.results.archive.evidence import read_events
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.figures.chart import Axis, Chart, Kind, Row, guide, thin

MAX_RUNS = 42  # in a chart over time
MAX_RANK_LINES = 7  # in a chart of samples; for more ranks the spread is drawn
SPREAD_INTERVALS = 60
SAMPLED_FIELDS = (
    *("cpu_seconds", "rss_bytes", "received_bytes", "sent_bytes", "read_bytes", "write_bytes"),
    *("gpu_percent", "gpu_memory_bytes", "gpu_watts"),
)
MAX_RANKS = 7  # in a chart of a running run
# What is read of an archive of any size. Sampling gives each rank a few thousand samples, however long a run is.
MAX_NAMES, MAX_POINTS = 200, 2_000  # metrics, and points of each that are kept, of which about 600 are drawn
MAX_SAMPLED, MAX_SAMPLES = 8_192, 20_000  # ranks, and samples of each
MAX_CHARTS = 12  # metrics that get a chart; a program may report one for each of its layers
_RATES = ("learning_rate", "lr")
_TIME = Axis("seconds of training", from_zero=True)
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


class LatestSamples(Struct, frozen=True):
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


class RunData(Struct, frozen=True, dict=True):
    """An archive with its metrics and samples, read once."""

    archive: Archive

    @property
    def name(self) -> str:
        """The run's name."""
        return self.archive.name

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
    def curves(self) -> dict[str, list[MetricPoint]]:
        """The points of rank 0's metrics by name, in order of time; of a long curve some, with its extremes."""
        goal_names = () if self.goal is None else self.goal.metric_names
        found: dict[str, list[MetricPoint]] = {}
        for row in self.archive.metrics():
            name = row.get("name")
            if row.get("rank") != 0 or (name not in found and len(found) >= MAX_NAMES and name not in goal_names):
                continue
            if (point := MetricPoint.parse(self.name, self.workers, row)) is not None:
                curve = found.setdefault(point.name, [])
                curve.append(point)
                if len(curve) >= 2 * MAX_POINTS:
                    values = [(float(index), _finite(each)) for index, each in enumerate(curve)]
                    curve[:] = [curve[int(index)] for index, _ in thin(values, MAX_POINTS)]
        return {name: sorted(curve, key=lambda point: point.time) for name, curve in found.items()}

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
            if sample.rank not in found and len(found) >= MAX_SAMPLED:
                continue
            kept = found.setdefault(sample.rank, SampleColumns())
            if not kept.times or (sample.time - kept.times[-1] >= least and len(kept.times) < MAX_SAMPLES):
                kept.add(sample)
        return found

    @cached_property
    def begun(self) -> float | None:
        """Start of the training in seconds since 1970; None if rank 0 did not report it."""
        if 0 not in self.archive.logs:
            return None
        with self.archive.open_file(self.archive.logs[0]) as log:
            for event in read_events(log):
                if event["event"] == "phase" and event["rank"] == 0 and event.get("phase") == "training":
                    return float(event["time"])
        return None


# --- metrics --------------------------------------------------------------------------------------------------------


def metric_charts(runs: Sequence[RunData], prefix: str, series: Mapping[str, str] | None = None) -> Iterator[Chart]:
    """Each metric of rank 0 over time: the goal's first, then losses, the rest, and at last the learning rate; a line
    for each run, and the target. `series` names the runs by the paths of their archives; runs of one share a color."""
    shown = [run for run in runs if run.archive.run["spec"]["task"] != "allreduce"]  # it reports no curves
    curves = ((name, curve) for run in shown for name, curve in run.curves.items())
    names = list(
        dict.fromkeys(name for name, curve in curves if any(map(is_finite_number, (each.value for each in curve))))
    )
    goal = next((run.goal for run in shown if run.goal), None)
    goal_names = [name for name in names if goal and name in goal.metric_names]
    losses = [name for name in names if name.endswith("loss") and name not in goal_names]
    rates = [name for name in names if name in _RATES]
    named = {*losses, *goal_names, *rates}
    others = [name for name in names if name not in named]
    targets = {run.archive.result["details"].get("target_loss") for run in shown}
    target = next(iter(targets)) if len(targets) == 1 else None
    for number, name in enumerate([*goal_names, *losses, *others][:MAX_CHARTS] + rates):
        key = "learning-rate" if name in rates else "goal-metric" if [name] == goal_names[:1] else f"metric-{number}"
        chart = _metric_chart(shown, f"{prefix}{key}", name, series or {})
        if goal and name in goal_names:
            chart = with_target(chart, f"goal: {goal.threshold:g}", goal.threshold)
        yield (
            with_target(chart, f"target: {target:g}", target) if name in losses and is_finite_number(target) else chart
        )


def _metric_chart(runs: Sequence[RunData], key: str, name: str, series: Mapping[str, str]) -> Chart:
    rows = []
    for run in runs[:MAX_RUNS]:
        words = series.get(str(run.archive.path), run.name)
        points = thin(_timed(run, run.curves.get(name, ())))
        rows += [{"series": words, "x": x, "y": y, "run": run.name} for x, y in points]
    order = list(dict.fromkeys(series.values()))  # as in other charts, whichever run is first
    rows.sort(key=lambda row: order.index(row["series"]) if row["series"] in order else len(order))
    notes = ["One line per run; repeats share a color."] if len({row["series"] for row in rows}) < len(runs) else []
    notes += [f"The first {MAX_RUNS} of {len(runs)} runs."] if len(runs) > MAX_RUNS else []
    title = name_metric(name)[:60]
    units = (point.unit for run in runs for point in run.curves.get(name, ()) if point.unit)
    return Chart(
        *(key, _heading(title), _TIME, Axis(title, next(units, unit_of(name))), tuple(rows)),
        caption=" ".join(notes),
    )


def _heading(words: str) -> str:
    return words[:1].upper() + words[1:]


def _timed(run: RunData, points: Sequence[MetricPoint]) -> list[tuple[float, float | None]]:
    """Seconds of training if every point has them, else since the start of the training or the first point."""
    if not points:
        return []
    begun = points[0].time if run.begun is None else run.begun
    is_known = all(point.seconds is not None for point in points)
    times = [point.seconds or 0.0 if is_known else point.time - begun for point in points]
    return list(zip(times, map(_finite, points), strict=True))


def _finite(point: MetricPoint) -> float | None:
    return point.value if is_finite_number(point.value) else None


def with_target(chart: Chart, name: str, y: float) -> Chart:
    """The chart with a dashed line."""
    end = max((row["x"] for row in chart.rows), default=1.0)
    return replace(chart, rows=(*chart.rows, *guide(name, [(0.0, y), (end, y)])))


def live_charts(points: Sequence[MetricPoint], goal: Goal | None) -> Iterator[Chart]:
    """A chart for each of the metrics reported so far, the goal's first, with a line for each of the first MAX_RANKS
    ranks."""
    by_name: dict[str, list[MetricPoint]] = {}
    for point in points:
        by_name.setdefault(point.name, []).append(point)
    goal_names = () if goal is None else goal.metric_names
    for name in sorted(by_name, key=lambda name: name not in goal_names)[:MAX_CHARTS]:
        own, rows = by_name[name], []
        for rank in sorted({point.rank for point in own})[:MAX_RANKS]:
            found = [(point.time - points[0].time, _finite(point)) for point in own if point.rank == rank]
            rows += [{"series": f"rank {rank}", "x": x, "y": y} for x, y in thin(found)]
        title = name_metric(name)[:60]
        axes = Axis("seconds since the first value", from_zero=True), Axis(title, unit_of(name))
        chart = Chart(name, _heading(title), *axes, tuple(rows))
        yield with_target(chart, f"goal: {goal.threshold:g}", goal.threshold) if goal and name in goal_names else chart


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


def resource_charts(runs: Sequence[Sampled], prefix: str, since: str = _SINCE_START) -> Iterator[Chart]:
    """CPU, memory, traffic, disk and GPU over time: a line per rank of each run, or the spread of many ranks."""
    for kind in RESOURCES:
        rows = [row for run in runs for row in _resource_rows(run, kind, is_alone=len(runs) == 1)]
        if any(row["y"] for row in rows):
            axes = Axis(since, from_zero=True), Axis(kind.label, from_zero=True)
            yield Chart(f"{prefix}{kind.key}", f"{kind.title} per rank", *axes, tuple(rows), Kind.STEPS)


def use_now(run: Sampled) -> dict[int, dict[str, float]]:
    """The current usage of each rank from its last samples: key of the resource -> value."""
    found: dict[int, dict[str, float]] = {}
    for kind in RESOURCES:
        for rank, points in _resource_curves(run, kind):
            found.setdefault(rank, {})[kind.key] = points[-1][1]
    return found


def _resource_rows(run: Sampled, kind: Resource, *, is_alone: bool) -> Iterator[Row]:
    curves = _resource_curves(run, kind)
    lines = {f"rank {rank}": points for rank, points in curves}
    if len(run.resources) > MAX_RANK_LINES:
        lines = _spread([points for _, points in curves])
    for name, points in lines.items():
        series = name if is_alone else f"{run.name}, {name}"
        yield from ({"series": series, "x": x, "y": y} for x, y in thin([*points], 400))


def _spread(curves: Sequence[Sequence[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    """Least, median and greatest of the ranks' means in equal intervals of time."""
    end = max((points[-1][0] for points in curves), default=0.0)
    if end <= 0:
        return {}
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
    known = [((place + 0.5) * end / SPREAD_INTERVALS, values) for place, values in enumerate(means) if values]
    return {
        f"{word} of {len(curves)} ranks": [(x, choose(values)) for x, values in known]
        for word, choose in (("least", min), ("median", statistics.median), ("greatest", max))
    }


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
