"""Where the labels of an axis stand: round numbers, never fewer than two."""

import math
from collections.abc import Sequence


def choose_ticks(low: float, high: float, *, logarithmic: bool = False, count: int = 5) -> list[float]:
    """At least two round numbers from `low` to `high`, in their order; `low` < `high`, both above 0 if logarithmic."""
    ticks = _decades(low, high) if logarithmic else _steps(low, high, count)
    if len(ticks) < 2:
        ticks = _steps(low, high, count)
    return ticks if len(ticks) > 1 else [low, high]


def widen(values: Sequence[float], *, logarithmic: bool = False, from_zero: bool = False) -> tuple[float, float]:
    """Ends of an axis for `values`, with some room; never of equal value."""
    values = [value for value in values if math.isfinite(value) and (value > 0 or not logarithmic)]
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


def format_tick(value: float) -> str:
    """ "0.25", "1,200", "2.5M"."""
    size = abs(value)
    if size >= 1e15 or (0 < size < 1e-4):
        return f"{value:.0e}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:,.6g}" if size < 1e4 else f"{value:,.0f}"


def _steps(low: float, high: float, count: int) -> list[float]:
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    found: list[float] = []
    for factor in (10, 5, 2.5, 2, 1, 0.5):
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
    step = max(1, -(-len(found) // 8))
    return found[::step]
