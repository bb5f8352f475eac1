"""The races' rule, against figures of its own community and against Student's distribution integrated."""

import math
from pathlib import Path

import pytest

from mlbench_cli.results.analysis.race import judge_race
from mlbench_cli.results.analysis.series import Point, collect
from mlbench_cli.results.archive.reader import Archive
from tests.unit.results.runs import sealed_run


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
    assert f"; {found.more} more run" in str(found)


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


def collect_races(folder: Path, losses: list[float], **parameters: object) -> Point:
    """Runs that met a goal of 3.28 and whose last losses are given."""
    for number, last in enumerate(losses):
        goal = {"metric": "loss", "comparison": "<=", "threshold": 3.28, "kind": "full", "value": 3.27, "last": last}
        details = {"compile_seconds": 20.0 + number}
        sealed_run(folder / str(number), name=f"race-r{number}", goal=goal, details=details, parameters=parameters)
    [group] = collect(Archive.open(folder / str(number)) for number in range(len(losses))).groups
    [point] = group.points
    return point


def test_repeats_that_train_past_their_goal_are_judged_by_their_last_losses(tmp_path: Path) -> None:
    point = collect_races(tmp_path, LOSSES, past_goal=True)
    assert point.race == judge_race(LOSSES, 3.28)
    assert point.without_compiling is not None
    assert (point.seconds.mean, point.without_compiling.mean) == (100.0, 78.0)


def test_runs_that_stop_at_their_goal_are_no_race(tmp_path: Path) -> None:
    """Their last losses were chosen: all are below the goal."""
    assert collect_races(tmp_path, [3.279, 3.278], past_goal=False).race is None
