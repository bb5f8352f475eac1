"""The life of a run on machines, as a client sees it through channels: looks, logs, results, stops and removal.

Machines are in memory, and time passes only where the engine waits.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.agent.channel import Channel, RemoteError
from mlbench_cli.engines.base import Submission
from mlbench_cli.engines.fetch import FetchError
from mlbench_cli.engines.machines import engine as module
from mlbench_cli.engines.machines.details import MachineDetails
from mlbench_cli.engines.machines.engine import MachinesEngine, Place
from mlbench_cli.engines.machines.observe import Snapshot
from mlbench_cli.engines.machines.placement import NodeShare, share_nodes
from mlbench_cli.errors import NotFoundError, UnreachableError, UsageError
from mlbench_cli.model.run import Ending, Observation, Run, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.run_folder import RunFolder
from tests.fakes.clock import Clock
from tests.unit.engines.machines.test_observe import node_state, rank_facts, succeeded

SPEC = RunSpec("m-2", "c", "hosts", "custom", "custom", ("true",), "gloo", 2)
EXITED = Observation(3.0, (WorkerState(0, "succeeded", exit_code=0),) * 2, ended=Ending.EXITED)


class Time(Clock):
    """Also the time of day."""

    def time(self) -> float:
        return 1e9 + self.now


class Machine:
    """One machine with one node of the run: its log, what its agent says, and what it was asked."""

    def __init__(self, number: int) -> None:
        self.number, self.target = number, SimpleNamespace(name=f"m{number + 1}")
        self.log = b""
        self.report: dict[str, Any] = {"state": node_state(rank_facts(number)), "alive": True}
        self.error: Exception | None = None
        self.exists, self.most, self.renewed = True, 1 << 30, False
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def end(self, **logs: bytes) -> None:
        """Its rank has ended, and its log is packed as it is, unless it is given."""
        text = logs.get("log", self.log)
        digest = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        results = {"archive": None, "logs": {str(self.number): digest}, "problem": None}
        state = node_state(succeeded(self.number), ended=Ending.EXITED)
        self.report = {"state": state, "results": results, "alive": False}

    def exchange(self, do: str, *, folder: str, nodes: Mapping[str, Any], renew: bool) -> tuple[Any, bytes]:
        self._note(do, folder=folder, nodes=nodes)
        self.renewed = renew
        offset = nodes[str(self.number)][str(self.number)]
        data = self.log[offset : offset + self.most]
        pieces = [[self.number, offset, len(data)]] if data else []
        return {
            "pieces": pieces,
            "exists": self.exists,
            "cancel": False,
            "nodes": {str(self.number): self.report},
        }, data

    def call(self, do: str, **given: Any) -> dict[str, Any]:
        self._note(do, **given)
        return {}

    def _note(self, do: str, **given: Any) -> None:
        self.calls.append((do, given))
        if self.error is not None:
            raise self.error

    def asked(self, do: str) -> list[dict[str, Any]]:
        """The arguments of all such requests."""
        return [given for name, given in self.calls if name == do]


class Engine(MachinesEngine):
    """On machines in memory."""

    def __init__(self, *machines: Machine) -> None:
        super().__init__(MachineDetails(folder="/f"))
        self.machines = machines
        self.stopped: list[str] = []

    def render(self, spec: RunSpec) -> Submission:
        return Submission(spec, ({"kind": "Plan", "name": spec.name}, {"script": "#!/bin/sh\n"}))

    def submit(self, run: Run, submission: Submission, *, detach: bool = False) -> None:
        raise NotImplementedError

    def resume(self, run: Run) -> None:
        raise NotImplementedError

    def _shares(self, spec: RunSpec) -> Sequence[NodeShare]:
        return share_nodes(spec)

    def _places(self, run: Run) -> Sequence[Place]:
        return [Place(cast(Channel, machine), f"/f/runs/{run.name}", (machine.number,)) for machine in self.machines]

    def _channels(self) -> Sequence[Channel]:
        return [cast(Channel, machine) for machine in self.machines]

    def _judge(self, run: Run, snapshot: Snapshot, observation: Observation) -> Observation:
        return observation

    def _stop(self, run: Run, places: Sequence[Place]) -> None:
        self.stopped.append(run.name)


class Lab:
    """An engine with two machines, and the folder of their run."""

    def __init__(self, folder: Path) -> None:
        self.machines = Machine(0), Machine(1)
        self.engine = Engine(*self.machines)
        self.run = Run("abc", SPEC, folder, "2027")
        folder.mkdir()

    def log(self, rank: int) -> bytes:
        return RunFolder(self.run.folder).log(rank).read_bytes()

    def end(self) -> None:
        for machine in self.machines:
            machine.end()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time(1000.0)
    monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr("mlbench_cli.model.silence.time", found)
    return found


@pytest.fixture
def lab(tmp_path: Path, clock: Time) -> Lab:
    return Lab(tmp_path / "run")


def keep(lab: Lab, observation: Observation = EXITED) -> None:
    """The end is known here already."""
    RunFolder(lab.run.folder).write_observation(observation)


# --- looks ----------------------------------------------------------------------------------------------------------


def test_a_look_copies_what_is_new_of_all_logs(lab: Lab) -> None:
    one, other = lab.machines
    one.log, other.log = b"one\n", b""
    assert [worker.phase for worker in lab.engine.look(lab.run).workers] == ["running", "running"]
    one.log, other.log = b"one\ntwo\n", b"three\n"
    lab.engine.look(lab.run)
    assert (lab.log(0), lab.log(1)) == (b"one\ntwo\n", b"three\n")
    assert one.asked("sync") == [
        {"folder": "/f/runs/m-2", "nodes": {"0": {"0": 0}}},
        {"folder": "/f/runs/m-2", "nodes": {"0": {"0": 4}}},
    ]


def test_a_long_log_is_asked_for_until_little_is_left(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 2)  # an answer of 16 bytes or more may not be the last one
    machine = lab.machines[0]
    machine.log, machine.most = b"0123456789" * 4, 16
    lab.engine.look(lab.run)
    assert lab.log(0) == machine.log
    assert [each["nodes"]["0"]["0"] for each in machine.asked("sync")] == [0, 16, 32]


def test_a_client_keeps_its_own_runs_alive(lab: Lab) -> None:
    lab.engine.look(lab.run)
    assert not lab.machines[0].renewed
    lab.engine._owned.add("abc")
    lab.engine.look(lab.run)
    assert lab.machines[0].renewed


def test_the_end_is_read_from_the_folder_once_it_is_there(lab: Lab) -> None:
    keep(lab)
    assert lab.engine.look(lab.run) == EXITED
    assert list(lab.engine.watch(lab.run)) == [EXITED]
    lab.engine.cancel(lab.run)
    assert [machine.calls for machine in lab.machines] == [[], []]
    assert lab.engine.stopped == []


def test_machines_are_asked_twice_a_second_until_the_end(lab: Lab, clock: Time) -> None:
    times = []
    for observation in lab.engine.watch(lab.run):
        times.append(clock.now - 1000.0)
        if len(times) == 3:
            lab.end()
        last = observation
    assert (times, last.ended) == ([0.0, 0.5, 1.0, 1.5], Ending.EXITED)


def test_slow_machines_are_not_waited_for_twice(lab: Lab, clock: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that took 0.4 s leaves a tenth to wait; one that took longer, a moment."""
    times, seconds = [], iter((0.4, 3.0, 0.0))
    exchange = lab.machines[0].exchange

    def slow(*words: Any, **given: Any) -> Any:
        clock.now += next(seconds)
        return exchange(*words, **given)

    lab.engine = Engine(lab.machines[0])
    monkeypatch.setattr(lab.machines[0], "exchange", slow)
    with closing(lab.engine.watch(lab.run)) as observations:
        for _ in range(3):
            next(observations)
            times.append(clock.now - 1000.0)
    assert times == pytest.approx([0.4, 3.5, 3.55])


SILENT: list[Exception] = [UnreachableError("m1 does not answer."), RemoteError("m1", "no memory", "system")]


@pytest.mark.parametrize("error", SILENT)
def test_silent_machines_are_borne_for_a_while(
    lab: Lab, clock: Time, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setenv("MLBENCH_UNREACHABLE_TIMEOUT", "20s")
    observations = lab.engine.watch(lab.run)
    assert next(observations).workers[0].phase == "running"
    for machine in lab.machines:
        machine.error = error
    found: list[Observation] = []
    with pytest.raises(type(error)):
        found.extend(observations)
    assert 20 <= clock.now - 1000.0 < 21.1
    assert all(observation.workers[0].phase == "running" for observation in found)
    assert [finding.code for finding in found[-1].findings] == ["unreachable"]
    assert found[0].findings == ()


def test_machines_that_never_answered_have_workers_that_wait(lab: Lab) -> None:
    for machine in lab.machines:
        machine.error = UnreachableError("no")
    first = next(lab.engine.watch(lab.run))
    assert ([worker.rank for worker in first.workers], first.ended) == ([0, 1], None)


# --- logs -----------------------------------------------------------------------------------------------------------


def test_a_log_ends_when_its_machine_is_done(lab: Lab) -> None:
    one, other = lab.machines
    one.log = b"one\nno line end"
    assert [line.text for line in lab.engine.logs(lab.run, 0)] == [b"one\n"]
    one.end()
    assert [line.text for line in lab.engine.logs(lab.run, 0)] == [b"one\n"]  # looked at less than half a second ago
    lab.engine._synced.clear()
    assert [line.text for line in lab.engine.logs(lab.run, 0)] == [b"one\n", b"no line end"]
    other.log = b"half"
    assert [line.text for line in lab.engine.logs(lab.run, 1)] == []
    with pytest.raises(NotFoundError, match="has no rank 2"):
        list(lab.engine.logs(lab.run, 2))


def test_a_look_at_machines_serves_all_logs_for_a_moment(lab: Lab, clock: Time) -> None:
    for seconds, asked in ((0.0, 1), (0.44, 1), (0.02, 2)):
        clock.now += seconds
        list(lab.engine.logs(lab.run, 0))
        assert len(lab.machines[0].asked("sync")) == asked


def test_a_log_of_silent_machines_has_not_ended(lab: Lab) -> None:
    lab.machines[0].log = b"half"
    lab.engine.look(lab.run)
    lab.engine._synced.clear()
    for machine in lab.machines:
        machine.error = UnreachableError("no")
    assert list(lab.engine.logs(lab.run, 0)) == []
    keep(lab)
    assert [line.text for line in lab.engine.logs(lab.run, 0)] == [b"half"]


def test_a_log_is_followed_to_its_end(lab: Lab, clock: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.now += seconds
        lab.machines[0].log += b"line %d\n" % len(waits)
        if len(waits) == 2:
            lab.end()

    monkeypatch.setattr(clock, "sleep", sleep)
    assert [line.text for line in lab.engine.logs(lab.run, 0, follow=True)] == [b"line 1\n", b"line 2\n"]
    assert waits == [0.5, 0.5]


# --- results --------------------------------------------------------------------------------------------------------


def test_fetched_results_are_told_to_all_machines_and_described(lab: Lab) -> None:
    lab.machines[0].log = b"one\n"
    lab.end()
    found = lab.engine.fetch(lab.run)
    assert (found.files, found.complete, found.findings) == (0, False, ())  # no output was packed
    for machine in lab.machines:
        assert machine.asked("put") == [{"path": "/f/runs/m-2/fetched"}]
    manifests = lab.run.folder / "manifests"
    assert (manifests / "job.sh").read_text() == "#!/bin/sh\n"
    assert json.loads((manifests / "plan.json").read_text()) == {"kind": "Plan", "name": "m-2"}
    placement = json.loads((manifests / "placement.json").read_text())
    empty = dict.fromkeys(("host", "address", "interface", "master_address", "cpus", "gpus", "bound", "slurm"))
    assert placement == {
        "schema_version": 1,
        "nodes": [
            {"node": 0, "ranks": [0], "node_name": "m1", **empty},
            {"node": 1, "ranks": [1], "node_name": "m2", **empty},
        ],
    }


def test_results_of_a_silent_machine_are_waited_for(lab: Lab) -> None:
    lab.end()
    lab.machines[1].error = UnreachableError("m2 does not answer.")
    with pytest.raises(UnreachableError) as caught:
        lab.engine.fetch(lab.run)
    assert caught.value.message == "Results of m-2 are on m2, which is not responding: m2 does not answer."
    assert caught.value.hint == "mlbench wait m-2   tries again"
    assert lab.machines[0].asked("put") == []


def test_machines_that_were_silent_for_too_long_are_given_up(
    lab: Lab, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_UNREACHABLE_TIMEOUT", "20s")
    lab.end()
    lab.engine.look(lab.run)
    lab.machines[1].error = UnreachableError("m2 does not answer.")
    lab.engine._sync(lab.run)
    clock.now += 20.1
    gap, finding = lab.engine.fetch(lab.run).findings
    assert (gap.code, gap.evidence) == ("log_gap", {"ranks": [1]})
    assert (finding.code, finding.summary) == (
        "results_lost",
        "m2 has not responded for 20 s: output and ends of logs are missing.",
    )


def test_a_log_that_differs_from_its_digest_is_copied_again(lab: Lab) -> None:
    machine = lab.machines[0]
    machine.log = b"one\n"
    lab.end()
    lab.engine.look(lab.run)
    RunFolder(lab.run.folder).log(0).write_bytes(b"two\n")
    lab.engine.fetch(lab.run)
    assert lab.log(0) == b"one\n"
    machine.end(log=b"another")
    with pytest.raises(FetchError) as caught:
        lab.engine.fetch(lab.run)
    assert "The logs of ranks [0] of m-2 differ from the digests of their machines" in str(caught.value)


# --- stopping and removing ------------------------------------------------------------------------------------------


def test_a_run_is_stopped_by_a_mark_on_all_machines(lab: Lab) -> None:
    lab.machines[1].error = UnreachableError("no")  # the others stop nevertheless
    lab.engine.cancel(lab.run)
    assert lab.machines[0].asked("put") == [{"path": "/f/runs/m-2/cancel"}]
    assert lab.engine.stopped == ["m-2"]


def test_agents_have_eight_seconds_to_stop(lab: Lab, clock: Time) -> None:
    lab.engine._await_end(lab.run)
    assert clock.now - 1000.0 == pytest.approx(8.0, abs=0.21)
    lab.end()
    begun = clock.now
    assert lab.engine._await_end(lab.run).is_over
    assert clock.now == begun


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("running", 'The run "m-2" is still running.'),
        ("ended", 'The results of the run "m-2" have not been fetched.'),
        ("sealed", None),
        ("gone", None),
        ("never started", None),
    ],
)
def test_results_that_exist_nowhere_else_are_not_removed(lab: Lab, state: str, words: str | None) -> None:
    if state == "ended":
        lab.end()
    elif state == "sealed":
        (lab.run.folder / "SHA256SUMS").touch()
    elif state == "gone":
        for machine in lab.machines:
            machine.exists = False
    elif state == "never started":
        keep(lab, Observation(1.0, EXITED.workers, ended=Ending.NEVER_STARTED))
    if words is not None:
        with pytest.raises(UsageError) as caught:
            lab.engine.delete(lab.run)
        assert caught.value.message == words
        assert [machine.asked("remove") for machine in lab.machines] == [[], []]
        assert lab.run.folder.exists()
        return
    lab.engine.delete(lab.run)
    for machine in lab.machines:
        assert machine.asked("remove") == [{"folder": "/f/runs/m-2", "force": False}]
        assert machine.asked("end_processes") == []
    assert not lab.run.folder.exists()


def test_a_running_run_is_stopped_and_removed_by_force(lab: Lab) -> None:
    lab.engine.delete(lab.run, force=True)
    assert lab.engine.stopped == ["m-2"]
    for machine in lab.machines:
        words = [word for word, _ in machine.calls if word != "sync"]
        assert words == ["put", "end_processes", "remove"]
        assert machine.asked("remove") == [{"folder": "/f/runs/m-2", "force": True}]
    assert not lab.run.folder.exists()


def test_a_machine_that_cannot_remove_is_an_error_unless_by_force(lab: Lab) -> None:
    keep(lab, Observation(1.0, EXITED.workers, ended=Ending.NEVER_STARTED))
    (lab.run.folder / "SHA256SUMS").touch()
    lab.machines[1].error = RemoteError("m2", "it is busy", "refused")
    with pytest.raises(RemoteError, match="m2: it is busy"):
        lab.engine.delete(lab.run)
    assert lab.run.folder.exists()
    lab.engine.delete(lab.run, force=True)
    assert not lab.run.folder.exists()
