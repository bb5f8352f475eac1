"""Follow a run until it ends. Any client that knows the cluster can do so. Without a client the run continues or ends,
depending on its engine.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

from mlbench_cli.engines.base import Engine
from mlbench_cli.engines.local.state import has_begun
from mlbench_cli.errors import CredentialError, DeadlineError, MlbenchError, NeverStartedError, UnreachableError
from mlbench_cli.model.run import Finding, Observation, Run, RunRow, RunState
from mlbench_cli.model.silence import Silence
from mlbench_cli.runs.finalize import finalize
from mlbench_cli.runs.finished import FinishedRun, read_finished
from mlbench_cli.runs.progress import Progress, ProgressReader, ProgressTracker
from mlbench_cli.storage.queue_folder import queued_observation
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import parse_timestamp

_QUEUE_POLL = 0.2
CANCEL_SECONDS = 10.0  # time for a canceled run to end

Report = Callable[[Progress], None]
Notice = Callable[[str], None]
Result = TypeVar("Result")


def follow(
    run: Run,
    engine: Engine,
    store: Store,
    *,
    timeout: float | None = None,
    report: Report | None = None,
    notice: Notice | None = None,
) -> FinishedRun:
    """Follow a run until it has ended, and finalize it. `report` is called at least once a second.

    After `timeout` seconds of waiting this raises DeadlineError, and the run continues. A run that can never start is
    canceled. An interrupt passes through; the engine decides what happens to the run.
    """
    if (finished := read_finished(run)) is None:
        timeout = _await_start(run, store, timeout, report)
        _wait_out_silence(run, lambda: engine.resume(run), notice)
        observation = _follow_to_end(run, engine, store, timeout, report)
        finished = _wait_out_silence(
            run, lambda: finalize(run, engine, store, observation, notice=notice), notice, has_answered=True
        )
    if finished is None:
        raise _cannot_observe(run)
    return finished


def is_waiting(row: RunRow) -> bool:
    """Whether a run is in the queue of its experiment, and its engine knows nothing of it."""
    return row.queue is not None and not (row.run.spec.engine == "local" and has_begun(row.run))


def watch(run: Run, engine: Engine, report: Report) -> Observation:
    """Follow a run until it has ended, without changing the run or its archive."""
    for observation in _observe(run, engine, report):
        if observation.ended:
            return observation
    raise _cannot_observe(run)


def cancel(
    run: Run, engine: Engine, store: Store, *, seconds: float = CANCEL_SECONDS, notice: Notice | None = None
) -> FinishedRun | None:
    """Stop a run, keep its partial results, and finalize it; None if it has not ended within `seconds`."""
    if (finished := read_finished(run)) is not None:
        return finished
    engine.cancel(run)
    deadline = time.monotonic() + seconds
    for observation in _observe(run, engine):
        if observation.ended:
            return finalize(run, engine, store, observation, notice=notice)
        if time.monotonic() >= deadline:
            break
    return None


def _wait_out_silence(
    run: Run, action: Callable[[], Result], notice: Notice | None, *, has_answered: bool = False
) -> Result:
    """Retry calls that a cluster does not answer, up to the user's limit; `notice` is called once."""
    silence = Silence(has_answered=has_answered)
    while True:
        begun = time.monotonic()
        try:
            return action()
        except (UnreachableError, CredentialError) as error:
            silence.tolerate(error, begun)
        silence.tell(None if notice is None else lambda words: notice(f"{run.name}: {words}"))
        time.sleep(silence.pause())


def _follow_to_end(run: Run, engine: Engine, store: Store, timeout: float | None, report: Report | None) -> Observation:
    begun = time.monotonic()
    is_noted = False
    permanent: tuple[Finding, ...] = ()
    for observation in _observe(run, engine, report):
        if observation.ended:
            codes = {finding.code for finding in observation.findings}
            kept = tuple(finding for finding in permanent if finding.code not in codes)
            return replace(observation, findings=kept + observation.findings)
        if not is_noted:  # the client that submitted it may have been killed before it could
            store.advance(run, RunState.RUNNING)
            is_noted = True
        if not permanent and (permanent := _permanent_findings(observation)):
            engine.cancel(run)
        if timeout is not None and time.monotonic() - begun >= timeout:
            raise _waiting_ended(run, observation, timeout)
    raise _cannot_observe(run)


def _observe(run: Run, engine: Engine, report: Report | None = None) -> Iterator[Observation]:
    """The engine's observations until the run has ended; `report` gets the progress at each."""
    with closing(engine.watch(run)) as observations:
        reader = None if report is None else ProgressReader(engine, run)
        for observation in observations:
            if report is not None and reader is not None:
                report(reader.read(observation))
            yield observation


def _permanent_findings(observation: Observation) -> tuple[Finding, ...]:
    """Why the workers can never start."""
    if any(worker.started is not None for worker in observation.workers):
        return ()
    return tuple(finding for finding in observation.findings if finding.permanent)


def _await_start(run: Run, store: Store, timeout: float | None, report: Report | None) -> float | None:
    """Wait until the queue has handed the run to its engine. Returns the remaining time."""
    begun = time.monotonic()
    while (row := store.find_run(run.id)) is not None and is_waiting(row):
        observation = queued_observation(row)
        for ended in observation.findings:
            raise NeverStartedError(ended.summary, hint=ended.hint)
        if report is not None:
            report(ProgressTracker.of(run.spec).progress(observation, parse_timestamp(run.created)))
        if timeout is not None and time.monotonic() - begun >= timeout:
            raise _waiting_ended(run, observation, timeout)
        time.sleep(_QUEUE_POLL)
    return None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))


def _cannot_observe(run: Run) -> MlbenchError:
    return MlbenchError(f'The run "{run.name}" can no longer be observed.', hint=f"mlbench wait {run.name}")


def _waiting_ended(run: Run, observation: Observation, timeout: float) -> DeadlineError:
    phases = [worker.phase for worker in observation.workers]
    counts = ", ".join(f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases))
    reason = f" {observation.findings[0].summary}" if observation.findings else ""
    return DeadlineError(
        f'The run "{run.name}" has not ended within {timeout:g} s of waiting ({counts}).{reason} It continues.',
        hint=f"mlbench wait {run.name}, or: mlbench cancel {run.name}",
        details={"findings": [finding.to_dict() for finding in observation.findings]},
    )
