"""Equivalence within a margin: against scipy's t-tests, by simulation of its errors, and where it cannot be decided."""

import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlbench_cli.results.analysis.equivalence import (
    LEVEL,
    MAX_REPEATS,
    MIN_REPEATS,
    decidable_margin,
    log_ratio,
    paired_log_ratio,
    repeats_needed,
    upper_deviation,
)
from tests.needs import needs

stats = needs("scipy.stats")


def draw(stream: random.Random, count: int, level: float, deviation: float) -> list[float]:
    return [math.exp(stream.gauss(level, deviation)) for _ in range(count)]


def test_intervals_and_p_values_are_those_of_scipy() -> None:
    stream = random.Random(3)
    for _ in range(300):
        a = draw(stream, stream.randint(2, 9), 1.0, stream.uniform(0.01, 0.2))
        b = draw(stream, stream.randint(2, 9), stream.gauss(1.0, 0.1), stream.uniform(0.01, 0.2))
        margin = stream.choice([0.02, 0.05, 0.1, 0.3])
        x, y, limit = [math.log(each) for each in a], [math.log(each) for each in b], math.log1p(margin)
        above = stats.ttest_ind([each + limit for each in y], x, equal_var=False, alternative="greater").pvalue
        below = stats.ttest_ind([each - limit for each in y], x, equal_var=False, alternative="less").pvalue
        found = log_ratio(a, b)
        assert found is not None
        assert found.equivalence_p(margin) == pytest.approx(max(above, below), rel=1e-8, abs=1e-12)
        for confidence in (0.9, 0.95, 0.99):
            ends = stats.ttest_ind(y, x, equal_var=False).confidence_interval(confidence)
            assert found.interval(confidence) == pytest.approx((math.exp(ends.low), math.exp(ends.high)), rel=1e-8)


def test_a_single_value_is_tested_with_the_deviation_of_the_other_side() -> None:
    """scipy's pooled test, to whose deviation a sample of one adds nothing."""
    b = [10.0, 10.4, 9.7, 10.1]
    pooled = stats.ttest_ind([math.log(each) for each in b], [math.log(10.2)], equal_var=True)
    for found in (log_ratio([10.2], b), log_ratio(b, [10.2])):
        assert found is not None
        assert abs(found.mean / found.error) == pytest.approx(abs(pooled.statistic), rel=1e-10)
        assert found.freedom == pooled.df == 3


def test_pairs_are_tested_by_their_differences() -> None:
    differences = [0.02, -0.01, 0.03]
    ends = stats.ttest_1samp(differences, 0).confidence_interval(0.9)
    assert paired_log_ratio(differences).interval(0.9) == pytest.approx((math.exp(ends.low), math.exp(ends.high)))


@pytest.mark.parametrize(
    ("a", "b"), [([1.0], [1.0]), ([], [1.0, 2.0]), ([1.0, 2.0], []), ([0.0, 1.0], [1.0, 1.0]), ([1.0, 1.0], [-1.0])]
)
def test_without_repeats_or_above_0_there_is_no_ratio(a: Sequence[float], b: Sequence[float]) -> None:
    assert log_ratio(a, b) is None


@pytest.mark.parametrize(("after", "p"), [(10.5, 0.0), (11.5, 1.0), (9.0, 1.0)])
def test_values_without_any_scatter_are_decided(after: float, p: float) -> None:
    found = log_ratio([10.0, 10.0], [after] * 3)
    assert found is not None
    assert found.interval(0.9) == pytest.approx((after / 10, after / 10))
    assert found.equivalence_p(0.1) == p


def share_called_same(count: int, repeats: int, deviation: float, shift: float, margin: float) -> float:
    stream, trials = random.Random(f"{count} {repeats} {shift}"), 2000
    called = 0
    for _ in range(trials):
        found = log_ratio(draw(stream, count, 0.0, deviation), draw(stream, repeats, shift, deviation))
        called += found is not None and found.equivalence_p(margin) <= LEVEL
    return called / trials


@pytest.mark.parametrize(("count", "repeats"), [(1, 5), (3, 3), (3, 5), (5, 5)])
def test_sides_at_the_margin_are_called_the_same_once_in_twenty_at_most(count: int, repeats: int) -> None:
    assert share_called_same(count, repeats, 0.02, math.log1p(0.1), 0.1) < LEVEL + 0.015


@pytest.mark.parametrize("deviation", [0.01, 0.02, 0.03])
def test_the_chosen_number_of_repeats_finds_sides_that_are_the_same(deviation: float) -> None:
    number = repeats_needed(deviation, 3, 0.1)
    assert MIN_REPEATS <= number < MAX_REPEATS
    assert share_called_same(3, number, deviation, 0.0, 0.1) > 0.85


@pytest.mark.parametrize("count", [3, 5, 10])
def test_the_limit_of_a_deviation_is_that_of_chi_squared(count: int) -> None:
    exact = math.sqrt((count - 1) / stats.chi2.ppf(0.2, count - 1))
    assert upper_deviation(1.0, count) == pytest.approx(exact, rel=0.01)


def test_the_noisier_an_original_the_more_repeats_up_to_where_they_do_not_help() -> None:
    numbers = [repeats_needed(deviation, 3, 0.05) for deviation in (0.0, 0.01, 0.015, 0.018)]
    assert numbers[0] == MIN_REPEATS
    assert numbers == sorted(numbers)
    hopeless = repeats_needed(0.3, 3, 0.05)
    assert hopeless < MAX_REPEATS
    assert decidable_margin(0.3, 3, hopeless) > 0.05


def test_the_simulation_of_verdicts_keeps_its_errors() -> None:
    words = [sys.executable, "-m", "benchmarks.reproduce_errors", "--series", "400", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4])
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 27
    for row in rows:
        if row["factor"] == 1.0:
            assert row["different"] < 0.02
        elif row["factor"] < 1.2:
            assert row["reproduced"] < LEVEL + 0.04
        else:
            assert row["reproduced"] < 0.01
    quiet = [row for row in rows if row["deviation"] == 0.01]
    assert all(row["reproduced"] > 0.97 for row in quiet if row["factor"] == 1.0)
    assert all(row["different"] > 0.97 for row in quiet if row["factor"] == 1.3)
