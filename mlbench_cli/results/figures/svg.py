"""Charts on pages: HTML with SVG inside. Places are percentages of the plot, so that text has 12 px at any width.

No ids, no style attributes, no scripts: the classes are those of figures.css. The caller adds title and table.
"""

from collections.abc import Iterable, Sequence
from html import escape
from math import log
from typing import NamedTuple

from mlbench_cli.results.analysis.numbers import format_value
from mlbench_cli.results.figures.chart import FIT, GREY, GUIDE, Axis, Chart, Kind, Row, Scale, format_tick

MAX_MARKS = 60  # points of a line that has marks
WIDE, NARROW, HEIGHT = 700, 300, 230  # widths and height of the plot for which labels are placed: .w and .n
_MIN_WRITTEN = 30.0  # percent of a bar's width in which its value is written
# Where a label may stand beside its point: dx, dy, anchor.
_SPOTS = (
    *((10, 4, "start"), (-10, 4, "end"), (0, -11, "middle"), (0, 19, "middle")),
    *((8, -8, "start"), (-8, -8, "end"), (8, 16, "start"), (-8, 16, "end")),
)
_MARKS = (
    '<circle class="{}" r="4.2"/>',
    '<path class="{}" d="M-4-4H4V4H-4z"/>',
    '<path class="{}" d="M0-5.3 5.3 0 0 5.3-5.3 0z"/>',
    '<path class="{}" d="M0-4.8 4.8 4H-4.8z"/>',
    '<path class="{}" d="M0 4.8-4.8-4H4.8z"/>',
    '<path class="{}" d="M-4.8-1.8H-1.8V-4.8H1.8V-1.8H4.8V1.8H1.8V4.8H-1.8V1.8H-4.8z"/>',
)


def render_svg(chart: Chart) -> str:
    """The chart with its key, if it has several series. A picture for assistive technology, with a name."""
    is_row = chart.kind in (Kind.BARS, Kind.SPANS)
    body = _bars(chart) if is_row else _plot(chart)
    return (_key(chart) if chart.needs_key else "") + body


def _key(chart: Chart) -> str:
    items, looks = [], chart.looks
    for name, words in chart.named.items():
        (color, mark), rows = looks[name], chart.series[name]
        if chart.kind in (Kind.BARS, Kind.SPANS):
            sample = f'<rect class="c-{color} k" width="13" height="13" x="2" y="1.5"/>'
        else:
            style = rows[0].get("style", "")
            is_line = chart.kind is not Kind.DOTS or style
            line = f'<path class="{_stroke(chart, style)} c-{color}" d="M0 8H18"/>' if is_line else ""
            sample = f'<g class="area">{line}</g>{_mark(color, mark, "9", "8") if _has_marks(chart, rows) else ""}'
        items.append(f'<li><svg aria-hidden="true">{sample}</svg><span>{escape(words)}</span></li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _stroke(chart: Chart, style: str) -> str:
    return "reference" if style else "thin" if chart.kind is Kind.STEPS else "curve"


def _has_marks(chart: Chart, line: Sequence[Row]) -> bool:
    is_marked = chart.kind in (Kind.LINES, Kind.DOTS) and line[0].get("style", "") not in (GUIDE, FIT)
    is_grey = chart.looks[line[0]["series"]][0] == GREY
    return is_marked and (chart.kind is Kind.DOTS or (len(line) <= MAX_MARKS and not is_grey))


def _mark(color: str, number: int, x: str, y: str, title: str = "", *, few: bool = False) -> str:
    shape = _MARKS[number % len(_MARKS)].format(f"k c-{color}{' few' if few else ''}")
    words = f"<title>{escape(title)}</title>" if title else ""
    return f'<svg class="mark" x="{x}" y="{y}">{words}{shape}</svg>'


def _percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


# --- plots ----------------------------------------------------------------------------------------------------------


def _plot(chart: Chart) -> str:
    x, y = chart.scales()
    area, marks = [], []
    looks = chart.looks
    for line in sorted(chart.lines, key=lambda line: looks[line[0]["series"]][0] != GREY):  # others lie above
        color, number = looks[line[0]["series"]]
        if (chart.kind is not Kind.DOTS or line[0].get("style")) and (path := _path(line, x, y)):
            area.append(f'<path class="{_stroke(chart, line[0].get("style", ""))} c-{color}" d="{path}"/>')
        for row in line:
            across, up = x.share(row["x"]), None if row["y"] is None else y.share(row["y"])
            if across is None or up is None:
                continue
            if row.get("low") is not None and row.get("high") is not None:
                marks.append(_interval(y, _percent(across), row, color))
            if _has_marks(chart, line):
                place = _percent(across), _percent(1 - up)
                marks.append(_mark(color, number, *place, _title(chart, row), few=bool(row.get("few"))))
    labels = _labels(chart, x, y) if chart.kind is Kind.DOTS else ""
    return (
        f'<svg class="plot" role="img" aria-label="{escape(chart.alt)}">{_grid(chart, x, y)}'
        '<svg class="area" viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%" '
        f'aria-hidden="true">{"".join(area)}</svg>{"".join(marks)}{labels}</svg>'
    )


def _path(line: Sequence[Row], x: Scale, y: Scale) -> str:
    words, pen = [], "M"
    for row in line:
        across, up = x.share(row["x"]), None if row["y"] is None else y.share(row["y"])
        if across is None or up is None:
            pen = "M"
            continue
        words.append(f"{pen}{1000 * across:.0f} {1000 * (1 - up):.0f}")
        pen = "L"
    return "".join(words)


def _interval(y: Scale, across: str, row: Row, color: str) -> str:
    # An interval that reaches 0 has no end on a logarithmic axis.
    ends = (y.share(row[end]) for end in ("low", "high"))
    bottom, top = (_percent(1 - max(0.0, min(1.0, 0.0 if end is None else end))) for end in ends)
    return f'<line x1="{across}" x2="{across}" y1="{bottom}" y2="{top}" class="interval c-{color}"/>'


def _title(chart: Chart, row: Row) -> str:
    words = f"{row['series']}, {chart.x.label} {row['x']:.9g}: {format_value(row['y'], chart.y.unit)}"
    return f"{words}, {row['note']}" if row.get("note") else words


def _grid(chart: Chart, x: Scale, y: Scale) -> str:
    lines, texts = [], []
    for tick in y.ticks:
        at = _percent(1 - (y.share(tick) or 0.0))
        lines.append(f'<line x1="0" x2="100%" y1="{at}" y2="{at}"/>')
        texts.append(f'<text x="0" dx="-8" dy=".34em" y="{at}" class="end">{_tick(chart.y, tick)}</text>')
    for tick in x.ticks:
        at = _percent(x.share(tick) or 0.0)
        texts.append(f'<text x="{at}" y="100%" dy="18" class="middle">{_tick(chart.x, tick)}</text>')
    return (
        f'<g class="grid">{"".join(lines)}</g><g class="ticks">{"".join(texts)}'
        f'<text x="0" y="0" dx="-44" dy="-14">{escape(_axis_name(chart.y))}</text>'
        f'<text x="100%" y="100%" dy="36" class="end">{escape(_axis_name(chart.x))}</text></g>'
    )


def _axis_name(axis: Axis) -> str:
    return f"{axis.label} (log)" if axis.is_log and not axis.at_values else axis.label


def _tick(axis: Axis, value: float) -> str:
    return escape(format_tick(value, axis.unit))


def _labels(chart: Chart, x: Scale, y: Scale) -> str:
    """The notes of points, placed for a wide and for a narrow plot; one that finds no place is in the table."""
    spots = [
        ({"w": row["note"], "n": row.get("short", row["note"])}, across, 1 - up)
        for row in chart.rows
        if row.get("note") and (across := x.share(row["x"])) is not None and (up := y.share(row["y"])) is not None
    ]
    found = []
    for name, width in (("w", WIDE), ("n", NARROW)):
        taken = [(a * width - 6, b * HEIGHT - 6, a * width + 6, b * HEIGHT + 6) for _, a, b in spots]
        for texts, a, b in spots:
            text, long = texts[name], 7.0 * len(texts[name])
            for dx, dy, anchor in _SPOTS:
                left = a * width + dx - {"start": 0.0, "end": long, "middle": long / 2}[anchor]
                box = (left, b * HEIGHT + dy - 11, left + long, b * HEIGHT + dy + 3)
                if left < 2 or box[2] > width + 30 or box[1] < -4 or box[3] > HEIGHT:
                    continue
                if all(box[2] < t[0] or box[0] > t[2] or box[3] < t[1] or box[1] > t[3] for t in taken):
                    taken.append(box)
                    place = f'x="{_percent(a)}" y="{_percent(b)}" dx="{dx}" dy="{dy}"'
                    found.append(f'<text class="{name} {anchor}" {place}>{escape(text)}</text>')
                    break
    return "".join(found)


# --- bars: a line of text for each x --------------------------------------------------------------------------------


def _bars(chart: Chart) -> str:
    top = chart.longest()
    rows: dict[str, list[Row]] = {}
    for row in chart.rows:
        rows.setdefault(row["x"], []).append(row)
    lines = (f"<span>{escape(name)}</span>{_bar(chart, own, top)}" for name, own in rows.items())
    ends = (
        f'<span></span><span class="ends"><span>0</span><span>{escape(format_value(top, chart.y.unit))}</span></span>'
    )
    last = f"{ends}<span></span>" if chart.kind is Kind.SPANS else ""
    return f'<div class="bars" role="img" aria-label="{escape(chart.alt)}">{"".join(lines)}{last}</div>'


def _bar(chart: Chart, rows: Sequence[Row], top: float) -> str:
    """The parts of a bar or the spans of a lane, then what they sum up to."""
    begin, drawn, looks = 0.0, [], chart.looks
    for row in rows:
        length = max(0.0, row["y"] or 0.0)
        start = row["low"] if chart.kind is Kind.SPANS else begin
        text = f"{row['series']}: {format_value(length, chart.y.unit)}"
        place = f'x="{_percent(start / top)}" width="{_percent(length / top)}"'
        css = f"c-{looks[row['series']][0]}"
        drawn.append(f'<rect class="{css}" {place} height="100%"><title>{escape(text)}</title></rect>')
        begin += length
        if chart.kind is Kind.BARS and row.get("low") is not None:
            drawn.append(_across(row["low"] / top, row["high"] / top, "50%"))
    notes = dict.fromkeys(row["note"] for row in rows if row.get("note"))
    total = "  ".join([format_value(begin, chart.y.unit), *notes])
    return f'<svg aria-hidden="true">{"".join(drawn)}</svg><span class="total">{escape(total)}</span>'


def _across(low: float, high: float, y: str) -> str:
    return f'<line x1="{_percent(low)}" x2="{_percent(min(1.0, high))}" y1="{y}" y2="{y}" class="interval c-ink"/>'


# --- the plot cell of a row -----------------------------------------------------------------------------------------


class Spent(NamedTuple):
    """A part of a bar in a row; `begin` and `share` from 0 to 1."""

    name: str
    color: str
    begin: float
    share: float
    label: str


def render_spent(spent: Iterable[Spent], low: float | None, high: float | None, ideal: float | None) -> str:
    """A bar of parts, the interval of their sum, and a dashed mark where it should end."""
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
        drawn.append(_across(low, high, "88%"))
    if ideal is not None:
        drawn.append(f'<line x1="{_percent(ideal)}" x2="{_percent(ideal)}" y1="-20%" y2="120%" class="ideal"/>')
    return f'<svg class="spent" aria-hidden="true">{"".join(drawn)}</svg>'


def render_ratio(mean: float, low: float | None, high: float | None, widest: float = 2.0) -> str:
    """A ratio with its interval, on a line from 1/widest to widest; 1 is in the middle."""

    def place(ratio: float) -> float:
        return min(1.0, max(0.0, 0.5 + 0.5 * log(ratio) / log(widest))) if ratio > 0 else 0.0

    if mean <= 0:
        return ""
    span = "" if low is None or high is None else _across(place(low), place(high), "50%")
    dot = _mark("ink", 0, _percent(place(mean)), "50%", few=not span)
    middle = '<line x1="50%" x2="50%" y1="0" y2="100%" class="same"/>'
    return f'<svg class="ratio" aria-hidden="true">{middle}{span}{dot}</svg>'
