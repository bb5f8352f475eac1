"""An experiment's queue on disk: which process starts its runs, since when, and why it stopped.

DATA/experiments/ID/queue.lock   held by the process that starts the runs, until it ends
                    queue.json   that process, and why it ended if it could say so
                    queue.log    what a detached queue has printed

The lock is authoritative: the kernel frees it when the process ends, for whatever reason.
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from mlbench_cli.agent.processes import process_origin
from mlbench_cli.model.run import Finding, Observation, RunRow, WorkerState
from mlbench_cli.util.files import is_lock_held, write_atomically
from mlbench_cli.util.times import now

FOLDER = "experiments"
QUEUE_ENDED = "queue_ended"  # the code of the finding
_MAX_LOG = 1 << 16


class QueueState(StrEnum):
    """Whether a process is starting the runs of an experiment."""

    ALIVE = "alive"
    ENDED = "ended"
    UNKNOWN = "unknown"  # started on another machine: this one cannot know whether it runs


class QueueHolder(NamedTuple):
    """The process that holds, or last held, the queue. `ended` is why it ended; None if unknown."""

    pid: int
    host: str
    boot_id: str | None
    started: str  # RFC 3339
    is_detached: bool
    ended: str | None = None
    pid_namespace: int | None = None

    @property
    def phrase(self) -> str:
        """The process in a few words, for messages."""
        kind = "queue" if self.is_detached else "mlbench run"
        return f"{kind}, process {self.pid} on {self.host}, since {self.started}"


@dataclass(frozen=True)
class QueueFolder:
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
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        if not os.fstat(descriptor).st_nlink:  # its holder removed the folder: this lock excludes nobody
            os.close(descriptor)
            return None
        return descriptor

    def find_state(self) -> QueueState:
        """Whether somebody holds the lock."""
        holder, here = self.read_holder(), process_origin()
        if holder is not None and holder.boot_id != here["boot_id"] and holder.host != here["host"]:
            return QueueState.ENDED if holder.ended else QueueState.UNKNOWN
        try:
            is_held = is_lock_held(self.lock)
        except OSError:
            is_held = False
        return QueueState.ALIVE if is_held else QueueState.ENDED

    def write_holder(self, pid: int, *, is_detached: bool, ended: str | None = None) -> None:
        """Record the holder of the lock, and why it ended. Only for the holder itself or the process that just ended
        it."""
        known = self.read_holder()
        started = known.started if ended and known else now()
        document = {"pid": pid, "started": started, "is_detached": is_detached, "ended": ended, **process_origin()}
        write_atomically(self.path / "queue.json", json.dumps(document).encode())

    def write_end(self, reason: str) -> None:
        """Record why the queue ended."""
        holder = self.read_holder()
        self.write_holder(holder.pid if holder else 0, is_detached=bool(holder and holder.is_detached), ended=reason)

    def read_holder(self) -> QueueHolder | None:
        """The process that holds or last held the lock; None if there was none."""
        document = _read_json(self.path / "queue.json")
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
        try:
            with open(self.log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _MAX_LOG))
                return file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []


def queued_observation(row: RunRow) -> Observation:
    """The observation of a queued run: it waits, or its queue has ended."""
    assert row.queue is not None
    folder = QueueFolder.of(row.run.folder.parents[1], row.queue.id)
    is_waiting = folder.find_state() is not QueueState.ENDED
    reason = "waiting for the runs before it" if is_waiting else None
    workers = tuple(WorkerState(rank, reason=reason) for rank in range(row.run.spec.process_count))
    ended = Finding(
        QUEUE_ENDED,
        f'{row.run.name} has not been started: the queue of the experiment "{row.queue.name}" ended; '
        f"{folder.explain_end()}.",
        hint=f"To resume: mlbench run {row.queue.name}",
    )
    return Observation(time.time(), workers, () if is_waiting else (ended,))


def _read_json(path: Path) -> Mapping[str, Any] | None:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
