"""The figures of a set of runs: total_time, speedup and time_for_all_phases, each as PNG and SVG, and a CSV. Where runs
had a time to spend, accuracy_after_time, too; if they measured collectives, those of results/collectives.py; if their
method sends beside the training, overlap.

Figures are drawn without pyplot, so nothing global is touched, and hold neither dates nor versions: the same archives
give the same bytes with the same matplotlib.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_cli import files
from mlbench_cli.errors import UsageError
from mlbench_cli.model import Run
from mlbench_cli.results.analysis.comparability import UNKNOWN
from mlbench_cli.results.analysis.series import Group, Measurement, Point, Series, collect, describe
from mlbench_cli.results.analysis.statistics import Estimate
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.results.figures.style import COLORS, MARKERS, PHASES, style, write
from mlbench_cli.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = ("-", "--", "-.", ":")
_BAD = {"goal_missed": "goal missed", "never_started": "never started"}


def draw(
    archives: Iterable[Archive | Run | Path],
    folder: Path,
    *,
    published: bool = False,
    foreign: Iterable[Path] = (),
    min_runs: int = 1,
) -> list[Path]:
    """Draw the figures of sealed archives (folders, zips or runs) into `folder`; the paths that were written.

    Every archive is verified first. Raises UsageError without archives, DamagedArchive (which names it) if one is
    damaged or not sealed. With one number of workers there is no speed-up, and that figure says what to run.
    `published` puts the original's curves beside those of collectives, `foreign` those in files of nccl-tests or OSU.
    `min_runs`: fewest successful runs of a size for a speed-up.
    """
    from mlbench_cli.results.analysis import collectives
    from mlbench_cli.results.analysis.foreign_collectives import read_foreign_curves
    from mlbench_cli.results.figures import overlap

    imported = [curve for path in foreign for curve in read_foreign_curves(path)]

    opened = [_open_verified(item) for item in archives]
    if not opened:
        raise UsageError(
            "There are no finished runs to draw.",
            hint="mlbench run NAME 1 2 4 --task TASK, then: mlbench charts FOLDER",
        )
    series = collect(opened, min_runs)
    curves = [curve for archive in opened for curve in collectives.read(archive)] + imported
    if published:
        curves += collectives.select_published(curves)
    overlaps = [found for archive in opened if (found := overlap.read_overlap(archive)) is not None]
    for archive in opened:
        archive.close()
    with layout.naming_file_on_os_error(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        written = [path for name, figure in figures(series) for path in write(figure, folder / name)]
        if overlaps:
            written += overlap.draw(overlaps, folder)
        if curves:
            written += collectives.draw(curves, folder)
        files.write_atomically(folder / "summary.csv", series.to_csv().encode())
    return [*written, folder / "summary.csv"]


def figures(series: Series) -> Iterator[tuple[str, "Figure"]]:
    """Name and figure, one after the other; each is to be used before the next is asked for. The style ends with it."""
    with style():
        plots = {"total_time": _total_time, "speedup": _speedup, "time_for_all_phases": _phases}
        if any(group.after_time for group in series.groups):
            plots["accuracy_after_time"] = _after_time
        for name, plot in plots.items():
            figure = plot(series)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # the same places in both formats, found once
            yield name, figure


def _open_verified(item: Archive | Run | Path) -> Archive:
    path = item if isinstance(item, Path) else Path(item.path) if isinstance(item, Archive) else item.folder
    return open_verified(path)


# --- the figures --------------------------------------------------------------------------------------------------


def _total_time(series: Series) -> "Figure":
    """Bars by number of workers, one colour per group, one panel per task."""
    looks = _looks(series)
    legend = [(label, color) for label, (color, _, _) in looks.items()] if len(looks) > 1 else []
    to_goal = all(group.facts["goal"] and not group.after_time for group in series.groups)
    title = "Total time to the goal" if to_goal else "Total time"
    figure, panels = _panels(series, title, _titles(series, series.tasks), 3.5, legend)
    for task, axes in zip(series.tasks, panels, strict=True):
        groups = [group for group in series.groups if group.task == task]
        counts = sorted({point.workers for group in groups for point in group.points})
        width = 0.8 / len(groups)
        labelled = len(groups) * len(counts) <= 14
        for index, group in enumerate(groups):
            for point in group.points:
                x = counts.index(point.workers) + (index - (len(groups) - 1) / 2) * width
                _bar(axes, x, width * 0.92, point, looks[group.label][0])
                _note(axes, x, point, f"{_short(point.seconds.mean)}" if labelled else "", narrow=not labelled)
        _count_axis(axes, counts)
    return figure


def _speedup(series: Series) -> "Figure":
    """Lines over the number of workers against the ideal, one panel per task."""
    tasks = [task for task in series.tasks if any(group.has_speedup for group in series.groups if group.task == task)]
    if not tasks:
        figure, (axes,) = _panels(series, "Speed-up", [""], 1.6)
        axes.set_axis_off()
        message = "A speed-up needs successful runs with two numbers of workers:\n\nmlbench run NAME 1 2 4 --task TASK"
        if all(group.after_time for group in series.groups):
            message = "Runs that had a time to spend have no speed-up;\n\nhow far they came is in accuracy_after_time"
        axes.text(0.5, 0.5, message, ha="center", va="center", fontsize=11, transform=axes.transAxes)
        return figure
    figure, panels = _panels(series, "Speed-up", _titles(series, tasks), 4.4)
    looks = _looks(series)
    for task, axes in zip(tasks, panels, strict=True):
        groups = [group for group in series.groups if group.task == task and group.has_speedup]
        counts = sorted({point.workers for group in groups for point in group.points if point.good})
        wide = counts[-1] >= 8 * counts[0]
        if wide:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
        for first in sorted({group.baseline.workers for group in groups if group.baseline}):
            _ideal(axes, [count for count in counts if count >= first], named=first != counts[0])
        for group in groups:
            _line(axes, group, *looks[group.label])
        if not wide:
            axes.set_ylim(bottom=0)  # after the lines, since it ends the scaling to what is drawn
        _speedup_axes(axes, counts)
        axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.13), fontsize=8.5, handlelength=2.6)
    return figure


def _phases(series: Series) -> "Figure":
    """Stacked bars that add up to the total, one panel per group."""
    used = [name for name in PHASES if any(point.parts[name] > 0 for group in series.groups for point in group.points)]
    names = {"data_wait": "data wait", "optimizer": "optimiser"}
    if any(run.hides for group in series.groups for point in group.points for run in point.shown):
        names["backward"] = "backward (hides communication)"
    titles = [_group_title(series, group) for group in series.groups]
    figure, panels = _panels(
        series, "Time for all phases", titles, 3.2, [(names.get(name, name), PHASES[name]) for name in used]
    )
    for group, axes in zip(series.groups, panels, strict=True):
        counts = [point.workers for point in group.points]
        for x, point in enumerate(group.points):
            bottom = 0.0
            for name in used:
                axes.bar(x, point.parts[name], 0.68, bottom, color=PHASES[name], edgecolor="white", linewidth=0.4)
                bottom += point.parts[name]
            if not point.good:
                axes.bar(x, bottom, 0.68, fill=False, hatch="////", edgecolor="#555555", linewidth=0.8)
            _whiskers(axes, x, point)
            _note(axes, x, point, _short(bottom), narrow=len(counts) > 8)
        _count_axis(axes, counts)
    return figure


def _after_time(series: Series) -> "Figure":
    """The goal's metric at the end of the time budget over the number of workers, one panel per task."""
    tasks = [task for task in series.tasks if any(group.after_time for group in series.groups if group.task == task)]
    budgets = {group.facts["budget"] for group in series.groups if group.after_time}
    title = f"Accuracy after {budgets.pop()} s" if len(budgets) == 1 else "Accuracy after time"
    figure, panels = _panels(series, title, _titles(series, tasks), 4.0)
    looks = _looks(series)
    for task, axes in zip(tasks, panels, strict=True):
        groups = [group for group in series.groups if group.task == task and group.after_time]
        counts = sorted({point.workers for group in groups for point in group.points if point.good})
        for index, group in enumerate(groups):
            color, marker, style = looks[group.label]
            aside = 0.05 * (index - (len(groups) - 1) / 2)  # so that intervals do not hide each other
            points = [(counts.index(point.workers) + aside, point.value) for point in group.points if point.good]
            found = [(x, value) for x, value in points if value]
            label = textwrap.fill(shorten(group.label, 150), 66)
            x, means = [x for x, _ in found], [value.mean for _, value in found]
            axes.plot(x, means, color=color, marker=marker, linestyle=style, label=label, markersize=5)
            for place, value in found:
                _interval(axes, place, value, color)
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.set_xlim(-0.6, len(counts) - 0.4)
        axes.set_xlabel("workers")
        axes.set_ylabel(", ".join(dict.fromkeys(group.metric for group in groups)))
        axes.margins(y=0.15)
        axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.13), fontsize=8.5, handlelength=2.6)
    return figure


# --- their pieces -------------------------------------------------------------------------------------------------


def _panels(
    series: Series, title: str, titles: Sequence[str], height: float, legend: Sequence[tuple[str, str]] = ()
) -> tuple["Figure", list["Axes"]]:
    """A figure with title, subtitle, legend and footnote, and a panel for each of `titles`, in rows of up to three."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = {1: 1, 2: 2, 4: 2}.get(len(titles), 3)
    rows = -(-len(titles) // columns)
    width = {1: 7.5, 2: 10.5, 3: 13.5}[columns]
    subtitle = textwrap.wrap(_subtitle(series), int(width * 13.5))
    footnote = textwrap.wrap(_footnote(series), int(width * 16))
    legend_columns = max(1, int(width * 12 / (max((len(label) for label, _ in legend), default=0) + 6)))
    legend_rows = -(-len(legend) // legend_columns)
    head, foot, keys = 0.42 + 0.18 * len(subtitle), 0.1 + 0.15 * len(footnote), 0.21 * legend_rows
    total = height * rows + head + keys + foot
    # The layout engine arranges the panels; what is above and below them is laid out here, in inches.
    rectangle = (0.0, (foot + keys) / total, 1.0, 1 - (head + keys + foot) / total)
    figure = Figure(figsize=(width, total), layout=ConstrainedLayoutEngine(rect=rectangle, w_pad=0.12, h_pad=0.08))
    left = 0.12 / width
    _title(figure, series, title, left, 1 - 0.1 / total)
    figure.text(left, 1 - 0.38 / total, "\n".join(subtitle), va="top", color="#444444")
    figure.text(left, 0.08 / total, "\n".join(footnote), va="bottom", fontsize=8, color="#444444")
    if legend:
        _legend(figure, legend, legend_columns, (left, (foot + keys) / total))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for text, panel in zip(titles, axes, strict=False):
        if text:
            panel.set_title(text)
    for empty in axes[len(titles) :]:
        empty.set_axis_off()
    return figure, axes[: len(titles)]


def _title(figure: "Figure", series: Series, title: str, x: float, y: float) -> None:
    """The title, and in a colour of its own that data were synthetic, or figures not a performance measurement."""
    shown = figure.text(x, y, title, va="top", fontsize=13, fontweight="bold")
    for fact, words in (("synthetic", "SYNTHETIC DATA"), ("label", "FUNCTIONAL ONLY")):
        marked = [bool(group.facts[fact]) for group in series.groups]
        if any(marked):
            x += shown.get_window_extent().width / figure.bbox.width
            text = f"   {words}" if all(marked) else f"   PARTLY {words}"
            shown = figure.text(x, y, text, va="top", fontsize=13, fontweight="bold", color="#D55E00")


def _subtitle(series: Series) -> str:
    """What all groups share, as far as it tells something."""
    silent = {"processes_per_worker": "1", "gpus_per_worker": "0"}
    told = (
        *("task", "backend", "device", "preset", "command", "goal"),
        *("processes_per_worker", "gpus_per_worker", "cpus", "label"),
    )
    common = {name: series.common.get(name, "") for name in told}
    shown = [name for name in told if common[name] not in (UNKNOWN, silent.get(name))]
    return " · ".join(filter(None, (describe(name, common[name]) for name in shown)))


def _titles(series: Series, tasks: Sequence[str]) -> list[str]:
    """The panels' titles: each task with what only its runs share. A single panel has none."""
    if len(series.tasks) == 1:
        return [""]
    return ["\n".join((task, *_common_facts(series, task))) for task in tasks]


def _group_title(series: Series, group: Group) -> str:
    if len(series.groups) == 1:
        return ""
    if len(series.tasks) == 1:
        return textwrap.fill(shorten(group.label, 150), 52)
    alone = len({other.label for other in series.groups}) == 1
    name = group.task if alone else f"{group.task}: {group.label}"
    return "\n".join((textwrap.fill(shorten(name, 150), 52), *_common_facts(series, group.task)))


def _common_facts(series: Series, task: str) -> list[str]:
    """What all groups of a task have in common and those of other tasks do not, as lines of a title."""
    groups = [group.facts for group in series.groups if group.task == task]
    told = [name for name in ("preset", "device", "command", "goal", "synthetic", "label") if name not in series.common]
    alike = [name for name in told if len({facts[name] for facts in groups}) == 1]
    words = " · ".join(filter(None, (describe(name, groups[0][name]) for name in alike)))
    return textwrap.wrap(shorten(words, 150), 50)


def _footnote(series: Series) -> str:
    """What a reader must know: what was measured, whiskers, and which runs do not count."""
    shown = [run for group in series.groups for point in group.points for run in point.shown]
    notes = []
    if not all(run.whole_run for run in shown):
        notes.append("Seconds count from the first training step to the goal or the end, validation included.")
    if any(run.whole_run for run in shown):
        notes.append("Runs that report no result are shown with the seconds of the whole run.")
    if any(len(point.shown) > 1 for group in series.groups for point in group.points):
        notes.append("Repeats are averaged; whiskers are the 95 % interval of the mean (Student's t).")
    labelled = [run for run in shown if run.conditions.labels]
    if labelled:
        notes.append(f"{_conditions(labelled)}.")
    if series.bad:
        names = [f"{run.name} ({_BAD.get(run.outcome, run.outcome)})" for run in series.bad]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        notes.append(f"Not counted, hatched if nothing else is there: {', '.join(names[:8])}{more}.")
    return " ".join(notes)


def _conditions(runs: Sequence[Measurement]) -> str:
    """Which runs were not alone on their CPUs, or short of them, and why."""
    phrases = [f"{run.name} ({run.conditions.phrase})" for run in runs]
    more = f" and {len(phrases) - 6} more" if len(phrases) > 6 else ""
    return shorten(f"Times under other conditions: {', '.join(phrases[:6])}{more}", 900)


def _looks(series: Series) -> dict[str, tuple[str, str, str]]:
    """Colour, marker and line style of each label, the same in every panel and figure."""
    labels = list(dict.fromkeys(group.label for group in series.groups))
    return {
        label: (COLORS[index % 7], MARKERS[index % 7], _STYLES[index // 7 % 4]) for index, label in enumerate(labels)
    }


def _bar(axes: "Axes", x: float, width: float, point: Point, color: str) -> None:
    if point.good:
        axes.bar(x, point.seconds.mean, width, color=color)
    else:
        axes.bar(x, point.seconds.mean, width, color="white", edgecolor=color, hatch="////", linewidth=1)
    _whiskers(axes, x, point)


def _whiskers(axes: "Axes", x: float, point: Point) -> None:
    _interval(axes, x, point.seconds, "#222222", floor=0.0)


def _interval(axes: "Axes", x: float, found: Estimate, color: str, floor: float = -math.inf) -> None:
    """The interval of repeats, down to `floor` (no time is below 0); nothing without repeats."""
    if found.low is None or found.high is None:
        return
    reach = [[found.mean - max(found.low, floor)], [found.high - found.mean]]
    axes.errorbar(x, found.mean, reach, color=color, capsize=2.5, linewidth=1, capthick=1)


def _note(axes: "Axes", x: float, point: Point, figure: str, *, narrow: bool) -> None:
    """Above a bar: its figure, and what became of runs that do not count."""
    trouble = ""
    if point.share:
        trouble = point.share
    elif point.bad:
        outcomes = sorted({_BAD.get(run.outcome, run.outcome) for run in point.bad})
        trouble = "/".join(outcomes)
    labels = "/".join(label.replace("_", "-") for label in point.labels)
    trouble = ", ".join(filter(None, (trouble, labels)))
    text = (" " if narrow else "\n").join(filter(None, (trouble, figure)))
    if not text:
        return
    axes.annotate(
        text,
        (x, point.seconds.mean if point.seconds.high is None else point.seconds.high),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=7.5,
        rotation=90 if narrow else 0,
        color="#222222",
    )


def _speedup_axes(axes: "Axes", counts: Sequence[int]) -> None:
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("workers")
    axes.set_ylabel("speed-up, times the baseline")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(True, axis="both")


def _ideal(axes: "Axes", counts: Sequence[int], *, named: bool) -> None:
    axes.plot(counts, [count / counts[0] for count in counts], color="#888888", linestyle=(0, (1, 1.5)), linewidth=1.4)
    axes.annotate(
        f"ideal from {counts[0]}" if named else "ideal",
        (counts[-1], counts[-1] / counts[0]),
        xytext=(-6, 1),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color="#666666",
    )


def _line(axes: "Axes", group: Group, color: str, marker: str, style: str) -> None:
    found = [(point, speedup) for point in group.points if (speedup := group.speedup(point))]
    baseline = found[0][0]
    workers = f"{baseline.workers} worker{'s' if baseline.workers > 1 else ''}"
    label = textwrap.fill(
        f"{shorten(group.label, 150)} (baseline: {_short(baseline.seconds.mean)} s with {workers})", 66
    )
    counts, means = [point.workers for point, _ in found], [speedup.mean for _, speedup in found]
    axes.plot(counts, means, color=color, marker=marker, linestyle=style, label=label, markersize=5)
    for point, speedup in found:
        if point.labels:
            axes.plot(point.workers, speedup.mean, color=color, marker=marker, markersize=5, markerfacecolor="white")
        # A logarithmic axis has no room below 0.
        _interval(axes, point.workers, speedup, color, floor=0.01 * speedup.mean)


def _count_axis(axes: "Axes", counts: Sequence[int]) -> None:
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlim(-0.6, len(counts) - 0.4)
    axes.set_xlabel("workers")
    axes.set_ylabel("seconds")
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.18)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def _legend(figure: "Figure", entries: Sequence[tuple[str, str]], columns: int, corner: tuple[float, float]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, label=shorten(label, 95)) for label, color in entries]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=corner, ncols=columns, borderaxespad=0, borderpad=0.1
    )


def _short(seconds: float) -> str:
    """Three digits that matter, never in powers of ten."""
    return f"{seconds:,.0f}" if seconds >= 99.95 else f"{seconds:#.3g}" if seconds >= 0.001 else "0"
