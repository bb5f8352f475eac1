"""Figures as PNG and SVG files, drawn with matplotlib from the same model and in the same colors as on pages.

pyplot is not used, to avoid global state. The files contain no dates and versions, so equal figures give equal bytes
with the same matplotlib.
"""

import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import MlbenchError
from mlbench_cli.results.analysis.numbers import format_value
from mlbench_cli.results.archive.layout import naming_file_on_os_error
from mlbench_cli.results.figures.look import MARKS, look_of, read_colors
from mlbench_cli.results.figures.model import Figure, Kind, Line, Sheet, Spread, split_panels
from mlbench_cli.results.figures.ticks import Places, format_tick, place_axis, values_of
from mlbench_cli.util import files
from mlbench_cli.util.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

_PLOT, _ROW, _LEGEND, _AROUND = 2.7, 0.3, 0.17, 0.95  # inches: a plot, a bar, a line of a legend, and what is around
_COLUMNS = {1: 1, 2: 2, 4: 2}
_WIDTHS = {1: 7.5, 2: 10.5, 3: 13.5}
MAX_LABEL = 150
MAX_LINES = 40  # of a message
MAX_MARKS = 60  # points of a line with marks
_STYLE: dict[str, object] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.dpi": 150,
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


def write_sheets(sheets: Iterable[Sheet], folder: Path, tables: Mapping[str, str] | None = None) -> list[Path]:
    """Write each sheet as NAME.png and NAME.svg into `folder`, which is made, and the texts of `tables` beside them.

    Returns the paths. Raises MlbenchError.
    """
    written = []
    with naming_file_on_os_error(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        for sheet, picture in draw_sheets(sheets):
            for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
                path = folder / f"{sheet.name}{suffix}"
                with files.replace_file(path) as file:
                    picture.savefig(file, format=suffix[1:], metadata=metadata)
                written.append(path)
        for name, text in (tables or {}).items():
            files.write_atomically(folder / name, text.encode())
            written.append(folder / name)
    return written


def draw_sheets(sheets: Iterable[Sheet]) -> "Iterator[tuple[Sheet, Picture]]":
    """Each sheet with its picture, which must be used before the next one is drawn.

    Raises MlbenchError without matplotlib.
    """
    with _style():
        for sheet in sheets:
            picture = _draw(sheet)
            picture.draw_without_rendering()
            picture.set_layout_engine("none")  # one layout for both formats
            _drop_overlapping(picture)
            yield sheet, picture


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError:
        raise MlbenchError("Charts need matplotlib, which is not installed.", hint=install_hint("plots")) from None
    colors = read_colors()
    own = {"axes.edgecolor": colors["edge"], "grid.color": colors["line"], "text.color": colors["ink"]}
    own |= {f"{name}.labelcolor": colors["quiet"] for name in ("xtick", "ytick")} | {"axes.labelcolor": colors["quiet"]}
    # Missing glyphs are drawn as boxes; the warning would print untrusted text and a local path.
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE | own)  # type: ignore[arg-type,unused-ignore]
        yield


class _Cell(NamedTuple):
    """A panel on the axes of `whole`, its title and the lines of its legend; `figure` is None for a legend alone."""

    figure: Figure | None
    whole: Figure
    title: str
    legend: tuple[Line, ...]

    def labels(self, letters: int) -> list[str]:
        """The entries of the legend, in lines of so many letters."""
        return [textwrap.fill(shorten(line.label, MAX_LABEL), letters) for line in self.legend]

    def height(self, letters: int) -> float:
        """In inches."""
        legend = _LEGEND * sum(text.count("\n") + 1 for text in self.labels(letters))
        if self.figure is None:
            return legend
        is_plot = self.figure.kind in (Kind.LINES, Kind.STEPS)
        return (_PLOT if is_plot else _ROW * max(2, len(self.figure.x.categories))) + _AROUND + legend


def _cells(sheet: Sheet) -> Iterator[_Cell]:
    """The panels of a sheet: its figures, or their small multiples followed by a legend that they share."""
    for figure in sheet.figures:
        panels, shared = split_panels(figure)
        for panel in panels:
            own = not shared and (panel.needs_legend or len(panels) > 1)
            legend = tuple(line for line in panel.parts if line.is_named) if own else ()
            title = figure.title if len(sheet.figures) > 1 or not panel.panel else ""
            yield _Cell(panel, figure, ", ".join(filter(None, (title, panel.panel))), legend)
        if shared:
            yield _Cell(None, figure, "", shared)


# --- the sheet ------------------------------------------------------------------------------------------------------


def _draw(sheet: Sheet) -> "Picture":
    """Draw title, subtitle, panels in rows of up to three, and footnote."""
    from matplotlib.figure import Figure as Picture
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    cells = list(_cells(sheet))
    columns = _COLUMNS.get(len(cells), 3) if cells else 1
    width = _WIDTHS[columns]
    letters = int(width / columns * 9.5)
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    heights = [max(cell.height(letters) for cell in row) for row in rows]
    subtitle = textwrap.wrap(sheet.subtitle, int(width * 13.5))
    message = [] if sheet.figures else ["", *(shorten(line, 90) for line in sheet.message.splitlines()[:MAX_LINES])]
    footnote = textwrap.wrap(sheet.footnote, int(width * 16))
    head, foot = 0.46 + 0.18 * len([*subtitle, *message]), 0.1 + 0.15 * len(footnote)
    total = sum(heights) + head + foot
    # The layout engine arranges the panels; text above and below them is placed here, in inches.
    rectangle = (0.0, foot / total, 1.0, 1 - (head + foot) / total)
    picture = Picture(figsize=(width, total), layout=ConstrainedLayoutEngine(rect=rectangle, w_pad=0.12, h_pad=0.08))
    quiet, left = read_colors()["quiet"], 0.12 / width
    _title(picture, sheet, left, 1 - 0.1 / total)
    picture.text(left, 1 - 0.4 / total, "\n".join(subtitle), va="top", color=quiet)
    picture.text(left, 1 - (0.4 + 0.18 * len(subtitle)) / total, "\n".join(message), va="top")
    picture.text(left, 0.08 / total, "\n".join(footnote), va="bottom", fontsize=8, color=quiet)
    if rows:
        panels = picture.subplots(len(rows), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
        handles: dict[str, Any] = {}
        for place, axes in enumerate(panels.flat):
            if place < len(cells):
                _panel(axes, cells[place], letters, handles, is_named=len(cells) > 1)
            else:
                axes.set_axis_off()
    return picture


def _title(picture: "Picture", sheet: Sheet, x: float, y: float) -> None:
    """Draw the title, and its warnings in another color."""
    shown = picture.text(x, y, sheet.title, va="top", fontsize=13, fontweight="bold")
    for mark in sheet.marks:
        x += shown.get_window_extent().width / picture.bbox.width
        shown = picture.text(
            x, y, f"   {mark}", va="top", fontsize=13, fontweight="bold", color=read_colors()["overlap"]
        )


def _panel(axes: "Axes", cell: _Cell, letters: int, handles: dict[str, Any], *, is_named: bool) -> None:
    """Draw a cell. `handles` are those of the lines drawn so far by label, for a legend in a separate cell."""
    labels = cell.labels(letters)
    if cell.figure is None:
        axes.set_axis_off()
        shown = [handles[line.label] for line in cell.legend]
        axes.legend(shown, labels, loc="upper left", handlelength=2.4, labelspacing=0.3, borderaxespad=0.3)
        return
    if is_named:
        axes.set_title(textwrap.fill(shorten(cell.title, MAX_LABEL), letters - 8))
    is_plot = cell.figure.kind in (Kind.LINES, Kind.STEPS)
    drawn = _plot(axes, cell.figure, cell.whole) if is_plot else _rows(axes, cell.figure, cell.whole, letters)
    handles.update(drawn)
    if labels:
        shown = [drawn[line.label] for line in cell.legend]
        axes.legend(
            shown, labels, loc="upper left", bbox_to_anchor=(-0.02, -0.55 / cell.height(999)), handlelength=2.4,
            labelspacing=0.3, borderaxespad=0.3,
        )  # fmt: skip


def _color(line: Line, index: int) -> str:
    colors = read_colors()
    return colors[line.color] if line.color else colors["edge"] if line.reference else colors[look_of(index)[0]]


def _marker(line: Line, index: int) -> Any:
    shape = (line.shape if line.color else look_of(index)[1]) % len(MARKS)
    return [(u, -v) for u, v in (*MARKS[shape], MARKS[shape][0])] if MARKS[shape] else "o"


# --- lines ----------------------------------------------------------------------------------------------------------


def _plot(axes: "Axes", figure: Figure, whole: Figure) -> dict[str, Any]:
    """Draw lines; their handles by label."""
    xs, ys = values_of(whole)
    x, y = place_axis(figure.x, xs), place_axis(figure.y, ys)
    axes.set(xscale="log" if figure.x.scale.is_log else "linear", yscale="log" if figure.y.scale.is_log else "linear")
    every = max(1, -(-len(x.ticks) // 8))
    ticks = x.ticks[::every]
    axes.set_xticks(ticks, [format_tick(tick, figure.x.unit) for tick in ticks])
    axes.set_yticks(y.ticks, [format_tick(tick, figure.y.unit) for tick in y.ticks])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([], minor=True)
    axes.set_xlim(x.low, x.high)
    axes.set_ylim(y.low, y.high)
    axes.set_xlabel(_wrap(figure.x.label), loc="right")
    axes.set_ylabel(_wrap(figure.y.label))
    drawn = [_line(axes, figure, line, index, y) for index, line in enumerate(figure.lines)]
    return {line.label: each for each, line in zip(drawn, figure.lines, strict=True) if line.is_named}


def _line(axes: "Axes", figure: Figure, line: Line, index: int, y: Places) -> Any:
    from matplotlib.patches import Patch

    color, points = _color(line, index), list(line.points())
    if line.spread is Spread.BAND:
        known = [(at, low, high) for at, _, low, high, _, _ in points if low is not None and high is not None]
        at, low, high = (list(column) for column in zip(*known, strict=True))
        axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
        return Patch(color=color, alpha=0.15)
    is_own = not line.reference or bool(line.color)
    has_marks = figure.kind is Kind.LINES and is_own and line.is_named and len(points) <= MAX_MARKS
    (drawn,) = axes.plot(
        line.xs,
        [float("nan") if value is None else value for value in line.ys],
        color=color,
        linestyle=("None" if not line.is_joined else (0, (3, 3)) if line.reference else "-"),
        linewidth=1.3 if line.reference or figure.kind is Kind.STEPS else 1.8,
        marker=_marker(line, index) if has_marks else None,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
    )
    for x, value, bottom, top, few, note in points:
        if bottom is not None and top is not None:
            reach = [[value - max(bottom, y.low)], [top - value]]
            width, alpha, cap = (4.5, 0.35, 0.0) if few else (1.3, 1.0, 3.0)
            axes.errorbar(x, value, reach, color=color, linewidth=width, alpha=alpha, capsize=cap)
        if few and has_marks:
            axes.plot(x, value, color=color, marker=_marker(line, index), markersize=6, markerfacecolor="white")
        if note:
            axes.annotate(note, (x, value), xytext=(5, 5), textcoords="offset points", fontsize=7.5)
    return drawn


# --- rows -----------------------------------------------------------------------------------------------------------


def _rows(axes: "Axes", figure: Figure, whole: Figure, letters: int) -> dict[str, Any]:
    """Draw bars or lanes; the handles of their parts by label."""
    names = [textwrap.fill(shorten(name, 60), max(16, letters // 3)) for name in figure.x.categories]
    top = max(values_of(whole)[1], default=0.0) or 1.0
    drawn = {line.label: _part(axes, figure, line, index) for index, line in enumerate(figure.parts)}
    for row in range(len(names)):
        text, end = _row_text(figure, float(row))
        axes.annotate(text, (end, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), 2) - 0.4, -0.6)
    places = place_axis(figure.y, [0.0, top])
    axes.set_xlim(0, 1.2 * top)
    axes.set_xticks(places.ticks, [format_tick(tick, figure.y.unit) for tick in places.ticks])
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.set_xlabel(_wrap(figure.y.label), loc="right")
    return drawn


def _part(axes: "Axes", figure: Figure, line: Line, index: int) -> Any:
    from matplotlib.patches import Patch

    color = _color(line, index)
    below = _starts(figure, index) if figure.kind is Kind.BARS else {}
    for at, value, low, high, few, _ in line.points():
        if figure.kind is Kind.BARS:
            begin = below.get(at, 0.0)
            axes.barh(at, max(0.0, value), 0.62, begin, color=color, edgecolor="white", linewidth=0.5)
            if low is not None and high is not None:
                reach = [[value - max(low, 0.0)], [high - value]]
                axes.errorbar(value, at, xerr=reach, color=read_colors()["ink"], linewidth=1, capsize=0 if few else 3)
        elif low is not None and high is not None:
            axes.barh(at, high - low, 0.62, low, color=color, edgecolor="white", linewidth=0.4)
    return Patch(facecolor=color)


def _starts(figure: Figure, index: int) -> dict[float, float]:
    """The start of part `index` of each bar."""
    sums: dict[float, float] = {}
    for line in figure.parts[:index]:
        for at, value, *_ in line.points():
            sums[at] = sums.get(at, 0.0) + max(0.0, value)
    return sums


def _row_text(figure: Figure, row: float) -> tuple[str, float]:
    """The text at the end of a row, and its position."""
    found = [point for line in figure.parts for point in line.points() if point[0] == row]
    note = next((note for *_, note in found if note), "")
    if figure.kind is Kind.BARS:
        total = sum(max(0.0, value) for _, value, *_ in found)
        end = max([total, *(high for _, _, _, high, _, _ in found if high is not None)], default=0.0)
        return "  ".join(filter(None, (format_value(total, figure.y.unit) if found else "–", note))), end
    end = max((high for _, _, _, high, _, _ in found if high is not None), default=0.0)
    total = sum((high or 0.0) - (low or 0.0) for _, _, low, high, _, _ in found)
    return note or format_value(total, figure.y.unit), end


def _wrap(text: str) -> str:
    return textwrap.fill(shorten(text, 90), 46)


def _drop_overlapping(picture: "Picture") -> None:
    """Remove notes that would overlap other text; the tables have them, too."""
    legends = [legend for axes in picture.axes if (legend := axes.get_legend())]
    fixed = [text.get_window_extent() for legend in legends for text in legend.get_texts()]
    for axes in picture.axes:
        axis_texts = ([*axis.get_ticklabels(), axis.label] for axis in (axes.xaxis, axes.yaxis))
        kept = [*fixed, *(label.get_window_extent() for texts in axis_texts for label in texts)]
        for text in list(axes.texts):
            box = text.get_window_extent()
            is_within = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= picture.bbox.width and box.y1 <= picture.bbox.height
            if is_within and not any(box.overlaps(other) for other in kept):
                kept.append(box)
            else:
                text.remove()
