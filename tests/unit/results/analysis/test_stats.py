"""The one statistic: against scipy, by simulation of its errors, and where nothing can be decided."""

import math
import random
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest

from mlbench_cli.results.analysis.sessions import Sessions, relate
from mlbench_cli.results.analysis.stats import (
    MAX_REPEATS,
    MIN_RUNS,
    Estimate,
    Ratio,
    Verdict,
    decidable_margin,
    estimate,
    paired_ratio,
    ratio,
    repeats_needed,
    student_quantile,
    upper_deviation,
)
from tests.needs import needs

HISTORY = (10.0, 10.1, 9.9, 10.05, 9.95, 10.2, 9.85, 10.0)


@pytest.fixture
def scipy() -> Any:
    """Takes 2 s of a core to import."""
    return needs("scipy.stats")


def draw(stream: random.Random, count: int, level: float, deviation: float) -> list[float]:
    return [math.exp(stream.gauss(level, deviation)) for _ in range(count)]


def logs(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values]


def known(found: Ratio | None) -> Ratio:
    assert found is not None
    return found


def test_quantiles_are_those_of_scipy(scipy: Any) -> None:
    for freedom in (1, 1.3, 2, 4.7, 30, 1e5):
        for confidence in (0.5, 0.9, 0.95, 0.9975):
            exact = scipy.t.ppf((1 + confidence) / 2, freedom)
            assert student_quantile(freedom, confidence) == pytest.approx(exact, rel=1e-8)


def test_means_are_geometric_with_the_interval_of_scipy(scipy: Any) -> None:
    stream = random.Random(1)
    for _ in range(100):
        values = draw(stream, stream.randint(3, 9), 1.0, 0.2)
        ends = scipy.ttest_1samp(logs(values), 0).confidence_interval(0.95)
        found = estimate(values)
        assert found.mean == pytest.approx(scipy.gmean(values))
        assert [found.low, found.high] == pytest.approx([math.exp(ends.low), math.exp(ends.high)])
    assert estimate([5.0, 7.0]).low is None
    assert estimate([80.5] * 3) == Estimate(3, 80.5, 80.5, 80.5)
    below = estimate([-1.0, 0.0, 1.0])  # no logarithm: the plain mean
    assert [below.mean, below.high] == pytest.approx([0.0, 4.302653 / math.sqrt(3)])


def test_ratios_verdicts_and_limits_are_those_of_scipy(scipy: Any) -> None:
    """Welch's test on logarithms; equivalence is two one-sided tests of 2.5 %."""
    stream = random.Random(3)
    seen = set()
    for _ in range(400):
        a = draw(stream, stream.randint(3, 9), 1.0, stream.uniform(0.01, 0.1))
        b = draw(stream, stream.randint(3, 9), stream.gauss(1.0, 0.1), stream.uniform(0.01, 0.1))
        x, y, limit = logs(a), logs(b), math.log(1.1)
        test = scipy.ttest_ind(y, x, equal_var=False)
        for checks in (1, 7):
            ends = test.confidence_interval(1 - 0.05 / checks)
            assert known(ratio(a, b)).interval(checks) == pytest.approx((math.exp(ends.low), math.exp(ends.high)))
        found = known(ratio(a, b))
        assert found.is_different == (test.pvalue < 0.05)
        above, below = (
            scipy.ttest_ind([each - shift for each in y], x, equal_var=False, alternative=way).pvalue < 0.025
            for shift, way in ((limit, "greater"), (limit, "less"))
        )
        gate = Verdict.FAILED if above else Verdict.PASSED if below else Verdict.CANNOT_TELL
        assert found.gate(1.1) is gate
        not_lower = scipy.ttest_ind([each + limit for each in y], x, equal_var=False, alternative="greater").pvalue
        assert (found.same(0.1) is Verdict.REPRODUCED) == (below and not_lower < 0.025)
        seen |= {gate, found.same(0.1)}
    assert seen == set(Verdict)


def test_pairs_are_tested_by_their_differences(scipy: Any) -> None:
    differences = [0.02, -0.01, 0.03]
    ends = scipy.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert paired_ratio(differences).interval() == pytest.approx((math.exp(ends.low), math.exp(ends.high)))
    assert paired_ratio(differences[:2]).low is None


def test_one_value_is_judged_by_the_spread_of_at_least_five_others(scipy: Any) -> None:
    spread = scipy.tstd(logs(HISTORY))
    found = known(ratio(HISTORY, (10.3,)))
    assert [found.error, found.freedom] == pytest.approx([spread * math.sqrt(1 + 1 / 8), 7])
    assert found.gate(1.01) is Verdict.CANNOT_TELL
    assert known(ratio(HISTORY, (11.2,))).gate(1.01) is Verdict.FAILED
    assert known(ratio(HISTORY, (11.2,))).gate(1.2) is Verdict.PASSED
    assert known(ratio((10.3,), HISTORY)).same(0.1) is Verdict.REPRODUCED  # a single original
    for few in ((10.0,), (10.0, 10.1, 9.9, 10.0)):
        assert known(ratio(few, (20.0,))).gate(1.1) is Verdict.CANNOT_TELL


def test_values_without_any_scatter_are_decided() -> None:
    assert known(ratio((10.0,) * 3, (10.0,) * 3)).gate(1.1) is Verdict.PASSED
    assert known(ratio((10.0,) * 3, (12.0,) * 3)).gate(1.1) is Verdict.FAILED
    assert known(ratio((10.0,) * 6, (10.4,))).gate(1.1) is Verdict.PASSED
    assert known(ratio((10.0,) * 6, (12.0,))).gate(1.1) is Verdict.FAILED
    assert known(ratio((10.0,) * 3, (10.5,) * 3)).same(0.1) is Verdict.REPRODUCED


@pytest.mark.parametrize(("a", "b"), [([], [1.0]), ([1.0], []), ([0.0, 1.0], [1.0, 1.0]), ([1.0], [-1.0])])
def test_without_values_or_above_0_there_is_no_ratio(a: Sequence[float], b: Sequence[float]) -> None:
    assert ratio(a, b) is None


def test_huge_figures_have_finite_ends() -> None:
    found = known(ratio((1e-90, 1e90, 1.0), (1e90, 1e-80, 2.0)))
    assert math.isfinite(found.high or math.inf)


# --- how many repeats -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 5, 10])
def test_the_limit_of_a_deviation_is_that_of_chi_squared(count: int, scipy: Any) -> None:
    exact = math.sqrt((count - 1) / scipy.chi2.ppf(0.2, count - 1))
    assert upper_deviation(1.0, count) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("deviation", [0.01, 0.02, 0.03])
def test_the_chosen_number_of_repeats_finds_sides_that_are_the_same(deviation: float) -> None:
    number, stream, called = repeats_needed(deviation, 3, 0.1), random.Random(5), 0
    assert MIN_RUNS <= number < MAX_REPEATS
    for _ in range(1000):
        found = known(ratio(draw(stream, 3, 0.0, deviation), draw(stream, number, 0.0, deviation)))
        called += found.same(0.1) is Verdict.REPRODUCED
    assert called / 1000 > 0.75


def test_the_noisier_an_original_the_more_repeats_up_to_where_they_do_not_help() -> None:
    numbers = [repeats_needed(deviation, 3, 0.05) for deviation in (0.0, 0.008, 0.012, 0.015)]
    assert numbers[0] == MIN_RUNS
    assert numbers == sorted(numbers)
    hopeless = repeats_needed(0.3, 3, 0.05)
    assert hopeless < MAX_REPEATS
    assert decidable_margin(0.3, 3, hopeless) > 0.05


def test_the_simulation_of_verdicts_keeps_its_errors() -> None:
    simulate = import_module("benchmarks.reproduce_errors").simulate
    for originals in (1, 3, 5):
        same, margin, longer = (simulate(originals, 0.01, factor, 400) for factor in (1.0, 1.1, 1.3))
        assert same.different < 0.02
        assert same.reproduced > 0.95
        assert margin.reproduced < 0.06
        assert longer.different > 0.95


def test_a_difference_at_its_limit_seldom_fails_or_passes() -> None:
    """Although the limit is a share of a mean that is not known exactly."""
    stream, once = random.Random(5), Sessions((1,) * 5, (1,) * 5)
    found = []
    for _ in range(400):
        old, new = ([stream.gauss(mean, 1.0) for _ in range(5)] for mean in (-10.0, -15.0))
        found.append(known(relate(old, new, once, takes_difference=True)).inverse.gate(1.5))
    assert found.count(Verdict.FAILED) < 0.04 * len(found)
    assert found.count(Verdict.PASSED) < 0.04 * len(found)
