"""The one statistic: the ratio of two sides of repeats, with one interval, and the questions that it answers.

    r = mean(ln new) - mean(ln old) +- t(0.975, df) * e

Everything is on logarithms, so that A / B and B / A are judged alike and no interval of a time reaches 0. Metrics that
are not all above 0, such as rewards, have no ratio: the difference of their plain means is judged in the same way. With
at least MIN_RUNS values on each side, e and df are Welch's (Welch, Biometrika 34 (1947) 28-35; Satterthwaite,
Biometrics Bulletin 2 (1946) 110-114). One or two values against at least MIN_HISTORY others are taken to scatter as
those do (`spread_of_history`). With fewer values there is no interval, and so no verdict. The values are runs, or means
of sessions (sessions.py).

The whole interval decides, whoever asks:

    is it different?                 the interval leaves out 1
    is it worse than the limit?      gate: yes above it, no below it, and otherwise nobody can tell
    is it the same within a margin?  same: the interval lies inside the margin (two one-sided tests, Schuirmann,
                                     J. Pharmacokinet. Biopharm. 15 (1987) 657-680), or outside of it

With k questions at once, "worse" and "different" need the level 5 % / k (Bonferroni), so that one of many figures does
not fail by chance. benchmarks/gate_errors.py and benchmarks/reproduce_errors.py simulate all of it.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import TypedDict

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.errors import CannotTellError, TaskFailedError

CONFIDENCE = 0.95
MIN_RUNS = 3  # values on each side, for an interval
MIN_HISTORY = 5  # values on one side, if the other has fewer than MIN_RUNS
MIN_REFERENCE = 5  # runs that a convergence band is made from
MAX_FIGURE = 1e100  # squares and sums of figures must still be floats
POWER = 0.9  # probability of finding equal sides equal, for choosing the number of repeats
MAX_REPEATS = 20
_MIN_DEVIATION = 0.005  # of a history: equal values would divide by 0
_MAX_LOG = 700.0
_ROUNDING = 1e-9
_ALMOST = 1.1
_NORMAL_80 = 0.8416  # 80 % quantile of the normal distribution


class Verdict(StrEnum):
    """The verdict from an interval. The first three answer `gate`, the others `reproduce`."""

    PASSED = "passed"
    FAILED = "failed"
    CANNOT_TELL = "cannot_tell"
    REPRODUCED = "reproduced"
    DIFFERENT = "different"

    @property
    def exit_code(self) -> int:
        if self in (Verdict.PASSED, Verdict.REPRODUCED):
            return 0
        return CannotTellError.exit_code if self is Verdict.CANNOT_TELL else TaskFailedError.exit_code

    @property
    def phrase(self) -> str:
        """For people: "cannot tell"."""
        return self.value.replace("_", " ")


def find_worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst verdict: a failure, else one that cannot be decided. PASSED for no verdicts."""
    found = set(verdicts)
    return next((worst for worst in (Verdict.FAILED, Verdict.CANNOT_TELL) if worst in found), Verdict.PASSED)


class EstimateDocument(TypedDict):
    """A mean or a ratio in a JSON document; null ends if there is no interval."""

    count: int
    mean: float
    low: float | None
    high: float | None
    confidence: float


class Estimate(Struct, frozen=True):
    """Repeats of one measurement: their number, mean and, for at least three, the 95 % interval of the mean.

    The mean is the geometric one, and the interval Student's on logarithms; of values that are not all above 0, it is
    the arithmetic mean with Student's interval.
    """

    count: int
    mean: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def from_dict(cls, document: EstimateDocument) -> "Estimate":
        """The inverse of `to_dict`."""
        return cls(document["count"], document["mean"], document["low"], document["high"])

    def to_dict(self) -> EstimateDocument:
        """Count, mean, and both ends of the interval with its confidence."""
        return {"count": self.count, "mean": self.mean, "low": self.low, "high": self.high, "confidence": CONFIDENCE}


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of `values`, of which there is at least one."""
    count, is_positive = len(values), min(values) > 0
    if min(values) == max(values):  # exactly that value, not a rounded exponential of its logarithm
        ends = (values[0], values[0]) if count >= MIN_RUNS else (None, None)
        return Estimate(count, values[0], *ends)
    scaled = [math.log(value) for value in values] if is_positive else list(values)
    back = math.exp if is_positive else float
    mean = math.fsum(scaled) / count
    if count < MIN_RUNS:
        return Estimate(count, back(mean))
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in scaled) / (count - 1))
    reach = student_quantile(count - 1) * deviation / math.sqrt(count)
    if is_positive:
        return Estimate(count, math.exp(mean), _exp(mean - reach), _exp(mean + reach))
    return Estimate(count, mean, mean - reach, mean + reach)


class Ratio(Struct, frozen=True):
    """New / old, or new - old of values that are not all above 0. `shift` is the logarithm of the ratio of geometric
    means, or the difference of plain ones, and `error` its standard error; None: no interval.

    count          values of the side that has fewer
    is_confounded  the sides were measured in different sessions, so it cannot be told from a difference of sessions
    base           of a difference: the magnitude of the old mean, which shares of it refer to; None: this is a ratio
    """

    shift: float
    count: int
    error: float | None = None
    freedom: float = 1.0
    is_confounded: bool = False
    base: float | None = None

    @property
    def is_difference(self) -> bool:
        """Whether it is new - old."""
        return self.base is not None

    @property
    def mean(self) -> float:
        """The ratio, or the difference."""
        return self._scale(self.shift)

    def _scale(self, shift: float) -> float:
        return shift if self.is_difference else _exp(shift)

    @property
    def has_too_few_runs(self) -> bool:
        """Whether a side has too few values for an interval."""
        return self.count < MIN_RUNS

    @property
    def low(self) -> float | None:
        """The lower end of its 95 % interval."""
        ends = self.interval()
        return ends[0] if ends else None

    @property
    def high(self) -> float | None:
        """The upper end of its 95 % interval."""
        ends = self.interval()
        return ends[1] if ends else None

    def interval(self, checks: int = 1, share: float = 1.0) -> tuple[float, float] | None:
        """Both ends of the 95 % interval; of one of several `checks` at once, those of the wider one. A difference that
        is judged by a share of the old mean is as uncertain as new - c * old with c up to `share`: at most `share`
        times as much."""
        if self.error is None:
            return None
        reach = student_quantile(self.freedom, 1 - (1 - CONFIDENCE) / checks) * self.error if self.error else 0.0
        reach *= share if self.is_difference else 1.0
        return self._scale(self.shift - reach), self._scale(self.shift + reach)

    @property
    def inverse(self) -> "Ratio":
        """Old / new, or old - new."""
        return replace(self, shift=-self.shift)

    @property
    def is_different(self) -> bool:
        """Whether there is a difference that repeats show: the interval leaves out 1, or 0 of a difference."""
        ends, equal = self.interval(), self._scale(0.0)
        return ends is not None and not self.is_confounded and not ends[0] <= equal <= ends[1]

    def gate(self, limit: float, checks: int = 1) -> Verdict:
        """Of a ratio of which more is worse: is it worse than `limit`? A failure is one of `checks` at once. The limit
        of a difference is that share of the old mean: 1.1 allows 10 % of its magnitude."""
        ends, strict = self.interval(1, limit), self.interval(checks, limit)
        limit = limit if self.base is None else (limit - 1) * self.base
        if ends is None or strict is None or self.is_confounded:
            return Verdict.CANNOT_TELL
        if strict[0] > limit:
            return Verdict.FAILED
        return Verdict.PASSED if ends[1] <= limit else Verdict.CANNOT_TELL

    def same(self, margin: float, checks: int = 1) -> Verdict:
        """Are both sides the same within `margin`, such as 0.1? "Different" is one of `checks` at once."""
        ends, strict = self.interval(1, 1 + margin), self.interval(checks, 1 + margin)
        if ends is None or strict is None:
            return Verdict.CANNOT_TELL
        least, most = (1 / (1 + margin), 1 + margin) if self.base is None else (-margin * self.base, margin * self.base)
        if least <= ends[0] and ends[1] <= most:
            return Verdict.REPRODUCED
        return Verdict.DIFFERENT if strict[0] > most or strict[1] < least else Verdict.CANNOT_TELL

    def to_dict(self) -> EstimateDocument:
        """As an estimate."""
        return Estimate(self.count, self.mean, self.low, self.high).to_dict()


def ratio(old: Sequence[float], new: Sequence[float]) -> Ratio | None:
    """New / old of independent values; None if a side has none, or a value is not above 0."""
    if not old or not new or min(*old, *new) <= 0:
        return None
    return relate_means(*([math.log(value) for value in side] for side in (old, new)))


def relate_means(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """The difference of the means of two sides of independent values, which are logarithms or are scaled to 1."""
    difference = _without_rounding(statistics.fmean(after) - statistics.fmean(before))
    count = min(len(before), len(after))
    if count >= MIN_RUNS:
        parts = [statistics.variance(side) / len(side) for side in (before, after)]
        if not any(parts):
            return Ratio(difference, count, 0.0, len(before) + len(after) - 2)
        return Ratio(difference, count, math.sqrt(math.fsum(parts)), _welch_freedom(parts, (len(before), len(after))))
    if max(len(before), len(after)) >= MIN_HISTORY:
        history = max(before, after, key=len)
        error = spread_of_history(history) * math.sqrt(1 / len(before) + 1 / len(after))
        return Ratio(difference, count, error, len(history) - 1)
    return Ratio(difference, count)


def _without_rounding(difference: float) -> float:
    """A difference of means, or 0: equal values differ in their last digits when they are summed in another order,
    in every repeat alike, and repeats would show that as a difference."""
    return difference if abs(difference) > _ROUNDING else 0.0


def paired_ratio(differences: Sequence[float]) -> Ratio:
    """New / old from one difference of means for each session."""
    count, mean = len(differences), _without_rounding(statistics.fmean(differences))
    if count < MIN_RUNS:
        return Ratio(mean, count)
    return Ratio(mean, count, statistics.stdev(differences) / math.sqrt(count), count - 1)


def spread_of_history(logs: Sequence[float]) -> float:
    """The deviation that a new value is expected to have, from the logarithms of earlier ones.

    At least 1.4826 times the median absolute deviation, so that a few values close together do not make the spread too
    small.
    """
    middle = statistics.median(logs)
    robust = 1.4826 * statistics.median(abs(value - middle) for value in logs)
    return max(statistics.stdev(logs), robust, _MIN_DEVIATION)


def find_least_mean(reference: Sequence[float], count: int) -> float:
    """The least mean epochs of `count` runs that a reference of at least MIN_REFERENCE allows: MLPerf's rule for
    reference convergence points (rcp_checker of mlperf-logging 4.1.68)."""
    mean, used = trimmed_mean(reference)
    deviation = max(statistics.pstdev(reference), 1e-9)
    return mean - student_quantile(used + count - 2, 0.9) * deviation * math.sqrt(1 / used + 1 / count)


def trimmed_mean(values: Sequence[float]) -> tuple[float, int]:
    """The mean without least and greatest, and how many values it is over; of fewer than 5 values the mean of all."""
    kept = sorted(values)[1:-1] if len(values) >= MIN_REFERENCE else list(values)
    return statistics.fmean(kept), len(kept)


# --- how many repeats -----------------------------------------------------------------------------------------------


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
    fewest = MIN_RUNS if count >= MIN_RUNS else MIN_HISTORY
    within = max(margin, _ALMOST * decidable_margin(deviation, count, most))
    return next(
        (number for number in range(fewest, most) if decidable_margin(deviation, count, number) <= within), most
    )


def decidable_margin(deviation: float, count: int, repeats: int) -> float:
    """The smallest margin within which `repeats` runs can be shown with POWER to equal `count` runs."""
    freedom = count + repeats - 2
    reach = student_quantile(freedom) + student_quantile(freedom, POWER)
    return math.expm1(reach * deviation * math.sqrt(1 / count + 1 / repeats))


# --- Student's distribution -----------------------------------------------------------------------------------------


def _exp(value: float) -> float:
    return math.exp(max(-_MAX_LOG, min(_MAX_LOG, value)))


def _welch_freedom(variances: Sequence[float], counts: Sequence[int]) -> float:
    total = math.fsum(variances)
    return total**2 / math.fsum(own**2 / (each - 1) for own, each in zip(variances, counts, strict=True))


@lru_cache(4096)
def student_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """t with P(-t < T < t) = `confidence` for T of Student's distribution with `freedom` degrees of freedom, >= 1.

    P(|T| > t) = I(freedom / 2, 1 / 2) at freedom / (freedom + t^2), with the regularized incomplete beta function I
    (Abramowitz and Stegun, 26.5.27). P(|T| < t) is concave, so Newton's method from 0 rises to the quantile.
    """
    quantile = 0.0
    for _ in range(200):
        inside = 1 - _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + quantile**2))
        step = (confidence - inside) / (2 * _student_density(quantile, freedom))
        quantile += step
        if abs(step) < 1e-12 * quantile:
            break
    return quantile


def _student_density(t: float, freedom: float) -> float:
    """The density of Student's distribution with `freedom` degrees of freedom at `t`."""
    top = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    return math.exp(top - (freedom + 1) / 2 * math.log1p(t**2 / freedom))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b) for a, b > 0 and 0 <= x <= 1."""
    if x <= 0:
        return 0.0
    if x > (a + 1) / (a + b + 2):  # here the fraction below converges slowly; I_x(a, b) = 1 - I_{1-x}(b, a)
        return 1 - _incomplete_beta(b, a, 1 - x)
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
