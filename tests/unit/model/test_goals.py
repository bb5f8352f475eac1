"""Goals: which values reach them, how far others are, and what they are called."""

import math
from typing import Any

import pytest

from mlbench_cli.model.goals import Goal, GoalRule, goal_wording, is_finite_number, name_metric
from mlbench_cli.model.methods import method_phrase

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


@pytest.mark.parametrize(
    ("value", "is_number"),
    [
        (0, True),
        (-1.5, True),
        (2**63 - 1, True),
        (1 - 2**63, True),
        (-(2**63), False),
        (True, False),
        (-math.inf, False),
    ],
)
def test_numbers_of_json(value: Any, is_number: bool) -> None:
    assert is_finite_number(value) is is_number


DOCUMENT = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0}


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        "Prec@1 >= 80",
        {},
        {**DOCUMENT, "comparison": ">"},
        {**DOCUMENT, "comparison": None},
        {**DOCUMENT, "metric": ""},
        {**DOCUMENT, "metric": 1},
        {**DOCUMENT, "threshold": "80"},
        {**DOCUMENT, "threshold": math.nan},
        {**DOCUMENT, "threshold": None},
    ],
)
def test_what_is_no_goal_is_none(document: Any) -> None:
    assert Goal.parse(document) is None


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


@pytest.mark.parametrize(
    ("threshold", "template", "wording"),
    [
        (80.0, "{threshold}% Top 1", "80% Top 1"),
        (0.125, "{threshold}", "0.125"),
        (80.0, None, "Prec@1 >= 80"),
        (1e-7, None, "Prec@1 >= 1e-07"),
    ],
)
def test_a_goal_in_words(threshold: float, template: str | None, wording: str) -> None:
    assert goal_wording({**DOCUMENT, "threshold": threshold}, template) == wording


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("Prec@1", "top-1 accuracy"),
        ("val_Prec@5", "top-5 accuracy"),
        ("val_global_Prec@1", "top-1 accuracy"),
        ("global_loss", "loss"),
        ("train_loss", "training loss"),
        ("train_Prec@1", "training top-1 accuracy"),
        ("val_BLEU-Score", "BLEU"),
        ("val_token_error", "validation token error"),
        ("val_global_loss", "validation loss"),
        ("train_Prec@1 best", "training top-1 accuracy, best"),
        ("retrain_loss", "retrain loss"),
    ],
)
def test_metrics_have_the_names_that_people_use(metric: str, name: str) -> None:
    assert name_metric(metric) == name


@pytest.mark.parametrize(
    ("method", "phrase"),
    [
        ({}, "task's own"),
        ({"name": "bsp"}, "bsp"),
        ({"name": "bsp", "delay": "0.002,1e-9"}, "bsp (delay=0.002,1e-9)"),
        ({"name": "bsp", "delay": "1,0", "sync": "local:4"}, "bsp (other version c702b916)"),
        ({"name": "bsp", "sync": "local:4", "delay": "1,0"}, "bsp (other version c702b916)"),
        ({"name": "no_such_preset"}, "no_such_preset"),
        ({"name": "no_such_preset", "sync": "every"}, "no_such_preset (sync=every)"),
        ({"sync": "every"}, "unnamed (sync=every)"),
    ],
)
def test_a_method_is_its_preset_and_what_differs(method: dict[str, str], phrase: str) -> None:
    assert method_phrase(method) == phrase
