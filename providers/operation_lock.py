"""One operation at a time on a cluster's name, for all processes of a data directory."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from mlbench_cli.errors import UsageError
from mlbench_cli.storage.store import Store

# Locks that this thread holds: what reads a record and then changes the cluster holds one lock for both.
_held: ContextVar[frozenset[Path]] = ContextVar("held", default=frozenset())


def is_operation_running(store: Store, name: str) -> bool:
    """Whether a process of this data directory is creating or deleting a cluster of that name now."""
    try:
        with open(_lock_path(store, name)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def hold_operation_lock(store: Store, name: str) -> Iterator[None]:
    """Lock a cluster's name against other processes of this data directory. A killed process leaves no lock.

    A record that was read before may be old: read it again with the lock. The same thread may lock the name again.
    """
    path = _lock_path(store, name)
    if path in _held.get():
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UsageError(
                f'Another mlbench (process {file.read().strip() or "?"}) is working on the cluster "{name}".',
                hint="Wait for it, or stop it.",
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        mark = _held.set(_held.get() | {path})
        try:
            yield
        finally:
            _held.reset(mark)


def _lock_path(store: Store, name: str) -> Path:
    return store.folder / "clusters" / f"{name}.lock"
