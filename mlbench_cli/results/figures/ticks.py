"""Where values and labels of an axis stand: round numbers, never fewer than two."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mlbench_cli.results.analysis.numbers import SECONDS
from mlbench_cli.results.figures.model import Axis, Figure, Kind, Scale

_MAX_DRAWN = 1e300  # a task may report any float; the room beside larger ones would overflow
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


class Places(NamedTuple):
    """An axis: its ends, its ticks, and the share of it that lies below a value; infinite if it has no place."""

    low: float
    high: float
    ticks: Sequence[float]
    share: Callable[[float], float]


def place_axis(axis: Axis, values: Sequence[float]) -> Places:
    """The axis for these values."""
    if axis.scale is Scale.CATEGORIES:
        low, high = -0.6, len(axis.categories) - 0.4
        ticks = [float(index) for index in range(len(axis.categories))]
    else:
        low, high = widen([*values, *axis.ticks], logarithmic=axis.scale.is_log, from_zero=axis.from_zero)
        ticks = list(axis.ticks) if len(axis.ticks) > 1 else choose_ticks(low, high, logarithmic=axis.scale.is_log)

    def share(value: float) -> float:
        if not math.isfinite(value) or (axis.scale.is_log and value <= 0):
            return -math.inf
        if axis.scale.is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    return Places(low, high, ticks, share)


def values_of(figure: Figure) -> tuple[list[float], list[float]]:
    """All values that the axes of a figure must hold."""
    xs = [x for line in figure.lines for x in line.xs]
    if figure.kind is Kind.BARS:
        sums: dict[float, float] = {}
        for line in figure.lines:
            for x, y in zip(line.xs, line.ys, strict=True):
                sums[x] = sums.get(x, 0.0) + max(0.0, y or 0.0)
        ends = [end for line in figure.lines for end in line.high if end is not None]
        return xs, [0.0, *sums.values(), *ends]
    columns = (column for line in figure.lines for column in (line.ys, line.low, line.high))
    return xs, [value for column in columns for value in column if value is not None]


def choose_ticks(low: float, high: float, *, logarithmic: bool = False, count: int = 5) -> list[float]:
    """At least two round numbers from `low` to `high`, in their order; `low` < `high`, both above 0 if logarithmic."""
    ticks = _decades(low, high) if logarithmic else _steps(low, high, count)
    if len(ticks) < 2:
        ticks = _steps(low, high, count)
    return ticks if len(ticks) > 1 else [low, high]


def widen(values: Sequence[float], *, logarithmic: bool = False, from_zero: bool = False) -> tuple[float, float]:
    """Ends of an axis for `values`, with some room; never of equal value."""
    values = [value for value in values if abs(value) <= _MAX_DRAWN and (value > 0 or not logarithmic)]
    if not values:
        return (1.0, 10.0) if logarithmic else (0.0, 1.0)
    low, high = min(values), max(values)
    if logarithmic:
        room = max(1.1, (high / low) ** 0.05)
        return low / room, high * room
    if from_zero:
        low = min(0.0, low)
    span = high - low or abs(high) or 1.0
    return low - (0.0 if from_zero and low == 0 else 0.06 * span), high + 0.08 * span


def format_tick(value: float, unit: str = "") -> str:
    """ "0.25", "1,200", "25k", "2.5M"; bytes ("B") as "4 KiB"."""
    size = abs(value)
    if unit == SECONDS and 0 < size < 0.1:
        scale, name = (1e-3, "ms") if size >= 1e-3 else (1e-6, "µs")
        return f"{value / scale:.4g}\u00a0{name}"
    if unit == "B/s":
        scale, name = next((each for each in _PREFIXES if size >= each[0]), (1.0, ""))
        return f"{value / scale:.3g}\u00a0{name}B/s"
    if unit == "B":
        scale, name = next((each for each in _BINARY if size >= each[0]), (1.0, "B"))
        return f"{value / scale:.4g}\u00a0{name}"
    if size >= 9.9995e15:  # beyond 9,999T
        return f"{value:.3g}"
    if 0 < size < 1e-4:
        return f"{value:.{min(20, 1 - math.floor(math.log10(size)))}f}".rstrip("0")
    if size < 1e4:
        return f"{value:,.6g}"
    return next(f"{value / limit:,.4g}{prefix}" for limit, prefix in _PREFIXES if size >= limit)


def _steps(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    found: list[float] = []
    for factor in (10, 5, 2, 1, 0.5):
        step = factor * magnitude
        first = math.ceil(low / step - 1e-9)
        found = [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]
        if len(found) >= max(3, count - 1):
            break
    return found


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        found = [
            factor * 10.0**power
            for power in range(first, last + 1)
            for factor in factors
            if low <= factor * 10.0**power <= high
        ]
        if len(found) >= 3:
            break
    step = max(1, -(-len(found) // 7))
    return found[::step]
