"""The races' rule, against figures of its own community and against Student's distribution integrated."""

import math

import pytest

from mlbench_cli.results.analysis.race import judge_race


def integrate(t: float, freedom: int) -> float:
    """P(T <= t) for t < 0, by Simpson's rule over the density."""
    top = math.gamma((freedom + 1) / 2) / (math.gamma(freedom / 2) * math.sqrt(freedom * math.pi))

    def density(x: float) -> float:
        return float(top * (1 + x * x / freedom) ** (-(freedom + 1) / 2))

    width = (t + 1000) / 400_000
    points = [density(-1000 + number * width) for number in range(400_001)]
    return width / 3 * (points[0] + points[-1] + 4 * sum(points[1:-1:2]) + 2 * sum(points[2:-1:2]))


LOSSES = [3.2791, 3.2783, 3.2804, 3.2779, 3.2788]


def test_the_chance_is_that_of_a_one_sided_t_test() -> None:
    found = judge_race(LOSSES, 3.28)
    mean = sum(LOSSES) / 5
    deviation = math.sqrt(sum((loss - mean) ** 2 for loss in LOSSES) / 4)
    t = (mean - 3.28) / (deviation / math.sqrt(5))
    assert found.p == pytest.approx(integrate(t, 4), rel=1e-4)
    assert not found.holds
    assert "more runs needed" in str(found)


def test_as_many_more_runs_as_the_community_needs() -> None:
    """With a deviation of 0.0019 a margin of 0.001 takes 23 runs, one of 0.002 takes 9."""
    for margin, runs in ((0.001, 23), (0.002, 9)):
        pair = [3.28 - margin - 0.0019 / math.sqrt(2), 3.28 - margin + 0.0019 / math.sqrt(2)]
        assert judge_race(pair, 3.28).more == pytest.approx(runs - 2, abs=1)


def test_enough_runs_show_it_and_a_mean_above_the_goal_never_does() -> None:
    assert judge_race(LOSSES * 3, 3.28).holds
    above = judge_race([3.29, 3.30, 3.285], 3.28)
    assert (above.more, above.holds) == (None, False)
    assert above.p is not None
    assert above.p > 0.5


def test_one_run_shows_nothing() -> None:
    assert judge_race([3.27], 3.28).more == 1
    assert judge_race([3.29], 3.28).more is None
    with pytest.raises(ValueError):  # noqa: PT011 - of statistics
        judge_race([], 3.28)
