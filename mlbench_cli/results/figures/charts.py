"""`mlbench charts`: pictures of a set of runs as PNG and SVG files, and a CSV of their numbers.

Total time, speed-up and phases are always drawn; cost, price index, metrics over time, resources, collectives and the
rest where runs have them. Runs share a panel by the same rules as in the report.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Run
from mlbench_cli.results.analysis import collectives
from mlbench_cli.results.analysis.comparability import UNKNOWN, describe
from mlbench_cli.results.analysis.figures import COST
from mlbench_cli.results.analysis.numbers import SECONDS, format_estimate, unit_of
from mlbench_cli.results.analysis.series import Measurement, Series, collect
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.results.figures.collectives import collective_sheets
from mlbench_cli.results.figures.curves import RunData, metric_figures, resource_figures
from mlbench_cli.results.figures.model import Figure, Sheet
from mlbench_cli.results.figures.png import write_sheets
from mlbench_cli.results.figures.published import published_sources
from mlbench_cli.results.figures.scaling import (
    Job,
    after_time_figure,
    phase_figures,
    published_phases_figures,
    scaling_figures,
    speedup_figure,
    split_jobs,
    time_figure,
)
from mlbench_cli.util.text import counted, list_some, shorten

MAX_MACHINE_RUNS = 4  # runs whose samples are drawn, the largest first
_BAD = {"goal_missed": "goal missed", "never_started": "never started"}


def draw(
    archives: Iterable[Archive | Run | Path],
    folder: Path,
    *,
    published: bool = False,
    min_runs: int = 1,
) -> list[Path]:
    """Draw the figures of sealed archives (folders, zips or runs) into `folder`; returns the written paths.

    Runs and paths are verified first, Archives are not. Raises UsageError without archives, DamagedArchive for a
    damaged or unsealed one, UnprovenArchive for an unproven one.
    With a single number of workers, the figure of speed-up says what to run instead.
    `published` adds MLBench 3's published results.
    `min_runs`: fewest successful runs of a size for a speed-up.
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
    series = collect(opened, min_runs)
    curves = [curve for archive in opened for curve in collectives.read(archive)]
    if published:
        has_others = any(published_sources(group.task) for group in series.groups)
        curves += (collectives.find_published if has_others else collectives.select_published)(curves)
    together = collectives.label_curves(curves)
    sheets = [*list_sheets(series, [RunData(archive) for archive in opened], published=published)]
    sheets += collective_sheets(together)
    for archive in opened:
        archive.close()
    tables = {"summary.csv": series.to_csv()}
    if curves:
        tables["collectives.csv"] = collectives.to_csv(together)
    return write_sheets(sheets, folder, tables)


def list_sheets(series: Series, runs: Sequence[RunData] = (), *, published: bool = False) -> Iterator[Sheet]:
    """The sheets of `mlbench charts` for a set of runs; `runs` are those whose curves are drawn."""
    measured = [run for group in series.groups for point in group.points for run in (*point.good, *point.bad)]
    order = {run.source: number for number, run in enumerate(measured)}
    runs = sorted(runs, key=lambda run: (order.get(str(run.archive.path), len(order)), str(run.archive.path)))
    prices = {run.source: price for run in measured if (price := run.get(COST)) is not None}
    jobs = split_jobs(series, prices, published=published)
    to_goal = all(group.facts["goal"] and not group.after_time for group in series.groups)
    title = "Total time to the goal" if to_goal else "Total time"
    yield _sheet(series, "total_time", title, [time_figure(job, "") for job in jobs], "\n".join(_list_times(jobs)))
    speedups = [speedup_figure(job, "") for job in jobs]
    message = "A speed-up needs successful runs with two numbers of workers:\n\nmlbench run NAME 1 2 4 --task TASK"
    if all(group.after_time for group in series.groups):
        message = "Runs with a time budget have no speed-up;\nsee accuracy_after_time instead."
    yield _sheet(series, "speedup", "Speed-up", speedups, message)
    phases = [figure for job in jobs for figure in phase_figures(job, "")]
    phases += [figure for job in jobs for figure in published_phases_figures(job, "") if published]
    yield _sheet(series, "time_for_all_phases", "Time for all phases", phases, "No run reported its phases.")
    after = [figure for job in jobs if (figure := after_time_figure(job, "")) is not None]
    if any(group.after_time for group in series.groups):
        budgets = {group.facts["budget"] for group in series.groups if group.after_time}
        title = f"Accuracy after {budgets.pop()} s" if len(budgets) == 1 else "Accuracy after time"
        yield _sheet(series, "accuracy_after_time", title, after, "\n".join(_list_values(jobs)))
    more: dict[str, list[Figure]] = {}
    for number, job in enumerate(jobs):
        own = [run for run in runs if str(run.archive.path) in _sources_of(job)]
        for figure in (*scaling_figures(job, number), *metric_figures(own, f"job{number}-")):
            more.setdefault(figure.key.partition("-")[2], []).append(figure)
    largest = sorted(runs, key=lambda run: -run.workers)[:MAX_MACHINE_RUNS]
    for figure in resource_figures(largest, "machine-"):
        more.setdefault(figure.key, []).append(figure)
    for key, figures in more.items():
        if key not in ("time", "speedup", "phases", "after-time"):
            title = figures[0].title.partition(": ")[0]
            yield _sheet(series, key.replace("-", "_"), title, figures, "")


def _sources_of(job: Job) -> set[str]:
    return {run.source for group in job.groups for point in group.points for run in point.shown}


def _sheet(series: Series, name: str, title: str, figures: Sequence[Figure | None], message: str) -> Sheet:
    """A sheet of the available figures; without any, of a message."""
    found = tuple(figure for figure in figures if figure is not None)
    marks = []
    for fact, words in (("synthetic", "SYNTHETIC DATA"), ("label", "FUNCTIONAL ONLY")):
        marked = [bool(group.facts[fact]) for group in series.groups]
        if any(marked):
            marks.append(words if all(marked) else f"PARTLY {words}")
    return Sheet(name, title, found, _subtitle(series), _footnote(series), tuple(marks), message)


def _list_times(jobs: Sequence[Job]) -> Iterator[str]:
    """Single values as text: "digits_resnet: 6.17 s with 4 workers"."""
    for job in jobs:
        for group in job.groups:
            for point in group.points:
                time = format_estimate(point.seconds, SECONDS) if point.good else "no run succeeded"
                yield f"{job.name}: {time} with {counted(point.workers, 'worker')}"


def _list_values(jobs: Sequence[Job]) -> Iterator[str]:
    for job in jobs:
        for group in job.groups:
            for point in group.points:
                if group.after_time and point.good and point.value:
                    value = format_estimate(point.value, unit_of(group.metric))
                    yield f"{job.name}: {group.metric} {value} with {counted(point.workers, 'worker')}"


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


def _footnote(series: Series) -> str:
    """The measured quantity, the meaning of whiskers, and excluded runs."""
    shown = [run for group in series.groups for point in group.points for run in point.shown]
    notes = []
    if not all(run.whole_run for run in shown):
        notes.append("Seconds count from the first training step to the goal or the end, validation included.")
    if any(run.whole_run for run in shown):
        notes.append("Runs that report no result are shown with the seconds of the whole run.")
    if any(len(point.shown) > 1 for group in series.groups for point in group.points):
        notes.append("Means of repeats. Capped bars: 95 % intervals (Student's t).")
    labeled = [run for run in shown if run.conditions.labels]
    if labeled:
        notes.append(f"{_conditions(labeled)}.")
    if series.bad:
        names = [f"{run.name} ({_BAD.get(run.outcome, run.outcome)})" for run in series.bad]
        notes.append(f"Excluded: {list_some(names, 8)}.")
    return " ".join(notes)


def _conditions(runs: Sequence[Measurement]) -> str:
    """The contended and oversubscribed runs, with reasons."""
    phrases = [f"{run.name} ({run.conditions.phrase})" for run in runs]
    return shorten(f"Measured under other conditions: {list_some(phrases, 6)}", 900)
