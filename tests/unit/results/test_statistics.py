"""Intervals of repeats: against tables, against samples whose mean is known, and none where there is nothing to say."""

import math
import random

import pytest

from mlbench_cli.results.analysis.statistics import Estimate, estimate, ratio, student_quantile


# Student's t for 95 %, two-sided, as every table of it has them.
@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)]
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, abs=6e-4)


def test_an_estimate_by_hand() -> None:
    found = estimate([90.0, 100.0, 110.0])  # deviation 10
    assert (found.count, found.mean) == (3, 100.0)
    assert found.margin == pytest.approx(4.302653 * 10 / math.sqrt(3), rel=1e-6)
    assert found.low == pytest.approx(100 - 24.841377, rel=1e-6)
    assert found.to_dict()["confidence"] == 0.95


def test_without_repeats_there_is_no_interval() -> None:
    assert estimate([5.0]) == Estimate(1, 5.0, None, None)
    assert estimate([5.0]).margin is None
    assert ratio(estimate([6.0]), estimate([3.0])) == Estimate(1, 2.0)


def test_nineteen_of_twenty_intervals_hold_the_mean() -> None:
    stream = random.Random(7)
    hits = 0
    for _ in range(2000):
        found = estimate([stream.gauss(3, 2) for _ in range(4)])
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 3 <= found.high
    assert 0.94 < hits / 2000 < 0.96


def test_relative_errors_of_a_ratio_add_as_squares() -> None:
    found = ratio(Estimate(3, 10.0, 9.0, 11.0), Estimate(5, 2.0, 1.6, 2.4))
    assert found is not None
    assert (found.count, found.mean) == (3, 5.0)
    assert found.margin == pytest.approx(5 * math.hypot(0.1, 0.2))
    half = ratio(Estimate(3, 10.0, 9.0, 11.0), Estimate(1, 2.0))
    assert half is not None
    assert half.margin == pytest.approx(0.5)
    assert ratio(Estimate(1, 1.0), Estimate(1, 0.0)) is None
