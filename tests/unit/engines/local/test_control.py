"""How a local run is started, followed, stopped and removed by a client: what it does for each state of the agent.

The agent is played: what its state says, and what it answers when it is started.
"""

import errno
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.engines.local import engine as module
from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.engines.local.state import abandon, is_abandoned
from mlbench_cli.errors import CapacityError, UsageError
from mlbench_cli.model.run import Ending, Observation, Run, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.queue_folder import write_queued
from tests.fakes.clock import Clock

SPEC = RunSpec("x-2", "local", "local", "custom", "custom", ("prog",), "gloo", 2)
STATE = {"ended": None, "pid": 7, "spec_hash": SPEC.hash, "name": "x-2"}


class Agent:
    """What a client sees of a run's agent, in place of `Watch`. It ends at `ends_at`, if it is told to."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.state: dict[str, Any] | None = None
        self.running = self.lost = self.unknown = False
        self.host = "far"
        self.changes: list[float] = []  # when its state changes
        self.ends_at = float("inf")

    def __call__(self, run: Run) -> "Agent":
        assert run.name == "x-2"
        return self

    def look(self) -> bool:
        if self.clock.now >= self.ends_at:
            self.running = False
            if self.state is not None:
                self.state = {**self.state, "ended": "exited"}
        if self.changes and self.clock.now >= self.changes[0]:
            self.changes.pop(0)
            return True
        return False

    def rank_ended(self, rank: int) -> bool:
        return rank == 1


class Lab:
    """An engine, the folder of its run, and what was done to processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.clock = Clock(1000.0)
        self.agent = Agent(self.clock)
        self.done: list[Any] = []
        self.engine = LocalEngine("finalizer.module")
        self.run = Run("abc", SPEC, folder, "2027")
        self.ended: float = float("inf")
        (folder / ".state").mkdir(parents=True)
        monkeypatch.setattr(module, "time", self.clock)
        monkeypatch.setattr(module, "Watch", self.agent)
        monkeypatch.setattr(module, "observation", self.observe)
        monkeypatch.setattr(module, "signal_process", lambda state, number: self.done.append((state["pid"], number)))
        monkeypatch.setattr(module, "kill_processes", lambda folder: self.done.append(folder))

    def observe(self, run: Run, watch: Any) -> Observation:
        assert watch is self.agent
        ended = Ending.EXITED if self.clock.now >= self.ended else None
        return Observation(round(self.clock.now - 1000.0, 3), (WorkerState(0),), ended=ended)

    @property
    def output(self) -> str:
        return f"{self.run.folder}/output"


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lab:
    return Lab(monkeypatch, tmp_path / "run")


# --- following ------------------------------------------------------------------------------------------------------


def test_changes_are_told_at_once_and_else_once_a_second(lab: Lab) -> None:
    lab.agent.changes = [1000.0, 1000.5, 1000.52]
    lab.ended = 1003.0
    times = [observation.time for observation in lab.engine.watch(lab.run)]
    assert times[:3] == pytest.approx([0.0, 0.5, 0.52], abs=0.021)
    assert len(times) == 6
    for before, after in itertools.pairwise(times[2:]):
        assert 1.0 <= round(after - before, 3) <= 1.02


def test_the_leash_of_a_run_is_dropped_at_its_end(lab: Lab) -> None:
    told, leash = os.pipe()
    lab.engine._leashes["abc"] = leash
    lab.ended = 1000.5
    list(lab.engine.watch(lab.run))
    assert lab.engine._leashes == {}
    assert os.read(told, 1) == b""  # closed
    os.close(told)


def test_a_look_is_one_observation(lab: Lab) -> None:
    assert lab.engine.look(lab.run).time == 0.0
    assert lab.clock.now == 1000.0
    lab.engine.resume(lab.run)
    assert (lab.engine.kept_until(lab.run), lab.engine.log_gaps(lab.run)) == (None, ())


def test_a_log_ends_with_its_rank(lab: Lab) -> None:
    (lab.run.folder / "logs").mkdir()
    for rank in (0, 1):
        (lab.run.folder / "logs" / f"rank-{rank}.log").write_bytes(b"one\nhalf")
    assert [line.text for line in lab.engine.logs(lab.run, 0)] == [b"one\n"]
    assert [line.text for line in lab.engine.logs(lab.run, 1)] == [b"one\n", b"half"]


# --- stopping -------------------------------------------------------------------------------------------------------


def test_a_running_agent_is_asked_to_end(lab: Lab) -> None:
    lab.agent.running, lab.agent.state = True, STATE
    lab.engine.cancel(lab.run)
    assert lab.done == [(7, signal.SIGTERM)]


def test_what_a_lost_agent_left_is_killed(lab: Lab) -> None:
    lab.agent.lost, lab.agent.state = True, STATE
    lab.engine.cancel(lab.run)
    assert lab.done == [lab.output]
    lab.engine.fetch(lab.run)
    assert lab.done == [lab.output] * 2


def test_of_a_run_that_has_ended_nothing_is_stopped(lab: Lab) -> None:
    lab.agent.state = {**STATE, "ended": "exited"}
    lab.engine.cancel(lab.run)
    found = lab.engine.fetch(lab.run)
    assert (found.files, found.complete, lab.done) == (0, True, [])


def test_a_run_on_another_machine_cannot_be_stopped(lab: Lab) -> None:
    lab.agent.unknown = True
    with pytest.raises(UsageError) as caught:
        lab.engine.cancel(lab.run)
    assert caught.value.message == 'The run "x-2" is on far, which cannot be reached from here.'
    assert caught.value.hint == "Run on far: mlbench cancel x-2"


def test_a_run_that_waits_is_taken_out_of_its_queue(lab: Lab) -> None:
    lab.engine.cancel(lab.run)
    assert not is_abandoned(lab.run)  # it does not wait
    write_queued(lab.run.folder, "e", "x")
    lab.engine.cancel(lab.run)
    assert is_abandoned(lab.run)
    assert lab.done == []


def test_a_queue_that_cannot_be_changed_says_why(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    write_queued(lab.run.folder, "e", "x")

    def fail(_: Run) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(module, "abandon", fail)
    with pytest.raises(UsageError) as caught:
        lab.engine.cancel(lab.run)
    assert caught.value.message == f"The folder {lab.run.folder} of the run cannot be changed: Read-only file system."


def test_a_run_that_has_just_started_is_stopped(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    write_queued(lab.run.folder, "e", "x")

    def read_state(_: Path) -> dict[str, Any]:
        lab.agent.running, lab.agent.state = True, STATE
        return STATE

    monkeypatch.setattr(module, "read_state", read_state)
    lab.engine.cancel(lab.run)
    assert lab.done == [(7, signal.SIGTERM)]
    assert not is_abandoned(lab.run)


# --- removing -------------------------------------------------------------------------------------------------------


def test_a_running_run_is_not_removed(lab: Lab) -> None:
    lab.agent.running, lab.agent.state = True, STATE
    with pytest.raises(UsageError, match='The run "x-2" is still running'):
        lab.engine.delete(lab.run)
    assert (lab.done, lab.run.folder.exists()) == ([], True)


@pytest.mark.parametrize(
    ("ends_after", "waited", "killed"), [(3.0, 3.0, False), (10.0, 10.0, False), (11.0, 10.0, True)]
)
def test_a_running_run_has_ten_seconds_to_end_before_it_is_removed_by_force(
    lab: Lab, ends_after: float, waited: float, killed: bool
) -> None:
    lab.agent.running, lab.agent.state = True, STATE
    lab.agent.ends_at = 1000.0 + ends_after
    lab.engine.delete(lab.run, force=True)
    assert lab.clock.now - 1000.0 == pytest.approx(waited, abs=0.03)
    assert lab.done == [(7, signal.SIGTERM), *([(7, signal.SIGKILL), lab.output] if killed else [])]
    assert not lab.run.folder.exists()


@pytest.mark.parametrize(("state", "done"), [(None, []), ({**STATE, "ended": "exited"}, [])])
def test_a_run_that_does_not_run_is_removed_at_once(lab: Lab, state: Any, done: list[Any]) -> None:
    lab.agent.state = state
    lab.engine.delete(lab.run)
    assert (lab.done, lab.clock.now) == (done, 1000.0)
    assert not lab.run.folder.exists()


def test_a_folder_that_cannot_be_removed_says_why(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(_: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(module, "remove_folder", remove)
    with pytest.raises(UsageError) as caught:
        lab.engine.delete(lab.run)
    assert caught.value.message == f"The folder {lab.run.folder} of the run cannot be removed: Read-only file system."
    assert "MLBENCH_HOME" in str(caught.value.hint)


# --- starting -------------------------------------------------------------------------------------------------------


class Lease:
    """The machine, which this run has."""

    descriptor, state, reason = -1, "held", None
    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def spawned(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What was started, and `answer`: what the agent says when it is ready."""
    found = SimpleNamespace(answer=b"ok\n", leashes=[], lease=Lease(), error=None)

    def spawn(folder: Path, leash: int, ready: int, lock: int, machine_lock: int) -> int:
        if found.error is not None:
            raise found.error
        assert (folder, machine_lock) == (lab.run.folder, -1)
        assert all(os.get_inheritable(descriptor) for descriptor in (leash, ready, lock) if descriptor >= 0)
        found.leashes.append(leash)
        os.write(ready, found.answer)
        return 2**22 + 1  # no process of this machine

    monkeypatch.setattr(module, "_spawn", spawn)
    monkeypatch.setattr(module, "acquire_machine", lambda run, report: found.lease)
    yield found
    lab.engine._release(lab.run)


def start(lab: Lab, *, detach: bool = False) -> None:
    lab.engine.submit(lab.run, lab.engine.render(lab.run.spec), detach=detach)


def test_an_agent_gets_the_plan_in_its_folder(lab: Lab, spawned: SimpleNamespace) -> None:
    start(lab)
    path = lab.run.folder / ".state" / "request.json"
    request = json.loads(path.read_text())
    plan = request.pop("plan")
    assert request == {
        "run_id": "abc",
        "python": sys.executable,
        "installed_code_only": False,
        "finalizer": "finalizer.module",
        "machine_lock": {"lock": "held", "lock_reason": None},
    }
    assert plan["spec_hash"] == SPEC.hash
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(item.name for item in (lab.run.folder / "output").iterdir()) == ["rank-0", "rank-1"]
    assert (lab.run.folder / "logs").is_dir()
    assert spawned.lease.closed


@pytest.mark.parametrize("detach", [False, True])
def test_an_attached_run_ends_with_its_client(lab: Lab, spawned: SimpleNamespace, detach: bool) -> None:
    start(lab, detach=detach)
    (leash,) = spawned.leashes
    assert (leash == -1) is detach
    assert ("abc" in lab.engine._leashes) is not detach
    held = lab.engine._leashes.get("abc")
    lab.engine._release(lab.run)
    assert lab.engine._leashes == {}
    if held is not None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(held)


@pytest.mark.parametrize(
    ("answer", "log", "kind", "words"),
    [
        (b"network: no permission\n", "", CapacityError, "cannot be created on this machine: no permission."),
        (b"no space left\n", "", UsageError, 'The run "x-2" could not be started: no space left.'),
        (b"", "one\nTraceback", UsageError, "could not be started: its agent died; Traceback."),
    ],
)
def test_an_agent_that_does_not_start_says_why(
    lab: Lab, spawned: SimpleNamespace, answer: bytes, log: str, kind: type[Exception], words: str
) -> None:
    (lab.run.folder / ".state" / "supervisor.log").write_text(log)
    spawned.answer = answer
    with pytest.raises(kind) as caught:
        start(lab)
    assert words in str(caught.value)
    assert (lab.engine._leashes, lab.engine._children) == ({}, {})


def test_a_machine_without_processes_to_spare_is_a_clear_error(lab: Lab, spawned: SimpleNamespace) -> None:
    free = os.dup(0)
    os.close(free)
    spawned.error = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    with pytest.raises(UsageError, match="cannot be created: Resource temporarily unavailable"):
        start(lab)
    assert os.dup(0) == free  # none of its pipes is left open
    os.close(free)
    assert spawned.lease.closed


def test_a_run_starts_once(lab: Lab, spawned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_state", lambda _: STATE)
    start(lab)
    assert spawned.leashes == []
    monkeypatch.setattr(module, "read_state", lambda _: {**STATE, "spec_hash": "other", "name": "y-1"})
    with pytest.raises(UsageError) as caught:
        start(lab)
    assert caught.value.message == f'The folder {lab.run.folder} holds another run, "y-1".'
    assert caught.value.hint == "mlbench delete y-1"


def test_a_run_that_was_stopped_or_deleted_while_it_waited_does_not_start(
    lab: Lab, spawned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandon(lab.run)
    with pytest.raises(UsageError, match='The run "x-2" was canceled before it started'):
        start(lab)

    def delete(run: Run, report: Any) -> Lease:
        for path in (run.folder / ".state").iterdir():
            path.unlink()
        (run.folder / ".state").rmdir()
        return Lease()

    monkeypatch.setattr(module, "acquire_machine", delete)
    with pytest.raises(UsageError, match='The run "x-2" was deleted before it was started'):
        start(lab)
    assert spawned.leashes == []
