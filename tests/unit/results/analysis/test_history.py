"""The rules of the gate against a baseline."""

import math
import random

import pytest

from mlbench_cli.results.analysis.history import decide
from mlbench_cli.results.analysis.sessions import Sessions
from mlbench_cli.results.analysis.verdict import Verdict

OLD = (10.0, 10.2, 9.9)
HISTORY = (10.0, 10.1, 9.9, 10.05, 9.95, 10.2, 9.85, 10.0)
T2 = 2.91998558  # scipy.stats.t.ppf(0.95, 2)


@pytest.mark.parametrize(
    ("old", "new", "worse", "low", "high", "decision"),
    [
        (OLD, (11.5, 11.7, 11.4), 1.149, 1.121, 1.179, Verdict.FAILED),
        (OLD, (11.0, 13.5, 10.2), 1.145, 0.898, 1.459, Verdict.CANNOT_TELL),
        (OLD, (10.1, 9.9, 10.15), 1.002, 0.977, 1.027, Verdict.PASSED),
        (OLD, (10.7, 10.8, 10.75), 1.072, 1.046, 1.098, Verdict.PASSED),
        ((10.0, 10.2), (11.5, 11.7), 1.149, 1.105, 1.194, Verdict.FAILED),
    ],
)
def test_repeats_are_judged_by_welchs_interval(
    old: tuple[float, ...], new: tuple[float, ...], worse: float, low: float, high: float, decision: Verdict
) -> None:
    """Worked with scipy."""
    judged = decide(old, new, 1.10, higher_is_better=False)
    assert judged.verdict is decision
    assert judged.worse == pytest.approx(worse, abs=0.0006)
    assert judged.low == pytest.approx(low, abs=0.0006)
    assert judged.high == pytest.approx(high, abs=0.0006)


def test_a_figure_that_should_be_high_is_judged_the_other_way_round() -> None:
    slower = decide(
        [1 / value for value in OLD], [1 / value for value in (11.5, 11.7, 11.4)], 1.1, higher_is_better=True
    )
    assert slower.verdict is Verdict.FAILED
    assert slower.worse == pytest.approx(1.149, abs=0.0006)
    faster = decide(OLD, (11.5, 11.7, 11.4), 1.1, higher_is_better=True)
    assert faster.verdict is Verdict.PASSED


@pytest.mark.parametrize(
    ("value", "limit", "decision"),
    [(10.3, 1.01, Verdict.CANNOT_TELL), (10.6, 1.01, Verdict.FAILED), (11.2, 1.01, Verdict.FAILED)],
)
def test_one_value_is_judged_by_the_spread_of_earlier_runs(value: float, limit: float, decision: Verdict) -> None:
    assert decide(HISTORY, (value,), limit, higher_is_better=False).verdict is decision
    assert decide(HISTORY, (value,), 1.2, higher_is_better=False).verdict is Verdict.PASSED


@pytest.mark.parametrize("old", [(10.0,), (10.0, 10.1, 9.9, 10.0)])
def test_one_value_against_a_short_history_decides_nothing(old: tuple[float, ...]) -> None:
    judged = decide(old, (20.0,), 1.1, higher_is_better=False)
    assert judged.verdict is Verdict.CANNOT_TELL
    assert judged.worse == pytest.approx(2.0, rel=0.02)


def test_equal_values_divide_by_nothing() -> None:
    assert decide((10.0,) * 3, (10.0,) * 3, 1.1, higher_is_better=False).verdict is Verdict.PASSED
    assert decide((10.0,) * 3, (12.0,) * 3, 1.1, higher_is_better=False).verdict is Verdict.FAILED
    assert decide((10.0,) * 6, (10.4,), 1.1, higher_is_better=False).verdict is Verdict.PASSED
    assert decide((10.0,) * 6, (12.0,), 1.1, higher_is_better=False).verdict is Verdict.FAILED


@pytest.mark.parametrize("values", [(0.0, 1.0), (-1.0, 2.0), ()])
def test_values_without_a_logarithm_decide_nothing(values: tuple[float, ...]) -> None:
    assert decide(OLD, values, 1.1, higher_is_better=False).verdict is Verdict.CANNOT_TELL


def test_many_checks_need_more_to_fail() -> None:
    assert decide(OLD, (11.5, 11.7, 11.4), 1.1, higher_is_better=False, checks=1).verdict is Verdict.FAILED
    assert decide(OLD, (11.5, 11.7, 11.4), 1.1, higher_is_better=False, checks=20).verdict is Verdict.CANNOT_TELL


@pytest.mark.parametrize(("count", "history", "factor"), [(3, 3, 1.1), (5, 5, 1.1), (1, 8, 1.0)])
def test_at_most_one_in_twenty_fails_by_chance(count: int, history: int, factor: float) -> None:
    """Repeats: at a true factor of exactly the limit, the worst case. One value: if nothing has changed."""
    draw = random.Random(7)

    def values(number: int, scale: float) -> list[float]:
        return [scale * math.exp(draw.gauss(0, 0.05)) for _ in range(number)]

    failed = sum(
        decide(values(history, 1.0), values(count, factor), 1.1, higher_is_better=False).verdict is Verdict.FAILED
        for _ in range(2000)
    )
    assert failed / 2000 <= 0.06


def test_the_interval_of_paired_sessions_has_one_degree_of_freedom_less_than_there_are_sessions() -> None:
    """The ends of a paired one-sided t-test: scipy.stats.ttest_rel of the logarithms, confidence 0.9."""
    old, new = (10.0, 20.0, 14.0), (11.2, 21.6, 15.6)
    logs = [math.log(b / a) for a, b in zip(old, new, strict=True)]
    mean = sum(logs) / 3
    error = math.sqrt(sum((each - mean) ** 2 for each in logs) / 2 / 3)
    judged = decide(old, new, 1.0, higher_is_better=False, sessions=Sessions((1, 2, 3), (1, 2, 3)))
    assert judged.worse == pytest.approx(math.exp(mean))
    assert judged.low == pytest.approx(math.exp(mean - T2 * error), rel=1e-6)
    assert judged.high == pytest.approx(math.exp(mean + T2 * error), rel=1e-6)
    assert judged.verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("new", "words"), [((12.0,), "1.20× worse"), ((8.0,), "1.25× better"), ((10.0,), "1.00× worse")]
)
def test_a_change_is_said_as_a_factor_above_one(new: tuple[float, ...], words: str) -> None:
    assert decide((10.0,), new, 1.1, higher_is_better=False).reason.startswith(words)
