"""A gate against a baseline: is a figure worse than it was by more than is allowed, or can nobody tell?

Two rules, both on logarithms, so that A / B and B / A are judged alike; d is ln(new) - ln(old), turned so that more is
worse, and R the factor that is allowed.

Repeats on both sides (at least 2 + 2): Welch's interval of d, one-sided 95 % at each end. It fails if the lower end is
above ln R, passes if the upper end is below it, and else cannot tell.

One new value against at least 5 earlier runs: T = d / (s sqrt(1/m + 1/n)) with their deviation s. It fails if d > ln R
and T > t(0.99, n - 1), passes if d <= ln R, and else cannot tell. s is at least 1.4826 times the median absolute
deviation and at least 0.005, since equal values would divide by 0.

With k checks at once a failure needs the level 5 % / k (Bonferroni), so that many figures do not fail by chance.
Sources: Welch, Biometrika 34 (1947) 28-35; Lehmann and Romano, Testing Statistical Hypotheses (2005), 9.1.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mlbench_cli.results.analysis.statistics import student_quantile, welch_freedom
from mlbench_cli.results.analysis.verdict import Verdict

MIN_HISTORY = 5
MIN_REPEATS = 2
_LEVEL, _HISTORY_LEVEL = 0.05, 0.01
_MIN_DEVIATION = 0.005


@dataclass(frozen=True)
class Judged:
    """`worse` is the factor by which the new values are worse; `low` and `high` its one-sided 95 % ends, if known."""

    verdict: Verdict
    reason: str
    worse: float | None = None
    low: float | None = None
    high: float | None = None


def decide(
    old: Sequence[float], new: Sequence[float], limit: float, *, higher_is_better: bool, checks: int = 1
) -> Judged:
    """Hold new values against old ones. All values must be above 0; `checks` are made at once."""
    if not old or not new:
        return Judged(Verdict.CANNOT_TELL, "one side has no values")
    if min(*old, *new, math.inf) <= 0:
        return Judged(Verdict.CANNOT_TELL, "a value is not above 0")
    sign = -1.0 if higher_is_better else 1.0
    before, after = ([sign * math.log(value) for value in values] for values in (old, new))
    if len(before) >= MIN_REPEATS and len(after) >= MIN_REPEATS:
        return _decide_by_welch(before, after, math.log(limit), checks)
    if len(before) >= MIN_HISTORY:
        return _decide_by_history(before, after, math.log(limit), checks)
    difference = statistics.fmean(after) - statistics.fmean(before)
    need = f"{MIN_REPEATS} repeats on both sides, or {MIN_HISTORY} earlier runs, are needed"
    return Judged(Verdict.CANNOT_TELL, f"{math.exp(difference):.4g} times as bad; {need}", math.exp(difference))


def _decide_by_welch(before: Sequence[float], after: Sequence[float], allowed: float, checks: int) -> Judged:
    difference = statistics.fmean(after) - statistics.fmean(before)
    parts = [statistics.variance(values) / len(values) for values in (before, after)]
    error = math.sqrt(sum(parts))
    freedom = welch_freedom(parts, (len(before), len(after))) if error > 0 else 1.0
    reach = student_quantile(freedom, 1 - 2 * _LEVEL) * error
    strict = student_quantile(freedom, 1 - 2 * _LEVEL / checks) * error
    low, high = difference - reach, difference + reach
    interval = f"{math.exp(low):.4g} to {math.exp(high):.4g}"
    text = f"{math.exp(difference):.4g} times as bad ({interval}), {_limit_text(allowed)}"
    figures = (math.exp(difference), math.exp(low), math.exp(high))
    if difference - strict > allowed:
        return Judged(Verdict.FAILED, text, *figures)
    if high < allowed or (error == 0 and difference <= allowed):
        return Judged(Verdict.PASSED, text, *figures)
    return Judged(Verdict.CANNOT_TELL, f"{text}; more repeats make the interval narrower", *figures)


def _decide_by_history(before: Sequence[float], after: Sequence[float], allowed: float, checks: int) -> Judged:
    difference = statistics.fmean(after) - statistics.fmean(before)
    middle = statistics.median(before)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in before)
    deviation = max(statistics.stdev(before), spread, _MIN_DEVIATION)
    score = difference / (deviation * math.sqrt(1 / len(after) + 1 / len(before)))
    least = student_quantile(len(before) - 1, 1 - 2 * _HISTORY_LEVEL / checks)
    worse = math.exp(difference)
    score_text = f"T {score:.2f} of {least:.2f}"
    text = f"{worse:.4g} times as bad as {len(before)} earlier runs ({score_text}), {_limit_text(allowed)}"
    if difference <= allowed:
        return Judged(Verdict.PASSED, text, worse)
    if score > least:
        return Judged(Verdict.FAILED, text, worse)
    return Judged(Verdict.CANNOT_TELL, f"{text}; as much as the earlier runs differ among themselves", worse)


def _limit_text(allowed: float) -> str:
    return f"{math.exp(allowed):.4g} is allowed"
