"""The judge: what came of a run follows from exit codes, then from what the logs prove."""

import io
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbench_cli.model.run import LOCAL, Ending, Finding, Observation, Outcome, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.evidence import Evidence
from mlbench_cli.results.archive.judge import JUDGE_VERSION, Judgement, judge
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
        (observe_end("cancelled", 143, 143), None, "cancelled"),
        (observe_end("cancelled", None, None, findings=(PERMANENT,), started=None), None, "never_started"),
        (observe_end("cancelled", 143, 143, findings=(PERMANENT,)), None, "cancelled"),
        (observe_end("cancelled", None, None, started=None), None, "cancelled"),
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


def test_a_run_that_goes_on_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="not ended"):
        judge_run(Observation(1.0, ()))


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


def test_every_field_of_a_result() -> None:
    """The whole document of one run, by hand: a key that is renamed or empty is seen here."""
    judgement = judge_run(observe_end("exited", 0, 0, time=10.00044), BUDGET, TINY)
    worker = {"phase": "succeeded", "reason": None, "node": None, "exit_code": 0, "finished": None, "restarts": 0}
    expected = {
        "judge": JUDGE_VERSION,
        "run": "r-2",
        "id": "id",
        "task": "digits_resnet",
        "preset": "tiny",
        "engine": "local",
        "cluster": "local",
        "backend": "gloo",
        "workers": 2,
        "world_size": 2,
        "device": "cpu",
        "outcome": "budget_spent",
        "exit_code": 0,
        "ended": "exited",
        "first_failed": None,
        "summary": "r-2 has spent its time budget: Prec@1 81.5 after 7.5 s.",
        "started": "1970-01-01T00:00:01.000Z",
        "finished": "1970-01-01T00:00:10.000Z",
        "wall_seconds": 9.0,
        "task_seconds": {"wall": 7.5, "training": 7.0},
        "goal": {
            **GOAL,
            "last": 81.5,
            "wording": "80% Top 1 Validation Accuracy",
            "reached": True,
            "seconds": {"wall": 0.0, "training": None},
        },
        "budget_seconds": 6.0,
        "updates": 40,
        "samples": 640,
        "epochs": 3,
        "timings": {},
        "synthetic": True,
        "data": "ones",
        "data_identity": None,
        "metrics": {"val_Prec@1": 81.5},
        "progress": {},
        "label": {"word": "performance", "reason": None},
        "worker_states": [
            {**worker, "rank": rank, "started": "1970-01-01T00:00:01.000Z", "image_digest": None} for rank in (0, 1)
        ],
        "details": BUDGET["details"],
        "price": {"per_hour": 3600.0, "currency": "USD", "amount": 9.0},
        "official_line": "81.5% Top 1 Validation Accuracy after 7.500 seconds (budget 6, then the last validation)",
    }
    assert {**judgement.result, "division": None, "conditions": None} == {
        **expected,
        "division": None,
        "conditions": None,
    }
    assert judgement.result["division"]["word"] is None
    assert judgement.result["conditions"]["labels"] == []
    assert judgement.goal_reached is True


def test_a_run_without_a_result_measured_real_data_and_reached_nothing() -> None:
    judgement = judge_run(observe_end("exited", 0, 0))
    assert (judgement.result["synthetic"], judgement.goal_reached) == (False, False)
    assert judge_run(observe_end("exited", 0, 0), goal_result(value=79.9)).goal_reached is False
    assert judge_run(observe_end("exited", 0, 0), REACHED).goal_reached is True


def test_the_evidence_of_a_downgrade_is_kept() -> None:
    [finding] = judge_run(observe_end("exited", 0, 0), goal_result(value=79.9)).findings
    assert finding.evidence["goal"]["value"] == 79.9
    assert finding.evidence["reported"]["outcome"] == "goal_reached"
    [finding] = judge_run(observe_end("exited", 0, 0), {"outcome": "goal_reached"}).findings
    assert finding.evidence["goal"] is None


def test_the_evidence_of_other_code_is_kept() -> None:
    reported = event("environment", code_digest="b" * 64)
    code = {"code": {"task": "custom", "digest": "a" * 64}}
    [finding] = judge_run(observe_end("exited", 0, 0), before=reported, provenance=code).findings
    assert (finding.code, finding.evidence) == ("code_differs", {"recorded": "a" * 64, "reported": "b" * 64})


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


@pytest.mark.parametrize(
    ("seen", "result", "summary"),
    [
        (observe_end("exited", 0, 3), None, "r-2 failed. 1 of 2 ranks failed."),
        (observe_end("exited", 0, 3, findings=(FULL,)), None, "r-2 failed. The disk is full."),
        (observe_end("cancelled", 143, 143), None, "r-2 was cancelled."),
        (observe_end("exited", 0, 0), None, "r-2 completed."),
        (
            observe_end("exited", 0, 0),
            {**REACHED, "wall_seconds": 2.0},
            "r-2 reached its goal: Prec@1 81.5 (>= 80) after 2.0 s.",
        ),
    ],
)
def test_the_sentence_gives_outcome_figures_and_reason(
    seen: Observation, result: dict[str, Any] | None, summary: str
) -> None:
    assert judge_run(seen, result).result["summary"] == summary


def test_metric_lines_are_written_in_their_order() -> None:
    log = event("metric", name="a", value=1.0) + event("metric", name="b", value=2.0)
    lines: list[bytes] = []
    evidence = Evidence(
        *("id", "r-2", CREATED, SPEC, None, observe_end("exited", 0, 0), {}, list), {0: partial(io.BytesIO, log)}
    )
    judge(evidence, lines.append)
    assert [json.loads(line)["name"] for line in lines] == ["a", "b"]


@pytest.mark.parametrize(("nodes", "functional"), [(("a", "b"), None), (("a", "a"), None), (("a", "b"), "one machine")])
def test_workers_are_alone_on_nodes_of_their_own(nodes: tuple[str, str], functional: str | None) -> None:
    workers = tuple(
        WorkerState(rank, "succeeded", exit_code=0, started=1.0, node=node) for rank, node in enumerate(nodes)
    )
    spec, seen = replace(SPEC, functional_only=functional), Observation(10.0, workers, (), Ending.EXITED)
    found = Evidence("id", "r-2", CREATED, spec, None, seen, {}, list, {})
    assert found.is_alone is (nodes == ("a", "b") and functional is None)


def test_figures_are_left_out_of_the_sentence_if_the_task_did_not_report_them() -> None:
    spent = {"outcome": "budget_spent", "goal": {**GOAL, "last": 81.5}}
    judgement = judge_run(observe_end("exited", 0, 0), spent)
    assert judgement.result["summary"].endswith("Prec@1 81.5.")
    assert str(judgement.result["official_line"]).endswith("after 0.000 seconds")
    assert judge_run(observe_end("exited", 0, 0), {"outcome": "budget_spent"}).result["summary"].endswith("budget.")


@pytest.mark.parametrize("seconds", [(3.0, 2.0), (0.5, 0.0), (None, None), (-1.0, "x"), (float("nan"), True)])
def test_the_time_of_a_goal_that_was_passed_on_the_way(seconds: tuple[Any, Any]) -> None:
    """Only numbers that are finite and not negative; 0 is one."""
    wall, training = seconds
    details = {"goals": {"full": {"wall_seconds": wall, "training_seconds": training}}}
    goal = judge_run(observe_end("exited", 0, 0), {**BUDGET, "details": details}, TINY).result["goal"]
    assert goal is not None
    fits = isinstance(wall, float) and wall >= 0
    assert goal["seconds"] == {"wall": wall if fits else None, "training": training if fits else None}


def test_the_network_is_measured_only_between_workers() -> None:
    shaped = {"engine": "local"}
    for workers, there in ((1, False), (2, True)):
        spec = replace(SPEC, name=f"r-{workers}", workers=workers, network="1gbit,5ms")
        logs = {0: partial(io.BytesIO, b"")}
        seen = observe_end("exited", *([0] * workers))
        evidence = Evidence("id", spec.name, CREATED, spec, None, seen, {}, list, logs, shaped if there else None)
        judgement = judge(evidence)
        assert (judgement.network is not None) == there
        assert judgement.result.get("network") == (judgement.network["summary"] if judgement.network else None)


def test_a_spent_budget_without_a_last_figure_proves_nothing() -> None:
    spent = {"outcome": "budget_spent", "goal": GOAL}
    assert judge_run(observe_end("exited", 0, 0), spent).outcome is Outcome.GOAL_MISSED


def test_a_method_of_communication_is_named_unless_it_is_the_tasks_own() -> None:
    end = observe_end("exited", 0, 0)
    assert judge_run(end, spec=replace(SPEC, method={"name": "topk", "codec": "topk"})).result["method"] == "topk"
    assert "method" not in judge_run(end).result


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


def test_the_result_says_which_data_the_task_trained_on() -> None:
    identity = {"counts": {"training": 50000}, "digest": "sha256:abc", "official": True, "reason": None}
    judgement = judge_run(observe_end("exited", 0, 0), {"outcome": "completed", "data_identity": identity})
    assert judgement.result["data_identity"] == identity
    assert judge_run(observe_end("exited", 0, 0), {"outcome": "completed"}).result["data_identity"] is None
