"""Start a run and follow it until it ends: by the client, or by the background process of an experiment's queue.

Any client that knows the cluster can follow a run, which continues without one.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from mlbench_cli.engines import follow as follow_engine
from mlbench_cli.engines.base import Engine
from mlbench_cli.engines.follow import Silence
from mlbench_cli.engines.local.engine import has_begun
from mlbench_cli.errors import (
    CredentialError,
    DeadlineError,
    MlbenchError,
    NeverStartedError,
    NotFoundError,
    UnreachableError,
)
from mlbench_cli.isolation import ROOT, protected_path
from mlbench_cli.model.run import Experiment, Finding, Observation, Run, RunRow, RunState
from mlbench_cli.runs import queue
from mlbench_cli.runs.connect import connect_engine
from mlbench_cli.runs.finalize import FinishedRun, finalize, read_finished
from mlbench_cli.runs.progress import Progress, ProgressReader, ProgressTracker
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import now, parse_timestamp

_QUEUE_POLL = 0.2
CANCEL_SECONDS = 10.0  # time for a canceled run to end

Report = Callable[[Progress], None]
Notice = Callable[[str], None]
Result = TypeVar("Result")


def start_member(run: Run, engine: Engine, store: Store) -> None:
    """Hand a run to its engine. Raises what `Engine.submit` raises; the run stays recorded then.

    Raises NotFoundError for a run that was deleted in the meantime. The run's folder stays locked until its cluster has
    it, so that deleting the run finds it there. A local run may wait for this machine for hours; its engine locks the
    folder when it starts the run.
    """
    with ExitStack() as locks:
        locks.enter_context(RunFolder(run.folder).lock())
        if store.find_run(run.id) is None:
            shutil.rmtree(run.folder, ignore_errors=True)
            raise NotFoundError(f'The run "{run.name}" was deleted before it was started.', hint="mlbench status")
        if run.spec.engine == "local":  # whose folder shows that it was started
            locks.close()
        else:
            store.advance(run, RunState.SUBMITTED)
        engine.submit(run, engine.render(run.spec))
    store.advance(run, RunState.RUNNING)


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
    if (finished := _read_sealed(run, store)) is not None:
        return finished
    timeout = await_start(run, store, timeout, report)
    _wait_out_silence(run, lambda: engine.resume(run), notice)
    begun = time.monotonic()
    while finished is None:
        left = None if timeout is None else timeout - (time.monotonic() - begun)
        observation = _follow_to_end(run, engine, store, left, report)
        complete = partial(finalize, run, engine, store, observation, notice=notice)
        finished = _wait_out_silence(run, complete, notice, has_answered=True)
    return finished


def is_waiting(row: RunRow) -> bool:
    """Whether a run is in the queue of its experiment, and its engine knows nothing of it."""
    return row.queue is not None and not (row.run.spec.engine == "local" and has_begun(row.run))


def watch(run: Run, engine: Engine, store: Store, report: Report) -> Observation:
    """Follow a run until it has ended, without changing the run or its archive."""
    await_start(run, store, report=report)
    for observation in _observe(run, engine, report):
        if observation.ended:
            return observation
    raise _cannot_observe(run)


def cancel(
    run: Run, engine: Engine, store: Store, *, seconds: float = CANCEL_SECONDS, notice: Notice | None = None
) -> FinishedRun | None:
    """Stop a run, keep its partial results, and finalize it; None if it has not ended within `seconds`."""
    if (finished := _read_sealed(run, store)) is not None:
        return finished
    with nullcontext() if run.spec.engine == "local" else RunFolder(run.folder).lock(notice=notice):
        engine.cancel(run)
    deadline = time.monotonic() + seconds
    for observation in _observe(run, engine):
        if observation.ended:
            return finalize(run, engine, store, observation, notice=notice)
        if time.monotonic() >= deadline:
            break
    return None


def _read_sealed(run: Run, store: Store) -> FinishedRun | None:
    """What `read_finished` returns; the state is recorded if an agent has sealed the run and not yet recorded that."""
    finished = read_finished(run)
    if finished is not None:
        row = store.find_run(run.id)
        if row is not None and row.state is not RunState.FINISHED:
            store.advance(run, RunState.FINISHED, finished.outcome)
    return finished


def _wait_out_silence(
    run: Run, action: Callable[[], Result], notice: Notice | None, *, has_answered: bool = False
) -> Result:
    """Retry calls that a cluster does not answer, up to the user's limit; `notice` is called once."""
    silence: Silence | None = None
    while True:
        begun = time.monotonic()
        try:
            return action()
        except (UnreachableError, CredentialError) as error:
            silence = silence or Silence(has_answered=has_answered)
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
    with closing(follow_engine.watch(engine, run)) as observations:
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


def observe_queued(run: Run, store: Store) -> Iterator[Observation]:
    """The run in the queue of its experiment, until that hands it to its engine. Raises NeverStartedError if the queue
    has ended before."""
    while (row := store.find_run(run.id)) is not None and is_waiting(row):
        observation = queue.queued_observation(row)
        for ended in observation.findings:
            raise NeverStartedError(ended.summary, hint=ended.hint)
        yield observation


def await_start(run: Run, store: Store, timeout: float | None = None, report: Report | None = None) -> float | None:
    """Wait until the queue has handed the run to its engine, as `observe_queued` says. Returns the remaining time."""
    begun = time.monotonic()
    for observation in observe_queued(run, store):
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
        f'The run "{run.name}" has not ended within {timeout:.3g} s of waiting ({counts}).{reason} It continues.',
        hint=f"mlbench wait {run.name}, or: mlbench cancel {run.name}",
        details={"findings": [finding.to_dict() for finding in observation.findings]},
    )


# --- in the background -----------------------------------------------------------------------------------------------


def hand_over(experiment: Experiment, runs: Sequence[Run], home: Path, held: queue.QueueLease) -> int:
    """Let a process that outlives this one start the recorded `runs`. Returns its process ID.

    It takes over the lock. Raises MlbenchError with the end of its log if the process does not start.
    """
    folder, lock = held.folder, held.descriptor
    ready, said = os.pipe()
    try:
        with open(folder.log, "ab") as log:
            arguments = [str(home), experiment.name, str(lock), str(said), *(run.id for run in runs)]
            process = subprocess.Popen(
                [*_command(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock, said),
                cwd=os.getcwd(),
            )
        folder.write_holder(process.pid, is_detached=True)
    finally:
        os.close(said)
    with os.fdopen(ready, "rb") as file:
        if file.readline() == b"ok\n":
            held.is_handed_over = True
            return process.pid
    last = folder.read_log()[-1:]
    reason = f"{last[0].strip()[:300]}" if last else "it said nothing"
    raise MlbenchError(
        f'The queue of "{experiment.name}" could not be started: {reason}. Its runs are recorded, but none started.',
        hint=f"mlbench logs {experiment.name} --queue, then repeat the command",
    )


def _command() -> list[str]:
    """An interpreter for `main` that finds the modules that this process finds: mlbench_cli where it was loaded, and
    nothing in the current folder or PYTHONPATH. The variables themselves stay, for commands of users.
    """
    code = (
        f"import sys; sys.path.append({ROOT!r}); import mlbench_cli; "
        f"sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); from {__name__} import main; main(sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-c", code, os.pathsep.join(protected_path())]


def main(arguments: Sequence[str]) -> None:
    """Entry point of the detached queue."""
    home, name, lock, said, *ids = arguments
    os.set_inheritable(int(lock), False)  # child processes must not keep the lock
    os.set_inheritable(int(said), False)
    store = Store(Path(home))
    experiment = store.find_experiment(name)
    if experiment is None:
        raise SystemExit(f'The experiment "{name}" was deleted.')
    folder = queue.QueueFolder.of(store.folder, experiment.id)
    with os.fdopen(int(said), "wb") as ready:
        ready.write(b"ok\n")
    _log(f"queue of {name}: {len(ids)} runs, {experiment.parallel} at a time")
    problems = _work(experiment, ids, Path(home))
    store.close()
    folder.write_end("; ".join(problems) if problems else queue.ALL_ENDED)


def _work(experiment: Experiment, ids: Iterable[str], home: Path) -> list[str]:
    """Start the runs in order, at most experiment.parallel at a time, and follow each until it ends."""
    waiting = list(ids)
    problems: list[str] = []
    guard = threading.Lock()

    def work() -> None:
        store = Store(home)
        while True:
            with guard:
                if not waiting:
                    break
                run_id = waiting.pop(0)
            problem = _run_one(experiment, run_id, store)
            if problem:
                problems.append(problem)
        store.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(experiment.parallel, len(waiting)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    return problems


def _run_one(experiment: Experiment, run_id: str, store: Store) -> str | None:
    """Start a run and follow it until it ends. Returns what went wrong, as a sentence without a period."""
    row = store.find_run(run_id)  # it may have been deleted or canceled in the meantime
    if row is None or row.state is RunState.FINISHED:
        return None
    run = row.run
    try:
        engine = connect_engine(store.cluster(run.spec.cluster), _log)
        if row.state is not RunState.RUNNING:
            _log(f"{run.name}: starting")
            start_member(run, engine, store)
        finished = follow(run, engine, store)
    except MlbenchError as error:
        _log(f"{run.name}: {error.message}")
        return f"{run.name}: {error.message.rstrip('.')}"
    _log(finished.summary)
    return None


def _log(text: str) -> None:
    print(f"{now()} {text}", flush=True)
