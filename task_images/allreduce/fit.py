"""Latency and bandwidth from times over sizes: t = alpha + S * beta, by relative least squares. Plain Python."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

LEAST_SIZES = 3
_TUNING = 1.345  # Huber's: in units of the residuals' spread, from where on a point counts less than its square
_ROUNDS = 30


@dataclass(frozen=True)
class Fit:
    """alpha in microseconds; beta as bandwidth in GB/s (None if no size was large enough to tell it
    from nothing).

    The errors are standard errors of the fit. `off_mean` and `off_worst` say how far measured times are from the line,
    as a share of it, root of the mean square over sizes and at `worst_bytes`: a collective that changes its algorithm
    with the size is no straight line.
    """

    alpha_us: float
    alpha_error_us: float
    algbw: float | None
    algbw_error: float | None
    busbw: float | None
    off_mean: float
    off_worst: float
    worst_bytes: int
    sizes: int

    def to_dict(self) -> dict[str, Any]:
        """The fit as the result event has it."""
        return asdict(self)


def fit(sizes: Sequence[int], times: Sequence[float], factor: float) -> Fit | None:
    """The line through `times` (microseconds) over `sizes` (bytes). None with fewer than LEAST_SIZES different sizes.

    Residuals are relative, so that a microsecond counts as much at a small size as a millisecond at a large one.
    Outliers weigh less (Huber); neither alpha nor beta is negative. `factor` makes busbw of algbw.
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
    alpha_error, beta_error = _errors(sizes, weights, trust, off)
    worst = max(range(len(off)), key=lambda index: abs(off[index]))
    algbw = 1e-3 / beta if beta > beta_error else None
    return Fit(
        alpha,
        alpha_error,
        algbw,
        None if algbw is None else algbw * beta_error / beta,
        None if algbw is None else algbw * factor,
        math.sqrt(statistics.fmean(one**2 for one in off)),
        abs(off[worst]),
        sizes[worst],
        len(sizes),
    )


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


def _errors(
    x: Sequence[float], weights: Sequence[float], trust: Sequence[float], off: Sequence[float]
) -> tuple[float, float]:
    """Standard errors of intercept and slope, from the spread of the relative residuals as far as they are trusted."""
    noise = sum(t * one**2 for t, one in zip(trust, off, strict=True)) / max(1.0, sum(trust) - 2)
    trusted = [w * t for w, t in zip(weights, trust, strict=True)]
    mean_x, _, variance = _moments(x, x, trusted)
    total = sum(trusted)
    return math.sqrt(noise / total * (1 + mean_x**2 / variance)), math.sqrt(noise / (total * variance))
