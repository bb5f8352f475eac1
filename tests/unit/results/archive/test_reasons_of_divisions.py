"""Divisions from a spec and rules alone: the order of the reasons, and each change by itself."""

from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.model.goals import GoalRule
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.documents import DataIdentityDocument
from mlbench_cli.results.archive.judge import Code, Division, find_division
from mlbench_cli.tasks.catalog import TaskRules

COMMAND = ("python", "-m", "digits")
VALUES: dict[str, Any] = {"goal_full": 80.0, "goal_light": 70.0, "rate": 0.1, "loaders": 2, "goal_on": "validation"}
RULES = TaskRules(
    "digits", "digits", COMMAND, GoalRule("Prec@1", ">=", "{threshold}%"), ("loaders",), VALUES, {**VALUES, "rate": 0.2}
)
SPEC = RunSpec("d-2", "c", "local", "digits", "spec", COMMAND, "gloo", 2, parameters={**VALUES, "rate": 0.2})
OFFICIAL: DataIdentityDocument = {"counts": {}, "digest": None, "official": True, "reason": None}


def divide(
    rules: TaskRules | None = RULES,
    synthetic: bool = False,
    data: DataIdentityDocument | None = OFFICIAL,
    code: Code = Code.SAME,
    **changes: Any,
) -> Division:
    parameters = {**SPEC.parameters, **changes.pop("parameters", {})}
    return find_division(replace(SPEC, parameters=parameters, **changes), rules, synthetic, data, code)


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": {"loaders": 9}},
        {"parameters": {"budget_seconds": 60.0}},
        {"seed": 7, "backend": "mpi", "workers": 64, "device": "gpu", "goal": "light", "cpus": 3},
        {"image": "digits"},
        {"image": "ghcr.io:443/me/digits:9.9"},
        {"image": f"ghcr.io/me/digits@sha256:{'a' * 64}"},
        {"network": "1gbit"},
        {"code": Code.SAME},
    ],
)
def test_what_does_not_change_the_mathematics_is_free(changes: dict[str, Any]) -> None:
    assert divide(**changes) == Division("closed")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"preset": "tiny"}, "preset tiny"),
        ({"parameters": {"rate": 0.1}}, "rate 0.1 instead of 0.2"),
        ({"parameters": {"new": 1}}, "new 1 instead of None"),
        ({"faults": "at 5s kill rank 1"}, "faults were injected"),
        ({"on_failure": "restart"}, "failed ranks were started again"),
        ({"method": {"name": "eftopk"}}, "method eftopk"),
        ({"argv": (*COMMAND, "--fast")}, "another command"),
        ({"image": "ghcr.io/me/digits2:1"}, "image ghcr.io/me/digits2:1"),
        ({"image": "digits/other"}, "image digits/other"),
        ({"code": Code.OTHER}, "another version of the task's code"),
        ({"code": Code.UNKNOWN}, "code not known to be the task's"),
        ({"data": None}, "data not known to be official"),
        ({"data": {**OFFICIAL, "official": None}}, "data not known to be official"),
        ({"data": {**OFFICIAL, "official": None, "reason": "no digest"}}, "data not known to be official (no digest)"),
        ({"preset": "open"}, "a command of one's own"),
        ({"rules": replace(RULES, origin="theirs 1.0")}, "the task is not mlbench's own but of theirs 1.0"),
        (
            {
                "preset": "tiny",
                "faults": "x",
                "on_failure": "restart",
                "method": {"name": "m"},
                "parameters": {"rate": 9},
                "argv": ("x",),
                "image": "y",
                "code": Code.OTHER,
                "data": None,
            },
            "preset tiny, faults were injected, failed ranks were started again, method m, rate 9 instead of 0.2, "
            "another command, image y, another version of the task's code, data not known to be official",
        ),
    ],
)
def test_every_change_opens_the_division_and_is_named(changes: dict[str, Any], reason: str) -> None:
    assert divide(**changes) == Division("open", reason)


PART: DataIdentityDocument = {**OFFICIAL, "official": False, "reason": "a part"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task": "custom", "rules": None}, "a command without a task's goal"),
        ({"rules": None}, "a task that this mlbench does not know"),
        ({"rules": replace(RULES, goal=None)}, "the task has no goal"),
        ({"parameters": {"goal_full": 10.0}}, "the goal was changed: goal_full 10.0 instead of 80.0"),
        ({"parameters": {"goal_light": 10}}, "the goal was changed: goal_light 10 instead of 70.0"),
        ({"parameters": {"goal_on": "training"}}, "the goal was changed: goal_on training instead of validation"),
        ({"parameters": {"hold_out": 0.1}}, "the goal was changed: hold_out 0.1 instead of 0"),
        (
            {"parameters": {"goal_full": 1, "goal_light": 2, "goal_on": "training", "hold_out": 0.5}},
            "the goal was changed: goal_full 1 instead of 80.0, goal_light 2 instead of 70.0, "
            "goal_on training instead of validation, hold_out 0.5 instead of 0",
        ),
        ({"synthetic": True}, "the data are synthetic"),
        ({"data": PART}, "a part"),
        ({"data": {**PART, "reason": None}}, "not the official data"),
        # The first reason counts.
        ({"synthetic": True, "data": PART}, "the data are synthetic"),
        (
            {"parameters": {"goal_full": 10.0}, "synthetic": True},
            "the goal was changed: goal_full 10.0 instead of 80.0",
        ),
        ({"preset": "open", "data": PART}, "a part"),
        ({"preset": "open", "synthetic": True}, "the data are synthetic"),
    ],
)
def test_what_can_be_compared_with_nothing_has_no_division(changes: dict[str, Any], reason: str) -> None:
    assert divide(**changes) == Division(None, reason)
