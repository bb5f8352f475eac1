"""Queues of experiments on clusters: what an engine does not know yet, several runs at a time, and who may stop it."""

import fcntl
import os
import shutil
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from mlbench_cli.engines.local.engine import LOCK, LocalEngine
from mlbench_cli.errors import NeverStartedError, NotFoundError, UnreachableError, UsageError
from mlbench_cli.model.run import (
    Cluster,
    Ending,
    Experiment,
    Member,
    Observation,
    Outcome,
    Run,
    RunState,
    WorkerState,
)
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs import queue, supervise
from mlbench_cli.runs.experiment_status import experiment_status
from mlbench_cli.runs.finalize import finalize
from mlbench_cli.runs.queue import QueueFolder
from mlbench_cli.runs.recording import record
from mlbench_cli.runs.removal import delete_run
from mlbench_cli.runs.snapshot import read_states
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.storage.store import Store
from tests.fakes.engine import FakeEngine

CREATED = "2026-01-01T00:00:00.000Z"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    store.record_cluster(Cluster("c", "attached"))
    return store


def experiment_of(
    store: Store, count: int, parallel: int = 1, engine: str = "kubernetes", sizes: tuple[int, ...] = ()
) -> tuple[Experiment, list[Run]]:
    runs = []
    for number, workers in enumerate(sizes or (1,) * count, 1):
        spec = RunSpec(f"x-{number}", "c", engine, "custom", "custom", ("true",), "gloo", workers, seed=number)
        runs.append(Run(f"run{number}", spec, store.folder / "runs" / f"run{number}", CREATED))
    members = tuple(Member(index, run.id, run.spec.content_hash) for index, run in enumerate(runs))
    experiment = Experiment("e", "x", CREATED, {}, members, parallel=parallel)
    record(experiment, runs, store)
    return experiment, runs


def test_a_cluster_that_does_not_answer_is_asked_once(store: Store) -> None:
    for number in range(3):
        store.record_run(RunSpec(f"x-{number}", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 1))
    asked: list[Run] = []

    def refuse(run: Run) -> NoReturn:
        asked.append(run)
        raise UnreachableError("c does not answer.")

    found = list(read_states(store.runs(), refuse))
    assert [(status.state, status.problem) for status in found] == [("submitted", "c does not answer.")] * 3
    assert len(asked) == 1


def test_a_run_that_waits_is_not_asked_of_its_cluster(store: Store) -> None:
    experiment, (run,) = experiment_of(store, 1)
    engine = FakeEngine()
    with queue.hold(experiment, store):
        (status,) = read_states(store.runs(), lambda _: engine)
        assert (status.state, status.problem) == ("queued", None)
    (status,) = read_states(store.runs(), lambda _: engine)
    assert "its runs have ended" in str(status.problem)
    with pytest.raises(NeverStartedError, match="has not been started") as caught:
        supervise.follow(run, engine, store)
    assert "mlbench run x" in str(caught.value.hint)
    assert engine.calls == []


def test_a_run_whose_agent_is_about_to_tell_of_it_is_not_lost_with_its_queue(store: Store) -> None:
    """The queue was killed between the start of the agent, which has the lock, and the agent's first state."""
    _, (run,) = experiment_of(store, 1, engine="local")
    (run.folder / ".state").mkdir()
    with open(run.folder / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (status,) = read_states(store.runs(), lambda _: LocalEngine())
        assert (status.state, status.problem) == ("queued", None)
    (status,) = read_states(store.runs(), lambda _: LocalEngine())
    assert "has not been started" in str(status.problem)


def test_the_time_left_is_that_of_runs_of_the_same_size_as_many_at_a_time_as_were_asked_for(store: Store) -> None:
    experiment, runs = experiment_of(store, 6, parallel=2, sizes=(1, 1, 2, 1, 1, 2))
    for run, seconds in zip(runs, (10.0, 20.0, 60.0), strict=False):
        workers = [
            WorkerState(rank, "succeeded", exit_code=0, started=100.0, finished=100.0 + seconds)
            for rank in range(run.spec.workers)
        ]
        finalize(run, FakeEngine([Observation(200.0, tuple(workers), ended=Ending.EXITED)]), store)
    store.advance(runs[3], RunState.FINISHED, Outcome.CANCELED)
    with queue.hold(experiment, store):
        states = list(read_states(store.runs(), lambda _: FakeEngine()))
        found = experiment_status(experiment, states, store, lambda _: FakeEngine())
    assert (found.finished, found.failed, found.canceled, found.total) == (4, 0, 1, 6)
    assert found.eta == (15.0 + 60.0) / 2


def test_only_one_process_is_the_queue(store: Store) -> None:
    experiment, _ = experiment_of(store, 1)
    folder = QueueFolder.of(store.folder, experiment.id)
    assert folder.is_held() is False
    with queue.hold(experiment, store):
        assert folder.is_held() is True
        with pytest.raises(UsageError, match=f"process {os.getpid()}"), queue.hold(experiment, store):
            pass
    assert folder.is_held() is False
    with pytest.raises(ValueError, match="boom"), queue.hold(experiment, store):
        raise ValueError("boom")
    assert folder.explain_end() == "ValueError: boom"
    folder.write_holder(7, is_detached=True)
    folder.log.write_text("x-1: starting\nOut of memory\n")
    assert folder.explain_end() == "its process 7 was killed; its log ends with: Out of memory"


def test_a_queue_on_another_machine_is_unknown_from_here(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, _ = experiment_of(store, 1)
    folder = QueueFolder.of(store.folder, experiment.id)
    folder.path.mkdir()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("mlbench_cli.agent.processes.boot_id", lambda: "another")
        far = os.uname_result(("Linux", "far", "", "", ""))
        elsewhere.setattr("mlbench_cli.runs.queue.os.uname", lambda: far)
        folder.write_holder(1, is_detached=True)
    assert folder.is_held() is None
    with pytest.raises(UsageError, match="is running: queue, process 1 on far"), queue.hold(experiment, store):
        pass
    with pytest.raises(UsageError, match="cannot be reached from this machine"):
        queue.stop(experiment, store.folder, "stopped")
    begun = folder.read_holder()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("mlbench_cli.agent.processes.boot_id", lambda: "another")
        elsewhere.setattr("mlbench_cli.runs.queue.now", lambda: "2099-01-01T00:00:00.000Z")
        folder.write_end("it was stopped there")
    ended = folder.read_holder()
    assert begun is not None
    assert ended is not None
    assert (ended.started, ended.ended) == (begun.started, "it was stopped there")
    assert folder.is_held() is False


class Rendezvous(FakeEngine):
    """An engine whose runs end once `count` of them have been submitted."""

    barrier: threading.Barrier

    def submit(self, run: Run, submission: object) -> None:
        self.barrier.wait(timeout=120)


@pytest.mark.parametrize("parallel", [1, 3])
def test_as_many_runs_at_a_time_as_were_asked_for(store: Store, monkeypatch: pytest.MonkeyPatch, parallel: int) -> None:
    experiment, runs = experiment_of(store, 3, parallel)
    barrier = threading.Barrier(parallel)

    def connect_engine(cluster: Cluster, report: object) -> FakeEngine:
        engine = Rendezvous([Observation(1.0, (WorkerState(0, "succeeded", exit_code=0),), ended=Ending.EXITED)])
        engine.barrier = barrier
        return engine

    monkeypatch.setattr(supervise, "connect_engine", connect_engine)
    with queue.hold(experiment, store) as held:
        ready, said = os.pipe()
        supervise.main(
            [str(store.folder), experiment.name, *map(str, (held.descriptor, said)), *(run.id for run in runs)]
        )
        assert os.read(ready, 3) == b"ok\n"
        os.close(ready)
    assert {row.state for row in store.runs()} == {RunState.FINISHED}
    assert all(row.queue is None for row in store.runs())


def test_a_run_that_was_deleted_meanwhile_is_not_started(store: Store) -> None:
    _, (run,) = experiment_of(store, 1)
    engine = FakeEngine()
    delete_run(run, store)
    with pytest.raises(NotFoundError, match="was deleted before it was started"):
        supervise.start_member(run, engine, store)
    assert engine.calls == []
    assert not run.folder.exists()


def test_a_run_that_its_queue_starts_while_deletion_waits_is_deleted_from_its_cluster(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (run,) = experiment_of(store, 1)
    engine, waits = FakeEngine(), threading.Event()
    monkeypatch.setattr("mlbench_cli.runs.removal.connect_engine", lambda *_: engine)
    with RunFolder(run.folder).lock():  # as the queue does that hands the run over
        home = store.folder

        def delete() -> None:
            delete_run(run, Store(home), notice=lambda text: waits.set())

        thread = threading.Thread(target=delete)
        thread.start()
        assert waits.wait(120)
        store.advance(run, RunState.SUBMITTED)
    thread.join(120)
    assert "delete" in str(engine.calls)


def test_a_lock_in_a_folder_that_was_removed_keeps_nobody_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, flock = QueueFolder.of(store.folder, "e"), fcntl.flock

    def remove_first(descriptor: int, operation: int) -> None:
        shutil.rmtree(folder.path)
        flock(descriptor, operation)

    monkeypatch.setattr("mlbench_cli.agent.processes.fcntl.flock", remove_first)
    assert folder.acquire() is None
    monkeypatch.undo()
    descriptor = folder.acquire()
    assert descriptor is not None
    os.close(descriptor)
