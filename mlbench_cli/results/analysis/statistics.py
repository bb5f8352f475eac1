"""Repeats: their mean, the ratio of two means, and how far the true values may be from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypedDict

CONFIDENCE = 0.95
MAX_FIGURE = 1e100  # larger figures are cut: their squares and sums must still be floats


class EstimateDocument(TypedDict):
    """An estimate in a JSON document; null ends if there is no interval."""

    count: int
    mean: float
    low: float | None
    high: float | None
    confidence: float


@dataclass(frozen=True)
class Estimate:
    """What repeats of one measurement say: how many there are, their mean, and the 95 % interval of the true mean.

    The interval is Student's: mean +- t s / sqrt(n), where s = sqrt(sum (x - mean)^2 / (n - 1)) and t is the quantile
    0.975 of Student's distribution with n - 1 degrees of freedom. It holds if repeats are independent and about
    normally distributed. One measurement has no interval: `low` and `high` are None.
    """

    count: int
    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def margin(self) -> float | None:
        """Half the interval's width; None without an interval."""
        return None if self.high is None or self.low is None else (self.high - self.low) / 2

    @property
    def inverse(self) -> "Estimate":
        """Of 1 / x for a ratio x, whose interval is above 0."""
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return Estimate(self.count, 1 / self.mean, low, high)

    @classmethod
    def from_dict(cls, document: EstimateDocument) -> "Estimate":
        """The inverse of `to_dict`."""
        return cls(document["count"], document["mean"], document["low"], document["high"])

    def to_dict(self) -> EstimateDocument:
        """Count, mean, and both ends of the interval with its confidence."""
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


def welch_freedom(variances: Sequence[float], counts: Sequence[int]) -> float:
    """Welch and Satterthwaite's degrees of freedom of a sum of means.

    `variances` are those of the means, not all 0; `counts` the numbers of values, at least 2, that they are over.
    """
    total = math.fsum(variances)
    return total**2 / math.fsum(own**2 / (each - 1) for own, each in zip(variances, counts, strict=True))


def ratio(above: Estimate, below: Estimate) -> Estimate | None:
    """above / below, both of them positive, with the 95 % interval of the ratio of the true means.

    The interval is Welch's, of the difference of the logarithms: ln(a / b) +- t sqrt(u_a^2 + u_b^2) with the relative
    standard errors u = s / (sqrt(n) mean) (delta method) and Student's t with Welch and Satterthwaite's degrees of
    freedom, (u_a^2 + u_b^2)^2 / (u_a^4 / (n_a - 1) + u_b^4 / (n_b - 1)). Neither the variances nor the numbers of
    repeats need to be equal. It holds for independent repeats whose deviation is small against the mean, up to about a
    third; tests check the coverage. Inverting the ratio inverts the interval.

    Without repeats on both sides there is no interval. None if either mean is not above 0.
    Sources: Welch, Biometrika 34 (1947) 28-35; Satterthwaite, Biometrics Bulletin 2 (1946) 110-114; Casella and
    Berger, Statistical Inference (2002) section 5.5.4 for the delta method.
    """
    if above.mean <= 0 or below.mean <= 0:
        return None
    quotient, count = above.mean / below.mean, min(above.count, below.count)
    errors = [_relative_variance(above), _relative_variance(below)]
    variances = [error for error in errors if error is not None]
    if len(variances) < 2:
        return Estimate(count, quotient)
    total = math.fsum(variances)
    if total == 0:
        return Estimate(count, quotient, quotient, quotient)
    counts = (above.count, below.count)
    reach = math.exp(student_quantile(welch_freedom(variances, counts)) * math.sqrt(total))
    return Estimate(count, quotient, quotient / reach, quotient * reach)


def _relative_variance(found: Estimate) -> float | None:
    """The squared relative standard error of a mean; None without repeats."""
    if found.margin is None or found.count < 2:
        return None
    return (found.margin / student_quantile(found.count - 1) / found.mean) ** 2


@lru_cache(4096)
def student_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """t with P(-t < T < t) = `confidence` for T of Student's distribution with `freedom` degrees of freedom, >= 1.

    P(|T| > t) = I(freedom / 2, 1 / 2) at freedom / (freedom + t^2), with the regularized incomplete beta function I
    (Abramowitz and Stegun, 26.5.27). P(|T| < t) is concave, so Newton's method from 0 rises to the quantile.
    """
    quantile = 0.0
    for _ in range(200):
        inside = 1 - incomplete_beta(freedom / 2, 0.5, freedom / (freedom + quantile**2))
        step = (confidence - inside) / (2 * student_density(quantile, freedom))
        quantile += step
        if abs(step) < 1e-12 * quantile:
            break
    return quantile


def student_density(t: float, freedom: float) -> float:
    """The density of Student's distribution with `freedom` degrees of freedom at `t`."""
    top = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    return math.exp(top - (freedom + 1) / 2 * math.log1p(t**2 / freedom))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b) for a, b > 0 and 0 <= x <= 1."""
    if x <= 0:
        return 0.0
    if x > (a + 1) / (a + b + 2):  # here the fraction below converges slowly; I_x(a, b) = 1 - I_{1-x}(b, a)
        return 1 - incomplete_beta(b, a, 1 - x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(logarithm) / a / _beta_fraction(a, b, x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction 1 + d1/(1 + d2/(1 + ...)) of the incomplete beta function, by Lentz's method.

    Abramowitz and Stegun, 26.5.8.
    """
    value = upper = 1.0
    lower = 0.0
    for step in range(1, 1000):
        half = step // 2
        if step % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        lower = 1 / (1 + term * lower)
        upper = 1 + term / upper
        value *= upper * lower
        if abs(upper * lower - 1) < 1e-14:
            break
    return value
