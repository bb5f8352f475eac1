"""What faults cost a run, from the record of its attempts and its checkpoints: every second by hand."""

import json
from typing import Any

import pytest

from mlbench_cli.model.faults import plan_of
from mlbench_cli.results.archive.faults import (
    CheckpointMarks,
    FaultsDocument,
    faults_document,
    faults_phrase,
    find_fault_contradictions,
    find_not_injected,
)
from mlbench_cli.util.times import timestamp
from tests.unit.results.runs import START, spec

KILL: dict[str, Any] = {"planned": {"kind": "kill", "target": 1}, "at": 40.0, "until": None}
FIRST: dict[str, Any] = {"started": 1.0, "training": 5.0, "ended": 50.0, "ranks": 2, "rank": 1, "why": "killed"}
SECOND: dict[str, Any] = {"started": 58.0, "training": 62.0, "ended": 100.0, "ranks": 3, "resumed_update": 30}


def row(name: str, at: float, step: Any, value: Any, rank: int = 0) -> bytes:
    facts = {"rank": rank, "name": name, "step": step, "value": value, "time": timestamp(START + at)}
    return json.dumps(facts).encode() + b"\n"


def marks(*rows: bytes) -> CheckpointMarks:
    found = CheckpointMarks()
    for line in rows:
        found.take(line)
    return found


MARKS = (
    *(row("checkpoint_seconds", 20.0, 20, 0.5), row("checkpoint_seconds", 30.0, 30, 1.0)),
    *(row("restore_seconds", 61.0, 30, 2.0), row("checkpoint_seconds", 80.0, 60, 1.5)),
)


def document(*attempts: dict[str, Any], events: Any = (KILL,), rows: tuple[bytes, ...] = MARKS) -> FaultsDocument:
    record = {
        "script": "s",
        "policy": "restart",
        "began": START,
        "ended": 100.0,
        "attempts": list(attempts or (FIRST, SECOND)),
        "events": list(events),
    }
    found = faults_document(record, marks(*rows))
    assert found is not None
    return found


def test_every_second_of_a_run_with_a_restart_has_its_part() -> None:
    """Killed at 40 s, noticed at 50 s, started again at 58 s from the checkpoint of 30 s, trained on from 62 s."""
    found = document()
    seconds = found["seconds"]
    assert {name: value for name, value in seconds.items() if value} == {
        "startup": 4.0,
        "useful": 23.5 + 36.5,  # without the seconds in which checkpoints were written
        "checkpointing": 1.5 + 1.5,
        "lost": 10.0,
        "detection": 10.0,
        "restart": 8.0 + 2.0,
        "loading": 2.0,
    }
    assert sum(seconds.values()) == 99.0  # the first rank started after one second
    assert {key: value for key, value in found.items() if key not in ("seconds", "timeline", "recoveries")} == {
        "script": "s",
        "policy": "restart",
        "planned": 1,
        "injected": 1,
        "attempts": 2,
        "ranks": 3,
        "wall_seconds": 100.0,
        "goodput": 0.6,
        "checkpoints": 3,
        "checkpoint_seconds": 1.0,
        "events": [["kill", 1, 40.0, None]],
    }
    assert found["recoveries"] == [
        {
            "at": 40.0,
            "rank": 1,
            "why": "killed",
            "detection": 10.0,
            "restart": 10.0,
            "loading": 2.0,
            "lost": 10.0,
            "seconds": 32.0,  # 22 s until training, and 10 s of work again
        }
    ]
    assert found["timeline"] == [
        *(["startup", 1.0, 5.0], ["lost", 30.0, 40.0], ["detection", 40.0, 50.0], ["restart", 50.0, 58.0]),
        *(["useful", 5.0, 30.0], ["restart", 58.0, 62.0], ["useful", 62.0, 100.0]),
    ]


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"resumed_update": 20}, 20.0),
        ({"resumed_update": 25}, 35.0),  # no checkpoint is known
        ({"resumed_update": None}, 35.0),  # from the beginning
        ({}, 10.0),
    ],
)
def test_work_since_the_checkpoint_is_lost(change: dict[str, Any], lost: float) -> None:
    assert document(FIRST, {**SECOND, **change})["seconds"]["lost"] == lost


@pytest.mark.parametrize(
    ("events", "detection"),
    [
        ([], 0.0),
        ([{**KILL, "at": 4.0}], 0.0),  # before the training
        ([{**KILL, "at": 51.0}], 0.0),
        ([{**KILL, "at": 45.0}, KILL], 5.0),
        ([{**KILL, "problem": "no such rank"}], 0.0),
        ([{**KILL, "planned": {"kind": "slow", "target": 1}}], 0.0),
        ([{**KILL, "planned": {"kind": "node", "target": 1}}], 10.0),
        ([{**KILL, "planned": "kill"}], 0.0),
    ],
)
def test_detection_counts_from_the_last_fault_that_ends_a_rank(events: list[Any], detection: float) -> None:
    assert document(events=events)["seconds"]["detection"] == detection


@pytest.mark.parametrize(
    ("event", "waiting"),
    [
        ({"planned": {"kind": "stop"}, "at": 70.0, "until": 80.0}, 10.0),
        ({"planned": {"kind": "stop"}, "at": 90.0, "until": None}, 10.0),
        ({"planned": {"kind": "stop"}, "at": 60.0, "until": 64.0}, 2.0),  # training began at 62 s
        ({"planned": {"kind": "slow"}, "at": 70.0, "until": 80.0, "stopped_share": 0.5}, 5.0),
        ({"planned": {"kind": "slow"}, "at": 70.0, "until": 80.0}, 0.0),
        ({"planned": {"kind": "link"}, "at": 70.0, "until": 80.0}, 0.0),
        ({"planned": {"kind": "stop"}, "at": 70.0, "until": 80.0, "problem": "x"}, 0.0),
    ],
)
def test_a_stopped_rank_waits_and_a_slow_one_for_a_share(event: dict[str, Any], waiting: float) -> None:
    found = document({**SECOND, "resumed_update": None}, events=[event], rows=())
    assert found["seconds"]["waiting"] == waiting
    assert found["seconds"]["useful"] == 38.0 - waiting


def test_a_run_that_never_trained_has_no_useful_second() -> None:
    found = document({"started": 1.0, "ended": 60.0, "ranks": 2}, events=[], rows=())
    assert (found["seconds"]["startup"], found["seconds"]["useful"], found["goodput"]) == (99.0, 0.0, 0.0)
    assert (found["checkpoints"], found["checkpoint_seconds"], found["recoveries"]) == (0, None, [])


def test_without_a_record_of_attempts_there_is_no_document() -> None:
    assert faults_document(None, marks()) is None
    assert faults_document({}, marks()) is None
    assert faults_document({"attempts": "x"}, marks()) is None
    nothing = faults_document({"attempts": [{}]}, marks())
    assert nothing is not None
    assert (nothing["wall_seconds"], nothing["goodput"], nothing["script"], nothing["timeline"]) == (
        0.0,
        None,
        None,
        [],
    )


def test_only_checkpoints_of_rank_0_with_numbers_count() -> None:
    found = marks(
        *MARKS,
        row("checkpoint_seconds", 1.0, 1, 1.0, rank=1),
        row("checkpoint_seconds", 1.0, None, 1.0),
        row("checkpoint_seconds", 1.0, 1, "nan"),
        row("checkpoint_bytes_seconds", 1.0, 1, 1.0),
        row("train_loss", 1.0, 1, 1.0),
        row("checkpoint_seconds", 90.0, 70, -1.0),
    )
    assert found.written == [
        (START + 20, 20.0, 0.5),
        (START + 30, 30.0, 1.0),
        (START + 80, 60.0, 1.5),
        (START + 90, 70.0, 0.0),
    ]
    assert found.read == [(START + 61, 30.0, 2.0)]


@pytest.mark.parametrize(
    ("injected", "attempts", "phrase"),
    [(0, 1, ""), (1, 1, "after 1 fault"), (2, 2, "after 2 faults and 1 restart"), (0, 3, "after 2 restarts")],
)
def test_faults_and_restarts_in_words(injected: int, attempts: int, phrase: str) -> None:
    assert faults_phrase({**document(), "injected": injected, "attempts": attempts}) == phrase


FAULTY = spec(faults="at 30s kill rank 1; at 60s kill any rank", on_failure="restart")


@pytest.mark.parametrize(
    ("record", "problems"),
    [
        ({"events": [KILL]}, None),
        (None, ["they were not recorded"]),
        ({"events": [{**KILL, "problem": "no such rank"}]}, ["kill 1: no such rank"]),
        ({"events": [{"planned": {"kind": "disk"}, "problem": "x"}, {"problem": "y"}]}, ["disk: x", "a fault: y"]),
        ({"never_trained": True}, ["the training, from which their times count, never began"]),
        ({"missed": {"kind": "kill", "target": 3}}, ["kill 3: the run ended between two attempts"]),
    ],
)
def test_a_result_without_all_of_its_faults_does_not_count(record: Any, problems: list[str] | None) -> None:
    found = find_not_injected(FAULTY, record, True)
    assert (found.evidence["problems"] if found else None) == problems
    if found:
        assert found.summary == (
            f"Not all faults were injected, so the result does not count: {'; '.join(problems or [])}."
        )
    assert find_not_injected(FAULTY, record, False) is None
    assert find_not_injected(spec(), record, True) is None


def test_the_record_follows_from_the_script() -> None:
    plan = [{"planned": fault.to_dict()} for fault in plan_of(FAULTY)]
    record = {"script": FAULTY.faults, "policy": "restart", "events": plan}
    assert list(find_fault_contradictions(FAULTY, record)) == []
    assert list(find_fault_contradictions(FAULTY, {**record, "events": plan[:1]})) == []  # the run ended before
    assert list(find_fault_contradictions(FAULTY, None)) == []
    assert list(find_fault_contradictions(FAULTY, {**record, "events": plan[::-1]})) == [
        "the faults do not follow from the script and the seed"
    ]
    for change in ({"script": "at 1s kill rank 1"}, {"policy": "fail"}):
        assert list(find_fault_contradictions(FAULTY, {**record, **change})) == [
            "faults.json has another script or policy than the run"
        ]
    plain = spec()
    assert list(find_fault_contradictions(plain, {"script": None, "policy": "fail", "events": []})) == []


# --- limits and rounding ----------------------------------------------------------------------------------------------


def test_times_of_a_recovery_are_milliseconds() -> None:
    kill = {**KILL, "at": 40.00061, "until": 41.98765}
    first = {**FIRST, "ended": 50.12345}
    found = document(first, {**SECOND, "started": 58.2001, "training": 62.00049}, events=[kill])
    (recovery,) = found["recoveries"]
    assert recovery == {
        "at": 40.001,
        "rank": 1,
        "why": "killed",
        "detection": 10.123,
        "restart": 9.876,  # 62.00049 - 40.001 - 10.123, less 2 s of loading
        "loading": 2.0,
        "lost": 10.001,
        "seconds": 32.0,
    }
    assert found["events"] == [["kill", 1, 40.001, 41.988]]
    assert ["detection", 40.001, 50.123] in found["timeline"]
    assert all(value == round(value, 3) for value in found["seconds"].values())


def test_the_length_and_the_shares_of_a_run_are_rounded() -> None:
    record = {"attempts": [{"started": 0.0, "training": 1.00004, "ranks": 1}], "ended": 3.00049, "began": START}
    costs = [row("checkpoint_seconds", 2.0, step, cost) for step, cost in enumerate((0.1, 0.1, 0.2))]
    found = faults_document(record, marks(*costs))
    assert found is not None
    assert (found["wall_seconds"], found["checkpoint_seconds"]) == (3.0, 0.1333)
    assert found["goodput"] == round((3.00049 - 1.00004 - 0.4) / 3.00049, 4)
    assert (found["script"], found["policy"], found["planned"], found["injected"]) == (None, "None", 0, 0)


@pytest.mark.parametrize(("at", "lost"), [(5.0, 35.0), (4.9, 35.0), (30.0, 10.0), (41.0, 0.0), (41.1, 35.0)])
def test_a_checkpoint_counts_that_was_written_at_most_a_second_after_the_fault(at: float, lost: float) -> None:
    """The event is reported after the file was written; the fault began at 40 s, the training at 5 s."""
    found = document(rows=(row("checkpoint_seconds", at, 30, 0.0),))
    assert found["seconds"]["lost"] == pytest.approx(lost)


@pytest.mark.parametrize(("at", "loading"), [(58.0, 2.0), (57.9, 0.0), (63.0, 2.0), (63.1, 0.0)])
def test_loading_ends_at_most_a_second_after_the_training_begins(at: float, loading: float) -> None:
    found = document(rows=(row("restore_seconds", at, 30, 2.0),))
    assert (found["seconds"]["loading"], found["recoveries"][0]["loading"]) == (loading, loading)
    assert found["seconds"]["restart"] == 12.0 - loading


def test_parts_are_never_longer_than_what_they_are_part_of() -> None:
    long = (row("checkpoint_seconds", 20.0, 20, 500.0), row("restore_seconds", 60.0, 30, 500.0))
    seconds = document(FIRST, {**SECOND, "resumed_update": None}, rows=long)["seconds"]
    assert (seconds["loading"], seconds["restart"]) == (4.0, 8.0)
    late = document(SECOND, events=[], rows=(row("checkpoint_seconds", 70.0, 20, 500.0),))["seconds"]
    assert (late["checkpointing"], late["waiting"], late["useful"]) == (38.0, 0.0, 0.0)
    stopped = {"planned": {"kind": "stop"}, "at": 70.0, "until": 99.0}
    both = document(SECOND, events=[stopped], rows=(row("checkpoint_seconds", 70.0, 20, 30.0),))["seconds"]
    assert (both["checkpointing"], both["waiting"], both["useful"]) == (30.0, 8.0, 0.0)


@pytest.mark.parametrize(("at", "is_counted"), [(100.01, True), (100.02, False), (62.0, True), (61.9, False)])
def test_checkpoints_count_from_the_first_update_to_the_end(at: float, is_counted: bool) -> None:
    found = document(SECOND, events=[], rows=(row("checkpoint_seconds", at, 60, 1.5),))
    assert found["seconds"]["checkpointing"] == (1.5 if is_counted else 0.0)


def test_malformed_values_of_a_record_are_left_out() -> None:
    event = {"planned": {"kind": "k" * 20, "target": "1"}, "at": -5, "until": "x"}
    first = {**FIRST, "rank": "1", "why": "w" * 50, "ended": 50.0}
    found = document(first, {**SECOND, "ranks": "many"}, "no attempt", events=[event, "no event"])  # type: ignore[arg-type]
    assert found["events"] == [["k" * 10, None, 0.0, 0.0]]
    assert (found["ranks"], found["attempts"], found["planned"]) == (0, 2, 1)
    assert (found["recoveries"][0]["rank"], found["recoveries"][0]["why"]) == (None, "w" * 40)


def test_of_many_faults_that_were_not_injected_the_first_are_told() -> None:
    events = [{"planned": {"kind": "kill", "target": number}, "problem": "x"} for number in range(30)]
    found = find_not_injected(FAULTY, {"events": events}, True)
    assert found is not None
    assert found.summary.endswith(": kill 0: x; kill 1: x; kill 2: x.")
    assert len(found.evidence["problems"]) == 20
    assert found.hint


def test_a_script_that_cannot_be_read_is_a_contradiction() -> None:
    odd = spec(faults="at 5s fry rank 1")
    record = {"script": odd.faults, "policy": "fail", "events": [KILL]}
    (problem,) = find_fault_contradictions(odd, record)
    assert problem.startswith('its fault script cannot be read: --faults "at 5s fry rank 1": "fry" is not one of')
