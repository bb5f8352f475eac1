"""File locks inherited by child processes, so that they survive a killed parent."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlbench_cli.agent.processes import try_lock
from mlbench_cli.errors import UsageError


@contextmanager
def inheritable_lock(program: str, name: str, *, shared: bool = False, patience: float = 0.0) -> Iterator[int | None]:
    """Lock `name` for `program` and this user; yields the descriptor, or None if another process holds the lock.

    `shared`: only to see whether somebody holds it; those who look do not keep each other out. `patience`: seconds to
    wait for those who look. A child process that inherits the descriptor keeps the lock.
    """
    folder = Path(tempfile.gettempdir()) / f"mlbench-{program}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise UsageError(f"{folder} belongs to another user.", hint="Set TMPDIR to a folder that belongs to you.")
    with open(folder / f"{name}.lock", "w") as file:
        yield file.fileno() if try_lock(file.fileno(), shared=shared, patience=patience) else None
