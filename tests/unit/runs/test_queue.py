"""Queues of experiments on clusters: what an engine does not know yet, several runs at a time, and who may stop it."""

import fcntl
import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent.processes import process_origin
from mlbench_cli.errors import DeadlineError, MlbenchError, NeverStartedError, NotFoundError, Terminated, UsageError
from mlbench_cli.model.run import Cluster, Ending, Experiment, Member, Observation, Outcome, Run, RunState, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs import queue, supervise
from mlbench_cli.runs.recording import record
from mlbench_cli.runs.removal import delete_run
from mlbench_cli.runs.snapshot import read_states
from mlbench_cli.storage.queue_folder import QueueFolder, QueueState, clear_queued, read_queued, write_queued
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.storage.store import Store
from tests.fakes.engine import FakeEngine

CREATED = "2026-01-01T00:00:00.000Z"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    store.record_cluster(Cluster("c", "attached"))
    return store


def experiment_of(store: Store, count: int, parallel: int = 1) -> tuple[Experiment, list[Run]]:
    runs = []
    for number in range(1, count + 1):
        spec = RunSpec(f"x-{number}", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 1, seed=number)
        runs.append(Run(f"run{number}", spec, store.folder / "runs" / f"run{number}", CREATED))
    members = tuple(Member(index, run.id, run.spec.content_hash) for index, run in enumerate(runs))
    experiment = Experiment("e", "x", CREATED, {}, members, parallel=parallel)
    record(experiment, runs, store)
    return experiment, runs


def test_a_run_that_waits_is_not_asked_of_its_cluster(store: Store) -> None:
    experiment, (run,) = experiment_of(store, 1)
    engine = FakeEngine()
    with queue.hold(experiment, store):
        (status,) = read_states(store.runs(), lambda _: engine)
        assert (status.state, status.problem) == ("created", None)
    (status,) = read_states(store.runs(), lambda _: engine)
    assert "its runs have ended" in str(status.problem)
    with pytest.raises(NeverStartedError, match="has not been started") as caught:
        supervise.follow(run, engine, store)
    assert "mlbench run x" in str(caught.value.hint)
    assert engine.calls == []


def test_only_one_process_is_the_queue(store: Store) -> None:
    experiment, _ = experiment_of(store, 1)
    folder = QueueFolder.of(store.folder, experiment.id)
    assert folder.find_state() is QueueState.ENDED
    with queue.hold(experiment, store):
        assert folder.find_state() is QueueState.ALIVE
        with pytest.raises(UsageError, match=f"process {os.getpid()}"), queue.hold(experiment, store):
            pass
    assert folder.find_state() is QueueState.ENDED
    with pytest.raises(ValueError, match="boom"), queue.hold(experiment, store):
        raise ValueError("boom")
    assert folder.explain_end() == "ValueError: boom"


def test_a_queue_whose_runs_have_ended_is_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its last steps. On a busy machine, a client that has waited for its runs can be there first."""
    monkeypatch.setattr(queue, "_LAST_STEPS", 0.0)
    experiment, (run,) = experiment_of(store, 1)
    descriptor = QueueFolder.of(store.folder, experiment.id).acquire()
    assert descriptor is not None
    with pytest.raises(UsageError, match="is running"), queue.hold(experiment, store):
        pass
    store.update_run(run, RunState.FINISHED, Outcome.COMPLETED)
    threading.Timer(0.2, os.close, [descriptor]).start()
    with queue.hold(experiment, store):
        pass


def test_a_queue_on_another_machine_is_unknown_from_here(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, _ = experiment_of(store, 1)
    folder = QueueFolder.of(store.folder, experiment.id)
    folder.path.mkdir()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("mlbench_cli.agent.processes.boot_id", lambda: "another")
        far = os.uname_result(("Linux", "far", "", "", ""))
        elsewhere.setattr("mlbench_cli.storage.queue_folder.os.uname", lambda: far)
        folder.write_holder(1, is_detached=True)
    assert folder.find_state() is QueueState.UNKNOWN
    with pytest.raises(UsageError, match="is running: queue, process 1 on far"), queue.hold(experiment, store):
        pass
    with pytest.raises(UsageError, match="cannot be reached from this machine"):
        queue.stop(experiment, store.folder, "stopped")


class Rendezvous(FakeEngine):
    """An engine whose runs end once `count` of them have been submitted."""

    barrier: threading.Barrier

    def submit(self, run: Run, submission: object, *, detach: bool = False) -> None:
        self.barrier.wait(timeout=30)


@pytest.mark.parametrize("parallel", [1, 3])
def test_as_many_runs_at_a_time_as_were_asked_for(store: Store, monkeypatch: pytest.MonkeyPatch, parallel: int) -> None:
    experiment, runs = experiment_of(store, 3, parallel)
    barrier = threading.Barrier(parallel)

    def connect_engine(cluster: Cluster, report: object) -> FakeEngine:
        engine = Rendezvous([Observation(1.0, (WorkerState(0, "succeeded", exit_code=0),), ended=Ending.EXITED)])
        engine.barrier = barrier
        return engine

    monkeypatch.setattr(queue, "connect_engine", connect_engine)
    assert queue._work(experiment, [run.id for run in runs], store.folder) == []
    assert {row.state for row in store.runs()} == {RunState.FINISHED}
    assert [read_queued(run.folder) for run in runs] == [None] * 3


def test_a_run_that_was_deleted_meanwhile_is_not_started(store: Store) -> None:
    experiment, (run,) = experiment_of(store, 1)
    engine = FakeEngine()
    delete_run(run, store)
    with pytest.raises(NotFoundError, match="was deleted before it was started"):
        queue.start_member(experiment, run, engine, store, detach=True)
    assert engine.calls == []
    assert not run.folder.exists()


def test_a_run_that_its_queue_starts_while_deletion_waits_is_deleted_from_its_cluster(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, (run,) = experiment_of(store, 1)
    engine, waits = FakeEngine(), threading.Event()
    monkeypatch.setattr("mlbench_cli.runs.removal.connect_engine", lambda cluster: engine)
    with RunFolder(run.folder).lock():  # as the queue does that hands the run over
        home = store.folder

        def delete() -> None:
            delete_run(run, Store(home), notice=lambda text: waits.set())

        thread = threading.Thread(target=delete)
        thread.start()
        assert waits.wait(30)
        write_queued(run.folder, experiment.id, experiment.name, is_starting=True)
    thread.join(30)
    assert "delete" in str(engine.calls)


def test_a_lock_in_a_folder_that_was_removed_keeps_nobody_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, flock = QueueFolder.of(store.folder, "e"), fcntl.flock

    def remove_first(descriptor: int, operation: int) -> None:
        shutil.rmtree(folder.path)
        flock(descriptor, operation)

    monkeypatch.setattr("mlbench_cli.storage.queue_folder.fcntl.flock", remove_first)
    assert folder.acquire() is None
    monkeypatch.undo()
    descriptor = folder.acquire()
    assert descriptor is not None
    os.close(descriptor)


# --- how a queue ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Terminated("SIGTERM"), "it was stopped by SIGTERM"),
        (KeyboardInterrupt(), "Ctrl-C stopped it"),
        (UsageError("The disk is full."), "The disk is full"),
        (OSError("no space"), "OSError: no space"),
    ],
)
def test_why_a_queue_ended_in_words(store: Store, error: BaseException, words: str) -> None:
    experiment, _ = experiment_of(store, 1)
    with pytest.raises(type(error)), queue.hold(experiment, store):
        raise error
    assert QueueFolder.of(store.folder, experiment.id).explain_end() == words


def test_a_queue_that_was_handed_over_does_not_end_with_its_client(store: Store) -> None:
    experiment, _ = experiment_of(store, 1)
    with queue.hold(experiment, store) as held:
        held.is_handed_over = True
    holder = held.folder.read_holder()
    assert holder is not None
    assert (holder.ended, holder.is_detached) == (None, False)


def test_the_trouble_of_a_client_is_not_that_of_the_queue_that_it_handed_over(store: Store) -> None:
    experiment, _ = experiment_of(store, 1)

    def hand_over() -> None:
        with queue.hold(experiment, store) as held:
            held.is_handed_over = True
            raise UsageError("x")

    with pytest.raises(UsageError):
        hand_over()
    holder = QueueFolder.of(store.folder, experiment.id).read_holder()
    assert holder is not None
    assert holder.ended is None


def test_a_queue_of_an_experiment_that_was_not_recorded_leaves_no_folder(store: Store) -> None:
    unrecorded = Experiment("other", "y", CREATED, {}, ())
    with queue.hold(unrecorded, store) as held:
        assert held.folder.path.is_dir()
    assert not held.folder.path.exists()


def test_a_queue_that_has_ended_is_not_stopped(store: Store) -> None:
    experiment, _ = experiment_of(store, 1)
    notices: list[str] = []
    assert not queue.stop(experiment, store.folder, "stopped", notices.append)
    with queue.hold(experiment, store):
        pass
    assert not queue.stop(experiment, store.folder, "stopped", notices.append)
    assert notices == []


def test_a_queue_that_does_not_end_is_reported_after_its_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, _ = experiment_of(store, 1)
    signals: list[int] = []
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(queue, "_terminate", lambda pid, folder: signals.append(pid))
    with queue.hold(experiment, store), monkeypatch.context() as fast:
        fast.setattr(queue, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
        notices: list[str] = []
        with pytest.raises(DeadlineError, match="has not ended within") as caught:
            queue.stop(experiment, store.folder, "stopped", notices.append)
    assert signals == [os.getpid()]
    assert caught.value.hint == "mlbench cancel x"
    assert notices[0].startswith(f"Stopping the mlbench run, process {os.getpid()} on ")
    assert queue.STOP_SECONDS <= clock[0] < queue.STOP_SECONDS + 1


def test_the_reason_of_who_stopped_a_queue_is_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, _ = experiment_of(store, 1)
    folder = QueueFolder.of(store.folder, experiment.id)
    states = iter([QueueState.ALIVE, QueueState.ENDED])
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_holder(os.getpid(), is_detached=True)
    monkeypatch.setattr(QueueFolder, "find_state", lambda self: next(states))
    monkeypatch.setattr(queue, "_terminate", lambda pid, folder: None)
    assert queue.stop(experiment, store.folder, "mlbench cancel stopped it")
    assert folder.explain_end() == "mlbench cancel stopped it"


def test_problems_of_single_runs_do_not_end_a_queue(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, runs = experiment_of(store, 3)
    store.update_run(runs[0], RunState.FINISHED)
    delete_run(runs[1], store)

    def connect_engine(cluster: Cluster, report: object) -> FakeEngine:
        raise UsageError("The cluster is gone.")

    monkeypatch.setattr(queue, "connect_engine", connect_engine)
    assert queue._work(experiment, [run.id for run in runs], store.folder) == ["x-3: The cluster is gone"]


# --- a process of its own --------------------------------------------------------------------------------------------


class Process:
    """What `subprocess.Popen` is asked for; the process says `answer` when it is ready, and prints `log`."""

    def __init__(self, answer: bytes = b"ok\n", log: bytes = b"") -> None:
        self.answer, self.log = answer, log
        self.words: list[str] = []
        self.options: dict[str, Any] = {}

    def __call__(self, words: list[str], **options: Any) -> Any:
        self.words, self.options = words, options
        options["stdout"].write(self.log)
        options["stdout"].flush()
        os.write(options["pass_fds"][1], self.answer)
        return SimpleNamespace(pid=4321)


def test_a_queue_is_handed_to_a_process_that_outlives_this_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, runs = experiment_of(store, 2)
    process = Process()
    monkeypatch.setattr("mlbench_cli.runs.queue.subprocess.Popen", process)
    with queue.hold(experiment, store) as held:
        assert queue.start(experiment, runs, store.folder, held) == 4321
        lock, said = process.options["pass_fds"]
        assert (held.is_handed_over, lock) == (True, held.descriptor)
        holder = held.folder.read_holder()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(said)
    assert holder is not None
    assert (holder.pid, holder.is_detached, holder.ended) == (4321, True, None)
    assert process.words[-6:] == [str(store.folder), "x", str(lock), str(said), "run1", "run2"]
    assert process.options["start_new_session"] is True
    assert process.options["stdin"] == subprocess.DEVNULL
    assert process.options["stderr"] == subprocess.STDOUT


@pytest.mark.parametrize(
    ("answer", "log", "reason"),
    [
        (b"", b"", "it said nothing"),
        (b"", b"one\nImportError: no\n", "ImportError: no"),
        (b"no\n", b"x" * 400, "x" * 300),
    ],
)
def test_a_queue_that_does_not_start_says_why(
    store: Store, monkeypatch: pytest.MonkeyPatch, answer: bytes, log: bytes, reason: str
) -> None:
    experiment, runs = experiment_of(store, 1)
    monkeypatch.setattr("mlbench_cli.runs.queue.subprocess.Popen", Process(answer, log))
    with pytest.raises(MlbenchError) as caught, queue.hold(experiment, store) as held:
        queue.start(experiment, runs, store.folder, held)
    assert caught.value.message == (
        f'The queue of "x" could not be started: {reason}. Its runs are recorded, but none started.'
    )
    assert caught.value.hint == "mlbench logs x --queue, then repeat the command"
    assert not held.is_handed_over


def run_main(store: Store, name: str, *ids: str) -> bytes:
    """What the process says to the one that has started it."""
    told, said = os.pipe()
    lock = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(lock, True)
    try:
        queue.main([str(store.folder), name, str(lock), str(said), *ids])
        assert not os.get_inheritable(lock)  # its children must not keep it
        return os.read(told, 99)
    finally:
        os.close(lock)
        os.close(told)


@pytest.mark.parametrize(
    ("problems", "end"),
    [([], "all its runs have ended"), (["x-1: no", "x-2: gone"], "x-1: no; x-2: gone")],
)
def test_the_process_says_when_it_is_ready_and_why_it_ended(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    problems: list[str],
    end: str,
) -> None:
    experiment, _ = experiment_of(store, 2, parallel=3)
    folder = QueueFolder.of(store.folder, experiment.id)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_holder(os.getpid(), is_detached=True)
    asked: list[Any] = []

    def work(_: Experiment, ids: list[str], home: Path) -> list[str]:
        asked.append((ids, home))
        return problems

    monkeypatch.setattr(queue, "_work", work)
    assert run_main(store, "x", "run1", "run2") == b"ok\n"
    assert asked == [(["run1", "run2"], store.folder)]
    holder = folder.read_holder()
    assert holder is not None
    assert (holder.ended, holder.is_detached) == (end, True)
    assert capsys.readouterr().out.endswith("Z queue of x: 2 runs, 3 at a time\n")


def test_the_process_of_an_experiment_that_was_deleted_ends(store: Store) -> None:
    with pytest.raises(SystemExit, match='The experiment "y" was deleted'):
        run_main(store, "y")


def test_what_a_queue_does_with_each_run(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It starts what is recorded, detached, and follows what runs already."""
    experiment, runs = experiment_of(store, 2)
    store.update_run(runs[1], RunState.RUNNING)
    clear_queued(runs[1].folder)
    submitted: list[tuple[str, bool]] = []

    class Engine(FakeEngine):
        def submit(self, run: Run, submission: object, *, detach: bool = False) -> None:
            submitted.append((run.name, detach))

    def connect_engine(cluster: Cluster, report: object) -> FakeEngine:
        assert cluster.name == "c"
        return Engine([Observation(1.0, (WorkerState(0, "succeeded", exit_code=0),), ended=Ending.EXITED)])

    monkeypatch.setattr(queue, "connect_engine", connect_engine)
    assert queue._work(experiment, [run.id for run in runs], store.folder) == []
    assert submitted == [("x-1", True)]
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["x-1: starting", "x-1 completed.", "x-2 completed."]


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Signals that were sent, and how."""
    found: list[tuple[str, int, int]] = []
    monkeypatch.setattr("mlbench_cli.runs.queue.os.kill", lambda pid, number: found.append(("kill", pid, number)))
    monkeypatch.setattr(
        "mlbench_cli.runs.queue.signal.pidfd_send_signal",
        lambda handle, number: found.append(("handle", handle, number)),
        raising=False,
    )
    return found


@pytest.mark.parametrize("is_alive", [True, False])
@pytest.mark.parametrize("has_handles", [True, False])
def test_only_the_process_that_holds_the_queue_gets_a_signal(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    signals: list[tuple[str, int, int]],
    is_alive: bool,
    has_handles: bool,
) -> None:
    experiment, _ = experiment_of(store, 1)
    folder = QueueFolder.of(store.folder, experiment.id)
    handle = os.open(os.devnull, os.O_RDONLY) if has_handles else -1
    state = QueueState.ALIVE if is_alive else QueueState.ENDED
    monkeypatch.setattr(queue, "process_handle", lambda pid: handle)
    monkeypatch.setattr(QueueFolder, "find_state", lambda self: state)
    queue._terminate(4321, folder)
    sent = ("handle", handle, 15) if has_handles else ("kill", 4321, 15)
    assert signals == ([sent] if is_alive else [])
    if has_handles:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)


def test_a_process_that_has_gone_needs_no_signal(
    store: Store, monkeypatch: pytest.MonkeyPatch, signals: list[tuple[str, int, int]]
) -> None:
    def process_handle(pid: int) -> int:
        raise ProcessLookupError

    monkeypatch.setattr(queue, "process_handle", process_handle)
    queue._terminate(4321, QueueFolder.of(store.folder, "e"))
    assert signals == []


def test_a_queue_in_another_container_cannot_be_stopped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, _ = experiment_of(store, 1)
    with queue.hold(experiment, store):
        origin = process_origin()
        monkeypatch.setattr(queue, "process_origin", lambda: {**origin, "pid_namespace": 1})
        with pytest.raises(UsageError, match="cannot be reached from this machine") as caught:
            queue.stop(experiment, store.folder, "stopped")
    assert str(caught.value.hint).endswith(": mlbench cancel x")
