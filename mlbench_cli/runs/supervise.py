"""The one loop that follows a run to its end and fills its archive. Any client that knows the cluster may run it.

The run goes on without it (or dies with its client, where the engine says so). `settle` completes a run that has ended:
whoever looks first brings its files, decides its outcome and seals its archive, and all others read what was decided.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from mlbench_cli import model
from mlbench_cli.catalog import COMPARISONS
from mlbench_cli.engines.base import Engine
from mlbench_cli.errors import (
    CleanupError,
    DeadlineError,
    MlbenchError,
    NeverStartedError,
    NotFoundError,
    TaskFailedError,
)
from mlbench_cli.files import write_atomically
from mlbench_cli.model import Finding, Observation, Run, RunRow, RunState, WorkerState
from mlbench_cli.runs.progress import EventReader as EventReader
from mlbench_cli.runs.progress import Progress as Progress
from mlbench_cli.runs.progress import Tracker, is_number
from mlbench_cli.runs.settled import described, outcome_file, read_settled, seen_as, snapshot_of_settled
from mlbench_cli.spec import RunSpec
from mlbench_cli.store import Store
from task_images import contract

READ_EVERY = 1.0  # seconds between two looks into the log of rank 0
CANCEL_WAIT = 10.0  # seconds in which a cancelled run should have ended
_ENDINGS = {
    "cancelled": "cancelled",
    "client_lost": "cancelled",
    "deadline": "deadline",
    "never_started": "never_started",
    "lost": "lost",
}
_OUTPUT_LOST = Finding(
    "output_lost",
    "Output files of the run are gone from the cluster, or were fetched by another client; the archive holds the logs.",
    hint="Fetch sooner: mlbench wait NAME, or hold longer with --hold.",
)
_SUCCESSES = ("goal_reached", "goal_missed", "budget_spent", "completed")


@dataclass(frozen=True)
class Outcome:
    """How a run ended: a word of store.OUTCOMES, mlbench's exit code for it, and one sentence.

    `sealed` is False where the archive could not be completed (a full disk); the next client tries again.
    """

    word: str
    exit_code: int
    summary: str
    findings: tuple[Finding, ...]
    observation: Observation
    sealed: bool = True


def exit_code_of(outcome: Outcome | str, require_goal: bool = False) -> int:
    """mlbench's exit code for an outcome, or its word.

    A missed goal is 0 unless `require_goal`, and so is a spent budget, whose word does not say whether the goal was
    reached on the way. A cancelled run is 7 for those who waited for its result; who cancels it
    with Ctrl-C leaves with 130, by the interrupt itself. Work done but not sealed is 8.
    """
    word = outcome if isinstance(outcome, str) else outcome.word
    if word in ("goal_missed", "budget_spent") and require_goal:
        return TaskFailedError.exit_code
    if word in _SUCCESSES:
        unsealed = isinstance(outcome, Outcome) and not outcome.sealed
        return CleanupError.exit_code if unsealed else 0
    codes = {"never_started": NeverStartedError.exit_code, "deadline": DeadlineError.exit_code}
    return codes.get(word, TaskFailedError.exit_code)


def decide(spec: RunSpec, observation: Observation, result: Mapping[str, Any] | None) -> str:
    """The outcome of a run that has ended: pure. `result` is rank 0's last result event.

    Success is the exit code 0 of every rank, and no log or event can replace one. What a task says of its goal counts
    only then, and only if its own figures do not contradict it.
    """
    if observation.ended is None:
        raise ValueError("the run has not ended")
    if observation.ended in _ENDINGS:
        stopped_early = all(worker.started is None for worker in observation.workers)
        if (
            observation.ended == "cancelled"
            and stopped_early
            and any(found.permanent for found in observation.findings)
        ):
            return "never_started"  # waiting was given up because it could not help
        return _ENDINGS[observation.ended]
    if observation.ended != "exited" or len(observation.workers) < spec.workers:
        return "failed"
    if any(worker.exit_code != 0 for worker in observation.workers):
        return "failed"
    if any(found.code == "disk_full" for found in observation.findings):
        return "failed"  # what was not written cannot be known to be unimportant
    claim = result.get("outcome") if result else None
    if claim not in contract.OUTCOMES:
        return "completed"
    return "goal_missed" if claim == "goal_reached" and _contradicts(result or {}) else str(claim)


def follow(
    run: Run,
    engine: Engine,
    store: Store,
    *,
    timeout: float | None = None,
    report: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Follow a run until it has ended and is sealed. `report` is called at least once a second.

    `timeout` is how long this client waits, in seconds; then DeadlineError, and the run goes on. An interrupt goes
    through: the run goes on or dies with this client, as its engine says, and `cancel` ends it in order.
    """
    if (known := _recall(run, store)) is not None:
        return known
    from mlbench_cli.results.archive import seal  # noqa: F401  (loaded while the run runs, not when it has ended)

    begun = time.monotonic()
    reader, tracker = EventReader(engine, run), Tracker.of(run.spec)
    created = datetime.fromisoformat(run.created).timestamp()
    next_read, noted = 0.0, False
    hopeless: tuple[Finding, ...] = ()
    with closing(_closable(engine.observe(run))) as observations:
        for seen in observations:
            if report and (seen.ended or time.monotonic() >= next_read):
                for event in reader.poll():
                    tracker.take(event)
                next_read = time.monotonic() + READ_EVERY
            if report:
                report(tracker.progress(seen, created))
            if seen.ended:
                break
            if not noted:
                _note_running(run, store)
                noted = True
            if not hopeless and (hopeless := _hopeless(seen)):
                engine.cancel(run)
            if timeout is not None and time.monotonic() - begun >= timeout:
                raise _waited_enough(run, seen, timeout)
        else:
            raise MlbenchError(f'The run "{run.name}" can no longer be observed.', hint=f"mlbench wait {run.name}")
    kept = tuple(found for found in hopeless if found.code not in {other.code for other in seen.findings})
    return _settle(run, engine, store, replace(seen, findings=kept + seen.findings))


def settle(run: Run, engine: Engine, store: Store) -> Outcome | None:
    """The outcome of a run that has ended, None for one that has not. Does not wait for the run.

    Completes what is not yet complete: fetches, seals, and updates the store. Two clients may do it at once.
    """
    if (known := _recall(run, store)) is not None:
        return known
    seen = _look(run, engine)
    return _settle(run, engine, store, seen) if seen.ended else None


def cancel(run: Run, engine: Engine, store: Store) -> Outcome | None:
    """Stop a run, keep what there is, and settle it. None where it has not ended within CANCEL_WAIT seconds."""
    if (known := _recall(run, store)) is not None:
        return known
    engine.cancel(run)
    end = time.monotonic() + CANCEL_WAIT
    with closing(_closable(engine.observe(run))) as observations:
        for seen in observations:
            if seen.ended:
                return _settle(run, engine, store, seen)
            if time.monotonic() >= end:
                break
    return None


def snapshot(row: RunRow, engine: Engine) -> dict[str, Any]:
    """What there is to say of a run now, for `status`: JSON values only. Of a settled run the engine is not asked."""
    if (known := snapshot_of_settled(row)) is not None:
        return known
    run = row.run
    tracker = Tracker.of(run.spec)
    seen = _look(run, engine)
    for event in EventReader(engine, run).poll():
        tracker.take(event)
    progress = tracker.progress(seen, datetime.fromisoformat(run.created).timestamp()).to_dict()
    return {**described(row), **seen_as(asdict(seen), progress, tracker.metrics)}


# --- settling ---------------------------------------------------------------------------------------------------


def _settle(run: Run, engine: Engine, store: Store, seen: Observation) -> Outcome:
    """Complete a run that was seen to have ended, unless another client has done so in the meantime."""
    tracker = Tracker.of(run.spec)
    word = decide(run.spec, seen, None)
    try:
        with _only_one(run):
            if _row(run, store) is None:
                raise NotFoundError(f'The run "{run.name}" was deleted meanwhile.', hint="mlbench status")
            if (known := _recall(run, store)) is not None:
                return known
            fetched = engine.fetch(run)
            codes = {finding.code for finding in seen.findings}
            more = fetched.findings if fetched.complete else (_OUTPUT_LOST, *fetched.findings)
            seen = replace(seen, findings=(*seen.findings, *(found for found in more if found.code not in codes)))
            _read_log(run, tracker)
            word = decide(run.spec, seen, tracker.result)
            outcome = _seal(run, tracker, word, seen)
    except (OSError, MlbenchError) as error:
        if not _is_full(error):
            raise
        return _unsealed(run, tracker, word, seen)
    store.update_run(run, RunState.FINISHED, model.Outcome(outcome.word))
    return outcome


def _seal(run: Run, tracker: Tracker, word: str, seen: Observation) -> Outcome:
    from mlbench_cli.results.archive.seal import seal

    failed = next((worker for worker in seen.workers if worker.rank == seen.first_failed), None)
    codes = [failed.exit_code if failed else None, *(worker.exit_code for worker in seen.workers)]
    # The first that is not 0; 0 where all are; None where nothing has ended.
    code = next((code for code in codes if code), None if codes[1:] == [None] * len(codes[1:]) else 0)
    # The archive may uphold less than was decided here, for it reads all logs; its word is the last.
    word = seal(run, outcome=word, exit_code=code, observation=seen)
    outcome = Outcome(word, exit_code_of(word), _summary(run, word, seen, tracker.result), seen.findings, seen)
    progress = tracker.progress(seen, datetime.fromisoformat(run.created).timestamp())
    document = {
        "schema_version": 1,
        "word": outcome.word,
        "summary": outcome.summary,
        "observation": asdict(seen),
        "progress": progress.to_dict(),
        "metrics": tracker.metrics,
    }
    write_atomically(outcome_file(run), json.dumps(document).encode())
    return outcome


def _recall(run: Run, store: Store) -> Outcome | None:
    """The outcome that was settled before, if it was; the store is brought up to it."""
    outcome = _read_outcome(run)
    if outcome is None:
        return None
    row = _row(run, store)
    if row and row.state != "finished":
        store.update_run(run, RunState.FINISHED, model.Outcome(outcome.word))
    return outcome


def _read_outcome(run: Run) -> Outcome | None:
    document = read_settled(run)
    if document is None:
        return None
    seen = document["observation"]
    findings = tuple(Finding(**found) for found in seen.pop("findings"))
    workers = tuple(WorkerState(**worker) for worker in seen.pop("workers"))
    observation = Observation(workers=workers, findings=findings, **seen)
    word = document["word"]
    return Outcome(word, exit_code_of(word), document["summary"], findings, observation)


def _read_log(run: Run, tracker: Tracker) -> None:
    """Take all that rank 0 has reported, from its log in the folder."""
    from mlbench_cli.results.archive.events import read_events

    with suppress(FileNotFoundError), open(run.folder / "logs" / "rank-0.log", "rb") as log:
        for event in read_events(log):
            tracker.take(event)


def _unsealed(run: Run, tracker: Tracker, word: str, seen: Observation) -> Outcome:
    """The outcome where the disk has no room for the archive. It stays unsettled: the next client tries again."""
    finding = Finding(
        "archive_unfinished",
        f"The disk is full: the archive of {run.name} in {run.folder} could not be completed.",
        hint=f"Make room, then: mlbench wait {run.name}",
        retryable=True,
    )
    findings = (*seen.findings, finding)
    outcome = Outcome(word, 0, _summary(run, word, seen, tracker.result), findings, seen, sealed=False)
    return replace(outcome, exit_code=exit_code_of(outcome))


def _is_full(error: BaseException) -> bool:
    cause = error if isinstance(error, OSError) else error.__context__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def _only_one(run: Run) -> Iterator[None]:
    """Hold the lock of the run's folder, which is the folder itself: it needs no room on the disk."""
    run.folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(run.folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (run.folder / ".state").mkdir(exist_ok=True)
        yield
    finally:
        os.close(lock)


def _row(run: Run, store: Store) -> RunRow | None:
    """The store's row of this very run, None where it was deleted."""
    try:
        row = store.run(run.name)
    except NotFoundError:
        return None
    return row if row.run.id == run.id else None


# --- following --------------------------------------------------------------------------------------------------


def _look(run: Run, engine: Engine) -> Observation:
    with closing(_closable(engine.observe(run))) as observations:
        return next(observations)


def _closable(observations: Iterator[Observation]) -> Generator[Observation, None, None]:
    yield from observations


def _note_running(run: Run, store: Store) -> None:
    row = _row(run, store)
    if row and row.state == "created":
        store.update_run(run, RunState.RUNNING)


def _hopeless(seen: Observation) -> tuple[Finding, ...]:
    """Why the workers will never start, however long one waits."""
    if seen.ended or any(worker.started is not None for worker in seen.workers):
        return ()
    return tuple(found for found in seen.findings if found.permanent)


def _waited_enough(run: Run, seen: Observation, timeout: float) -> DeadlineError:
    phases = [worker.phase for worker in seen.workers]
    counts = ", ".join(f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases))
    reason = f" {seen.findings[0].summary}" if seen.findings else ""
    return DeadlineError(
        f'The run "{run.name}" has not ended within {timeout:g} s of waiting ({counts}).{reason} It goes on.',
        hint=f"mlbench wait {run.name}, or: mlbench cancel {run.name}",
        details={"findings": [found.to_dict() for found in seen.findings]},
    )


# --- words ------------------------------------------------------------------------------------------------------


def _contradicts(result: Mapping[str, Any]) -> bool:
    """Whether a result that claims a reached goal gives a value that does not meet the threshold."""
    goal = result.get("goal")
    if not isinstance(goal, dict) or "value" not in goal or goal.get("comparison") not in COMPARISONS:
        return False
    value, threshold = goal["value"], goal.get("threshold")
    if not is_number(value) or not is_number(threshold):
        return True
    return bool(value < threshold if goal["comparison"] == ">=" else value > threshold)


def _summary(run: Run, word: str, seen: Observation, result: Mapping[str, Any] | None) -> str:
    if word == "failed":
        failed = sum(1 for worker in seen.workers if worker.exit_code)
        reason = seen.findings[0].summary if seen.findings else f"{failed} of {len(seen.workers)} ranks failed."
        return f"{run.name} failed. {reason}"
    figures = _figures(result)
    reason = seen.findings[0].summary if seen.findings else ""
    sentence = {
        "goal_reached": f"{run.name} reached its goal{figures}.",
        "goal_missed": f"{run.name} ended without reaching its goal{figures}.",
        "budget_spent": f"{run.name} has spent its time budget{_last_figures(result)}.",
        "completed": f"{run.name} completed.",
        "cancelled": f"{run.name} was cancelled. {reason}",
        "deadline": f"{run.name} ran out of time. {reason}",
        "never_started": f"{run.name} never started. {reason}",
        "lost": f"{run.name} was lost. {reason}",
    }[word]
    return sentence.strip()


def _figures(result: Mapping[str, Any] | None) -> str:
    """ ", Prec@1 97.2 (>= 97) after 12.3 s" as far as the result event says so."""
    goal = result.get("goal") if result else None
    if not result or not isinstance(goal, dict) or not is_number(goal.get("value")):
        return ""
    seconds = result.get("wall_seconds")
    after = f" after {seconds:.1f} s" if is_number(seconds) else ""
    wanted = f" ({goal.get('comparison')} {goal['threshold']:g})" if is_number(goal.get("threshold")) else ""
    return f": {str(goal.get('metric'))[:60]} {goal['value']:.4g}{wanted}{after}"


def _last_figures(result: Mapping[str, Any] | None) -> str:
    """ ", Prec@1 81.25 after 7200.1 s" as far as the result event says so."""
    goal = result.get("goal") if result else None
    if not result or not isinstance(goal, dict) or not is_number(goal.get("last")):
        return ""
    seconds = result.get("wall_seconds")
    after = f" after {seconds:.1f} s" if is_number(seconds) else ""
    return f": {str(goal.get('metric'))[:60]} {goal['last']:.4g}{after}"
