"""Charts as PNG and SVG files, drawn with matplotlib from the rows that pages draw, and a CSV of the rows.

pyplot is not used, to avoid global state. The files contain no dates and versions, so equal charts give equal bytes
with the same matplotlib.
"""

import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mlbench_cli.config.extras import load_library
from mlbench_cli.errors import naming_file_on_os_error
from mlbench_cli.results.analysis.numbers import format_value
from mlbench_cli.results.figures.chart import (
    FIT,
    GUIDE,
    Axis,
    Chart,
    Kind,
    Row,
    Scale,
    format_tick,
    make_scale,
    to_csv,
)
from mlbench_cli.util import files
from mlbench_cli.util.text import shorten

if TYPE_CHECKING:  # types of an optional library
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

STYLE = Path(__file__).with_name("figures.css")
MAX_MARKS = 60  # points of a line with marks
MAX_NOTES = 24  # points of a chart with notes
MAX_LINES = 40  # of a message
_MARKERS = "osD^vP"
_STYLE: dict[str, Any] = {
    **{f"axes.spines.{side}": False for side in ("left", "right", "top")},
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.dpi": 150,
    "svg.fonttype": "path",
    "svg.hashsalt": "mlbench",
    "text.parse_math": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


class Sheet(Struct, frozen=True):
    """Charts side by side in one file `name`.png and .svg, with their rows in `name`.csv. `marks` are warnings beside
    the title, such as "SYNTHETIC DATA". A sheet without charts shows its `message`."""

    name: str
    title: str
    charts: tuple[Chart, ...]
    subtitle: str = ""
    footnote: str = ""
    marks: tuple[str, ...] = ()
    message: str = ""


def write_sheets(sheets: Iterable[Sheet], folder: Path) -> list[Path]:
    """Write each sheet as NAME.png, .svg and .csv into `folder`. Returns the paths. Raises MlbenchError."""
    written = []
    with naming_file_on_os_error(folder, "written"), _style():
        folder.mkdir(parents=True, exist_ok=True)
        for sheet in sheets:
            picture = draw(sheet)
            for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
                path = folder / f"{sheet.name}{suffix}"
                with files.replace_file(path) as file:
                    picture.savefig(file, format=suffix[1:], metadata=metadata)
                written.append(path)
            if sheet.charts:
                path = folder / f"{sheet.name}.csv"
                files.write_atomically(path, to_csv(sheet.charts).encode())
                written.append(path)
    return written


@cache
def read_colors() -> dict[str, str]:
    """The light colors of pages by name, for pictures on white."""
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", STYLE.read_text("utf-8").split("@media", 1)[0]))


@contextmanager
def _style() -> Iterator[None]:
    matplotlib = load_library("matplotlib", "plots")
    colors = read_colors()
    own = {"axes.edgecolor": colors["edge"], "grid.color": colors["line"], "text.color": colors["ink"]}
    own |= dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), colors["quiet"])
    # Missing glyphs are drawn as boxes; the warning would print untrusted text and a local path.
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE | own)
        yield


def draw(sheet: Sheet) -> "Picture":
    """The title, its warnings, the charts in two columns with a key each, and the footnote."""
    columns = 2 if len(sheet.charts) > 1 else 1
    starts = range(0, len(sheet.charts), columns)
    heights = [max(map(_height, sheet.charts[start : start + columns])) for start in starts] or [1.5]
    width = 5.5 * columns + 2
    note = [line for text in (sheet.subtitle, sheet.footnote) for line in textwrap.wrap(text, int(width * 15))]
    picture: Picture = load_library("matplotlib.figure", "plots").Figure(
        figsize=(width, sum(heights) + 0.8 + 0.15 * len(note)), layout="constrained"
    )
    title = "   ".join((shorten(sheet.title, 150), *sheet.marks))
    color = read_colors()["second" if sheet.marks else "ink"]
    picture.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=color)
    picture.supxlabel("\n".join(note), x=0.01, ha="left", fontsize=8, color=read_colors()["quiet"])
    panels = picture.subplots(len(heights), columns, squeeze=False, height_ratios=heights).flat
    for axes, chart in zip_longest(panels, sheet.charts):
        if chart is None:
            axes.set_axis_off()
        else:
            _draw_panel(axes, chart, chart.title if len(sheet.charts) > 1 else "")
    if not sheet.charts:
        lines = [shorten(line, 90) for line in sheet.message.splitlines()[:MAX_LINES]]
        picture.axes[0].text(0, 1, "\n".join(lines), va="top")
    picture.draw_without_rendering()
    picture.draw_without_rendering()  # the first one finds how wide the labels of bars are
    picture.set_layout_engine("none")  # one layout for both formats
    _drop_overlapping(picture)
    return picture


def _height(chart: Chart) -> float:
    """The height of a chart and its key in inches."""
    rows = 0.3 * max(3, len({row["x"] for row in chart.rows})) if chart.kind is Kind.BARS else 2.7
    return rows + 0.9 + 0.17 * len(chart.named)


def _draw_panel(axes: "Axes", chart: Chart, title: str) -> None:
    axes.set_title("\n".join(textwrap.wrap(shorten(title, 150), 60)))
    handles = _draw_bars(axes, chart) if chart.kind is Kind.BARS else _draw_plot(axes, chart)
    if chart.needs_key:
        names = {name: textwrap.fill(shorten(words, 150), 70) for name, words in chart.named.items()}
        place = (-0.02, -0.62 / _height(chart))
        axes.legend([handles[name] for name in names], [*names.values()], loc="upper left", bbox_to_anchor=place)


def _draw_plot(axes: "Axes", chart: Chart) -> dict[str, Any]:
    colors, handles = read_colors(), dict[str, Any]()
    x, y = chart.scales()
    axes.set(xscale="log" if x.is_log else "linear", yscale="log" if y.is_log else "linear")
    axes.set(xlim=(x.low, x.high), ylim=(y.low, y.high))
    axes.set_xticks(x.ticks, [format_tick(tick, chart.x.unit) for tick in x.ticks])
    axes.set_yticks(y.ticks, [format_tick(tick, chart.y.unit) for tick in y.ticks])
    axes.minorticks_off()
    axes.set_xlabel(_wrap(chart.x), loc="right")
    axes.set_ylabel(_wrap(chart.y))
    for line in chart.lines:
        style, name = line[0].get("style", ""), line[0]["series"]
        color, number = colors[chart.looks[name][0]], chart.looks[name][1]
        is_marked = chart.kind is not Kind.STEPS and style not in (GUIDE, FIT) and len(line) <= MAX_MARKS
        look: dict[str, Any] = {
            "color": color,
            "marker": _MARKERS[number % len(_MARKERS)] if is_marked else "",
            "markersize": 5.5,
        }
        drawn = axes.errorbar(
            [_at(x, row["x"]) for row in line],
            [_at(y, row["y"]) for row in line],
            [[_reach(y, row, "low") for row in line], [_reach(y, row, "high") for row in line]],
            linestyle="None" if chart.kind is Kind.DOTS and not style else (0, (3, 3)) if style else "-",
            linewidth=1.3 if style or chart.kind is Kind.STEPS else 1.8,
            elinewidth=1.3,
            capsize=3,
            **look,
        )
        handles.setdefault(name, drawn.lines[0])
        for row in line:
            if row.get("few"):
                axes.plot(_at(x, row["x"]), _at(y, row["y"]), **look, markerfacecolor="white")
            if row.get("note") and len(chart.rows) <= MAX_NOTES:
                place = _at(x, row["x"]), _at(y, row["y"])
                axes.annotate(row["note"], place, xytext=(5, 5), textcoords="offset points", fontsize=7.5)
    return handles


def _at(scale: Scale, value: Any) -> float:
    """The value, or NaN, which matplotlib leaves out, if it has no place on the axis."""
    return math.nan if value is None or scale.share(value) is None else float(value)


def _reach(scale: Scale, row: Row, end: str) -> float:
    """From the value to an end of its interval, which may lie outside of the axis; NaN without an interval."""
    if row.get(end) is None:
        return math.nan
    return abs(min(max(float(row[end]), scale.low), 2 * scale.high) - _at(scale, row["y"]))


def _draw_bars(axes: "Axes", chart: Chart) -> dict[str, Any]:
    colors, handles = read_colors(), dict[str, Any]()
    names = list(dict.fromkeys(row["x"] for row in chart.rows))
    longest = chart.longest()
    ends, tops, notes = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), dict.fromkeys(names, "")
    for row in chart.rows:
        name, at, length = row["x"], names.index(row["x"]), min(longest, max(0.0, row["y"] or 0.0))
        color = colors[chart.looks[row["series"]][0]]
        bars = axes.barh(at, length, 0.62, ends[name], color=color, edgecolor="white", linewidth=0.5)
        handles.setdefault(row["series"], bars)
        ends[name] += length
        tops[name] = max(tops[name], ends[name])
        notes[name] = row.get("note") or notes[name]
        if row.get("low") is not None:
            tops[name] = max(tops[name], min(row["high"], longest))
            axes.plot([max(0.0, row["low"]), tops[name]], [at, at], color=colors["ink"], linewidth=1, marker="|")
    for at, name in enumerate(names):
        text = "  ".join(filter(None, (format_value(ends[name], chart.y.unit), notes[name])))
        axes.annotate(text, (tops[name], at), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    scale = make_scale(chart.y, [0.0, longest])
    axes.set_yticks(range(len(names)), [textwrap.fill(shorten(name, 60), 40) for name in names], fontsize=8)
    axes.set_ylim(max(len(names), 2) - 0.4, -0.6)
    axes.set_xlim(0, 1.2 * scale.high)
    axes.set_xticks(scale.ticks, [format_tick(tick, chart.y.unit) for tick in scale.ticks])
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.set_xlabel(_wrap(chart.y), loc="right")
    return handles


def _wrap(axis: Axis) -> str:
    return textwrap.fill(shorten(axis.label, 90), 46)


def _drop_overlapping(picture: "Picture") -> None:
    """Remove notes that would overlap other text or leave the picture; the CSV has them."""
    kept: Sequence[Any] = []
    for axes in picture.axes:
        fixed = [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label, axes._left_title]  # type: ignore[attr-defined]
        kept = [*kept, *(text.get_window_extent() for text in fixed)]
    for axes in picture.axes:
        for text in list(axes.texts):
            box = text.get_window_extent()
            is_within = box.x0 >= 0 and box.x1 <= picture.bbox.width
            if is_within and not any(box.overlaps(other) for other in kept):
                kept = [*kept, box]
            else:
                text.remove()
