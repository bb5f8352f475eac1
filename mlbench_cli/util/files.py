"""Atomic file writes: a reader, also after a crash, sees either the old content or the new content.

Agents write with it, too: standard library only, and nothing that delays their start, such as pathlib.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO


@contextmanager
def replace_file(path: str | os.PathLike[str], *, is_durable: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file for writing; it replaces `path` when the block succeeds. `mode` is limited by the umask.

    The content has been synced by then, unless the caller does that later. The rename is durable once the folder has
    been synced (`sync_folder`).
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode), "w+b") as file:
            yield file
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def write_atomically(path: str | os.PathLike[str], data: bytes, *, is_durable: bool = True, mode: int = 0o666) -> None:
    """Replace the content of `path` by `data`, and have it on disk on return, unless that is not needed."""
    with replace_file(path, is_durable=is_durable, mode=mode) as file:
        file.write(data)
    if is_durable:
        sync_folder(os.path.dirname(path) or ".")


def write_at(path: str | os.PathLike[str], offset: int, data: bytes) -> None:
    """Write into a file, which is made if needed, from `offset` on. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, data, offset)
    finally:
        os.close(descriptor)


def touch(path: str) -> None:
    """Make a file, or make it one of now. Needs no room on the disk if it is there."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
    os.utime(path)


def read_end(path: str | os.PathLike[str], limit: int = 1 << 16) -> bytes:
    """The last `limit` bytes of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
            return file.read(limit)
    except OSError:
        return b""


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The bytes of a file. Raises OSError, also if it is larger than `limit` or not regular (a pipe may block)."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", os.fspath(path))
    return data


def explain_start(program: str, error: OSError, path: str = "") -> str:
    """Why the system could not start a program that it searches in the folders of `path`. It says "No such file" also
    of a script that is there, but not the program of its first line."""
    places = [program] if "/" in program else [os.path.join(folder, program) for folder in path.split(os.pathsep)]
    line = b""
    for place in filter(os.path.isfile, places[::-1]):
        with suppress(OSError), open(place, "rb") as file:
            line = file.readline(256)
    if error.errno == errno.ENOENT and line.startswith(b"#!"):
        named = line[2:].rstrip(b"\n").decode("utf-8", "replace").strip(" ")
        return f"its first line names {named!r}, which does not exist"
    if error.errno == errno.ENOEXEC:
        return "it is neither made for this kind of machine nor has a first line such as #!/bin/sh"
    return error.strerror or str(error)


def read_object(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The JSON object in a file; None if the file cannot be read or holds something else."""
    try:
        with open(path, "rb") as file:
            document = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def let_read(path: str | os.PathLike[str]) -> int:
    """The mode of a file or folder, after giving its owner the permission to read it, which a task may have removed.
    Raises OSError if there is none.
    """
    mode = os.lstat(path).st_mode
    needed = {stat.S_IFREG: stat.S_IRUSR, stat.S_IFDIR: stat.S_IRWXU}.get(stat.S_IFMT(mode), 0)
    if mode & needed != needed:
        with suppress(PermissionError):  # it may be readable for this user, who is not its owner
            os.chmod(path, stat.S_IMODE(mode) | needed)
    return mode


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to `count`, as far as allowed; usual are 1,024, on a Mac 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def size_of(path: str | os.PathLike[str]) -> int:
    """The size of a file in bytes; 0 if there is none."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def remove_folder(folder: str | os.PathLike[str]) -> None:
    """Remove a folder. It is renamed first, so readers never see it half deleted. Symbolic links are kept."""
    if os.path.islink(folder) or not os.path.isdir(folder):
        return
    parent, name = os.path.split(folder)
    hidden = os.path.join(parent, f".{name}.{os.getpid()}.deleted")
    os.replace(folder, hidden)
    _remove_tree(hidden)


def _remove_tree(folder: str) -> None:
    """As shutil.rmtree, of folders of any depth: each one is moved to the top before it is emptied."""
    pending, number = [folder], 0
    while pending:
        place = pending.pop()
        with os.scandir(place) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_dir() and not entry.is_symlink():
                number += 1
                pending.append(os.path.join(folder, f".{number}.deleted"))
                os.rename(entry.path, pending[-1])
            else:
                os.unlink(entry.path)
        if place != folder:
            os.rmdir(place)
    os.rmdir(folder)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
