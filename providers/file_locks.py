"""Rights that a process hands down to the programs it starts, so that they keep them when it is killed."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlbench_cli.errors import UsageError


@contextmanager
def inheritable_lock(program: str, name: str) -> Iterator[int | None]:
    """The right of this user, on this machine, to let `program` work on `name`; None where another process has it.

    A child that inherits the descriptor keeps the lock.
    """
    folder = Path(tempfile.gettempdir()) / f"mlbench-{program}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise UsageError(f"{folder} belongs to somebody else.", hint="Set TMPDIR to a folder of your own.")
    with open(folder / f"{name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield file.fileno()
