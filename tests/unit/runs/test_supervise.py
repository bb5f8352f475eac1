"""Following and stopping a run, whatever its engine: what is reported, recorded, waited for, and given up.

Time passes only where the product sleeps, and where an observation of the engine says so.
"""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.base import Fetched
from mlbench_cli.errors import CredentialError, DeadlineError, MlbenchError, NeverStartedError, UnreachableError
from mlbench_cli.model.run import Ending, Finding, Observation, Outcome, Run, RunState, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.documents import write_run_document
from mlbench_cli.runs import supervise
from mlbench_cli.runs.progress import Progress
from mlbench_cli.storage.queue_folder import QueueFolder, clear_queued, write_queued
from mlbench_cli.storage.store import Store
from tests.fakes.clock import Clock
from tests.fakes.engine import FakeEngine

RUNNING = Observation(2.0, (WorkerState(0, "running", started=1.0),))
PENDING = Observation(1.0, (WorkerState(0, "pending"),))
EXITED = Observation(3.0, (WorkerState(0, "succeeded", exit_code=0, started=1.0, finished=3.0),), ended=Ending.EXITED)
NO_IMAGE = Finding("image_not_found", "There is no such image.", permanent=True)
SLOW = Finding("slow", "The image is large.", hint="Wait.")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(1000.0)
    monkeypatch.setattr(supervise, "time", found)
    monkeypatch.setattr("mlbench_cli.model.silence.time", found)
    return found


def record(store: Store, engine: str = "kubernetes") -> Run:
    run = store.record_run(RunSpec("r-1", "far", engine, "custom", "custom", ("true",), "gloo", 1))
    write_run_document(run, None)
    return run


class Passing(FakeEngine):
    """Each observation takes `seconds`. `errors` are raised by `resume`, then by `fetch`, in turn."""

    def __init__(self, clock: Clock, *observations: Observation, seconds: float = 1.0, errors: Any = ()) -> None:
        super().__init__(observations)
        self.clock, self.seconds, self.errors = clock, seconds, list(errors)
        self.in_loss = False

    def watch(self, run: Run) -> Generator[Observation, None, None]:
        for observation in super().watch(run):
            self.clock.now += self.seconds
            yield observation
            if self.in_loss:
                return

    def resume(self, run: Run) -> None:
        self._raise("resume")

    def fetch(self, run: Run) -> Fetched:
        self._raise("fetch")
        return super().fetch(run)

    def _raise(self, call: str) -> None:
        self.calls.append(call)
        if self.errors and self.errors[0][0] == call:
            raise self.errors.pop(0)[1]


def test_a_run_is_followed_and_its_archive_completed(store: Store, clock: Clock) -> None:
    run = record(store)
    engine = Passing(clock, PENDING, RUNNING, EXITED)
    reports: list[Progress] = []
    states: list[RunState] = []

    def report(progress: Progress) -> None:
        reports.append(progress)
        states.append(store.run("r-1").state)

    finished = supervise.follow(run, engine, store, report=report)
    assert (finished.outcome, finished.result is not None) == (Outcome.COMPLETED, True)
    assert [progress.observation for progress in reports] == [PENDING, RUNNING, EXITED]
    assert states == [RunState.CREATED, RunState.RUNNING, RunState.RUNNING]
    assert store.run("r-1").state is RunState.FINISHED
    assert [call for call in engine.calls if call in ("resume", "watch", "fetch")] == [
        "resume",
        "watch",
        "fetch",
        "fetch",
    ]
    # It is not followed again.
    again = supervise.follow(run, Passing(clock), store)
    assert again.outcome is Outcome.COMPLETED


def test_a_run_that_the_store_has_as_finished_is_not_made_running_again(store: Store, clock: Clock) -> None:
    run = record(store)
    store.update_run(run, RunState.FINISHED)
    seen: list[RunState] = []
    supervise.follow(run, Passing(clock, RUNNING, EXITED), store, report=lambda _: seen.append(store.run("r-1").state))
    assert seen == [RunState.FINISHED, RunState.FINISHED]


@pytest.mark.parametrize(
    ("observations", "counts", "reason"),
    [
        ((RUNNING,), "1 running", ""),
        (
            (Observation(1.0, PENDING.workers * 2 + RUNNING.workers, (SLOW,)),),
            "2 pending, 1 running",
            " The image is large.",
        ),
    ],
)
def test_waiting_ends_at_its_timeout_and_the_run_continues(
    store: Store, clock: Clock, observations: Any, counts: str, reason: str
) -> None:
    run = record(store)
    engine = Passing(clock, *observations)
    with pytest.raises(DeadlineError) as caught:
        supervise.follow(run, engine, store, timeout=3.0)
    assert caught.value.message == (
        f'The run "r-1" has not ended within 3 s of waiting ({counts}).{reason} It continues.'
    )
    assert caught.value.hint == "mlbench wait r-1, or: mlbench cancel r-1"
    assert len(caught.value.details["findings"]) == (1 if reason else 0)
    assert clock.now == 1003.0
    assert "cancel" not in engine.calls


def test_a_run_that_ends_at_the_timeout_has_ended(store: Store, clock: Clock) -> None:
    finished = supervise.follow(record(store), Passing(clock, RUNNING, RUNNING, EXITED), store, timeout=3.0)
    assert finished.outcome is Outcome.COMPLETED


def test_an_engine_that_says_nothing_more(store: Store, clock: Clock) -> None:
    run = record(store)
    engine = Passing(clock, RUNNING)
    engine.in_loss = True
    with pytest.raises(MlbenchError, match='The run "r-1" can no longer be observed') as caught:
        supervise.follow(run, engine, store)
    assert caught.value.hint == "mlbench wait r-1"
    with pytest.raises(MlbenchError, match="can no longer be observed"):
        supervise.watch(run, engine, lambda _: None)
    assert supervise.cancel(run, engine, store) is not None  # it was stopped


# --- runs that cannot start -----------------------------------------------------------------------------------------


def test_a_run_that_can_never_start_is_stopped_and_says_why(store: Store, clock: Clock) -> None:
    run = record(store)
    hopeless = Observation(1.0, (WorkerState(0, "pending"),), (SLOW, NO_IMAGE))
    finished = supervise.follow(run, Passing(clock, hopeless), store)
    assert finished.outcome is Outcome.NEVER_STARTED
    codes = [finding.code for finding in finished.findings]
    assert codes.count("image_not_found") == 1


def test_a_reason_that_is_known_at_the_end_is_not_repeated(store: Store, clock: Clock) -> None:
    run = record(store)
    end = Observation(2.0, (WorkerState(0, "lost"),), (Finding("image_not_found", "Later words."),), Ending.CANCELLED)
    hopeless = Observation(1.0, (WorkerState(0, "pending"),), (NO_IMAGE,))
    engine = Passing(clock, hopeless, end)
    finished = supervise.follow(run, engine, store)
    assert [finding.summary for finding in finished.findings if finding.code == "image_not_found"] == ["Later words."]
    assert engine.calls.count("cancel") == 1


def test_a_finding_that_stays_does_not_stop_workers_that_run(store: Store, clock: Clock) -> None:
    engine = Passing(clock, Observation(2.0, RUNNING.workers, (NO_IMAGE,)), EXITED)
    assert supervise.follow(record(store), engine, store).outcome is Outcome.COMPLETED
    assert "cancel" not in engine.calls


# --- queues ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(store: Store) -> QueueFolder:
    """The queue of an experiment, which this process holds."""
    folder = QueueFolder.of(store.folder, "e")
    assert folder.acquire() is not None
    return folder


def on_sleep(clock: Clock, action: Callable[[int], None]) -> list[float]:
    """Call `action` with the number of each sleep; their durations."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds
        action(len(slept))

    clock.sleep = sleep  # type: ignore[method-assign]
    return slept


def test_the_engine_is_asked_once_the_queue_has_handed_the_run_over(
    store: Store, clock: Clock, held: QueueFolder
) -> None:
    run = record(store)
    write_queued(run.folder, "e", "x")
    engine = Passing(clock, RUNNING, EXITED)
    slept = on_sleep(clock, lambda number: clear_queued(run.folder) if number == 3 else None)
    assert supervise.follow(run, engine, store).outcome is Outcome.COMPLETED
    assert slept == [0.2, 0.2, 0.2]
    assert engine.calls[0] == "resume"


def test_a_run_that_is_being_submitted_has_left_the_queue(store: Store, clock: Clock) -> None:
    run = record(store)
    write_queued(run.folder, "e", "x", is_starting=True)
    states: list[RunState] = []

    def report(_: Progress) -> None:
        states.append(store.run("r-1").state)
        if len(states) == 2:
            clear_queued(run.folder)

    supervise.follow(run, Passing(clock, RUNNING, RUNNING, RUNNING, EXITED), store, report=report)
    assert states == [RunState.CREATED, RunState.CREATED, RunState.RUNNING, RunState.RUNNING]


def test_time_in_the_queue_counts_as_waiting(store: Store, clock: Clock, held: QueueFolder) -> None:
    run = record(store)
    write_queued(run.folder, "e", "x")
    on_sleep(clock, lambda _: None)
    with pytest.raises(DeadlineError, match=r"has not ended within 2 s of waiting \(1 pending\)"):
        supervise.follow(run, Passing(clock, RUNNING), store, timeout=2.0)
    assert clock.now == pytest.approx(1002.0, abs=0.21)
    on_sleep(clock, lambda _: clear_queued(run.folder))
    begun = clock.now
    with pytest.raises(DeadlineError, match=r"\(1 running\)"):
        supervise.follow(run, Passing(clock, RUNNING, seconds=0.1), store, timeout=1.0)
    assert clock.now - begun == pytest.approx(1.0, abs=0.11)


def test_a_queue_that_ended_starts_nothing_more(store: Store, clock: Clock) -> None:
    run = record(store)
    write_queued(run.folder, "e", "x")
    with pytest.raises(NeverStartedError) as caught:
        supervise.follow(run, Passing(clock, RUNNING), store)
    assert caught.value.message.startswith('r-1 has not been started: the queue of the experiment "x" ended')
    assert caught.value.hint == "To resume: mlbench run x"


def test_the_local_engine_sees_its_queue_itself(store: Store, clock: Clock) -> None:
    run = record(store, "local")
    write_queued(run.folder, "e", "x")
    ended = Observation(1.0, (WorkerState(0),), (Finding("queue_ended", "The queue ended.", hint="Go on."),))
    with pytest.raises(NeverStartedError, match=r"^The queue ended\.$") as caught:
        supervise.follow(run, Passing(clock, ended), store)
    assert caught.value.hint == "Go on."


# --- clusters that do not answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["resume", "fetch"])
def test_a_cluster_that_does_not_answer_is_asked_again_and_the_user_told_once(
    store: Store, clock: Clock, call: str
) -> None:
    run = record(store)
    errors = [(call, UnreachableError("No answer.")) for _ in range(40)]
    notices: list[str] = []
    slept = on_sleep(clock, lambda _: None)
    engine = Passing(clock, EXITED, errors=errors)
    finished = supervise.follow(run, engine, store, notice=notices.append)
    assert finished.outcome is Outcome.COMPLETED
    assert len(slept) == 40
    assert len(notices) == 1
    assert notices[0].startswith("r-1: No answer. The run may continue there. Silent for 11 s")


def test_a_silence_that_lasts_is_an_error(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_UNREACHABLE_TIMEOUT", "30s")
    errors = [("resume", UnreachableError("No answer.")) for _ in range(1000)]
    with pytest.raises(UnreachableError, match="No answer"):
        supervise.follow(record(store), Passing(clock, EXITED, errors=errors), store)
    assert 30 <= clock.now - 1000 < 36


def test_credentials_that_are_refused_at_once_are_an_error_but_not_at_the_end(store: Store, clock: Clock) -> None:
    refused = CredentialError("It says no.")
    run = record(store)
    with pytest.raises(CredentialError):
        supervise.follow(run, Passing(clock, EXITED, errors=[("resume", refused)]), store)
    assert clock.now == 1000.0
    assert supervise.follow(run, Passing(clock, EXITED, errors=[("fetch", refused)]), store).outcome == "completed"


# --- stopping -------------------------------------------------------------------------------------------------------


def test_a_run_is_stopped_and_sealed(store: Store, clock: Clock) -> None:
    run = record(store)
    engine = Passing(clock, RUNNING)
    finished = supervise.cancel(run, engine, store)
    assert finished is not None
    assert finished.outcome is Outcome.CANCELLED
    assert engine.calls[0] == "cancel"
    again = Passing(clock, RUNNING)
    found = supervise.cancel(run, again, store)
    assert found is not None
    assert (found.outcome, again.calls) == (Outcome.CANCELLED, [])


def test_stopping_waits_for_the_end_as_long_as_it_may(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record(store)
    engine = Passing(clock, *[RUNNING] * 20)
    monkeypatch.setattr(engine, "cancel", lambda _: None)
    assert supervise.cancel(run, engine, store) is None
    assert clock.now == 1010.0
    engine = Passing(clock, *[RUNNING] * 2, EXITED)
    monkeypatch.setattr(engine, "cancel", lambda _: None)
    found = supervise.cancel(run, engine, store, seconds=3.0)
    assert found is not None
    assert found.outcome is Outcome.COMPLETED


def test_watching_changes_nothing(store: Store, clock: Clock) -> None:
    run = record(store)
    engine = Passing(clock, PENDING, RUNNING, EXITED)
    seen: list[Observation] = []
    found = supervise.watch(run, engine, lambda progress: seen.append(progress.observation))
    assert (found, seen) == (EXITED, [PENDING, RUNNING, EXITED])
    assert store.run("r-1").state is RunState.CREATED
    assert {"resume", "fetch", "cancel"} & {*engine.calls} == set()
