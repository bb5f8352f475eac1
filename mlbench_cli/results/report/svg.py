"""A figure as a static SVG: what is printed, and what a browser without scripts shows. No library, no fonts, no ids."""

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from mlbench_cli.results.report.model import Axis, Figure, Kind, Line, Scale
from mlbench_cli.results.report.ticks import choose_ticks, format_tick, widen

# Okabe and Ito's palette (2008), distinct with any colour vision, without its yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 44
_LEGEND_LINE, _LETTER = 17, 6.4
MAX_LETTERS = 70
MAX_TICKS = 12  # of the x-axis
TURNED_ROOM = 40  # below the axis, for names that are turned


def render_svg(figure: Figure) -> str:
    """The figure with its legend. Hidden from assistive technology: the caller gives it a name and a table."""
    legend = list(_legend_rows(figure))
    bottom = HEIGHT + (TURNED_ROOM if is_turned(figure) else 0)
    height = bottom + _LEGEND_LINE * len(legend) + 4
    to_x, x_ticks = _axis(figure.x, _all_xs(figure), LEFT, WIDTH - RIGHT)
    to_y, y_ticks = _axis(figure.y, _all_ys(figure), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" class="static" role="img" '
        f'aria-label="{escape(figure.alt)}">'
    ]
    parts += _grid(figure, to_x, x_ticks, to_y, y_ticks)
    parts += _bars(figure, to_x, to_y) if figure.kind is Kind.STACK else _lines(figure, to_x, to_y)
    for row, entries in enumerate(legend):
        y = bottom + _LEGEND_LINE * row + 8
        for x, index, label in entries:
            parts.append(_sample(figure, index, x, y))
            parts.append(f'<text x="{x + 30:g}" y="{y + 4:g}" class="key">{escape(label)}</text>')
    return "".join([*parts, "</svg>"])


def mark(shape: int, x: float, y: float, color: str, radius: float = 3.2) -> str:
    """A point: circle, square, triangle or diamond by turns, so that colour is never the only difference."""
    a, r = f"{x:.1f}", radius
    if shape % 4 == 0:
        return f'<circle cx="{a}" cy="{y:.1f}" r="{r:g}" fill="{color}"/>'
    if shape % 4 == 1:
        return f'<rect x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r:g}" height="{2 * r:g}" fill="{color}"/>'
    if shape % 4 == 2:
        corners = [(x, y - r - 1), (x + r + 1, y + r), (x - r - 1, y + r)]
    else:
        corners = [(x, y - r - 1), (x + r + 1, y), (x, y + r + 1), (x - r - 1, y)]
    return f'<polygon points="{" ".join(f"{u:.1f},{v:.1f}" for u, v in corners)}" fill="{color}"/>'


def color_of(index: int) -> str:
    """The colour of the line number `index`; colours repeat after the last one."""
    return COLORS[index % len(COLORS)]


def dash_of(index: int, line: Line) -> str:
    """The dashes of a line, so that lines of one colour differ; references have their own."""
    return "3 4" if line.reference else DASHES[index // len(COLORS) % len(DASHES)]


# --- axes -----------------------------------------------------------------------------------------------------------


def _axis(
    axis: Axis, values: Sequence[float], begin: float, end: float
) -> tuple[Callable[[float], float], list[float]]:
    """From a value to its place, and the ticks."""
    if axis.scale is Scale.CATEGORIES:
        low, high = -0.6, len(axis.categories) - 0.4
        ticks = [float(index) for index in range(len(axis.categories))]
    else:
        is_log = axis.scale in (Scale.LOG2, Scale.LOG10)
        low, high = widen([*values, *axis.ticks], logarithmic=is_log, from_zero=axis.from_zero)
        ticks = list(axis.ticks) if len(axis.ticks) > 1 else choose_ticks(low, high, logarithmic=is_log)
    shape: Callable[[float], float] = math.log if axis.scale in (Scale.LOG2, Scale.LOG10) else float
    first, last = shape(low), shape(high)
    return lambda value: begin + (shape(value) - first) / (last - first) * (end - begin), ticks


def _all_xs(figure: Figure) -> list[float]:
    return [x for line in figure.lines for x in line.xs]


def _all_ys(figure: Figure) -> list[float]:
    if figure.kind is Kind.STACK:
        return [0.0, *(sum(values) for values in _stacks(figure).values())]
    columns = (column for line in figure.lines for column in (line.ys, line.low, line.high))
    return [value for column in columns for value in column if value is not None]


def _stacks(figure: Figure) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for line in figure.lines:
        for x, y in zip(line.xs, line.ys, strict=True):
            found.setdefault(x, []).append(y or 0.0)
    return found


def is_turned(figure: Figure) -> bool:
    """Whether the names of categories need more room than they have side by side."""
    every = max(1, -(-len(figure.x.categories) // MAX_TICKS))
    room = (WIDTH - LEFT - RIGHT) / max(1, len(figure.x.categories[::every]))
    return any(len(name) * _LETTER > room for name in figure.x.categories)


def _grid(
    figure: Figure,
    to_x: Callable[[float], float],
    x_ticks: Sequence[float],
    to_y: Callable[[float], float],
    y_ticks: Sequence[float],
) -> Iterator[str]:
    bottom = HEIGHT - BOTTOM
    for tick in y_ticks:
        y = to_y(tick)
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" class="grid"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{escape(format_tick(tick))}</text>'
    every = max(1, -(-len(x_ticks) // MAX_TICKS))
    turns = is_turned(figure)
    for tick in x_ticks[::every]:
        x = to_x(tick)
        name = figure.x.categories[int(tick)] if figure.x.scale is Scale.CATEGORIES else format_tick(tick)
        yield f'<path d="M{x:.1f} {bottom}v4" class="axis"/>'
        if turns:
            place = f'x="{x + 4:.1f}" y="{bottom + 12}" transform="rotate(-24 {x + 4:.1f} {bottom + 12})"'
            yield f'<text {place} class="end">{escape(name[:20])}</text>'
        else:
            yield f'<text x="{x:.1f}" y="{bottom + 17}" class="middle">{escape(name[:24])}</text>'
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}" class="axis"/>'
    below = HEIGHT - 8 + turns * TURNED_ROOM
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{below}" class="middle">{escape(figure.x.label)}</text>'
    middle = (TOP + bottom) / 2
    turn = f'transform="rotate(-90 14 {middle:g})"'
    yield f'<text x="14" y="{middle:g}" class="middle" {turn}>{escape(figure.y.label)}</text>'


# --- what was measured ----------------------------------------------------------------------------------------------


def _lines(figure: Figure, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> Iterator[str]:
    is_log = figure.y.scale in (Scale.LOG2, Scale.LOG10)
    for index, line in enumerate(figure.lines):
        color = color_of(index)
        places = [
            None if y is None or not math.isfinite(y) or (is_log and y <= 0) else (to_x(x), to_y(y))
            for x, y in zip(line.xs, line.ys, strict=True)
        ]
        dash = f' stroke-dasharray="{found}"' if (found := dash_of(index, line)) else ""
        if figure.x.scale is not Scale.CATEGORIES and (path := _path(places)):
            yield f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dash}/>'
        for low, high, place in zip(line.low, line.high, places, strict=False):
            if low is None or high is None or place is None:
                continue
            # An interval that reaches 0 has no end on a logarithmic axis.
            x, bottom = place[0], HEIGHT - BOTTOM if is_log and low <= 0 else to_y(low)
            path = f"M{x:.1f} {bottom:.1f}V{to_y(high):.1f}m-4 0h8M{x - 4:.1f} {bottom:.1f}h8"
            yield f'<path d="{path}" stroke="{color}" fill="none"/>'
        if figure.kind is Kind.LINES and not line.reference and len(places) <= 60:
            yield from (mark(index, *place, color) for place in places if place is not None)


def _path(places: Sequence[tuple[float, float] | None]) -> str:
    words, pen = [], "M"
    for place in places:
        if place is None:
            pen = "M"
            continue
        words.append(f"{pen}{place[0]:.1f} {place[1]:.1f}")
        pen = "L"
    return "".join(words)


def _bars(figure: Figure, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> Iterator[str]:
    below: dict[float, float] = {}
    width = min(70.0, 0.66 * (to_x(1) - to_x(0)))
    for index, line in enumerate(figure.lines):
        for x, y in zip(line.xs, line.ys, strict=True):
            base = below.get(x, 0.0)
            below[x] = base + (y or 0.0)
            if line.is_blank:
                continue
            top, bottom = to_y(below[x]), to_y(base)
            yield (
                f'<rect x="{to_x(x) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{max(0.0, bottom - top):.1f}" fill="{color_of(index)}" fill-opacity="{opacity_of(index)}" '
                'stroke="#fff" stroke-width="0.5"/>'
            )


def opacity_of(index: int) -> str:
    """The second round of colours is lighter."""
    return "1" if index < len(COLORS) else "0.45"


# --- legend ---------------------------------------------------------------------------------------------------------


def _legend_rows(figure: Figure) -> Iterator[list[tuple[float, int, str]]]:
    """Rows of (x, line, label) that fit into the width."""
    row: list[tuple[float, int, str]] = []
    x = float(LEFT)
    for index, line in enumerate(figure.lines):
        if line.is_blank:
            continue
        label = line.label if len(line.label) <= MAX_LETTERS else f"{line.label[: MAX_LETTERS - 1]}…"
        width = 44 + _LETTER * len(label)
        if row and x + width > WIDTH:
            yield row
            row, x = [], float(LEFT)
        row.append((x, index, label))
        x += width
    if row:
        yield row


def _sample(figure: Figure, index: int, x: float, y: float) -> str:
    color = color_of(index)
    if figure.kind is Kind.STACK:
        return (
            f'<rect x="{x + 8:g}" y="{y - 5:g}" width="12" height="11" fill="{color}" '
            f'fill-opacity="{opacity_of(index)}"/>'
        )
    dash = f' stroke-dasharray="{found}"' if (found := dash_of(index, figure.lines[index])) else ""
    shown = f'<path d="M{x:g} {y:g}h26" stroke="{color}" stroke-width="1.8"{dash}/>'
    if figure.kind is Kind.LINES and not figure.lines[index].reference:
        shown += mark(index, x + 13, y, color)
    return shown
