"""The queue of an experiment: the process that starts its runs, one after another or a few at a time.

Attached, it is `mlbench run` itself; with --detach, a background process that outlives the client (`supervise`). Which
runs wait in it is in the store; which process it is, since when, and why it ended, is here:

DATA/experiments/ID/queue.lock   held by that process until it ends
                    queue.json   the process, and why it ended if it could say so
                    queue.log    what a detached queue has printed

The lock is authoritative: the kernel frees it when the process ends, for whatever reason. With --detach the runs are
detached, too: if the queue is killed, running runs continue, and the remaining ones wait until the user resumes.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from mlbench_cli.agent.processes import is_alive, is_lock_held, process_note, signal_process, try_lock
from mlbench_cli.engines.local.engine import is_starting
from mlbench_cli.errors import DeadlineError, Interrupted, MlbenchError, Terminated, UsageError
from mlbench_cli.model.run import Experiment, Finding, Observation, RunRow, RunState
from mlbench_cli.storage.store import Store
from mlbench_cli.util.files import read_end, read_object, write_atomically
from mlbench_cli.util.times import now

FOLDER = "experiments"
QUEUE_ENDED = "queue_ended"  # the code of the finding
STOP_SECONDS = 10.0  # time for a stopped queue to end
ALL_ENDED = "all its runs have ended"
_LAST_STEPS = 1.0  # time for a queue to end after its last run,
_LAST_STEPS_OF_ENDED = 20.0  # and if all runs are recorded as ended: on a busy machine it takes a while
_POLL = 0.05


class QueueHolder(NamedTuple):
    """The process that holds, or last held, the queue. `ended` is why it ended; None if unknown."""

    pid: int
    host: str
    boot_id: str | None
    started: str  # RFC 3339
    is_detached: bool
    ended: str | None = None
    pid_namespace: int | None = None
    start_time: int | None = None  # as in `processes.ProcessNote`

    @property
    def phrase(self) -> str:
        """The process in a few words, for messages."""
        kind = "queue" if self.is_detached else "mlbench run"
        return f"{kind}, process {self.pid} on {self.host}, since {self.started}"


class QueueFolder(Struct, frozen=True):
    """The paths of an experiment's queue, its lock, and its process."""

    path: Path

    @classmethod
    def of(cls, home: Path, experiment_id: str) -> "QueueFolder":
        """The queue of an experiment in the data folder `home`."""
        return cls(home / FOLDER / experiment_id)

    @property
    def lock(self) -> Path:
        """The file locked by the process that starts the runs."""
        return self.path / "queue.lock"

    @property
    def log(self) -> Path:
        """What a detached queue prints."""
        return self.path / "queue.log"

    def acquire(self) -> int | None:
        """Acquire the lock, held while any process has the returned descriptor open; None if another process holds
        it."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o600)
        # Where its holder has removed the folder, this lock excludes nobody.
        if try_lock(descriptor) and os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)
        return None

    def is_held(self) -> bool | None:
        """Whether somebody holds the lock; None if that is a process of another machine, which cannot be seen here."""
        holder = self.read_holder()
        is_held = is_lock_held(self.lock, None if holder is None else holder._asdict())
        return False if is_held is None and holder is not None and holder.ended else is_held

    def write_holder(self, pid: int, *, is_detached: bool, ended: str | None = None) -> None:
        """Record the holder of the lock, and why it ended. Only for the holder itself or the process that just ended
        it."""
        known = self.read_holder()
        started = known.started if ended and known else now()
        document = {"started": started, "is_detached": is_detached, "ended": ended, **process_note(pid)}
        write_atomically(self.path / "queue.json", json.dumps(document).encode())

    def write_end(self, reason: str) -> None:
        """Record why the queue ended."""
        holder = self.read_holder()
        self.write_holder(holder.pid if holder else 0, is_detached=bool(holder and holder.is_detached), ended=reason)

    def read_holder(self) -> QueueHolder | None:
        """The process that holds or last held the lock; None if there was none."""
        document = read_object(self.path / "queue.json")
        try:
            return None if document is None else QueueHolder(**document)
        except TypeError:
            return None

    def explain_end(self) -> str:
        """Why no process starts the remaining runs, e.g. "its process was killed"."""
        holder = self.read_holder()
        if holder is None:
            return "it was never started"
        if holder.ended:
            return holder.ended
        said = self.read_log()[-1:] if holder.is_detached else []
        cause = f"; its log ends with: {said[0].strip()[:200]}" if said else ""
        return f"its process {holder.pid} was killed{cause}"

    def read_log(self) -> list[str]:
        """The last lines of the queue's log, oldest first."""
        return read_end(self.log).decode("utf-8", "replace").splitlines()


def queued_observation(row: RunRow) -> Observation:
    """The observation of a queued run: it waits, or its queue has ended."""
    assert row.queue is not None
    folder = QueueFolder.of(row.run.folder.parents[1], row.queue.id)
    # A queue that was killed may have started an agent, whose ranks run before it has written that.
    is_waiting = folder.is_held() is not False or is_starting(row.run)
    reason = "waiting for the runs before it" if is_waiting else None
    ended = Finding(
        QUEUE_ENDED,
        f'{row.run.name} has not been started: the queue of the experiment "{row.queue.name}" ended; '
        f"{folder.explain_end()}.",
        hint=f"To resume: mlbench run {row.queue.name}",
    )
    return Observation.of_waiting(time.time(), row.run.spec, reason, findings=() if is_waiting else (ended,))


# --- holding it ------------------------------------------------------------------------------------------------------


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
    while folder.is_held() is not None:
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


# --- stopping it -----------------------------------------------------------------------------------------------------


def stop(experiment: Experiment, home: Path, reason: str, notice: Callable[[str], None] | None = None) -> bool:
    """End the queue of an experiment, so that nothing further starts. Returns whether there was one.

    Started runs continue, unless the queue is an attached client, whose run ends with it. Raises UsageError if it is on
    another machine, DeadlineError if it does not end in time.
    """
    folder = QueueFolder.of(home, experiment.id)
    is_held = folder.is_held()
    holder = folder.read_holder()
    if is_held is False or holder is None:
        return False
    if is_held is None or is_alive(holder._asdict()) is None:
        raise UsageError(
            f'The queue of "{experiment.name}" cannot be reached from this machine: {holder.phrase}.',
            hint=f"Run on {holder.host}: mlbench cancel {experiment.name}",
        )
    if notice is not None:
        notice(f"Stopping the {holder.phrase} (waiting up to {STOP_SECONDS:g} s).")
    signal_process(holder._asdict(), signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while folder.is_held():
        if time.monotonic() >= deadline:
            raise DeadlineError(
                f"The {holder.phrase} has not ended within {STOP_SECONDS:g} s.",
                hint=f"mlbench cancel {experiment.name}",
            )
        time.sleep(_POLL)
    folder.write_end(reason)
    return True
