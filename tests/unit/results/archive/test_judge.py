"""The judge: what came of a run follows from exit codes, then from what the logs prove."""

import io
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlbench_cli.model.run import LOCAL, Ending, Finding, Observation, Outcome, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.evidence import Evidence
from mlbench_cli.results.archive.judge import Judgement, judge
from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import find_rules
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
    workers = tuple(
        WorkerState(rank, "failed" if code else "succeeded", exit_code=code, started=started)
        for rank, code in enumerate(codes)
    )
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
    empty = {worker.rank: partial(io.BytesIO, b"") for worker in observation.workers}
    logs = {**empty, 0: partial(io.BytesIO, log)}
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
        (observe_end("canceled", 143, 143), None, "canceled"),
        (observe_end("canceled", None, None, findings=(PERMANENT,), started=None), None, "never_started"),
        (observe_end("canceled", 143, 143, findings=(PERMANENT,)), None, "canceled"),
        (observe_end("canceled", None, None, started=None), None, "canceled"),
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
    how: Ending, codes: list[int | None], result: dict[str, object] | None
) -> None:
    outcome = judge_run(observe_end(how, *codes), result).outcome
    if outcome.is_success:
        assert how is Ending.EXITED
        assert codes
        assert set(codes) == {0}
        assert len(codes) >= SPEC.workers


def test_the_exit_code_is_that_of_the_rank_that_failed_first() -> None:
    seen = observe_end("failed", 3, 143)
    codes = [judge_run(replace(seen, first_failed=first)).result["exit_code"] for first in (None, 1)]
    assert codes == [3, 143]


def test_a_downgraded_outcome_says_why() -> None:
    judgement = judge_run(observe_end("exited", 0, 0), goal_result(value=79.9))
    assert [finding.code for finding in judgement.findings] == ["goal_not_proved"]
    assert "79.9 does not meet >= 80" in judgement.result["summary"]


def test_the_official_text_says_that_the_goal_was_changed() -> None:
    spec = RunSpec(
        *(
            "r-2",
            "local",
            "local",
            "digits_resnet",
            "spec",
            ("python", "-m", "task_images.run", "digits_resnet"),
            "gloo",
            2,
        ),
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


BUDGET = {
    "outcome": "budget_spent",
    "goal": {**GOAL, "last": 81.5},
    "details": {"goals": {"full": {"wall_seconds": 0.0, "training_seconds": -1.0}}},
    "wall_seconds": 7.5,
    "training_seconds": 7.0,
    "budget_seconds": 6.0,
    "updates": 40,
    "samples": 640,
    "epochs": 3,
    "synthetic": True,
    "data": "ones",
    "data_identity": None,
    "timings": {"forward": {"rank0": 1.5}},
}
TINY = RunSpec(
    *("r-2", "local", "local", "digits_resnet", "tiny", ("prog",), "gloo", 2),
    parameters={"goal_full": 80.0, "goal_light": 80.0},
    price={"per_hour": 3600.0, "currency": "USD"},
)


@pytest.mark.parametrize(
    ("value", "claimed", "outcome"),
    [
        (100.0, 100.0 + 1e-7, "goal_reached"),  # 1e-9 of the larger one
        (100.0 + 1e-7, 100.0, "goal_reached"),
        (100.0, 100.0 + 2e-7, "goal_missed"),
        (-100.0, -100.0 - 9e-8, "goal_missed"),
    ],
)
def test_a_metric_event_may_differ_by_rounding_only(value: float, claimed: float, outcome: str) -> None:
    assert judge_run(observe_end("exited", 0, 0), goal_result(value=claimed), value=value).outcome == outcome


@pytest.mark.parametrize("seconds", [(3.0, 2.0), (0.5, 0.0), (None, None), (-1.0, "x"), (float("nan"), True)])
def test_the_time_of_a_goal_that_was_passed_on_the_way(seconds: tuple[Any, Any]) -> None:
    """Only numbers that are finite and not negative; 0 is one."""
    wall, training = seconds
    details = {"goals": {"full": {"wall_seconds": wall, "training_seconds": training}}}
    goal = judge_run(observe_end("exited", 0, 0), {**BUDGET, "details": details}, TINY).result["goal"]
    assert goal is not None
    fits = isinstance(wall, float) and wall >= 0
    assert goal["seconds"] == {"wall": wall if fits else None, "training": training if fits else None}


def test_a_spent_budget_without_a_last_figure_proves_nothing() -> None:
    spent = {"outcome": "budget_spent", "goal": GOAL}
    assert judge_run(observe_end("exited", 0, 0), spent).outcome is Outcome.GOAL_MISSED


@pytest.mark.parametrize(("kind", "expected"), [("light", "light"), (None, "full")])
def test_a_goal_of_which_only_the_task_knows_has_the_reported_kind_or_the_one_that_was_asked_for(
    kind: str | None, expected: str
) -> None:
    assert SPEC.goal == "full"
    unknown = replace(SPEC, task="of-another-version")
    goal = judge_run(observe_end("exited", 0, 0), goal_result(kind=kind), unknown).result["goal"]
    assert goal is not None
    assert goal["kind"] == expected
    assert goal["wording"] == "Prec@1 >= 80"


@pytest.mark.parametrize(
    "change",
    [{}, {"kind": None}, {"threshold": 10.0}, {"metric": "Prec@5"}, {"comparison": "<="}, {"kind": "light"}],
    ids=str,
)
def test_another_goal_than_the_one_that_was_asked_for_proves_nothing(change: dict[str, Any]) -> None:
    (spec,) = resolve(Request(name="r", workers=(2,), task="digits_resnet"), LOCAL)
    asked = {"metric": "Prec@1", "comparison": ">=", "threshold": spec.parameters["goal_full"], "kind": "full"}
    reported = {**asked, "value": 99.5, "last": 99.0, **change}
    judgement = judge_run(observe_end("exited", 0, 0), {"outcome": "goal_reached", "goal": reported}, spec, value=99.5)
    goal, found = judgement.result["goal"], [item for item in judgement.findings if item.code == "goal_differs"]
    assert goal is not None
    assert {key: goal[key] for key in asked} == asked  # type: ignore[literal-required]
    if change in ({}, {"kind": None}):
        assert (goal["value"], goal["last"], judgement.goal_reached, found) == (99.5, 99.0, True, [])
        return
    assert (goal["value"], goal["last"], judgement.goal_reached, len(found)) == (None, None, False, 1)
    assert found[0].evidence == {"reported": reported, "asked": asked}
