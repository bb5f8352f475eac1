"""Writing files so that a reader, or a restart after a crash, sees the old content or the new one, never a part."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write; it takes the place of `path` if the block ends well.

    The content is on disk then. The rename itself is durable once the folder is synced (`sync_folder`).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data`, durably."""
    with replace_file(path) as file:
        file.write(data)
    sync_folder(path.parent)


def read_end(path: Path, limit: int = 1 << 16) -> bytes:
    """The last `limit` bytes of a file; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
            return file.read(limit)
    except OSError:
        return b""


def remove_folder(folder: Path) -> None:
    """Remove a folder, out of sight in one step first: for readers it is there or it is not. A link stays."""
    if folder.is_symlink() or not folder.is_dir():
        return
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}.deleted")
    os.replace(folder, hidden)
    shutil.rmtree(hidden)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_lock_held(path: Path) -> bool:
    """Whether a process holds the lock of the file `path`, also one in another PID namespace. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
