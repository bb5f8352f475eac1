"""Goals: which values reach them, how far others are, and what they are called."""

import math
from typing import Any

import pytest

from mlbench_cli.model.goals import Goal, GoalRule

UP, DOWN = Goal("Prec@1", ">=", 80.0), Goal("loss", "<=", 0.5)


@pytest.mark.parametrize(
    ("goal", "value", "meets", "distance"),
    [
        (UP, 80.0, True, 0.0),
        (UP, 80, True, 0.0),
        (UP, 79.5, False, 0.5),
        (UP, 99.0, True, 0.0),
        (DOWN, 0.5, True, 0.0),
        (DOWN, 0.75, False, 0.25),
        (DOWN, -1.0, True, 0.0),
    ],
)
def test_a_goal_is_met_at_its_threshold(goal: Goal, value: float, meets: bool, distance: float) -> None:
    assert (goal.meets(value), goal.distance(value)) == (meets, distance)


@pytest.mark.parametrize("value", [None, "90", True, math.nan, math.inf, [90], 2**63])
def test_only_finite_numbers_meet_a_goal(value: Any) -> None:
    assert not UP.meets(value)


RULE = GoalRule("Prec@1", ">=", "{threshold}% Top 1 Validation Accuracy")


@pytest.mark.parametrize(
    ("parameters", "kind", "goal"),
    [
        ({"goal_full": 80.0, "goal_light": 70}, "full", UP),
        ({"goal_full": 80.0, "goal_light": 70}, "light", Goal("Prec@1", ">=", 70)),
        ({"goal_full": 80.0}, "light", None),
        ({"goal_full": "80"}, "full", None),
        ({"goal_full": 80.0, "goal_on": "training"}, "full", Goal("train_Prec@1", ">=", 80.0)),
        ({"goal_full": 80.0, "goal_on": "validation"}, "full", UP),
        ({"goal_full": 80.0, "blocks": 3}, "full", None),
        ({"goal_full": 80.0, "blocks": 0}, "full", UP),
    ],
)
def test_the_goal_of_a_runs_parameters(parameters: dict[str, Any], kind: str, goal: Goal | None) -> None:
    assert RULE.find_goal(parameters, kind) == goal
