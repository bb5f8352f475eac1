"""Atomic file writes: a reader, also after a crash, sees either the old content or the new content."""

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_file(path: Path, *, is_durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing; it replaces `path` when the block succeeds.

    The content has been synced by then, unless the caller does that later. The rename is durable once the folder has
    been synced (`sync_folder`).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w+b") as file:
            yield file
            if is_durable:
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
    """The last `limit` bytes of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
            return file.read(limit)
    except OSError:
        return b""


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a file. Raises OSError, also if it is larger than `limit` or not regular (a pipe may block)."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return data


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to `count`, as far as allowed; usual are 1,024, on a Mac 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def size_of(path: Path) -> int:
    """The size of a file in bytes; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first, so readers never see it half deleted. Symbolic links are kept."""
    if folder.is_symlink() or not folder.is_dir():
        return

    hidden = folder.with_name(f".{folder.name}.{os.getpid()}.deleted")
    os.replace(folder, hidden)
    _remove_tree(hidden)


def _remove_tree(folder: Path) -> None:
    """As shutil.rmtree, of folders of any depth: each one is moved to the top before it is emptied."""
    pending, number = [folder], 0
    while pending:
        place = pending.pop()
        with os.scandir(place) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                number += 1
                pending.append(folder / f".{number}.deleted")
                os.rename(entry.path, pending[-1])
            else:
                os.unlink(entry.path)
        if place != folder:
            os.rmdir(place)
    os.rmdir(folder)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
