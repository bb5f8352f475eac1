"""The judge: what came of a run follows from exit codes, then from what the logs prove."""

import io
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbench_cli.catalog import find_rules
from mlbench_cli.model import LOCAL, Ending, Finding, Observation, Outcome, WorkerState
from mlbench_cli.results.archive.judge import Evidence, Judgement, judge
from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request
from mlbench_cli.spec import RunSpec
from task_images.contract import format_event

SPEC = RunSpec("r-2", "local", "local", "custom", "custom", ("prog",), "gloo", 2)
GOAL = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "kind": "full", "value": 81.5}
REACHED = {"outcome": "goal_reached", "goal": GOAL}
PERMANENT = Finding("image_not_found", "The image does not exist.", permanent=True)
FULL = Finding("disk_full", "The disk is full.")
CREATED = "1970-01-01T00:00:00.000Z"


def observe_end(
    how: str, *codes: int | None, findings: tuple[Finding, ...] = (), started: float | None = 1.0, time: float = 10.0
) -> Observation:
    workers = tuple(WorkerState(rank, "succeeded", exit_code=code, started=started) for rank, code in enumerate(codes))
    return Observation(time, workers, findings, Ending(how))


def goal_result(**goal: Any) -> dict[str, Any]:
    return {"outcome": "goal_reached", "goal": {**GOAL, **goal}}


def event(kind: str, time: float = 5.0, **fields: Any) -> bytes:
    return format_event({"v": 1, "event": kind, "rank": 0, "time": time, **fields}).encode() + b"\n"


def judge_run(
    observation: Observation,
    result: dict[str, Any] | None = None,
    spec: RunSpec = SPEC,
    value: float = 81.5,
    provenance: dict[str, Any] | None = None,
    before: bytes = b"",
) -> Judgement:
    """What the judge makes of a log with one metric event and the result."""
    log = before + event("metric", name="val_Prec@1", value=value) + (event("result", **result) if result else b"")
    rules = find_rules(spec.task, spec.preset)
    logs = {0: partial(io.BytesIO, log)}
    return judge(Evidence("id", spec.name, CREATED, spec, rules, observation, provenance or {}, list, logs))


@pytest.mark.parametrize(
    ("seen", "result", "outcome"),
    [
        (observe_end("exited", 0, 0), None, "completed"),
        (observe_end("exited", 0, 0), {"outcome": "completed"}, "completed"),
        (observe_end("exited", 0, 0), {"outcome": "goal_missed"}, "goal_missed"),
        (observe_end("exited", 0, 0), REACHED, "goal_reached"),
        (observe_end("exited", 0, 0), {"outcome": "splendid"}, "completed"),
        (observe_end("exited", 0, 0), {"outcome": ["goal_reached"]}, "completed"),
        (observe_end("exited", 0, 0), {"outcome": "budget_spent"}, "budget_spent"),
        (observe_end("exited", 0, 1), {"outcome": "budget_spent"}, "failed"),
        (observe_end("exited", 0, 0), goal_result(value=79.9), "goal_missed"),
        (observe_end("exited", 0, 0), goal_result(value="nan"), "goal_missed"),
        (observe_end("exited", 0, 0), goal_result(value=None), "goal_missed"),
        (observe_end("exited", 0, 0), goal_result(value=90.0), "goal_missed"),
        (observe_end("exited", 0, 0), goal_result(comparison="<=", value=81.5), "goal_missed"),
        (observe_end("exited", 0, 1), REACHED, "failed"),
        (observe_end("exited", 0, None), REACHED, "failed"),
        (observe_end("exited", 0), REACHED, "failed"),
        (observe_end("exited", 0, 0, findings=(FULL,)), REACHED, "failed"),
        (observe_end("failed", 0, 0), REACHED, "failed"),
        (observe_end("failed", 3, 143), None, "failed"),
        (observe_end("cancelled", 143, 143), None, "cancelled"),
        (observe_end("cancelled", None, None, findings=(PERMANENT,), started=None), None, "never_started"),
        (observe_end("cancelled", 143, 143, findings=(PERMANENT,)), None, "cancelled"),
        (observe_end("cancelled", None, None, started=None), None, "cancelled"),
        (observe_end("client_lost", 137, 137), REACHED, "cancelled"),
        (observe_end("deadline", 143, 143), REACHED, "deadline"),
        (observe_end("never_started"), None, "never_started"),
        (observe_end("lost", 0, 0), REACHED, "lost"),
    ],
)
def test_the_outcome_follows_from_exit_codes_before_anything_else(
    seen: Observation, result: dict[str, Any] | None, outcome: str
) -> None:
    assert judge_run(seen, result).outcome == outcome


@given(
    st.sampled_from([*Ending]),
    st.lists(st.one_of(st.none(), st.integers(0, 255)), min_size=0, max_size=4),
    st.sampled_from([None, REACHED, {"outcome": "goal_missed"}, {"outcome": "completed"}]),
)
def test_success_needs_the_exit_code_0_of_every_rank(
    how: Ending, codes: list[int | None], result: dict[str, Any] | None
) -> None:
    outcome = judge_run(observe_end(how, *codes), result).outcome
    if outcome.is_success:
        assert how is Ending.EXITED
        assert codes
        assert set(codes) == {0}
        assert len(codes) >= SPEC.workers


def test_a_run_that_goes_on_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="not ended"):
        judge_run(Observation(1.0, ()))


def test_a_downgraded_outcome_says_why() -> None:
    judgement = judge_run(observe_end("exited", 0, 0), goal_result(value=79.9))
    assert [finding.code for finding in judgement.findings] == ["goal_not_proved"]
    assert "79.9 does not meet >= 80" in judgement.result["summary"]


def test_the_official_text_says_that_the_goal_was_changed() -> None:
    spec = RunSpec(
        *("r-2", "local", "local", "digits_resnet", "spec", ("python", "-m", "task_images.digits_resnet"), "gloo", 2),
        parameters={"goal_full": 10.0, "goal_light": 97.0},
    )
    result = {"outcome": "goal_reached", "goal": {**GOAL, "threshold": 10.0}, "training_seconds": 2.0}
    judgement = judge_run(observe_end("exited", 0, 0), result, spec)
    assert judgement.outcome is Outcome.GOAL_REACHED
    assert judgement.result["division"]["word"] is None
    first, second = judgement.official_text.splitlines()
    assert "reached in 2.000 seconds" in first
    assert "the goal was changed: goal_full 10.0 instead of" in second


def test_another_version_of_the_code_is_a_finding_and_never_closed() -> None:
    spec = resolve(Request(name="r", workers=(2,), task="digits_resnet"), LOCAL)[0]
    goal = {**GOAL, "value": 99.0, "threshold": spec.parameters["goal_full"]}
    result = {"outcome": "goal_reached", "goal": goal, "data_identity": {"official": True}}
    divisions = []
    for digest in ("a" * 64, "b" * 64):
        judgement = judge_run(
            *(observe_end("exited", 0, 0), result, spec, 99.0),
            provenance={"code": {"task": "digits_resnet", "digest": "a" * 64}},
            before=event("environment", code_digest=digest),
        )
        divisions.append((judgement.result["division"]["word"], [finding.code for finding in judgement.findings]))
    assert divisions == [("closed", []), ("open", ["code_differs"])]


@pytest.mark.parametrize(
    ("outcome", "code", "strict"),
    [
        ("goal_reached", 0, 0),
        ("completed", 0, 7),
        ("goal_missed", 0, 7),
        ("budget_spent", 0, 7),
        ("failed", 7, 7),
        ("cancelled", 7, 7),
        ("lost", 7, 7),
        ("never_started", 6, 6),
        ("deadline", 124, 124),
    ],
)
def test_exit_codes(outcome: str, code: int, strict: int) -> None:
    word = Outcome(outcome)
    reached_goal = word is Outcome.GOAL_REACHED
    assert word.exit_code(goal_reached=reached_goal) == code
    assert word.exit_code(require_goal=True, goal_reached=reached_goal) == strict
    assert word.exit_code(goal_reached=reached_goal, sealed=False) == (8 if code == 0 else code)
