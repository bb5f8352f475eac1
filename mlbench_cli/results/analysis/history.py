"""A gate against a baseline: is a figure worse by more than the limit, not worse, or undecided?

All rules are on logarithms, so that A / B and B / A are judged alike; d is ln(new) - ln(old), turned so that more is
worse, and R the factor that is allowed. Which rule decides follows from the sessions that the runs were measured in
(sessions.py), because runs of one session are not independent of each other:

Both sides in one session, at least 2 + 2 runs: Welch's interval of d, one-sided 95 % at each end. It fails if the lower
end is above ln R, passes if the upper end is below it, and else cannot tell. Several sessions on each side, none of
them common: the same with one mean for each session. Several common sessions: Student's interval of one difference for
each session.

One new value (or session) against at least 5 earlier ones: T = d / (s sqrt(1/m + 1/n)) with their deviation s. It fails
if d > ln R and T > t(0.99, n - 1), passes if the upper end d + t(0.95, n - 1) s sqrt(1/m + 1/n) is below ln R, and is
else not shown. s is at least 1.4826 times the median absolute deviation and at least 0.005, since equal values would
divide by 0.

A side with a single session that the other side lacks is undecided: a change cannot be distinguished from a session
effect.

With k checks at once a failure needs the level 5 % / k (Bonferroni), so that many figures do not fail by chance.
benchmarks/gate_errors.py simulates all rules. Sources: Welch, Biometrika 34 (1947) 28-35; Lehmann and Romano, Testing
Statistical Hypotheses (2005), 9.1; Kalibera and Jones, ISMM 2013, for means of sessions.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mlbench_cli.results.analysis.gate import describe_limit
from mlbench_cli.results.analysis.sessions import Basis, Sessions, mean_by_session
from mlbench_cli.results.analysis.statistics import student_quantile, welch_freedom
from mlbench_cli.results.analysis.verdict import Verdict
from mlbench_cli.util.text import significant

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
    old: Sequence[float],
    new: Sequence[float],
    limit: float,
    *,
    higher_is_better: bool,
    checks: int = 1,
    sessions: Sessions | None = None,
) -> Judged:
    """Compare new values with old ones. All values must be above 0; `checks` are made at once.

    `sessions` are those of the old and the new values; without them every value is independent of the others.
    """
    if not old or not new:
        return Judged(Verdict.CANNOT_TELL, "one side has no values")
    if min(*old, *new, math.inf) <= 0:
        return Judged(Verdict.CANNOT_TELL, "a value is not above 0")
    sign = -1.0 if higher_is_better else 1.0
    before, after = ([sign * math.log(value) for value in values] for values in (old, new))
    allowed = math.log(limit)
    if sessions is None:
        return _decide_independent(before, after, allowed, checks, "")
    means = [mean_by_session(values, each) for values, each in ((before, sessions.a), (after, sessions.b))]
    if sessions.basis is Basis.PAIRED:
        differences = [means[1][session] - means[0][session] for session in sessions.shared]
        return _decide_by_interval(differences, allowed, checks, sessions.note)
    if sessions.basis is Basis.WITHIN:
        (session,) = sessions.shared
        inside = [
            [value for value, each in zip(values, side, strict=True) if each == session]
            for values, side in ((before, sessions.a), (after, sessions.b))
        ]
        if min(map(len, inside)) >= MIN_REPEATS:
            return _decide_by_welch(inside[0], inside[1], allowed, checks, sessions.note)
        means[0] = {number: mean for number, mean in means[0].items() if number != session} or means[0]
    before, after = list(means[0].values()), list(means[1].values())
    if sessions.basis is not Basis.BETWEEN and len(before) < MIN_HISTORY:
        difference = statistics.fmean(after) - statistics.fmean(before)
        few = f"{MIN_REPEATS} runs of each side in one session, or {MIN_HISTORY} earlier sessions, are needed"
        why = few if sessions.basis is Basis.WITHIN else f"{sessions.note}; {few}"
        return Judged(Verdict.CANNOT_TELL, f"{_words(difference)}; {why}", math.exp(difference))
    note = sessions.note if sessions.basis is Basis.BETWEEN else f"{len(before)} earlier sessions: one mean for each"
    return _decide_independent(before, after, allowed, checks, note)


def _decide_independent(
    before: Sequence[float], after: Sequence[float], allowed: float, checks: int, note: str
) -> Judged:
    if len(before) >= MIN_REPEATS and len(after) >= MIN_REPEATS:
        return _decide_by_welch(before, after, allowed, checks, note)
    if len(before) >= MIN_HISTORY:
        return _decide_by_history(before, after, allowed, checks, note)
    difference = statistics.fmean(after) - statistics.fmean(before)
    need = f"{MIN_REPEATS} repeats on both sides, or {MIN_HISTORY} earlier runs, are needed"
    return Judged(Verdict.CANNOT_TELL, f"{_words(difference)}; {need}", math.exp(difference))


def _decide_by_welch(before: Sequence[float], after: Sequence[float], allowed: float, checks: int, note: str) -> Judged:
    difference = statistics.fmean(after) - statistics.fmean(before)
    parts = [statistics.variance(values) / len(values) for values in (before, after)]
    error = math.sqrt(sum(parts))
    freedom = welch_freedom(parts, (len(before), len(after))) if error > 0 else 1.0
    return _decide_by_error(difference, error, freedom, allowed, checks, note)


def _decide_by_interval(differences: Sequence[float], allowed: float, checks: int, note: str) -> Judged:
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return _decide_by_error(statistics.fmean(differences), error, len(differences) - 1, allowed, checks, note)


def _decide_by_error(difference: float, error: float, freedom: float, allowed: float, checks: int, note: str) -> Judged:
    reach = student_quantile(freedom, 1 - 2 * _LEVEL) * error
    strict = student_quantile(freedom, 1 - 2 * _LEVEL / checks) * error
    low, high = difference - reach, difference + reach
    text = f"{_words(difference, (low, high))}; {describe_limit(math.exp(allowed))}{f'; {note}' if note else ''}"
    figures = (math.exp(difference), math.exp(low), math.exp(high))
    if difference - strict > allowed:
        return Judged(Verdict.FAILED, text, *figures)
    if high < allowed or (error == 0 and difference <= allowed):
        return Judged(Verdict.PASSED, text, *figures)
    return Judged(Verdict.CANNOT_TELL, f"{text}; more repeats would narrow the interval", *figures)


def _decide_by_history(
    before: Sequence[float], after: Sequence[float], allowed: float, checks: int, note: str
) -> Judged:
    difference = statistics.fmean(after) - statistics.fmean(before)
    middle = statistics.median(before)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in before)
    deviation = max(statistics.stdev(before), spread, _MIN_DEVIATION)
    error = deviation * math.sqrt(1 / len(after) + 1 / len(before))
    score, least = difference / error, student_quantile(len(before) - 1, 1 - 2 * _HISTORY_LEVEL / checks)
    high = difference + student_quantile(len(before) - 1, 1 - 2 * _LEVEL) * error
    worse, most = math.exp(difference), math.exp(high)
    text = f"{_words(difference)} than {len(before)} earlier {'sessions' if note else 'runs'}"
    text += f" (T {score:.2f} of {least:.2f}; at most {significant(most)}×), {describe_limit(math.exp(allowed))}"
    if high < allowed:
        return Judged(Verdict.PASSED, text, worse, None, most)
    if difference > allowed and score > least:
        return Judged(Verdict.FAILED, text, worse, None, most)
    return Judged(
        Verdict.CANNOT_TELL,
        f"{text}; not significant: earlier ones differ as much from each other",
        worse,
        None,
        most,
    )


def _words(difference: float, ends: tuple[float, float] | None = None) -> str:
    """ "1.15× worse (1.12 to 1.18)" of a difference of logarithms."""
    is_worse = difference >= 0
    text = f"{significant(math.exp(abs(difference)))}× {'worse' if is_worse else 'better'}"
    if ends is None:
        return text
    low, high = sorted(math.exp(end if is_worse else -end) for end in ends)
    return f"{text} ({significant(low)} to {significant(high)})"
