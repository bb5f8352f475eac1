"""Outcomes, phases and what experiments derive of their members; documents of observations; cluster identities."""

from typing import Any

import pytest

from mlbench_cli.model.run import (
    ExperimentState,
    Observation,
    Outcome,
    RunState,
)


@pytest.mark.parametrize(
    ("outcome", "is_success", "is_resumable", "code"),
    [
        (Outcome.GOAL_REACHED, True, False, 0),
        (Outcome.GOAL_MISSED, True, False, 0),
        (Outcome.BUDGET_SPENT, True, False, 0),
        (Outcome.COMPLETED, True, False, 0),
        (Outcome.FAILED, False, False, 7),
        (Outcome.CANCELED, False, True, 7),
        (Outcome.DEADLINE, False, False, 124),
        (Outcome.NEVER_STARTED, False, True, 6),
        (Outcome.LOST, False, True, 7),
    ],
)
def test_what_follows_from_an_outcome(outcome: Outcome, is_success: bool, is_resumable: bool, code: int) -> None:
    assert (outcome.is_success, outcome.is_resumable, outcome.exit_code()) == (is_success, is_resumable, code)
    assert outcome.phrase


# --- experiments ------------------------------------------------------------------------------------------------------

NEW, RUNNING = (RunState.QUEUED, None), (RunState.RUNNING, None)
DONE, FAILED, LOST = ((RunState.FINISHED, word) for word in (Outcome.COMPLETED, Outcome.FAILED, Outcome.LOST))


@pytest.mark.parametrize(
    ("members", "queued", "idle"),
    [
        ([NEW], "pending", "stopped"),
        ([NEW, NEW], "pending", "stopped"),
        ([NEW, RUNNING], "running", "running"),
        ([NEW, DONE], "running", "stopped"),
        ([RUNNING, DONE], "running", "running"),
        ([DONE], "completed", "completed"),
        ([DONE, DONE], "completed", "completed"),
        ([DONE, FAILED], "failed", "failed"),
        ([DONE, LOST], "running", "stopped"),
        ([FAILED, LOST], "running", "stopped"),
        ([RUNNING, LOST], "running", "running"),
        ([NEW, LOST], "running", "stopped"),
    ],
)
def test_the_state_of_an_experiment_follows_from_its_members(members: list[Any], queued: str, idle: str) -> None:
    assert ExperimentState.derive(members, is_queued=True) == queued
    assert ExperimentState.derive(members, is_queued=False) == idle


# --- documents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{"ended": "bored"}, {"workers": [{"phase": "x"}]}, {"findings": [{"code": "c"}]}, {"more": 1}]
)
def test_a_damaged_observation_is_refused(changes: dict[str, Any]) -> None:
    document = {"time": 9.0, "workers": [], "findings": [], "ended": None}
    assert Observation.from_dict(document).ended is None
    with pytest.raises(ValueError, match=r"Invalid enum value|missing required field|unknown field"):
        Observation.from_dict({**document, **changes})
    with pytest.raises(ValueError, match="missing required field `workers`"):
        Observation.from_dict({key: value for key, value in document.items() if key != "workers"})
