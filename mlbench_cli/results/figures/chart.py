"""A chart: rows of dicts and two axes. Pages draw the rows (svg.py), files draw them (files.py), and they are the CSV.

Columns of a row; all but the first three may be missing:

    series     its name in the key; the lines of a series share a color
    x, y       the place; x is text for bars and spans, whose y is a length
    low, high  the 95 % interval of y; of spans, their ends
    few        True for fewer than three runs, which have no interval; drawn hollow
    note       text beside a point, such as "contended"; `short`: what is written of it in a narrow plot
    run        the line, if a series has several
    style      "" for what was measured here; "published" and "fit" are dashed; "guide" is for goals and ideals
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from mlbench_cli.results.analysis.numbers import PREFIXES, SECONDS
from mlbench_cli.util.csv_text import format_csv
from mlbench_cli.util.text import list_some
from task_images.contract import MIXED_CATEGORIES

Row = dict[str, Any]
GUIDE, FIT, PUBLISHED = "guide", "fit", "published"
# Colors of series in their order; the values are in figures.css. Further series are grey.
COLORS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
GREY = "edge"
# The parts of a step in the order of stacked bars: label, color, and the task contract's categories.
PHASES = (
    ("computing", "compute", ("forward", "loss", "backward", "optimizer")),
    ("computing with messages in it", "mixed", tuple(MIXED_CATEGORIES.values())),
    ("waiting for messages", "communication", ("communication",)),
    ("data", "data", ("data_wait", "preprocessing")),
    ("validation and metrics", "evaluation", ("validation", "metrics")),
    ("other", "other", ("other",)),
)
MAX_TICKS = 7
MAX_DRAWN, _MIN_DRAWN = 1e150, 1e-150  # a program may report any float; the room beside others would overflow
_BINARY = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


class Kind(StrEnum):
    """How rows are drawn. Bars and spans are horizontal, one line of text for each x."""

    LINES = "lines"
    STEPS = "steps"  # lines without marks
    DOTS = "dots"  # marks with their notes
    BARS = "bars"  # the series of an x are stacked
    SPANS = "spans"  # from low to high


class Axis(Struct, frozen=True):
    """`unit` is one of results/analysis/numbers.py. `at_values`: ticks are the values, such as numbers of workers."""

    label: str
    unit: str = ""
    is_log: bool = False
    from_zero: bool = False
    at_values: bool = False


class Scale(Struct, frozen=True):
    """The ends of an axis and its ticks."""

    low: float
    high: float
    is_log: bool
    ticks: Sequence[float]

    def share(self, value: float) -> float | None:
        """The share of the axis below a value; None if it has no place, such as 0 on a logarithmic axis."""
        if not math.isfinite(value) or abs(value) > MAX_DRAWN or (self.is_log and value <= 0):
            return None
        if self.is_log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


class Chart(Struct, frozen=True):
    """`key` is used in file names and links. `colors` are those of series that have a meaning, such as phases."""

    key: str
    title: str
    x: Axis
    y: Axis
    rows: tuple[Row, ...]
    kind: Kind = Kind.LINES
    caption: str = ""
    colors: Mapping[str, str] = field(default_factory=dict)

    @property
    def series(self) -> dict[str, list[Row]]:
        """The rows by the name of their series, in order."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row["series"], []).append(row)
        return found

    @property
    def lines(self) -> list[list[Row]]:
        """The rows by line: of one series, run and style."""
        found: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row["series"], row.get("run", ""), row.get("style", "")), []).append(row)
        return list(found.values())

    @property
    def looks(self) -> dict[str, tuple[str, int]]:
        """The color of each series and the number of its mark."""
        looks: dict[str, tuple[str, int]] = {}
        count = 0
        for name, rows in self.series.items():
            if rows[0].get("style") == GUIDE:
                looks[name] = GREY, 0
                continue
            color = self.colors.get(name) or (COLORS[count] if count < len(COLORS) else GREY)
            looks[name] = color, COLORS.index(color) if color in COLORS else count
            count += 1
        return looks

    @property
    def named(self) -> dict[str, str]:
        """The series of the key with their names: grey ones share one, "4 more"."""
        looks, series = self.looks, self.series
        grey = [name for name, (color, _) in looks.items() if color == GREY and series[name][0].get("style") != GUIDE]
        names = {name: name for name in series if name not in grey[1:]}
        return names | ({grey[0]: f"{len(grey)} more"} if len(grey) > 1 else {})

    @property
    def needs_key(self) -> bool:
        """Whether the chart needs a key: for several series, and for one with a fit."""
        return len(self.series) > 1 or any(row.get("style") for row in self.rows)

    @property
    def alt(self) -> str:
        """A sentence that describes the chart, for screen readers."""
        return f"{self.title}: {self.y.label} over {self.x.label}, for {list_some([*self.series], 8)}."

    def scales(self) -> tuple[Scale, Scale]:
        """Both axes of a plot."""
        xs = [row["x"] for row in self.rows]
        ys = [value for row in self.rows for key in ("y", "low", "high") if (value := row.get(key)) is not None]
        return make_scale(self.x, xs), make_scale(self.y, ys)

    def longest(self) -> float:
        """The length of the longest bar or its interval, or the end of the last span."""
        sums: dict[str, float] = {}
        for row in self.rows:
            sums[row["x"]] = sums.get(row["x"], 0.0) + max(0.0, row["y"] or 0.0)
        ends = [row["high"] for row in self.rows if row.get("high") is not None]
        longest = max([*(ends if self.kind is Kind.SPANS else (*sums.values(), *ends)), 0.0])
        return min(longest, MAX_DRAWN) or 1.0


def to_csv(charts: Sequence[Chart]) -> str:
    """The rows of charts; bounds of an interval are empty if unknown."""
    x, y = ({axis.label for axis in axes} for axes in zip(*((chart.x, chart.y) for chart in charts), strict=True))
    head = [*("chart", "series"), *(names.pop() if len(names) == 1 else what for names, what in ((x, "x"), (y, "y")))]
    more = [
        name for name in ("low", "high", "run", "note", "style") if any(row.get(name) for c in charts for row in c.rows)
    ]
    names = ("series", "x", "y", *more)
    rows = ([chart.title, *(row.get(name) for name in names)] for chart in charts for row in chart.rows)
    return format_csv([[*head, *more], *rows])


def guide(name: str, points: Sequence[tuple[float, float]]) -> list[Row]:
    """The rows of a goal, a target or an ideal."""
    return [{"series": name, "x": x, "y": y, "style": GUIDE} for x, y in points]


def thin(points: Sequence[tuple[float, float | None]], limit: int = 600) -> list[tuple[float, float | None]]:
    """About `limit` points at most, including the ends and the least and greatest of each group."""
    if len(points) <= limit:
        return list(points)
    size = -(-len(points) // (limit // 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        group = [(y, index) for index, (_, y) in enumerate(points[start : start + size], start) if y is not None]
        kept |= {min(group)[1], max(group)[1]} if group else set()
    return [points[index] for index in sorted(kept)]


def make_scale(axis: Axis, values: Sequence[float]) -> Scale:
    """The axis for these values, with some room; its ends differ, and it has two ticks at least."""
    least = _MIN_DRAWN if axis.is_log else -math.inf
    known = [value for value in values if abs(value) <= MAX_DRAWN and value > least] or [1.0]
    low, high = min(known), max(known)
    if axis.is_log:
        room = max(1.1, math.exp(0.05 * (math.log(high) - math.log(low))))
        low, high = low / room, high * room
    else:
        low = min(0.0, low) if axis.from_zero else low
        span = high - low if high - low > _MIN_DRAWN else abs(high) if abs(high) > _MIN_DRAWN else 1.0
        low, high = (low if axis.from_zero and low == 0 else low - 0.06 * span), high + 0.08 * span
    ticks = sorted(set(known)) if axis.at_values else _decades(low, high) if axis.is_log else []
    ticks = ticks[:: max(1, -(-len(ticks) // MAX_TICKS))]
    return Scale(low, high, axis.is_log, ticks if len(ticks) > 1 or axis.at_values else _steps(low, high))


def _steps(low: float, high: float) -> list[float]:
    """Round places between two values, in steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / 5
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= 0.999 * raw)
    return [float(f"{step * n:.12g}") for n in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [value for power in powers for f in factors if low <= (value := f * 10.0**power) <= high]
        if len(found) >= 3:
            break
    return found


def format_tick(value: float, unit: str = "") -> str:
    """ "0.25", "1,200", "25k", "2.5M"; "50 ms", "4 KiB"."""
    size = abs(value)
    if unit == SECONDS and 0 < size < 1:
        scale, name = (1e-3, "ms") if size >= 1e-3 else (1e-6, "µs")
        return f"{value / scale:.4g}\u00a0{name}"
    if unit in ("B", "B/s"):
        scales = _BINARY if unit == "B" else tuple((scale, f"{name}B/s") for scale, name in (*PREFIXES, (1.0, "")))
        scale, name = next((each for each in scales if size >= each[0]), scales[-1])
        return f"{value / scale:.{3 if size < 999.5 * scale else 4}g}\u00a0{name}"
    if size >= 1e4:
        scale, name = next(each for each in PREFIXES if size >= each[0])
        return f"{value / scale:,.4g}{name}" if size < 1e16 else f"{value:.3g}"
    return f"{value:.3g}" if 0 < size < 1e-4 else f"{value:,.6g}"
