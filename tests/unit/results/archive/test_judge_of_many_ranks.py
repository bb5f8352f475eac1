"""The judge on runs of several ranks: whose events count in which log, ranks that were left out, and its findings."""

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mlbench_cli.model.run import Ending, Finding, NodeClock, Observation, Outcome, WorkerState
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.results.archive.evidence import Evidence
from mlbench_cli.results.archive.judge import Judgement, judge
from mlbench_cli.tasks.catalog import TaskRules, find_rules
from task_images.contract import format_event

SPEC = RunSpec("r-2", "local", "local", "custom", "custom", ("prog",), "gloo", 2)
OWN = find_rules("digits_resnet", "tiny")
assert OWN is not None
TASK = replace(
    SPEC,
    task="digits_resnet",
    preset="tiny",
    argv=OWN.command,
    parameters={**OWN.preset, "goal_full": 80.0, "goal_light": 70.0},
)
GOAL = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "kind": "full", "value": 81.5}
REACHED = {"outcome": "goal_reached", "goal": GOAL, "wall_seconds": 2.0}


def event(kind: str, rank: int = 0, time: float = 5.0, **fields: Any) -> bytes:
    return format_event({"v": 1, "event": kind, "rank": rank, "time": time, **fields}).encode() + b"\n"


def metric(rank: int = 0, value: float = 81.5, name: str = "val_Prec@1", time: float = 5.0) -> bytes:
    return event("metric", rank, time, name=name, value=value)


def result(**changes: Any) -> bytes:
    return event("result", time=6.0, **{**REACHED, **changes})


def observe(*codes: int | None, **changes: Any) -> Observation:
    workers = tuple(
        WorkerState(rank, "failed" if code else "succeeded", exit_code=code, started=1.0, finished=10.0)
        for rank, code in enumerate(codes)
    )
    return Observation(**{"time": 10.0, "workers": workers, "ended": Ending.EXITED, **changes})


def judge_logs(
    logs: Mapping[int, bytes],
    spec: RunSpec = SPEC,
    seen: Observation | None = None,
    rules: TaskRules | None = None,
    lines: list[bytes] | None = None,
    version: int = 3,
    **more: Any,
) -> Judgement:
    evidence = Evidence(
        *("id", spec.name, "1970-01-01T00:00:00.000Z", spec, rules, seen or observe(*[0] * spec.workers)),
        **{"provenance": {}, "samples": list, **more},
        logs={rank: partial(io.BytesIO, text) for rank, text in logs.items()},
    )
    taken: list[bytes] = [] if lines is None else lines
    return judge(evidence, taken.append, version)


# --- whose events count -----------------------------------------------------------------------------------------------

FOUR = replace(SPEC, workers=2, processes_per_worker=2)
ALL = b"".join(metric(rank, name=f"m{rank}") for rank in range(5))


@pytest.mark.parametrize(
    ("spec", "logs", "counted"),
    [
        (SPEC, {0: ALL, 1: ALL}, [(0, "m0"), (1, "m1")]),
        # Each rank has its log.
        (FOUR, dict.fromkeys(range(4), ALL), [(rank, f"m{rank}") for rank in range(4)]),
        # The ranks of a worker share the log of its first rank.
        (FOUR, {0: ALL, 2: ALL}, [(0, "m0"), (1, "m1"), (2, "m2"), (3, "m3")]),
        (FOUR, {0: ALL, 1: ALL}, [(0, "m0"), (1, "m1")]),
        # A launcher on rank 0 prints what all ranks say.
        (replace(FOUR, run_on_all=False), {0: ALL, 1: ALL}, [(rank, f"m{rank}") for rank in range(4)]),
        (SPEC, {0: ALL, 2: ALL, 7: ALL}, [(0, "m0")]),  # the run has no such ranks
    ],
)
def test_events_of_a_rank_count_in_its_own_log(
    spec: RunSpec, logs: Mapping[int, bytes], counted: list[tuple[int, str]]
) -> None:
    lines: list[bytes] = []
    judge_logs(logs, spec, observe(0, 0, 0, 0), lines=lines)
    rows = [json.loads(line) for line in lines]
    assert [(row["rank"], row["name"]) for row in rows] == counted


@pytest.mark.parametrize(
    ("logs", "is_proven"),
    [
        ({0: metric() + result()}, True),
        ({0: metric(1) + result()}, False),  # another rank says so
        ({0: metric(name="train_Prec@1") + result()}, False),
        ({0: metric(value=90.0) + metric() + metric(value=10.0) + result()}, True),
        ({0: result() + metric()}, True),
        ({0: result()}, False),
        ({0: result(), 1: metric()}, False),  # in a log in which rank 0 does not write
    ],
)
def test_a_goal_is_proven_by_an_event_of_rank_0_in_its_log(logs: Mapping[int, bytes], is_proven: bool) -> None:
    found = judge_logs(logs)
    assert found.outcome is (Outcome.GOAL_REACHED if is_proven else Outcome.GOAL_MISSED)
    assert found.goal_reached is is_proven


@pytest.mark.parametrize("name", ["Prec@1", "val_Prec@1", "val_global_Prec@1"])
def test_the_event_may_have_any_of_the_names_of_the_metric(name: str) -> None:
    assert judge_logs({0: metric(name=name) + result()}).outcome is Outcome.GOAL_REACHED


def test_before_version_3_any_rank_proved_a_goal() -> None:
    found = judge_logs({0: result(), 1: metric(1)}, version=2)
    assert found.outcome is Outcome.GOAL_REACHED
    assert found.result["judge"] == 2


# --- ranks that were left out -----------------------------------------------------------------------------------------

THREE = replace(SPEC, workers=3, on_failure="shrink")


@pytest.mark.parametrize(
    ("spec", "last", "outcome"),
    [
        (THREE, {"ranks": 2, "members": [0, 2]}, "completed"),
        (THREE, {"ranks": 2, "members": [0, 1]}, "failed"),  # rank 1 belonged to the rest
        (THREE, {"ranks": 1}, "completed"),  # the first ranks, unless they are named
        (THREE, {"ranks": 2}, "failed"),
        (THREE, {"ranks": 3}, "failed"),
        (THREE, {"ranks": 0, "members": []}, "failed"),
        (THREE, {"ranks": True, "members": [0]}, "failed"),
        (THREE, {"ranks": 2, "members": [0]}, "failed"),
        (THREE, {"ranks": 2, "members": "02"}, "failed"),
        (THREE, {}, "failed"),
        (THREE, None, "failed"),
        (replace(THREE, on_failure="restart"), {"ranks": 2, "members": [0, 2]}, "failed"),
        (replace(THREE, on_failure=None), {"ranks": 2, "members": [0, 2]}, "failed"),
    ],
)
def test_a_rank_without_which_the_run_went_on_may_have_failed(spec: RunSpec, last: Any, outcome: str) -> None:
    record = {"attempts": [{"ranks": 3}, last], "events": []}
    found = judge_logs({0: b""}, spec, observe(0, 137, 0), faults=record)
    assert found.outcome == outcome


def test_without_a_record_of_attempts_every_rank_counts() -> None:
    records: list[Any] = [None, {}, {"attempts": []}, {"attempts": "x"}]
    for record in records:
        assert judge_logs({0: b""}, THREE, observe(0, 137, 0), faults=record).outcome == "failed"


# --- findings ---------------------------------------------------------------------------------------------------------


def test_a_task_that_reports_no_result_has_failed() -> None:
    found = judge_logs({0: metric()}, TASK, rules=OWN)
    assert found.outcome is Outcome.FAILED
    (finding,) = found.findings
    assert (finding.code, finding.summary, finding.hint) == (
        "no_result",
        "The program of digits_resnet exited with 0 but reported no result.",
        "mlbench logs r-2",
    )
    assert found.result["summary"] == f"r-2 failed. {finding.summary}"


@pytest.mark.parametrize(
    ("spec", "rules", "version", "outcome"),
    [
        (TASK, OWN, 2, "completed"),  # the older rules did not ask for it
        (SPEC, None, 3, "completed"),
        (replace(TASK, preset="custom"), OWN, 3, "completed"),
        (TASK, None, 3, "completed"),
        (TASK, replace(OWN, origin="theirs 1.0"), 3, "failed"),
        (TASK, replace(OWN, origin="theirs 1.0", goal=None), 3, "completed"),
        (TASK, replace(OWN, goal=None), 3, "failed"),
    ],
)
def test_only_programs_of_tasks_must_report_a_result(
    spec: RunSpec, rules: TaskRules | None, version: int, outcome: str
) -> None:
    assert judge_logs({0: b""}, spec, rules=rules, version=version).outcome == outcome


RDMA = replace(SPEC, kubernetes=KubernetesOptions(devices={"rdma/ib": "1"}))


@pytest.mark.parametrize(
    ("limits", "summary"),
    [
        ((1 << 30, -1), None),
        (((1 << 30) - 1, 1 << 30), "1 of 2 ranks may lock 1024 MiB of memory."),
        ((8 << 20, 65536), "2 of 2 ranks may lock 0.0625 MiB of memory."),
        ((8 << 20, True), "1 of 2 ranks may lock 8 MiB of memory."),
        ((0, None), "1 of 2 ranks may lock 0 MiB of memory."),
        ((-2, "x"), None),
    ],
)
def test_ranks_with_rdma_cards_must_be_allowed_to_lock_memory(limits: tuple[Any, Any], summary: str | None) -> None:
    logs = {rank: event("environment", rank, memlock_bytes=limit) for rank, limit in enumerate(limits)}
    found = judge_logs(logs, RDMA).findings
    assert judge_logs(logs, SPEC).findings == ()
    if summary is None:
        assert found == ()
        return
    (finding,) = found
    assert finding.code == "memlock_low"
    assert finding.summary.startswith(summary)
    low = {str(rank): limit for rank, limit in enumerate(limits) if type(limit) is int and 0 <= limit < 1 << 30}
    assert finding.evidence == {"memlock_bytes": low}


def test_of_many_ranks_with_little_memory_the_first_are_named() -> None:
    spec = replace(RDMA, workers=20)
    logs = {rank: event("environment", rank, memlock_bytes=rank) for rank in range(20)}
    (finding,) = judge_logs(logs, spec).findings
    assert finding.evidence == {"memlock_bytes": {str(rank): rank for rank in range(16)}}
    assert finding.summary.startswith("20 of 20 ranks may lock 0 MiB")


@pytest.mark.parametrize(
    ("recorded", "executed", "has_finding"),
    [("a", "a", False), ("a", "b", True), (None, "b", False), ("a", None, False)],
)
def test_code_differs_only_if_both_digests_are_known(
    recorded: str | None, executed: str | None, has_finding: bool
) -> None:
    provenance = {} if recorded is None else {"code": {"task": "custom", "digest": recorded}}
    log = b"" if executed is None else event("environment", code_digest=executed)
    found = judge_logs({0: log, 1: event("environment", 1, code_digest="z")}, provenance=provenance).findings
    assert [finding.summary for finding in found] == (
        ["Rank 0 ran a different version of custom than the mlbench that started it."] if has_finding else []
    )


def test_findings_of_the_observation_come_first() -> None:
    seen = observe(0, 0, findings=(Finding("seen", "It was slow."),))
    found = judge_logs({1: b"", 0: result(value=79.0, goal={**GOAL, "value": 79.0})}, seen=seen)
    assert [finding.code for finding in found.findings] == ["seen", "goal_not_proved"]
    assert found.documents["findings.json"] == {"findings": [finding.to_dict() for finding in found.findings]}


def test_a_partial_archive_says_that_the_run_had_not_ended() -> None:
    unfinished = Finding("still_running", "This archive was written during the run.")
    found = judge_logs({1: b"", 0: metric()}, seen=observe(None, None, ended=Ending.CANCELLED, findings=(unfinished,)))
    assert found.result["summary"] == "r-2 had not ended. This archive was written during the run."


# --- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "seconds", "price"),
    [
        ({}, 9.0, 9.0),
        ({"seconds": 8.12345}, 8.123, 8.123),  # a monotonic clock counts before wall times
        ({"clocks": (NodeClock("n1", 5.0),)}, None, None),
        ({"clocks": (NodeClock("n1", 5.0),), "seconds": 8.0}, 8.0, 8.0),
        ({"clocks": (NodeClock("n1", 0.0),)}, 9.0, 9.0),
    ],
)
def test_a_run_whose_clock_was_set_has_no_wall_time(
    changes: dict[str, Any], seconds: float | None, price: float | None
) -> None:
    spec = replace(SPEC, price={"per_hour": 3600.0})
    found = judge_logs({0: b""}, spec, observe(0, 0, **changes)).result
    assert found["wall_seconds"] == seconds
    assert found["price"] == {"per_hour": 3600.0, "amount": price}


STEPPED = {"clocks": (NodeClock("n1", 5.0),)}


@pytest.mark.parametrize(
    ("spec", "rules", "doubts"),
    [
        (SPEC, None, ["clock_stepped"]),
        (TASK, OWN, None),  # its own program measures with a monotonic clock
        (replace(TASK, argv=("mine",)), OWN, ["clock_stepped"]),
        (TASK, replace(OWN, origin="theirs 1.0"), ["clock_stepped"]),
        (replace(TASK, preset="open", argv=OWN.command), OWN, ["clock_stepped"]),
    ],
)
def test_a_clock_that_was_set_takes_the_line_of_programs_that_may_have_read_it(
    spec: RunSpec, rules: TaskRules | None, doubts: list[str] | None
) -> None:
    found = judge_logs({1: b"", 0: metric() + result()}, spec, observe(0, 0, **STEPPED), rules)
    assert found.outcome is Outcome.GOAL_REACHED
    assert found.result.get("doubts") == doubts
    assert (found.result["official_line"] is None) == (doubts is not None)
    assert "clock_stepped" in [finding.code for finding in found.findings]


def test_a_contradiction_takes_line_and_division() -> None:
    found = judge_logs({1: b"", 0: metric() + result(wall_seconds=1000.0)}, TASK, rules=OWN)
    (code,) = found.result["doubts"]
    assert code.startswith("implausible_")
    assert found.result["official_line"] is None
    assert found.result["division"] == {"word": None, "reason": f"the evidence contradicts itself ({code})"}
    assert found.result["summary"].startswith("r-2 reached its goal: Prec@1 81.5 (>= 80) after 1000.0 s. ")
    older = judge_logs({1: b"", 0: metric() + result(wall_seconds=1000.0)}, TASK, rules=OWN, version=2).result
    assert "doubts" not in older
    assert older["official_line"] is not None


@pytest.mark.parametrize(
    ("spec", "rules", "faults", "is_doubted"),
    [
        (TASK, OWN, None, True),
        (TASK, OWN, {"attempts": [{}]}, True),
        (TASK, OWN, {"attempts": [{}, {}]}, False),  # all ranks were started again
        (TASK, replace(OWN, origin="theirs 1.0"), None, False),
        (TASK, None, None, False),
        (SPEC, OWN, None, False),
    ],
)
def test_a_task_of_mlbench_reports_no_metric_after_its_result(
    spec: RunSpec, rules: TaskRules | None, faults: Any, is_doubted: bool
) -> None:
    log = metric() + result() + metric(value=81.6, time=6.5)
    found = judge_logs({0: log, 1: b""}, spec, rules=rules, faults=faults)
    told = [text for finding in found.findings for text in finding.evidence.get("contradictions", ())]
    assert ("rank 0 reported a metric after its result" in told) is is_doubted


# --- faults -----------------------------------------------------------------------------------------------------------

ATTEMPTS = [
    {"started": 0.0, "training": 1.0, "ended": 4.0, "ranks": 2, "rank": 1, "why": "killed"},
    {"started": 5.0, "training": 6.0, "ended": 9.0, "ranks": 2},
]


def test_faults_and_restarts_are_in_the_result_and_in_the_sentence() -> None:
    fault = {"planned": {"kind": "kill", "at": 2.0, "target": 1}, "at": 3.0, "until": None}
    spec = replace(SPEC, faults="at 2s kill rank 1", on_failure="restart")
    record = {
        "script": spec.faults,
        "policy": "restart",
        "began": 1.0,
        "ended": 9.0,
        "attempts": ATTEMPTS,
        "events": [fault],
    }
    found = judge_logs(
        {1: b"", 0: metric(name="checkpoint_seconds") + event("result", outcome="completed")}, spec, faults=record
    )
    assert found.result["summary"] == "r-2 completed after 1 fault and 1 restart."
    assert (found.result["faults"]["injected"], found.result["faults"]["attempts"]) == (1, 2)
    assert "doubts" not in found.result
    missed = judge_logs(
        {1: b"", 0: event("result", outcome="completed")}, spec, faults={**record, "never_trained": True}
    )
    assert missed.result["doubts"] == ["fault_not_injected"]
    assert "r-2 completed after 1 fault and 1 restart. Not all faults were injected" in missed.result["summary"]
    assert "faults" not in judge_logs({0: b""}).result


# --- commands of one's own, measured by their metrics -----------------------------------------------------------------

WATCHED = replace(TASK, preset="open", argv=("mine",))


@pytest.mark.parametrize(
    ("changes", "version", "wall"),
    [
        ({}, 3, 2.0),  # from the start of rank 0, whose clock times its metrics
        ({}, 2, 4.0),  # from the start of the first worker, as it was
        (STEPPED, 3, None),
        ({"clocks": (NodeClock("n1", 0.0),)}, 3, 2.0),
    ],
)
def test_a_metric_that_meets_the_goal_is_timed_from_the_start_of_rank_0(
    changes: dict[str, Any], version: int, wall: float | None
) -> None:
    first = WorkerState(0, "succeeded", exit_code=0, started=3.0, finished=10.0)
    workers = (replace(first, rank=1, started=1.0), first)
    log = metric(value=10.0, time=4.0) + metric(time=5.0) + metric(value=90.0, time=6.0)
    found = judge_logs({0: log, 1: b""}, WATCHED, observe(workers=workers, **changes), OWN, version=version)
    assert found.outcome is Outcome.GOAL_REACHED
    assert found.result["task_seconds"]["wall"] == wall
    goal = found.result["goal"]
    assert goal is not None
    assert (goal["value"], goal["last"]) == (81.5, 90.0)


def test_a_result_that_a_command_reports_itself_keeps_its_time() -> None:
    log = metric() + result(wall_seconds=7.5)
    found = judge_logs({0: log, 1: b""}, WATCHED, observe(0, 0, **STEPPED), OWN)
    assert found.result["task_seconds"]["wall"] == 7.5
