"""Goals: direction, both thresholds in one run, and figures up to each."""

import math

import pytest

from task_images.clock import Tracker
from task_images.report import GoalWatch


def test_one_run_records_both_goals_and_stops_at_the_chosen_one() -> None:
    watch, tracker = GoalWatch("Prec@1", ">=", 80, 70, "full"), Tracker()
    reached = []
    for epoch, value in enumerate((60, 70, 75, 80, 90), 1):
        tracker.updates = 10 * epoch
        reached.append(watch.observe(value, epoch, tracker))

    assert reached == [False, False, False, True, True]
    assert {kind: (one.value, one.epoch, one.snapshot.updates) for kind, one in watch.passages.items()} == {
        "light": (70, 2, 20),
        "full": (80, 4, 40),
    }
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 80, "kind": "full"}
    assert watch.facts() == {**goal, "value": 80, "last": 90}


def test_lower_is_better_for_perplexity() -> None:
    watch, tracker = GoalWatch("Perplexity", "<=", 70, 90, "light"), Tracker()
    assert [watch.observe(value, 1, tracker) for value in (500.0, 90.1, 90.0)] == [False, False, True]
    assert "full" not in watch.passages


def test_a_missed_goal_tells_the_best_value() -> None:
    watch, tracker = GoalWatch("Perplexity", "<=", 70, 90, "full"), Tracker()
    for value in (120.0, 85.0, math.nan, 100.0):
        watch.observe(value, 1, tracker)
    assert not watch.reached
    assert watch.facts()["value"] == 85.0


def test_a_resumed_run_with_a_higher_goal_has_yet_to_reach_it() -> None:
    first, resumed = (GoalWatch("Prec@1", ">=", full, 70, "full") for full in (80, 90))
    first.observe(85, 3, Tracker())
    resumed.load_state_dict(first.state_dict())
    assert (list(resumed.passages), resumed.reached, resumed.best) == (["light"], False, 85)


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_what_is_not_finite_meets_no_goal(value: float) -> None:
    for comparison in (">=", "<="):
        watch = GoalWatch("x", comparison, 1, 1, "full")
        assert not watch.observe(value, 1, Tracker())
        assert watch.facts()["value"] is None
