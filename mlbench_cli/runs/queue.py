"""The queue of an experiment: the process that starts its runs, one after another or a few at a time.

Attached, it is `mlbench run` itself; with --detach, a background process that outlives the client. It holds the lock of
the experiment's queue while it lives (queue_folder). With --detach the runs are detached, too: if the queue is killed,
running runs continue, and the remaining ones wait until the user resumes.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mlbench_cli.agent.processes import process_handle, process_origin
from mlbench_cli.engines.base import Engine
from mlbench_cli.errors import DeadlineError, Interrupted, MlbenchError, NotFoundError, Terminated, UsageError
from mlbench_cli.isolation import ROOT, protected_path
from mlbench_cli.model.run import Experiment, Run, RunState
from mlbench_cli.runs import supervise
from mlbench_cli.runs.connect import connect_engine
from mlbench_cli.storage.queue_folder import QueueFolder, QueueState
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import now

STOP_SECONDS = 10.0  # time for a stopped queue to end
_LAST_STEPS = 1.0  # time for a queue to end after its last run,
_LAST_STEPS_OF_ENDED = 20.0  # and if all runs are recorded as ended: on a busy machine it takes a while
_POLL = 0.05
ALL_ENDED = "all its runs have ended"


# --- starting one member --------------------------------------------------------------------------------------------


def start_member(run: Run, engine: Engine, store: Store) -> None:
    """Hand a run to its engine. Raises what `Engine.submit` raises; the run stays recorded then.

    Raises NotFoundError for a run that was deleted in the meantime. On Kubernetes the run's folder stays locked until
    its objects exist, so that deleting the run finds them. Elsewhere a submission may wait for hours.
    """
    with ExitStack() as locks:
        locks.enter_context(RunFolder(run.folder).lock())
        if store.find_run(run.id) is None:
            shutil.rmtree(run.folder, ignore_errors=True)
            raise NotFoundError(f'The run "{run.name}" was deleted before it was started.', hint="mlbench status")
        if run.spec.engine != "local":  # the folder of a local run shows that it was started
            store.advance(run, RunState.SUBMITTED)
        if run.spec.engine != "kubernetes":
            locks.close()
        engine.submit(run, engine.render(run.spec))
    store.advance(run, RunState.RUNNING)


# --- holding the queue ----------------------------------------------------------------------------------------------


@dataclass
class QueueLease:
    """The queue of an experiment, held by this process until the descriptor is closed or another process has it."""

    folder: QueueFolder
    descriptor: int
    is_handed_over: bool = False


@contextmanager
def hold(experiment: Experiment, store: Store) -> Iterator[QueueLease]:
    """Act as the queue of an experiment, and record why it ended. Raises UsageError if another process is the queue."""
    store.require_writable()
    folder = QueueFolder.of(store.folder, experiment.id)
    held = QueueLease(folder, _acquire(experiment, folder, store))
    try:
        folder.write_holder(os.getpid(), is_detached=False)
        try:
            yield held
        except BaseException as error:
            if not held.is_handed_over:
                folder.write_end(_end_of(error))
            raise
        if not held.is_handed_over:
            folder.write_end(ALL_ENDED)
    finally:
        if store.find_experiment(experiment.name) is None:  # refused before it was recorded
            shutil.rmtree(folder.path, ignore_errors=True)
        os.close(held.descriptor)


def _end_of(error: BaseException) -> str:
    if isinstance(error, Terminated):
        return "it was stopped by SIGTERM"
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return "Ctrl-C stopped it"
    return error.message.rstrip(".") if isinstance(error, MlbenchError) else f"{type(error).__name__}: {error}"


def _acquire(experiment: Experiment, folder: QueueFolder, store: Store) -> int:
    """A descriptor that holds the queue's lock. Raises UsageError if another process holds it."""
    begun = time.monotonic()
    descriptor = None
    while folder.find_state() is not QueueState.UNKNOWN:
        if (descriptor := folder.acquire()) is not None:
            break
        waited = time.monotonic() - begun
        if waited >= _LAST_STEPS_OF_ENDED or (waited >= _LAST_STEPS and not _have_ended(experiment, store)):
            break
        time.sleep(_POLL)
    if descriptor is None:
        holder = folder.read_holder()
        raise UsageError(
            f'The experiment "{experiment.name}" is running: {holder.phrase if holder else "another process"}.',
            hint=f"mlbench wait {experiment.name}, mlbench status {experiment.name}, "
            f"or: mlbench cancel {experiment.name}",
        )
    return descriptor


def _have_ended(experiment: Experiment, store: Store) -> bool:
    runs = (store.find_run(member.run_id) for member in experiment.members)
    return all(run is None or run.state is RunState.FINISHED for run in runs)


# --- a separate process ---------------------------------------------------------------------------------------------


def start(experiment: Experiment, runs: Sequence[Run], home: Path, held: QueueLease) -> int:
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
    folder = QueueFolder.of(store.folder, experiment.id)
    with os.fdopen(int(said), "wb") as ready:
        ready.write(b"ok\n")
    _log(f"queue of {name}: {len(ids)} runs, {experiment.parallel} at a time")
    problems = _work(experiment, ids, Path(home))
    store.close()
    folder.write_end("; ".join(problems) if problems else ALL_ENDED)


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
    row = store.find_run(run_id)  # it may have been deleted or cancelled in the meantime
    if row is None or row.state is RunState.FINISHED:
        return None
    run = row.run
    try:
        engine = connect_engine(store.cluster(run.spec.cluster), _log)
        if row.state is not RunState.RUNNING:
            _log(f"{run.name}: starting")
            start_member(run, engine, store)
        finished = supervise.follow(run, engine, store)
    except MlbenchError as error:
        _log(f"{run.name}: {error.message}")
        return f"{run.name}: {error.message.rstrip('.')}"
    _log(finished.summary)
    return None


def _log(text: str) -> None:
    print(f"{now()} {text}", flush=True)


# --- stopping it ----------------------------------------------------------------------------------------------------


def stop(experiment: Experiment, home: Path, reason: str, notice: Callable[[str], None] | None = None) -> bool:
    """End the queue of an experiment, so that nothing further starts. Returns whether there was one.

    Started runs continue, unless the queue is an attached client, whose run ends with it. Raises UsageError if it is on
    another machine, DeadlineError if it does not end in time.
    """
    folder = QueueFolder.of(home, experiment.id)
    state = folder.find_state()
    holder = folder.read_holder()
    if state is QueueState.ENDED or holder is None:
        return False
    if state is QueueState.UNKNOWN or holder.pid_namespace != process_origin()["pid_namespace"]:
        raise UsageError(
            f'The queue of "{experiment.name}" cannot be reached from this machine: {holder.phrase}.',
            hint=f"Run on {holder.host}: mlbench cancel {experiment.name}",
        )
    if notice is not None:
        notice(f"Stopping the {holder.phrase} (waiting up to {STOP_SECONDS:g} s).")
    _terminate(holder.pid, folder)
    deadline = time.monotonic() + STOP_SECONDS
    while folder.find_state() is QueueState.ALIVE:
        if time.monotonic() >= deadline:
            raise DeadlineError(
                f"The {holder.phrase} has not ended within {STOP_SECONDS:g} s.",
                hint=f"mlbench cancel {experiment.name}",
            )
        time.sleep(_POLL)
    folder.write_end(reason)
    return True


def _terminate(pid: int, folder: QueueFolder) -> None:
    """Signal the holder of the lock, but not a process that has reused its process ID."""
    with suppress(ProcessLookupError):
        handle = process_handle(pid)
        try:
            if folder.find_state() is not QueueState.ALIVE:
                return
            if handle >= 0:  # the lock holder is alive, and the handle refers to it
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            else:  # a system without such handles, for example macOS
                os.kill(pid, signal.SIGTERM)
        finally:
            if handle >= 0:
                os.close(handle)
