"""What the state that a local agent wrote means for its run."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent.processes import boot_id
from mlbench_cli.engines.local import state as local
from mlbench_cli.engines.local.state import (
    Liveness,
    Watch,
    abandon,
    enqueue,
    find_clocks,
    find_liveness,
    is_abandoned,
    is_queued,
    make_worker,
    observation,
    read_state,
    starting,
)
from mlbench_cli.model.run import Ending, NodeClock, Run, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.queue_folder import write_queued
from mlbench_cli.util.times import timestamp

NOW = 1_800_000_000.0
SPEC = RunSpec("x-2", "local", "local", "custom", "custom", ("true",), "gloo", 2)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "time", SimpleNamespace(time=lambda: NOW))


def a_run(folder: Path, age: float = 0.0) -> Run:
    folder = folder / "runs" / "abc"
    (folder / ".state").mkdir(parents=True, exist_ok=True)
    return Run("abc", SPEC, folder, timestamp(NOW - age))


def rank(number: int, phase: str = "running", **more: Any) -> dict[str, Any]:
    return {
        "rank": number,
        "phase": phase,
        "pid": 100 + number,
        "started": 5.0,
        "finished": None,
        "exit_code": None,
        "signal": None,
        "stopped": False,
        "start_error": None,
        "out_of_memory": None,
        **more,
    }


def write_state(run: Run, *ranks: dict[str, Any], **more: Any) -> None:
    state = {
        "name": "x-2",
        "ranks": ranks or (rank(0), rank(1)),
        "ended": None,
        "stopping": None,
        "first_failed": None,
        "boot_id": boot_id(),
        "host": os.uname().nodename,
        **more,
    }
    path = run.folder / ".state" / "state.json"
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(state))


def look(run: Run) -> Watch:
    watch = Watch(run)
    watch.look()
    return watch


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent holds its lock."""
    monkeypatch.setattr(local, "is_lock_held", lambda path: path.name == "supervisor.lock")


# --- liveness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("boot", "host", "is_held", "liveness"),
    [
        ("ours", "here", True, Liveness.ALIVE),
        ("ours", "here", False, Liveness.DEAD),
        ("ours", "elsewhere", True, Liveness.ALIVE),  # a container of this machine
        ("other", "here", True, Liveness.DEAD),  # this machine was restarted
        ("other", "elsewhere", True, Liveness.UNKNOWN),
    ],
)
def test_whether_an_agent_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot: str, host: str, is_held: bool, liveness: Liveness
) -> None:
    monkeypatch.setattr(local, "is_lock_held", lambda path: is_held)
    facts = {
        "boot_id": boot_id() if boot == "ours" else "another",
        "host": os.uname().nodename if host == "here" else "far",
    }
    assert find_liveness(tmp_path, facts) is liveness


@pytest.mark.parametrize(
    ("found", "liveness"), [(True, Liveness.ALIVE), (None, Liveness.ALIVE), (False, Liveness.DEAD)]
)
def test_without_a_lock_the_process_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool | None, liveness: Liveness
) -> None:
    monkeypatch.setattr(local, "is_alive", lambda facts: found)
    assert find_liveness(tmp_path, {"boot_id": boot_id()}) is liveness


# --- before there is a state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("age", "is_starting"), [(0.0, True), (59.9, True), (60.0, False)])
def test_a_recorded_run_has_a_minute_to_start(tmp_path: Path, age: float, is_starting: bool) -> None:
    run = a_run(tmp_path, age)
    assert starting(run) is is_starting
    found = observation(run, look(run))
    assert found.ended is (None if is_starting else Ending.NEVER_STARTED)
    assert [finding.code for finding in found.findings] == ([] if is_starting else ["not_started"])
    assert len(found.workers) == 2
    assert Watch(run).rank_ended(0) is not is_starting


def test_a_run_that_waits_for_the_machine_starts_as_long_as_somebody_will_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path, 3600.0)
    enqueue(run, os.getpid())
    assert (starting(run), is_queued(run)) == (True, True)
    assert {worker.reason for worker in observation(run, look(run)).workers} == {"waiting for the runs before it"}
    monkeypatch.setattr(local, "is_alive", lambda note: False)
    assert (starting(run), is_queued(run)) == (False, False)
    assert observation(run, look(run)).ended is Ending.NEVER_STARTED


def test_a_run_that_was_taken_out_of_the_queue_is_cancelled(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    enqueue(run, os.getpid())
    assert not is_abandoned(run)
    abandon(run)
    found = observation(run, look(run))
    assert (is_abandoned(run), starting(run), found.ended) == (True, False, Ending.CANCELLED)
    assert {worker.reason for worker in found.workers} == {None}


def test_a_run_of_a_queue_that_has_ended_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path)
    write_queued(run.folder, "e", "series")
    assert (starting(run), is_queued(run)) == (False, True)
    assert [finding.code for finding in observation(run, look(run)).findings] == ["queue_ended"]
    monkeypatch.setattr(local, "is_lock_held", lambda path: path.name == "submit.lock")  # a client submits it now
    assert starting(run)
    assert observation(run, look(run)).findings == ()


# --- with a state ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alive")
def test_a_run_that_is_under_way(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    write_state(run, rank(0), rank(1, "pending", pid=None, started=None), seconds=3.0, stepped_seconds=0.0)
    watch = look(run)
    assert (watch.running, watch.lost, watch.unknown, watch.host) == (True, False, False, os.uname().nodename)
    assert (watch.rank_ended(0), watch.look()) == (False, False)
    found = observation(run, watch)
    name = os.uname().nodename
    assert found.workers == (
        WorkerState(0, "running", node=name, started=5.0),
        WorkerState(1, "pending", "only rank 0 runs the command", name),
    )
    assert (found.ended, found.seconds, found.time) == (None, 3.0, NOW)


def test_a_run_whose_agent_is_gone_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "is_lock_held", lambda path: False)
    run = a_run(tmp_path)
    write_state(run, rank(0), rank(1, "succeeded", exit_code=0))
    watch = look(run)
    found = observation(run, watch)
    assert (watch.lost, watch.running, watch.rank_ended(0), found.ended) == (True, False, True, Ending.LOST)
    assert [(worker.phase, worker.reason) for worker in found.workers] == [
        ("lost", "the agent is gone"),
        ("succeeded", None),
    ]
    assert [finding.code for finding in found.findings] == ["supervisor_lost"]
    assert watch.look() is False


def test_a_run_of_another_machine_is_unknown_here(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    write_state(run, boot_id="another", host="far")
    watch = look(run)
    found = observation(run, watch)
    assert (watch.unknown, watch.lost, watch.running, found.ended) == (True, False, True, None)
    (finding,) = found.findings
    assert finding.summary.startswith("The run was started on far; this machine cannot tell")
    assert finding.hint == "Run on far: mlbench status x-2"


@pytest.mark.parametrize(
    ("facts", "state", "phase", "reason"),
    [
        ({"phase": "failed", "exit_code": 3}, {}, "failed", "exited with 3"),
        ({"phase": "failed", "exit_code": 139, "signal": 11}, {}, "failed", "was killed by SIGSEGV"),
        ({"phase": "failed", "start_error": "no file"}, {}, "failed", "could not be started: no file"),
        ({"phase": "failed", "stopped": True}, {"first_failed": 1}, "failed", "stopped: rank 1 failed"),
        ({"phase": "failed", "stopped": True}, {"ended": "deadline"}, "failed", "stopped: deadline"),
        ({"stopped": True}, {"ended": None, "stopping": "client_lost"}, "running", "stopped: client lost"),
        ({"phase": "succeeded", "exit_code": 0}, {}, "succeeded", None),
        ({"pid": None}, {}, "running", "only rank 0 runs the command"),
    ],
)
def test_why_a_rank_ended(
    tmp_path: Path, facts: dict[str, Any], state: dict[str, Any], phase: str, reason: str | None
) -> None:
    run = a_run(tmp_path)
    other = rank(1, "failed", exit_code=3)
    write_state(run, rank(0, **facts), other, **{"ended": "failed", **state})
    worker = observation(run, look(run)).workers[0]
    assert (worker.phase, worker.reason) == (phase, reason)


@pytest.mark.parametrize("ended", ["exited", "failed", "cancelled", "deadline"])
def test_an_end_is_what_the_agent_wrote(tmp_path: Path, ended: str) -> None:
    run = a_run(tmp_path)
    write_state(run, rank(0, "failed", exit_code=3), rank(1), ended=ended, first_failed=0)
    found = observation(run, look(run))
    assert (found.ended, found.first_failed, look(run).rank_ended(1)) == (Ending(ended), 0, True)


@pytest.mark.usefixtures("alive")
def test_a_rank_that_has_ended_writes_no_more_lines(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    write_state(run, *(rank(number, phase) for number, phase in enumerate(("running", "succeeded", "failed", "lost"))))
    assert [look(run).rank_ended(number) for number in range(4)] == [False, True, True, True]


@pytest.mark.usefixtures("alive")
def test_a_state_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    watch = Watch(run)
    assert (watch.look(), watch.state, watch.host) == (False, None, "another machine")
    write_state(run)
    assert (watch.look(), watch.look()) == (True, False)
    write_state(run, ended="exited")
    assert (watch.look(), watch.running) == (True, False)
    (run.folder / ".state" / "state.json").write_text("{")
    assert (watch.look(), read_state(run.folder)) == (False, None)


# --- clocks and workers ----------------------------------------------------------------------------------------------


def test_clocks_of_nodes_that_have_ended() -> None:
    note = {"ahead_seconds": 0.5, "error_seconds": 0.01}
    states = [
        {"node_name": "m1", "host": "h", "stepped_seconds": 2.0, "seconds": 9.0},
        {
            "host": "m2",
            "stepped_seconds": 0.0,
            "seconds": 9.0,
            "clock_start": note,
            "clock_end": {"ahead_seconds": -0.5, "error_seconds": 0.02},
        },
        {"host": "m3", "stepped_seconds": 0.0, "seconds": None},
    ]
    assert find_clocks(states) == (NodeClock("m1", 2.0), NodeClock("m2", 0.0, 0.5, -0.5, 0.02))


def test_a_worker_from_the_facts_of_its_agent() -> None:
    facts = rank(3, exit_code=1, finished=9.0, restarts=2, seconds=3.5)
    assert make_worker(facts, "failed", "why", "m1") == WorkerState(
        3, "failed", "why", "m1", 1, 5.0, 9.0, restarts=2, seconds=3.5
    )
    assert make_worker(rank(0), "running", None, None) == WorkerState(0, "running", started=5.0)
