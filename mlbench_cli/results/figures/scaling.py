"""Charts over the number of workers: time, speedup, cost, communication, price index and phases of a job."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mlbench_cli.model.goals import name_metric
from mlbench_cli.results.analysis.figures import COST
from mlbench_cli.results.analysis.jobs import Job
from mlbench_cli.results.analysis.numbers import SECONDS, format_share, unit_of
from mlbench_cli.results.analysis.published import PublishedValue, published_phases
from mlbench_cli.results.analysis.series import Group, Point
from mlbench_cli.results.analysis.stats import MIN_RUNS, Estimate, Ratio, estimate
from mlbench_cli.results.figures.chart import COLORS, PHASES, PUBLISHED, Axis, Chart, Kind, Row, guide
from task_images.contract import COMPUTE_CATEGORIES, MIXED_CATEGORIES

MAX_BARS = 4  # metrics of a program of which the last values are drawn
_WORKERS = Axis("workers", is_log=True, at_values=True)


class _Kind(NamedTuple):
    """A chart over the number of workers. `value` is None where a point has none; `published` names the metric of
    published_results.csv."""

    key: str
    title: str
    axis: Axis
    value: Callable[[Group, Point], Estimate | Ratio | None]
    published: str
    caption: str


def _time(group: Group, point: Point) -> Estimate | None:
    return point.value if group.after_time and point.good else point.seconds if not group.after_time else None


def _speedup(group: Group, point: Point) -> Ratio | None:
    return group.speedup(point) if group.has_speedup else None


def _compute_speedup(group: Group, point: Point) -> Estimate | None:
    base = group.baseline
    if base is None or not point.good or any(name in each.parts for each in (base, point) for name in _MIXED):
        return None
    seconds = [sum(each.parts.get(name, 0.0) for name in COMPUTE_CATEGORIES) for each in (base, point)]
    return Estimate(len(point.good), seconds[0] / seconds[1]) if min(seconds) > 0 else None


def _cost(group: Group, point: Point) -> Estimate | None:
    return point.estimates.get(COST) if point.good else None


def _share(group: Group, point: Point) -> Estimate | None:
    if not point.good or "communication" not in point.parts:
        return None
    return estimate([(run.get("communication") or 0.0) / run.seconds for run in point.good if run.seconds > 0])


def _price_index(group: Group, point: Point) -> Estimate | None:
    speedup, base = _speedup(group, point), group.baseline
    if speedup is None or base is None:
        return None
    growth = point.workers / base.workers
    low, high = (growth / end**2 if end else None for end in (speedup.high, speedup.low))
    return Estimate(speedup.count, growth / speedup.mean**2, low, high)


_MIXED = tuple(MIXED_CATEGORIES.values())
_TIME = Axis("seconds", SECONDS, from_zero=True)
KINDS = (
    _Kind("total_time", "Total time", _TIME, _time, "seconds", ""),
    _Kind(
        "speedup", "Speedup", Axis("speedup", from_zero=True), _speedup, "speedup", "T(k0) / T(k), of the same line."
    ),
    _Kind(
        *("compute_speedup", "Compute-only speedup", Axis("speedup of computing", from_zero=True), _compute_speedup),
        *("compute_speedup", "Forward, loss, backward and optimizer only, without communication; rank 0."),
    ),
    _Kind(
        *("communication", "Communication share", Axis("share of the time", from_zero=True), _share),
        *("communication_share", "Share of the total time that rank 0 spent communicating and waiting for others."),
    ),
    _Kind(
        *("cost", "Cost", Axis("US dollars", from_zero=True), _cost, "cost"),
        "The whole cluster from the start of the first worker to the end of the last, at list prices.",
    ),
    _Kind(
        *("price_index", "Price index", Axis("price index", is_log=True), _price_index, "price_index"),
        "Increase in price divided by increase in performance: (k / k0) / S(k)².",
    ),
)


def scaling_chart(job: Job, kind: _Kind, published: Sequence[PublishedValue] = ()) -> Chart | None:
    """The chart of a job; None if it has no value, zeros alone, or a single one, which is said in a sentence."""
    rows = [row for group in job.groups for row in _rows(job, group, kind)]
    rows += [row for each in published if (row := _published(each, kind)) is not None]
    if not any(row["y"] for row in rows if "style" not in row) or len(rows) < 2:
        return None
    axis = kind.axis
    if kind.key == "total_time":
        metric = job.groups[0].metric
        axis = (
            Axis(metric or "metric", unit_of(metric))
            if job.groups[0].after_time
            else Axis(job.what, SECONDS, from_zero=True)
        )
    counts = sorted({row["x"] for row in rows})
    if len(counts) == 1 or len(job.groups) > len(COLORS):  # a bar for each configuration
        named = {(group.label or job.title, point.workers): job.name_of(group, point) for group, point in _places(job)}
        bars = tuple(
            {**row, "x": named[row["series"], row["x"]], "series": kind.title} for row in rows if "style" not in row
        )
        return Chart(kind.key, f"{kind.title}: {job.name}", Axis("configuration"), axis, bars, Kind.BARS, kind.caption)
    if kind.key in ("speedup", "compute_speedup"):
        rows += guide("ideal", [(count, count / counts[0]) for count in counts])
    elif kind.key == "price_index":
        rows += guide("below 1, distribution pays off", [(counts[0], 1.0), (counts[-1], 1.0)])
    return Chart(kind.key, f"{kind.title}: {job.name}", _WORKERS, axis, tuple(rows), Kind.LINES, kind.caption)


def _rows(job: Job, group: Group, kind: _Kind) -> Iterator[Row]:
    for point in group.points:
        found = kind.value(group, point)
        if found is not None:
            yield _row(group.label or job.title, point.workers, found, point)


def _row(series: str, x: int | str, found: Estimate | Ratio, point: Point) -> Row:
    row: Row = {"series": series, "x": x, "y": found.mean, "few": found.count < MIN_RUNS, "note": note_of(point)}
    return {**row, "low": found.low, "high": found.high} if found.low is not None else row


def metric_bars(job: Job) -> Iterator[Chart]:
    """The last values of the metrics that a user's program reports, which its runs are compared by: a bar for each
    configuration."""
    places = [(group, point) for group, point in _places(job) if point.good]
    names = dict.fromkeys(name for _, point in places for name in point.metrics if job.groups[0].key.command)
    for name in [*names][:MAX_BARS] if len(places) > 1 else ():
        lasts = [(group, point, last) for group, point in places if (last := point.metrics.get(name, {}).get("last"))]
        rows = tuple(_row("last value", job.name_of(group, point), last, point) for group, point, last in lasts)
        words = name_metric(name)
        title, axis = (
            f"{words[:1].upper()}{words[1:]} at the end",
            Axis(words, lasts[0][1].unit_of(name) if lasts else ""),
        )
        yield Chart(f"last-{name}", title, Axis("configuration"), axis, rows, Kind.BARS)


def _published(each: PublishedValue, kind: _Kind) -> Row | None:
    """A point of a published series; costs are recomputed from published times, and as MLBench printed them."""
    names = {kind.published: each.name, f"published_{kind.published}": f"{each.name}, as printed"}
    if each.metric not in names:
        return None
    return {"series": names[each.metric], "x": each.workers, "y": each.value, "style": PUBLISHED}


def note_of(point: Point) -> str:
    """The note at a point: "1 of 2 reached it", "failed", "contended"."""
    trouble = point.share or ("" if point.good else "/".join(sorted({run.outcome for run in point.bad})))
    return ", ".join(word.replace("_", " ") for word in (trouble, *point.labels) if word)


def phase_chart(job: Job, key: str = "time_for_all_phases") -> Chart | None:
    """Rank 0's time by phase: a bar for each configuration."""
    points = [(group, point) for group, point in _places(job) if any(point.parts.values())]
    rows = [
        {"series": words, "x": job.name_of(group, point), "y": seconds, "note": _waiting(point)}
        for words, _, names in PHASES
        for group, point in points
        if (seconds := sum(point.parts.get(name, 0.0) for name in names)) > 0
    ]
    if not any(row["series"] != "other" for row in rows):
        return None
    caption = "Rank 0; means over repeats. The parts of a bar add up to the total time."
    if any(name in point.parts for _, point in points for name in _MIXED):
        caption += " Where messages are sent inside a pass, their time cannot be told from computing."
    return _phases(key, f"Time by phase: {job.name}", rows, caption)


def published_phase_charts(task: str) -> Iterator[Chart]:
    """MLBench 3's bars, apart from ours because they are from other machines."""
    for variant, rows in published_phases(task):
        caption = "Published by the original MLBench, from other machines and other software."
        yield _phases("published_phases", f"Published time by phase: {variant}", rows, caption)


def _phases(key: str, title: str, rows: Sequence[Row], caption: str) -> Chart:
    colors = {name: color for words, color, names in PHASES for name in (words, *names, color)}
    return Chart(key, title, Axis("configuration"), _TIME, tuple(rows), Kind.BARS, caption, colors)


def _places(job: Job) -> list[tuple[Group, Point]]:
    return [(group, point) for group in job.groups for point in group.points]


def _waiting(point: Point) -> str:
    """ "waits 38 %": share of the time spent waiting for messages; empty if none."""
    share = point.waiting or 0.0
    return ", ".join(filter(None, (f"waits {format_share(share)}" if share >= 0.005 else "", note_of(point))))
