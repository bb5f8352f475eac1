"""The three figures of a set of runs: total_time, speedup and time_for_all_phases, each as PNG and SVG, and a CSV.

Figures are drawn without pyplot, so nothing global is touched, and hold neither dates nor versions: the same archives
give the same bytes with the same matplotlib.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_cli.errors import MlbenchError, UsageError
from mlbench_cli.results import layout
from mlbench_cli.results.archive import Archive
from mlbench_cli.results.series import Group, Point, Series, collect, describe
from mlbench_cli.results.verify import open_verified
from mlbench_cli.spec import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette (2008), told apart with any colour vision; yellow is left out for its contrast on white.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
_MARKERS = "osD^vPX"
_STYLES = ("-", "--", "-.", ":")
# One hue for what belongs together: computation blue, communication vermilion, data green, checking purple.
_PHASES = {
    "forward": "#9ecae1",
    "loss": "#deebf7",
    "backward": "#4292c6",
    "optimizer": "#08519c",
    "communication": "#D55E00",
    "preprocessing": "#a1d99b",
    "data_wait": "#238b45",
    "metrics": "#cbc9e2",
    "validation": "#8c6bb1",
    "other": "#bdbdbd",
}
_BAD = {"goal_missed": "goal missed", "never_started": "never started"}
_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.dpi": 150,
    "font.size": 9.5,
    "grid.color": "#dddddd",
    "hatch.color": "#555555",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 150,
    "svg.fonttype": "path",
    "svg.hashsalt": "mlbench",
    "text.parse_math": False,
}


def draw(archives: Iterable[Archive | Run | Path], folder: Path) -> list[Path]:
    """Draw the figures of sealed archives (folders, zips or runs) into `folder`; the paths that were written.

    Every archive is verified first. Raises UsageError without archives, DamagedArchive (which names it) where one is
    damaged or not sealed. With one number of workers there is no speed-up, and that figure says what to run.
    """
    opened = [_verified(item) for item in archives]
    if not opened:
        raise UsageError(
            "There are no finished runs to draw.",
            hint="mlbench run NAME 1 2 4 --task TASK, then: mlbench charts FOLDER",
        )
    series = collect(opened)
    for archive in opened:
        archive.close()
    figures = {"total_time": _total_time, "speedup": _speedup, "time_for_all_phases": _phases}
    with layout.told(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        written = [path for name, plot in figures.items() for path in _write(plot, series, folder / name)]
        layout.replace(folder / "summary.csv", series.to_csv().encode())
    return [*written, folder / "summary.csv"]


def _verified(item: Archive | Run | Path) -> Archive:
    path = item if isinstance(item, Path) else Path(item.path) if isinstance(item, Archive) else item.folder
    return open_verified(path)


def _write(plot: Callable[[Series], "Figure"], series: Series, stem: Path) -> list[Path]:
    try:
        import matplotlib
    except ImportError:
        raise MlbenchError(
            "Charts need matplotlib, which is not installed.", hint="pip install 'mlbench[plots]'"
        ) from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)  # type: ignore[arg-type,unused-ignore]
        figure = plot(series)
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
            with layout.replacing(stem.with_suffix(suffix)) as file:
                figure.savefig(file, format=suffix[1:], metadata=metadata)
    return [stem.with_suffix(".png"), stem.with_suffix(".svg")]


# --- the figures --------------------------------------------------------------------------------------------------


def _total_time(series: Series) -> "Figure":
    """Bars by number of workers, one colour per group, one panel per task."""
    figure, panels = _panels(series, "Time to the goal", series.tasks, 3.6)
    looks = _looks(series)
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
        axes.set_ylabel(_measure(groups))
        if len(series.tasks) > 1:
            axes.set_title(task)
    _legend(figure, [(label, color) for label, (color, _, _) in looks.items()])
    return figure


def _speedup(series: Series) -> "Figure":
    """Lines over the number of workers against the ideal, one panel per task."""
    tasks = [task for task in series.tasks if any(group.has_speedup for group in series.groups if group.task == task)]
    if not tasks:
        figure, (axes,) = _panels(series, "Speed-up", [""], 3.2)
        axes.set_axis_off()
        message = (
            "A speed-up needs good runs with at least two numbers of workers.\n\nmlbench run NAME 1 2 4 --task TASK"
        )
        axes.text(0.5, 0.55, message, ha="center", va="center", fontsize=11, transform=axes.transAxes)
        return figure
    figure, panels = _panels(series, "Speed-up", tasks, 4.4)
    looks = _looks(series)
    for task, axes in zip(tasks, panels, strict=True):
        groups = [group for group in series.groups if group.task == task and group.has_speedup]
        counts = sorted({point.workers for group in groups for point in group.points if point.good})
        wide = counts[-1] >= 8 * counts[0]
        if wide:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
        for first in sorted({group.baseline.workers for group in groups if group.baseline}):
            ideal = [count for count in counts if count >= first]
            axes.plot(
                ideal, [count / first for count in ideal], color="#888888", linestyle=(0, (1, 1.5)), linewidth=1.4
            )
            axes.annotate(
                "ideal" if first == counts[0] else f"ideal from {first}",
                (ideal[-1], ideal[-1] / first),
                xytext=(-4, 2),
                textcoords="offset points",
                ha="right",
                va="bottom",
                color="#666666",
            )
        for group in groups:
            _line(axes, group, *looks[group.label])
        axes.set_xticks(counts, [str(count) for count in counts], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("workers")
        axes.set_ylabel("speed-up (times faster than the baseline)")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if not wide:
            axes.set_ylim(bottom=0)
        axes.grid(True, axis="both")
        axes.legend(loc="upper left", fontsize=8, handlelength=2.6)
        if len(tasks) > 1:
            axes.set_title(task)
    return figure


def _phases(series: Series) -> "Figure":
    """Stacked bars that add up to the total, one panel per group."""
    figure, panels = _panels(series, "Time for all phases", [*series.groups], 3.3)
    used = [name for name in _PHASES if any(point.parts[name] > 0 for group in series.groups for point in group.points)]
    for group, axes in zip(series.groups, panels, strict=True):
        counts = [point.workers for point in group.points]
        for x, point in enumerate(group.points):
            bottom = 0.0
            for name in used:
                axes.bar(x, point.parts[name], 0.68, bottom, color=_PHASES[name], edgecolor="white", linewidth=0.4)
                bottom += point.parts[name]
            if not point.good:
                axes.bar(x, bottom, 0.68, fill=False, hatch="////", edgecolor="#555555", linewidth=0.8)
            _whiskers(axes, x, point)
            _note(axes, x, point, _short(bottom), narrow=len(counts) > 8)
        _count_axis(axes, counts)
        axes.set_ylabel(_measure([group]) if len(series.groups) == 1 else "seconds")
        if len(series.groups) > 1:
            name = f"{group.task}: {group.label}" if len(series.tasks) > 1 else group.label
            axes.set_title(textwrap.fill(name, 46), fontsize=9)
    names = {"data_wait": "data wait", "optimizer": "optimiser"}
    _legend(figure, [(names.get(name, name), _PHASES[name]) for name in used])
    return figure


# --- their pieces -------------------------------------------------------------------------------------------------


def _panels(series: Series, title: str, panels: Sequence[Any], height: float) -> tuple["Figure", list["Axes"]]:
    """A figure with title, subtitle and footnote, and one panel for each of `panels`, in rows of up to three."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
    rows = -(-len(panels) // columns)
    width = {1: 7.5, 2: 10.5, 3: 13.5}[columns]
    subtitle = textwrap.wrap(_subtitle(series), int(width * 13.5))
    footnote = textwrap.wrap(_footnote(series), int(width * 15))
    head, foot = 0.42 + 0.18 * len(subtitle), 0.08 + 0.16 * len(footnote)
    total = height * rows + head + foot
    # What the layout engine arranges, panels and legend, stays between head and foot.
    rectangle = (0.0, foot / total, 1.0, 1 - (head + foot) / total)
    figure = Figure(figsize=(width, total), layout=ConstrainedLayoutEngine(rect=rectangle, w_pad=0.12, h_pad=0.08))
    figure.text(0.12 / width, 1 - 0.1 / total, title, va="top", fontsize=13, fontweight="bold")
    figure.text(0.12 / width, 1 - 0.38 / total, "\n".join(subtitle), va="top", color="#444444")
    figure.text(0.12 / width, 0.07 / total, "\n".join(footnote), va="bottom", fontsize=8, color="#444444")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for empty in axes[len(panels) :]:
        empty.set_axis_off()
    return figure, axes[: len(panels)]


def _subtitle(series: Series) -> str:
    """What all groups share; that data were synthetic stands out."""
    common = dict(series.common)
    first = "SYNTHETIC DATA" if common.pop("synthetic", "") else ""
    told = [name for name in common if not name.startswith("parameter ") and name not in ("engine", "measure")]
    hidden = {"processes_per_worker": "1", "gpus_per_worker": "0"}
    words = [describe(name, common[name]) for name in told if common[name] != hidden.get(name)]
    return " · ".join(filter(None, [first, *words]))


def _footnote(series: Series) -> str:
    """What a reader must know: whiskers, and which runs do not count."""
    notes = []
    if any(len(point.shown) > 1 for group in series.groups for point in group.points):
        notes.append("Bars and points are means of repeats, whiskers the fastest and slowest.")
    if series.bad:
        names = [f"{run.name} ({_BAD.get(run.outcome, run.outcome)})" for run in series.bad]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        notes.append(f"Not counted, hatched where nothing else is there: {', '.join(names[:8])}{more}.")
    return " ".join(notes)


def _looks(series: Series) -> dict[str, tuple[str, str, str]]:
    """Colour, marker and line style of each label, the same in every panel and figure."""
    labels = list(dict.fromkeys(group.label for group in series.groups))
    return {
        label: (_COLORS[index % 7], _MARKERS[index % 7], _STYLES[index // 7 % 4]) for index, label in enumerate(labels)
    }


def _bar(axes: "Axes", x: float, width: float, point: Point, color: str) -> None:
    if point.good:
        axes.bar(x, point.seconds.mean, width, color=color)
    else:
        axes.bar(x, point.seconds.mean, width, color="white", edgecolor=color, hatch="////", linewidth=1)
    _whiskers(axes, x, point)


def _whiskers(axes: "Axes", x: float, point: Point) -> None:
    if len(point.shown) < 2:
        return
    mean, low, high = point.seconds.mean, point.seconds.low, point.seconds.high
    axes.errorbar(x, mean, [[mean - low], [high - mean]], color="#222222", capsize=2.5, linewidth=1, capthick=1)


def _note(axes: "Axes", x: float, point: Point, figure: str, *, narrow: bool) -> None:
    """Above a bar: its figure, and what became of runs that do not count."""
    trouble = ""
    if point.bad and point.good:
        trouble = f"{len(point.good)} of {len(point.good) + len(point.bad)}"
    elif point.bad:
        outcomes = sorted({_BAD.get(run.outcome, run.outcome) for run in point.bad})
        trouble = "/".join(outcomes)
    text = (" " if narrow else "\n").join(filter(None, (trouble, figure)))
    if not text:
        return
    axes.annotate(
        text,
        (x, point.seconds.high),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=7.5,
        rotation=90 if narrow else 0,
        color="#222222",
    )


def _line(axes: "Axes", group: Group, color: str, marker: str, style: str) -> None:
    found = [(point, speedup) for point in group.points if (speedup := group.speedup(point))]
    counts = [point.workers for point, _ in found]
    means = [speedup.mean for _, speedup in found]
    below = [speedup.mean - speedup.low for _, speedup in found]
    above = [speedup.high - speedup.mean for _, speedup in found]
    assert group.baseline is not None  # it has a speed-up
    workers = f"{group.baseline.workers} worker{'s' if group.baseline.workers > 1 else ''}"
    label = textwrap.fill(f"{group.label} (1 = {_short(group.baseline.seconds.mean)} s with {workers})", 60)
    axes.errorbar(
        counts,
        means,
        [below, above],
        color=color,
        marker=marker,
        linestyle=style,
        label=label,
        capsize=2.5,
        markersize=5,
    )


def _count_axis(axes: "Axes", counts: Sequence[int]) -> None:
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlim(-0.6, len(counts) - 0.4)
    axes.set_xlabel("workers")
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.18)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def _measure(groups: Sequence[Group]) -> str:
    whole = {run.whole_run for group in groups for point in group.points for run in point.shown}
    if whole == {True}:
        return "seconds of the whole run"
    if whole == {False} and all(group.facts["goal"] for group in groups):
        return "seconds from the first step to the goal"
    return "seconds"


def _legend(figure: "Figure", entries: Sequence[tuple[str, str]]) -> None:
    """Below the panels, in as many columns as fit."""
    from matplotlib.patches import Patch

    longest = max(len(label) for label, _ in entries)
    columns = max(1, min(len(entries), int(figure.get_figwidth() * 12 / (longest + 6))))
    handles = [Patch(facecolor=color, label=textwrap.fill(label, 90)) for label, color in entries]
    figure.legend(handles=handles, loc="outside lower left", ncols=columns)


def _short(seconds: float) -> str:
    """Three digits that matter, never in powers of ten."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}" if seconds >= 0.001 else "0"
