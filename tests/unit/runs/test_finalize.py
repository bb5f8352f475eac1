"""Completing a run's archive, with an engine that plays what it is given."""

import errno
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.base import Fetched
from mlbench_cli.errors import DeadlineError, MlbenchError, NotFoundError
from mlbench_cli.model.run import Ending, Finding, Observation, Outcome, Phase, Run, RunState, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.documents import write_run_document
from mlbench_cli.runs import finalize as module
from mlbench_cli.runs.finalize import finalize, finalize_folder
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.storage.store import Store
from tests.fakes.engine import FakeEngine

REASON = Finding("results_lost", "The keeper lost the output of worker 0.", hint="Run it again.")


@pytest.mark.parametrize(
    ("findings", "codes"),
    [((), ["output_lost"]), ((REASON,), ["results_lost"]), ((Finding("log_gap", "x"),), ["output_lost", "log_gap"])],
)
def test_a_loss_is_said_once_by_who_knows_why(tmp_path: Path, findings: tuple[Finding, ...], codes: list[str]) -> None:
    store = Store(tmp_path)
    run = store.record_run(RunSpec("r-1", "far", "kubernetes", "custom", "custom", ("true",), "gloo", 1))
    write_run_document(run, None)
    ended = Observation(1.0, (WorkerState(0, Phase.SUCCEEDED, exit_code=0),), ended=Ending.EXITED)
    engine = FakeEngine([ended])
    engine.fetched = Fetched(0, 0, complete=False, findings=findings)
    finished = finalize(run, engine, store)
    assert finished is not None
    assert [finding.code for finding in finished.findings] == codes


ENDED = Observation(1.0, (WorkerState(0, Phase.SUCCEEDED, exit_code=0),), ended=Ending.EXITED)
FAILED = Observation(1.0, (WorkerState(0, Phase.FAILED, exit_code=3),), ended=Ending.EXITED)
RUNNING = Observation(1.0, (WorkerState(0, Phase.RUNNING),))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose end the user's command was told of."""
    found: list[str] = []
    monkeypatch.setattr(module, "run_on_end", lambda finished, notice: found.append(finished.run.name))
    return found


def record(store: Store, engine: str = "kubernetes") -> Run:
    run = store.record_run(RunSpec("r-1", "far", engine, "custom", "custom", ("true",), "gloo", 1))
    write_run_document(run, None)
    return run


def test_a_run_that_has_not_ended_stays_as_it_is(store: Store, hooks: list[str]) -> None:
    run = record(store)
    engine = FakeEngine([RUNNING])
    assert finalize(run, engine, store) is None
    assert engine.calls == ["look"]
    assert (store.run("r-1").state, hooks) == (RunState.CREATED, [])
    assert not RunFolder(run.folder).is_sealed


def test_a_run_is_completed_once(store: Store, hooks: list[str]) -> None:
    run = record(store)
    engine = FakeEngine([ENDED], logs={0: [b"one\n"]})
    finished = finalize(run, engine, store)
    assert finished is not None
    assert (finished.outcome, finished.summary) == (Outcome.COMPLETED, "r-1 completed.")
    assert (store.run("r-1").state, store.run("r-1").outcome) == (RunState.FINISHED, Outcome.COMPLETED)
    assert (engine.calls, hooks) == (["look", "fetch"], ["r-1"])
    assert (run.folder / "logs" / "rank-0.log").read_bytes() == b"one\n"
    store.update_run(run, RunState.RUNNING)
    again = finalize(run, FakeEngine([RUNNING]), store)
    assert again is not None
    assert again.outcome is Outcome.COMPLETED
    assert (store.run("r-1").state, hooks) == (RunState.FINISHED, ["r-1"])


def test_what_was_seen_first_of_the_end_counts(store: Store, hooks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the archive is sealed, the cluster may forget how the run ended, or report another end."""
    run = record(store)
    engine = FakeEngine([RUNNING])

    def fetch(_: Run) -> Fetched:
        raise DeadlineError("It takes too long.")

    monkeypatch.setattr(engine, "fetch", fetch)
    with pytest.raises(DeadlineError):
        finalize(run, engine, store, FAILED)
    assert (RunFolder(run.folder).read_observation(), engine.calls) == (FAILED, [])
    finished = finalize(run, FakeEngine([ENDED]), store, ENDED)
    assert finished is not None
    assert finished.outcome is Outcome.FAILED


def test_a_finding_that_the_observation_has_is_not_repeated(store: Store, hooks: list[str]) -> None:
    run = record(store)
    engine = FakeEngine()
    gap, other = Finding("log_gap", "Lines are missing."), Finding("other", "Something else.")
    engine.fetched = Fetched(0, 0, findings=(Finding("log_gap", "Again."), other))
    finished = finalize(run, engine, store, Observation(1.0, ENDED.workers, (gap,), Ending.EXITED))
    assert finished is not None
    assert [(finding.code, finding.summary) for finding in finished.findings] == [
        ("log_gap", "Lines are missing."),
        ("other", "Something else."),
    ]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_run_that_was_deleted_is_not_completed(store: Store, hooks: list[str], is_sealed: bool) -> None:
    run = record(store)
    if is_sealed:
        finalize(run, FakeEngine([ENDED]), store)
    store.forget_run(run)
    with pytest.raises(NotFoundError) as caught:
        finalize(run, FakeEngine([ENDED]), store)
    assert (caught.value.message, caught.value.hint) == ('The run "r-1" was deleted in the meantime.', "mlbench status")


def full(number: int) -> MlbenchError:
    """An error of mlbench whose cause is one of the disk."""
    error = MlbenchError("It cannot be written.")
    error.__context__ = OSError(number, "no")
    return error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "quota"), full(errno.ENOSPC)])
def test_a_full_disk_leaves_the_archive_for_later(
    store: Store, hooks: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = record(store)
    engine = FakeEngine([ENDED])

    def fetch(_: Run) -> Fetched:
        raise error

    monkeypatch.setattr(engine, "fetch", fetch)
    finished = finalize(run, engine, store)
    assert finished is not None
    assert (finished.outcome, finished.result) == (Outcome.COMPLETED, None)
    finding = finished.findings[-1]
    assert finding.to_dict() == {
        **Finding("archive_unfinished", "").to_dict(),
        "summary": f"The disk is full: the archive of r-1 in {run.folder} could not be completed.",
        "hint": "Free up disk space, then: mlbench wait r-1",
        "retryable": True,
    }
    assert (store.run("r-1").state, hooks) == (RunState.CREATED, [])
    assert finished.exit_code() == 8


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), full(errno.EIO), MlbenchError("Something else.")])
def test_other_trouble_is_an_error(store: Store, hooks: list[str], monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    run = record(store)
    engine = FakeEngine([ENDED])

    def fetch(_: Run) -> Fetched:
        raise error

    monkeypatch.setattr(engine, "fetch", fetch)
    with pytest.raises(type(error)):
        finalize(run, engine, store)


# --- by the agent of a local run ------------------------------------------------------------------------------------


def test_an_agent_completes_the_run_of_its_folder(
    store: Store, hooks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record(store, "local")
    monkeypatch.setattr("mlbench_cli.engines.local.engine.LocalEngine", lambda: FakeEngine([ENDED]))
    finalize_folder(run.folder)
    assert (store.run("r-1").outcome, hooks) == (Outcome.COMPLETED, ["r-1"])


def test_an_agent_of_a_deleted_run_completes_nothing(
    store: Store, hooks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlbench_cli.engines.local.engine.LocalEngine", lambda: FakeEngine([ENDED]))
    run = record(store, "local")
    store.forget_run(run)
    finalize_folder(run.folder)
    (run.folder / "run.json").unlink()
    finalize_folder(run.folder)
    assert hooks == []
