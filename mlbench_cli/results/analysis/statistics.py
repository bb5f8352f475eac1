"""Repeats: their mean, and how far the true mean may be from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """What repeats of one measurement say: how many there are, their mean, and the 95 % interval of the true mean.

    The interval is Student's: mean +- t s / sqrt(n), where s = sqrt(sum (x - mean)^2 / (n - 1)) and t is the quantile
    0.975 of Student's distribution with n - 1 degrees of freedom. It holds where repeats are independent and about
    normally distributed. One measurement has no interval: `low` and `high` are None.
    """

    count: int
    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def margin(self) -> float | None:
        """Half the interval's width."""
        return None if self.high is None else self.high - self.mean

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "low": self.low, "high": self.high, "confidence": CONFIDENCE}


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of `values`, of which there is at least one."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(1, mean)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    margin = student_quantile(count - 1) * deviation / math.sqrt(count)
    return Estimate(count, mean, mean - margin, mean + margin)


def ratio(above: Estimate, below: Estimate) -> Estimate | None:
    """above / below, both of them positive, with the interval by first-order propagation of independent errors.

    The relative margins add as squares: m = q sqrt((m_a / a)^2 + (m_b / b)^2). A side without repeats adds nothing, as
    if it were exact; without repeats on either side there is no interval. None where `below` is not above 0.
    """
    if below.mean <= 0:
        return None
    quotient = above.mean / below.mean
    margins = [side.margin / side.mean for side in (above, below) if side.margin is not None and side.mean > 0]
    if not margins:
        return Estimate(min(above.count, below.count), quotient)
    margin = quotient * math.hypot(*margins)
    return Estimate(min(above.count, below.count), quotient, quotient - margin, quotient + margin)


def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """t with P(-t < T < t) = `confidence` for T of Student's distribution with `freedom` degrees of freedom, >= 1."""
    low, high = 0.0, math.pi / 2  # of the angle atan(t / sqrt(freedom)), which the probability grows with
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _probability(angle: float, freedom: int) -> float:
    """P(|T| < t) where angle = atan(t / sqrt(freedom)): Abramowitz and Stegun, 26.7.3 and 26.7.4, finite sums."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for power in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
