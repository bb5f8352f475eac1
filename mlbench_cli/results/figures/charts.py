"""`mlbench charts`: eleven figures of a set of runs as PNG and SVG files with their rows as CSV.

Time, speedup and phases are always drawn; the others where runs have them. Runs share a chart by the same rules as in
the report.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from mlbench_cli.errors import UsageError
from mlbench_cli.model.goals import name_metric
from mlbench_cli.model.run import Run
from mlbench_cli.results.analysis import collectives
from mlbench_cli.results.analysis.comparability import UNKNOWN, describe
from mlbench_cli.results.analysis.jobs import Job, split_jobs
from mlbench_cli.results.analysis.numbers import SECONDS, format_estimate, unit_of
from mlbench_cli.results.analysis.published import published_values
from mlbench_cli.results.analysis.series import Measurement, Series, collect, drop_duplicates
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.results.figures.chart import Chart
from mlbench_cli.results.figures.collectives import collective_charts
from mlbench_cli.results.figures.curves import RunData, metric_charts, resource_charts
from mlbench_cli.results.figures.files import Sheet, write_sheets
from mlbench_cli.results.figures.scaling import KINDS, metric_bars, phase_chart, published_phase_charts, scaling_chart
from mlbench_cli.util.files import write_atomically
from mlbench_cli.util.text import counted, list_some

MAX_MACHINE_RUNS = 4  # runs whose samples are drawn, the largest first
_BAD = {"goal_missed": "goal missed", "never_started": "never started"}
_NO_SPEEDUP = "A speedup needs successful runs with two numbers of workers:\n\nmlbench run NAME 1 2 4 --task TASK"
_SPENT = "Runs with a time budget have no speedup; see total_time."
_NO_PHASES = "No run reported its phases."
_APPROXIMATE = "Some published values are read from plots, within 2 to 5 %."


def draw(
    archives: Iterable[Archive | Run | Path],
    folder: Path,
    *,
    published: bool = False,
    min_runs: int = 1,
) -> list[Path]:
    """Draw the figures of sealed archives (folders, zips or runs) into `folder`; returns the written paths.

    Runs and paths are verified first, Archives are not. With a single number of workers, the figure of speedup says
    what to run instead. `published` adds MLBench 3's published results. `min_runs`: fewest successful runs of a size
    for a speedup. Raises UsageError without archives, DamagedArchive or UnprovenArchive.
    """
    opened = [
        item if isinstance(item, Archive) else open_verified(item if isinstance(item, Path) else item.folder)
        for item in archives
    ]
    if not opened:
        raise UsageError(
            "There are no finished runs to draw.",
            hint="mlbench run NAME 1 2 4 --task TASK, then: mlbench charts FOLDER",
        )
    opened = drop_duplicates(opened)
    series = collect(opened, min_runs)
    curves = [curve for archive in opened for curve in collectives.read(archive)]
    if published:
        has_others = any(published_values(group.task) for group in series.groups)
        curves += (collectives.find_published if has_others else collectives.select_published)(curves)
    together = collectives.label_curves(curves)
    sheets = list_sheets(series, [RunData(archive) for archive in opened], together, published=published)
    is_own = all(group.key.command for group in series.groups)  # what a user's program is about are its metrics
    written = write_sheets(sorted(sheets, key=lambda sheet: is_own and sheet.name != "metrics"), folder)
    write_atomically(folder / "summary.csv", series.to_csv().encode())
    return [*written, folder / "summary.csv"]


def list_sheets(
    series: Series, runs: Sequence[RunData] = (), curves: Sequence[collectives.Curve] = (), *, published: bool = False
) -> Iterator[Sheet]:
    """The sheets of `mlbench charts` for a set of runs; `runs` are those whose curves are drawn."""
    jobs = split_jobs(series)
    spent = all(group.after_time for group in series.groups)
    to_goal = all(group.facts["goal"] and not group.after_time for group in series.groups)
    reached = f"{name_metric(series.groups[0].metric)} at the end of the time budget" if spent else "Total time"
    titles = {"total_time": "Total time to the goal" if to_goal else reached}
    messages = {"total_time": "\n".join(_list_times(jobs)), "speedup": _SPENT if spent else _NO_SPEEDUP}
    for kind in KINDS:
        charts = [scaling_chart(job, kind, published_values(job.task) if published else ()) for job in jobs]
        found = tuple(chart for chart in charts if chart is not None)
        if found or kind.key in messages:
            yield _sheet(series, kind.key, titles.get(kind.key, kind.title), found, messages.get(kind.key, ""))
    phases = [chart for job in jobs if (chart := phase_chart(job)) is not None]
    phases += [chart for job in jobs if published for chart in published_phase_charts(job.task)]
    yield _sheet(series, "time_for_all_phases", "Time for all phases", phases, _NO_PHASES)
    order = {run.source: number for number, run in enumerate(_measured(series))}
    runs = sorted(runs, key=lambda run: (order.get(str(run.archive.path), len(order)), str(run.archive.path)))
    metrics: list[Chart] = []
    for job in jobs:
        own = [run for run in runs if str(run.archive.path) in job.sources]
        for chart in (*metric_bars(job), *metric_charts(own, "", job.sources)):
            metrics.append(chart if len(jobs) == 1 else replace(chart, title=f"{chart.title}: {job.name}"))
    largest = sorted(runs, key=lambda run: -run.workers)[:MAX_MACHINE_RUNS]
    for name, title, drawn in (
        ("metrics", "Metrics", [chart for chart in metrics if chart.key != "learning-rate"]),
        ("learning_rate", "Learning rate over time", [chart for chart in metrics if chart.key == "learning-rate"]),
        ("resources", "Resources", list(resource_charts(largest, ""))),
    ):
        if drawn:
            yield _sheet(series, name, title, drawn)
    if together := tuple(collective_charts(curves)):
        subtitle = (
            "Median time of a call on its slowest rank. Dashed: the fit, latency + S / bandwidth (± its mean error)."
        )
        about = [collectives.ABOUT_PUBLISHED] if any(curve.published for curve in curves) else []
        machines = list_some(list(dict.fromkeys(curve.machine for curve in curves if curve.machine)), 4)
        footnote = " ".join((*([f"Measured on {machines}."] if machines else []), *about))
        yield Sheet("collectives", "Collectives by message size", together, subtitle, footnote, _marks(series))


def _measured(series: Series) -> list[Measurement]:
    return [run for group in series.groups for point in group.points for run in (*point.good, *point.bad)]


def _sheet(series: Series, name: str, title: str, charts: Sequence[Chart], message: str = "") -> Sheet:
    return Sheet(name, title, tuple(charts), _subtitle(series), _footnote(series, charts), _marks(series), message)


def _marks(series: Series) -> tuple[str, ...]:
    """Warnings beside the title: synthetic data, or a cluster whose timings mean nothing."""
    marks = []
    for fact, words in (("synthetic", "SYNTHETIC DATA"), ("label", "FUNCTIONAL ONLY")):
        marked = [bool(group.facts[fact]) for group in series.groups]
        if any(marked):
            marks.append(words if all(marked) else f"PARTLY {words}")
    return tuple(marks)


def _list_times(jobs: Sequence[Job]) -> Iterator[str]:
    """Single values as text: "digits_resnet: 6.17 s with 4 workers"; with a time budget, what the runs came to."""
    for job in jobs:
        for group in job.groups:
            for point in group.points:
                value = format_estimate(point.seconds, SECONDS) if point.good else "no run succeeded"
                if group.after_time and point.good and point.value:
                    value = f"{group.metric} {format_estimate(point.value, unit_of(group.metric))}"
                yield f"{job.name}: {value} with {counted(point.workers, 'worker')}"


def _subtitle(series: Series) -> str:
    """The informative settings that all groups share."""
    silent = {"processes_per_worker": "1", "gpus_per_worker": "0"}
    told = (
        *("task", "backend", "device", "preset", "command", "goal"),
        *("processes_per_worker", "gpus_per_worker", "cpus", "label"),
    )
    common = {name: series.common.get(name, "") for name in told}
    shown = [name for name in told if common[name] not in (UNKNOWN, silent.get(name))]
    return " · ".join(filter(None, (describe(name, common[name]) for name in shown)))


def _footnote(series: Series, charts: Sequence[Chart]) -> str:
    """What the charts show, the meaning of whiskers, and excluded runs."""
    shown = [run for group in series.groups for point in group.points for run in point.shown]
    notes = list(dict.fromkeys(chart.caption for chart in charts if chart.caption))
    if not all(run.whole_run for run in shown):
        notes.append("Seconds count from the first training step to the goal or the end, validation included.")
    if any(run.whole_run for run in shown):
        notes.append("Runs that report no result are shown with the seconds of the whole run.")
    if any(len(point.shown) > 1 for group in series.groups for point in group.points):
        notes.append("Means of repeats. Capped bars: 95 % intervals (Student's t).")
    if any(row["series"].startswith("published") for chart in charts for row in chart.rows):
        notes.append(_APPROXIMATE)
    notes += _conditions(shown)
    if series.bad:
        names = [f"{run.name} ({_BAD.get(run.outcome, run.outcome)})" for run in series.bad]
        notes.append(f"Excluded: {list_some(names, 8)}.")
    return " ".join(notes)


def _conditions(runs: Sequence[Measurement]) -> list[str]:
    """How many runs were contended, shared and so on, and a reason; summary.csv says which."""
    found: dict[str, list[str]] = {}
    for each in (each for run in runs for each in run.conditions.found):
        found.setdefault(each.label.replace("_", "-"), []).append(each.reason)
    words = [f"{label} ({counted(len(reasons), 'run')}: {reasons[0]})" for label, reasons in found.items()]
    return [f"Measured under other conditions: {list_some(words)}."] if words else []
