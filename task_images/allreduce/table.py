"""What a person reads of the figures: a header for each collective and type, a line for each size, and the fit.

The fit is latency and bandwidth from times over sizes, t = alpha + S * beta, by relative least squares.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from task_images.allreduce.measure import Row, Series
from task_images.allreduce.operations import COLLECTIVES

LEAST_SIZES = 3
_TUNING = 1.345  # Huber's: in units of the residuals' spread, from where on a point counts less than its square
_ROUNDS = 30


@dataclass(frozen=True)
class Fit:
    """alpha in microseconds; beta as bandwidth in GB/s (None if no size was large enough to tell it
    from nothing).

    `off_mean` says how far measured times are from the line, as a share of it, root of the mean square over sizes: a
    collective that changes its algorithm with the size is no straight line.
    """

    alpha_us: float
    algbw: float | None
    off_mean: float

    def to_dict(self) -> dict[str, Any]:
        """The fit as the result event has it."""
        return asdict(self)


def fit(sizes: Sequence[int], times: Sequence[float]) -> Fit | None:
    """The line through `times` (microseconds) over `sizes` (bytes). None with fewer than LEAST_SIZES different sizes.

    Residuals are relative, so that a microsecond counts as much at a small size as a millisecond at a large one.
    Outliers weigh less (Huber); neither alpha nor beta is negative.
    """
    if len(set(sizes)) < LEAST_SIZES or min(times, default=0) <= 0:
        return None
    weights = [1 / time**2 for time in times]
    trust = [1.0] * len(times)
    for _ in range(_ROUNDS):
        alpha, beta = _line(sizes, times, [a * b for a, b in zip(weights, trust, strict=True)])
        off = [(alpha + beta * size - time) / time for size, time in zip(sizes, times, strict=True)]
        spread = statistics.median(map(abs, off)) / 0.6745
        if spread < 1e-9:
            break
        trust = [min(1.0, _TUNING * spread / max(abs(one), 1e-12)) for one in off]
    beta_error = _estimate_error(sizes, weights, trust, off)
    off_mean = math.sqrt(statistics.fmean(one**2 for one in off))
    return Fit(alpha, 1e-3 / beta if beta > beta_error else None, off_mean)


def _line(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the weighted least squares, neither of them negative."""
    mean_x, mean_y, variance = _moments(x, y, weights)
    covariance = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True)) / sum(weights)
    slope = max(0.0, covariance / variance)
    intercept = mean_y - slope * mean_x
    if intercept >= 0:
        return intercept, slope
    # Through the origin.
    squares = sum(w * a * a for w, a in zip(weights, x, strict=True))
    return 0.0, sum(w * a * b for w, a, b in zip(weights, x, y, strict=True)) / squares


def _moments(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float, float]:
    """Weighted means of both, and the variance of x."""
    total = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_y = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    return mean_x, mean_y, sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True)) / total


def _estimate_error(
    x: Sequence[float], weights: Sequence[float], trust: Sequence[float], off: Sequence[float]
) -> float:
    """Standard error of the slope, from the spread of the relative residuals as far as they are trusted."""
    noise = sum(t * one**2 for t, one in zip(trust, off, strict=True)) / max(1.0, sum(trust) - 2)
    _, _, variance = _moments(x, x, [w * t for w, t in zip(weights, trust, strict=True)])
    return math.sqrt(noise / (sum(w * t for w, t in zip(weights, trust, strict=True)) * variance))


_COLUMNS = (
    *(("bytes", 11), ("elements", 11), ("min us", 10), ("mean us", 10), ("p50 us", 10), ("p95 us", 10)),
    *(("p99 us", 10), ("max us", 10), ("ranks us", 15), ("algbw GB/s", 10), ("busbw GB/s", 10), ("samples", 7)),
)


def header(series: Series, ranks: int) -> str:
    """The lines above a series: what S and the bus bandwidth mean, and the columns' titles."""
    kind = COLLECTIVES[series.collective]
    titles = "  ".join(f"{title:>{width}}" for title, width in _COLUMNS)
    return f"\n{series}, k = {ranks}: S = {kind.size}; busbw = {kind.formula}\n{titles}"


def line(row: Row) -> str:
    """The line of one size, in the order of the columns."""
    values = (
        *(row.bytes, row.elements, row.min_us, row.mean_us, row.p50_us, row.p95_us, row.p99_us, row.max_us),
        *(_span(row), row.algbw, row.busbw, row.samples),
    )
    return "  ".join(
        f"{_figure(value, title):>{width}}" for value, (title, width) in zip(values, _COLUMNS, strict=True)
    )


def describe_fit(fit: Fit | None) -> str:
    """The fit in words."""
    if fit is None:
        return "no fit: it needs at least three sizes"
    line = f"fit t = alpha + S * beta: alpha {fit.alpha_us:.4g} us"
    line += "" if fit.algbw is None else f", 1 / beta {fit.algbw:.4g} GB/s"
    return f"{line}; off by {fit.off_mean:.0%}"


def size(count: int) -> str:
    """Bytes in the largest binary unit of which there is one: "64 KiB", "1.5 MiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


def _span(row: Row) -> str:
    """The least and the greatest median of a single rank."""
    if row.rank_p50_min_us is None or row.rank_p50_max_us is None:
        return "-"
    return f"{row.rank_p50_min_us:.1f}-{row.rank_p50_max_us:.1f}"


def _figure(value: float | str | None, title: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(value)
    if title.endswith(" us"):
        return f"{value:.1f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.1e}"
