"""Are two sides of repeats the same within a margin? Two one-sided t-tests (TOST) on logarithms.

A significance test cannot show equality: few or noisy repeats never find a difference. TOST turns the burden around. It
rejects both "B is more than the margin above A" and "B is more than the margin below A" at 5 % each, which is the same
as the 90 % interval of the ratio lying inside the margin. Schuirmann, J. Pharmacokinet. Biopharm. 15 (1987) 657-680;
Chow, Shao and Wang, Sample Size Calculations in Clinical Research (2003) chapter 3 for the number of repeats.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mlbench_cli.results.analysis.statistics import incomplete_beta, student_quantile, welch_freedom

LEVEL = 0.05  # probability of calling two sides equal that differ by the margin
POWER = 0.9  # probability of finding equal sides equal, for choosing the number of repeats
MIN_REPEATS = 3
MAX_REPEATS = 20
_ALMOST = 1.1
_NORMAL_80 = 0.8416  # 80 % quantile of the normal distribution


@dataclass(frozen=True)
class LogRatio:
    """ln(B / A) of geometric means, its standard error and degrees of freedom."""

    mean: float
    error: float
    freedom: float

    @property
    def ratio(self) -> float:
        """B / A."""
        return math.exp(self.mean)

    def interval(self, confidence: float) -> tuple[float, float]:
        """Both ends of the two-sided interval of B / A."""
        reach = student_quantile(self.freedom, confidence) * self.error if self.error else 0.0
        return math.exp(self.mean - reach), math.exp(self.mean + reach)

    def equivalence_p(self, margin: float) -> float:
        """The larger p-value of the two tests against ln(1 + margin) above and below."""
        limit = math.log1p(margin)
        return max(self._upper_tail(limit + self.mean), self._upper_tail(limit - self.mean))

    def _upper_tail(self, distance: float) -> float:
        """P(T > distance / error)."""
        if not self.error:
            return 0.0 if distance > 0 else 1.0
        t = distance / self.error
        tail = incomplete_beta(self.freedom / 2, 0.5, self.freedom / (self.freedom + t**2)) / 2
        return tail if t > 0 else 1 - tail


def log_ratio(a: Sequence[float], b: Sequence[float]) -> LogRatio | None:
    """ln(B / A) with Welch's standard error. None if a value is not above 0, or without repeats on either side.

    If one side has a single value, it is taken to scatter as the other side does: Student's test with the pooled
    deviation, s sqrt(1 + 1 / n) with n - 1 degrees of freedom.
    """
    if not a or not b or min(*a, *b) <= 0 or max(len(a), len(b)) < 2:
        return None
    logs = [[math.log(value) for value in side] for side in (a, b)]
    mean = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    if min(len(a), len(b)) == 1:
        more = max(logs, key=len)
        return LogRatio(mean, statistics.stdev(more) * math.sqrt(1 + 1 / len(more)), len(more) - 1)
    variances = [statistics.variance(side) / len(side) for side in logs]
    if not any(variances):
        return LogRatio(mean, 0.0, len(a) + len(b) - 2)
    return LogRatio(mean, math.sqrt(math.fsum(variances)), welch_freedom(variances, (len(a), len(b))))


def paired_log_ratio(differences: Sequence[float]) -> LogRatio:
    """ln(B / A) from at least two differences of logarithms."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return LogRatio(statistics.fmean(differences), error, len(differences) - 1)


def upper_deviation(deviation: float, count: int) -> float:
    """The upper 80 % confidence limit of the true deviation, from a sample deviation of `count` values.

    A sample of 3 or 5 runs often scatters less than the process that it comes from, and a plan by its deviation makes
    too few repeats then. Browne, Statist. Med. 14 (1995) 1933-1940, proposes the 80 % limit. The quantile of
    chi-squared is Wilson and Hilferty's approximation (within 2 % from 2 degrees of freedom on).
    """
    part = 2 / (9 * (count - 1))
    quantile = (count - 1) * (1 - part - _NORMAL_80 * math.sqrt(part)) ** 3
    return deviation * math.sqrt((count - 1) / quantile)


def repeats_needed(deviation: float, count: int, margin: float, most: int = MAX_REPEATS) -> int:
    """How many repeats show with POWER that they equal `count` runs, if they do and scatter alike.

    `deviation` is that of the logarithms. If even `most` are too few, fewer that are almost as good.
    """
    within = max(margin, _ALMOST * decidable_margin(deviation, count, most))
    return next(
        (number for number in range(MIN_REPEATS, most) if decidable_margin(deviation, count, number) <= within), most
    )


def decidable_margin(deviation: float, count: int, repeats: int) -> float:
    """The smallest margin within which `repeats` runs can be shown with POWER to equal `count` runs."""
    freedom = count + repeats - 2
    reach = student_quantile(freedom, 1 - 2 * LEVEL) + student_quantile(freedom, POWER)
    return math.expm1(reach * deviation * math.sqrt(1 / count + 1 / repeats))
