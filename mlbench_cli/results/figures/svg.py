"""Figures on pages, as HTML with SVG inside. Places are percentages of the plot, so that text has 12 px at any width.

No ids, no style attributes, no scripts: the classes are those of figures.css. The caller adds title and table.
"""

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from mlbench_cli.results.analysis.numbers import format_value
from mlbench_cli.results.figures.look import MARKS, Look, look_of
from mlbench_cli.results.figures.model import Axis, Figure, Kind, Line, Spread, split_panels
from mlbench_cli.results.figures.ticks import Places, format_tick, place_axis, values_of

MAX_MARKS = 60  # points of a line that has marks
MAX_X_TICKS = 7
MAX_END_LABELS = 5  # lines
_MIN_WRITTEN = 30.0  # percent of a bar's width in which its value is written
_MIN_APART = 8.0  # percent of the height between two values at the ends of lines


def render_svg(figure: Figure) -> str:
    """The figure with its legend, if it has several series; many series as small multiples with the same axes.
    A picture for assistive technology, with a name."""
    panels, legend = split_panels(figure)
    if len(panels) == 1:
        return (_legend(figure, figure.parts) if figure.needs_legend else "") + _draw(figure, figure)
    drawn = (
        f'<div class="panel"><p>{escape(panel.panel)}</p>{"" if legend else _legend(panel, panel.parts)}'
        f"{_draw(panel, figure)}</div>"
        for panel in panels
    )
    return f'{_legend(figure, legend) if legend else ""}<div class="panels">{"".join(drawn)}</div>'


def _draw(figure: Figure, whole: Figure) -> str:
    """The figure on the axes of `whole`."""
    return _plot(figure, whole) if figure.kind in (Kind.LINES, Kind.STEPS) else _rows(figure, whole)


def _legend(figure: Figure, lines: Sequence[Line]) -> str:
    """The names of the lines with their marks."""
    items = (
        f"<li>{_sample(figure, index, line)}<span>{escape(line.label)}</span></li>"
        for index, line in enumerate(lines)
        if line.is_named
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _sample(figure: Figure, index: int, line: Line) -> str:
    css = _color(line, index)
    if figure.kind in (Kind.BARS, Kind.SPANS):
        return f'<svg aria-hidden="true"><rect class="{css} k" width="13" height="13" x="2" y="1.5"/></svg>'
    path = f'<g class="area {css}"><path class="{_stroke(figure, line)}" d="M0 8H18"/></g>' if line.is_joined else ""
    return f'<svg aria-hidden="true">{path}{"" if not _has_marks(figure, line) else _mark(index, line, "9", "8")}</svg>'


def _color(line: Line, index: int) -> str:
    return f"c-{line.color or ('reference' if line.reference else look_of(index)[0])}"


def _mark(index: int, line: Line, x: str, y: str, *, few: bool = False) -> str:
    corners = MARKS[(line.shape if line.color else look_of(index)[1]) % len(MARKS)]
    css = f"k {_color(line, index)}{' few' if few else ''}"
    if not corners:
        return f'<circle cx="{x}" cy="{y}" r="4.2" class="{css}"/>'
    points = " ".join(f"{4.4 * u:.1f},{4.4 * v:.1f}" for u, v in corners)
    return f'<svg class="mark" x="{x}" y="{y}"><polygon class="{css}" points="{points}"/></svg>'


def _stroke(figure: Figure, line: Line) -> str:
    is_thin = figure.kind is Kind.STEPS or not line.is_named
    return "reference" if line.reference else "thin" if is_thin else "curve"


def _has_marks(figure: Figure, line: Line) -> bool:
    is_plain = (line.reference and not line.color) or not line.is_named
    is_marked = figure.kind is Kind.LINES and line.spread is not Spread.BAND
    return is_marked and not is_plain and len(line.xs) <= MAX_MARKS


def _percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


# --- lines ----------------------------------------------------------------------------------------------------------


def _plot(figure: Figure, whole: Figure) -> str:
    x_values, y_values = values_of(whole)
    x, y = place_axis(figure.x, x_values), place_axis(figure.y, y_values)
    area = "".join(_curve(figure, index, line, x, y) for index, line in enumerate(figure.lines))
    marks = "".join(_points(figure, index, line, x, y) for index, line in enumerate(figure.lines))
    return (
        f'<svg class="plot" role="img" aria-label="{escape(figure.alt)}">{_grid(figure, x, y)}'
        '<svg class="area" viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%" '
        f'aria-hidden="true">{area}</svg>{marks}{_end_values(figure, x, y)}</svg>'
    )


def _grid(figure: Figure, x: Places, y: Places) -> str:
    parts = []
    for tick in y.ticks:
        at = _percent(1 - y.share(tick))
        css = ' class="base"' if y.share(tick) < 1e-9 else ""
        parts.append(f'<line x1="0" x2="100%" y1="{at}" y2="{at}"{css}/>')
    lines = "".join(parts)
    texts = [
        f'<text x="0" dx="-8" dy=".34em" y="{_percent(1 - y.share(tick))}" class="end">{_tick(figure.y, tick)}</text>'
        for tick in y.ticks
    ]
    every = max(1, -(-len(x.ticks) // MAX_X_TICKS))
    for tick in x.ticks[::every]:
        texts.append(
            f'<text x="{_percent(x.share(tick))}" y="100%" dy="18" class="middle">{_tick(figure.x, tick)}</text>'
        )
    return (
        f'<g class="grid">{lines}</g><g class="ticks">{"".join(texts)}'
        f'<text x="0" y="0" dx="-44" dy="-14">{escape(_axis_name(figure.y))}</text>'
        f'<text x="100%" y="100%" dy="36" class="end">{escape(_axis_name(figure.x))}</text></g>'
    )


def _axis_name(axis: Axis) -> str:
    return f"{axis.label} (log)" if axis.scale.is_log and len(axis.ticks) < 2 else axis.label


def _tick(axis: Axis, value: float) -> str:
    return escape(format_tick(value, axis.unit))


def _curve(figure: Figure, index: int, line: Line, x: Places, y: Places) -> str:
    css = _color(line, index)
    if line.spread is Spread.BAND:
        found = [(at, low, high) for at, _, low, high, _, _ in line.points() if low is not None and high is not None]
        ends = [(at, high) for at, _, high in found] + [(at, low) for at, low, _ in reversed(found)]
        places = [place for end in ends if (place := _place(*end, x, y)) is not None]
        outline = f'<path class="band {css}" d="{_path(places)}Z"/>' if places else ""
    else:
        outline = ""
    if not line.is_joined:
        return outline
    known = [None if value is None else _place(at, value, x, y) for at, value in zip(line.xs, line.ys, strict=True)]
    path = _path(known)
    return f'{outline}<path class="{_stroke(figure, line)} {css}" d="{path}"/>' if path else outline


def _place(at: float, value: float, x: Places, y: Places) -> tuple[float, float] | None:
    across, up = x.share(at), y.share(value)
    return (across, 1 - up) if math.isfinite(across) and math.isfinite(up) else None


def _path(places: Sequence[tuple[float, float] | None]) -> str:
    words, pen = [], "M"
    for place in places:
        if place is None:
            pen = "M"
            continue
        words.append(f"{pen}{1000 * place[0]:.0f} {1000 * place[1]:.0f}")
        pen = "L"
    return "".join(words)


def _points(figure: Figure, index: int, line: Line, x: Places, y: Places) -> str:
    if line.spread is Spread.BAND:
        return ""
    parts = []
    for at, value, low, high, few, note in line.points():
        place = _place(at, value, x, y)
        if place is None:
            continue
        across, down = _percent(place[0]), _percent(place[1])
        if low is not None and high is not None:
            parts.append(_spread(y, across, low, high, _color(line, index), few=few))
        if _has_marks(figure, line):
            title = _title(figure, line, at, value, note)
            parts.append(f"<g><title>{title}</title>{_mark(index, line, across, down, few=few)}</g>")
    return "".join(parts)


def _title(figure: Figure, line: Line, at: float, value: float, note: str) -> str:
    words = f"{line.label}, {figure.x.label} {figure.name_x(at)}: {format_value(value, figure.y.unit)}"
    return escape(f"{words}, {note}" if note else words)


def _spread(y: Places, across: str, low: float, high: float, css: str, *, few: bool) -> str:
    # An interval that reaches 0 has no end on a logarithmic axis.
    bottom, top = (_percent(1 - max(0.0, min(1.0, y.share(end)))) for end in (low, high))
    bar = f'<line x1="{across}" x2="{across}" y1="{bottom}" y2="{top}" class="{"range" if few else "interval"} {css}"/>'
    if few:
        return bar
    caps = (
        f'<svg class="mark" x="{across}" y="{end}"><path class="interval {css}" d="M-4 0H4"/></svg>'
        for end in (bottom, top)
    )
    return bar + "".join(caps)


def _end_values(figure: Figure, x: Places, y: Places) -> str:
    """The last value of each line, or a reference's name, where there is room for it."""
    if figure.kind is not Kind.LINES or len(figure.lines) > MAX_END_LABELS:
        return ""
    found = []
    for line in figure.lines:
        points = [(at, value) for at, value, *_ in line.points()]
        if not points or not line.is_joined or line.spread is Spread.BAND:
            continue
        at, value = max(points)
        place = _place(at, value, x, y)
        if place is not None and place[0] > 0.7:
            text = line.label if line.reference else format_value(value, figure.y.unit)
            found.append((place, text if len(text) <= 9 else "", "" if line.reference else "value"))
    found.sort(key=lambda item: item[0][1])
    is_apart = [True, *(100 * (after[0][1] - before[0][1]) >= _MIN_APART for before, after in pairwise(found)), True]
    return "".join(
        f'<text x="{_percent(place[0])}" y="{_percent(place[1])}" dx="9" dy=".34em" class="{css}">{escape(text)}</text>'
        for index, (place, text, css) in enumerate(found)
        if text and is_apart[index] and is_apart[index + 1]
    )


# --- rows: a bar for each category ----------------------------------------------------------------------------------


def _rows(figure: Figure, whole: Figure) -> str:
    parts = figure.parts
    top = max(values_of(whole)[1], default=0.0) or 1.0
    rows = []
    for index, name in enumerate(figure.x.categories):
        if figure.kind is Kind.BARS:
            body, total = _bar(figure, parts, float(index), top)
        else:
            body, total = _spans(figure, parts, float(index), top)
        rows.append(f'<span>{escape(name)}</span>{body}<span class="total">{escape(total)}</span>')
    ends = (
        f'<span></span><span class="ends"><span>0</span><span>{escape(format_value(top, figure.y.unit))}</span></span>'
        if figure.kind is not Kind.BARS
        else ""
    )
    return f'<div class="bars" role="img" aria-label="{escape(figure.alt)}">{"".join(rows)}{ends}</div>'


def _bar(figure: Figure, parts: Sequence[Line], category: float, top: float) -> tuple[str, str]:
    """Values on top of each other, with the interval of the sum if there is one part alone."""
    begin, drawn, note, error = 0.0, [], "", ""
    for index, line in enumerate(parts):
        for at, value, low, high, few, said in line.points():
            if at != category or value <= 0:
                continue
            drawn.append(_box(figure, line, index, begin, begin + value, top, is_written=len(parts) > 1))
            begin += value
            note = said or note
            if low is not None and high is not None:
                ends = " ".join(f'x{n}="{_percent(end / top)}"' for n, end in ((1, low), (2, high)))
                error = f'<line {ends} y1="50%" y2="50%" class="{"range" if few else "interval"} c-engine"/>'
    total = format_value(begin, figure.y.unit) if drawn else "–"
    return f'<svg aria-hidden="true">{"".join(drawn)}{error}</svg>', f"{total}  {note}" if note else total


def _box(figure: Figure, line: Line, index: int, low: float, high: float, top: float, *, is_written: bool) -> str:
    """A part of a bar; with its value inside, if there is room for it."""
    text = format_value(high - low, figure.y.unit)
    width = (high - low) / top
    css = _color(line, index)
    box = (
        f'<rect class="{css}" x="{_percent(low / top)}" width="{_percent(width)}" height="100%">'
        f"<title>{escape(line.label)}: {escape(text)}</title></rect>"
    )
    if not is_written or 100 * width < _MIN_WRITTEN or css not in ("c-compute", "c-communication"):
        return box
    return f'{box}<text x="{_percent(low / top)}" dx="6" y="50%" dy=".35em">{escape(text)}</text>'


def _spans(figure: Figure, parts: Sequence[Line], category: float, top: float) -> tuple[str, str]:
    drawn, total, note = [], 0.0, ""
    for index, line in enumerate(parts):
        for at, _, low, high, _, said in line.points():
            if at == category and low is not None and high is not None:
                drawn.append(_box(figure, line, index, low, high, top, is_written=False))
                total += high - low
                note = said or note
    return f'<svg aria-hidden="true">{"".join(drawn)}</svg>', note or format_value(total, figure.y.unit)


# --- parts of tables ------------------------------------------------------------------------------------------------


class Spent(NamedTuple):
    """A part of a bar in a row; `begin` and `share` from 0 to 1."""

    name: str
    color: str
    begin: float
    share: float
    label: str


def render_mark(look: Look) -> str:
    """Color and mark of a series, for a table or a sentence."""
    line = Line("", (), (), color=look[0], shape=look[1])
    return f'<svg class="chip" aria-hidden="true">{_mark(0, line, "8", "8")}</svg>'


def render_spent(spent: Sequence[Spent], low: float | None, high: float | None, ideal: float | None) -> str:
    """The plot cell of a row: a bar of parts, the interval of their sum, and a dashed mark where it should end."""
    drawn = []
    for part in spent:
        place = f'x="{_percent(part.begin)}" width="{_percent(part.share)}"'
        text = escape(part.label)
        title = f"<title>{escape(part.name)}: {text}</title>"
        drawn.append(f'<rect class="c-{part.color}" {place} height="100%">{title}</rect>')
        if part.color in ("compute", "communication") and 100 * part.share >= _MIN_WRITTEN:
            drawn.append(
                f'<text x="{_percent(part.begin)}" dx="6" y="50%" dy=".35em" class="on-{part.color}">{text}</text>'
            )
    if low is not None and high is not None:
        ends = f'x1="{_percent(low)}" x2="{_percent(min(1.0, high))}"'
        drawn.append(f'<line {ends} y1="88%" y2="88%" class="interval c-engine"/>')
    if ideal is not None:
        drawn.append(f'<line x1="{_percent(ideal)}" x2="{_percent(ideal)}" y1="-20%" y2="120%" class="ideal"/>')
    return f'<svg class="spent" aria-hidden="true">{"".join(drawn)}</svg>'
