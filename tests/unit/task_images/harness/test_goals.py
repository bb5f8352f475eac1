"""Goals: direction, both thresholds in one run, and figures up to each."""

import math

import pytest

from task_images.harness.goals import GoalWatch, make_accuracy_goal
from task_images.harness.tracker import Tracker


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


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_what_is_not_finite_meets_no_goal(value: float) -> None:
    for comparison in (">=", "<="):
        watch = GoalWatch("x", comparison, 1, 1, "full")
        assert not watch.observe(value, 1, Tracker())
        assert watch.facts()["value"] is None


def test_only_two_comparisons_exist() -> None:
    with pytest.raises(ValueError, match="neither"):
        GoalWatch("x", ">", 1, 1, "full")


def test_higher_is_better_for_accuracy() -> None:
    watch = GoalWatch("Prec@1", ">=", 80, 70, "full")
    for value in (60.0, 69.9, 65.0):
        assert not watch.observe(value, 1, Tracker())
    assert (watch.best, watch.last, watch.passages) == (69.9, 65.0, {})


def observe(full: float, light: float, *values: float) -> GoalWatch:
    watch, tracker = GoalWatch("loss", "<=", full, light, "full"), Tracker()
    for epoch, value in enumerate(values, 1):
        tracker.updates = 10 * epoch
        watch.observe(value, epoch, tracker)
    return watch


def test_a_goal_that_was_reached_is_reached_after_a_restart() -> None:
    first = observe(1.0, 2.0, 3.0, 1.5, 1.75)
    state = first.state_dict()
    other = GoalWatch("loss", "<=", 1.0, 2.0, "full")
    other.load_state_dict(state)
    assert (other.best, other.last) == (1.5, 1.75)
    assert other.passages == first.passages
    assert (other.passages["light"].epoch, other.passages["light"].snapshot.updates) == (2, 20)
    assert not other.reached
    assert other.observe(1.0, 5, Tracker())
    assert other.passages["light"] == first.passages["light"]
    assert other.facts()["value"] == 1.0


def test_a_goal_of_the_earlier_run_counts_only_if_it_meets_this_runs() -> None:
    state = observe(1.0, 2.0, 1.9, 0.9).state_dict()
    harder = GoalWatch("loss", "<=", 0.5, 1.9, "full")
    harder.load_state_dict(state)
    assert list(harder.passages) == ["light"]
    hardest = GoalWatch("loss", "<=", 0.5, 1.8, "full")
    hardest.load_state_dict(state)
    assert hardest.passages == {}
    assert hardest.best == 0.9


@pytest.mark.parametrize(("samples", "metric"), [("training", "train_Prec@1"), ("validation", "Prec@1")])
def test_an_accuracy_is_that_of_the_chosen_samples(samples: str, metric: str) -> None:
    watch = make_accuracy_goal(80.0, 70.0, samples, "light")
    assert (watch.metric, watch.comparison, watch.threshold, watch.chosen) == (metric, ">=", 70.0, "light")
    assert watch.thresholds == {"full": 80.0, "light": 70.0}
