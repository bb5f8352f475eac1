"""Secrets for libraries that read them only from files."""

import contextlib
import os
import tempfile
import weakref

MEMORY = "/dev/shm"


def private_folder() -> "tempfile.TemporaryDirectory[str]":
    """A temporary folder with access for this user only, in memory if possible."""
    return tempfile.TemporaryDirectory(prefix="mlbench-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)


class PrivateFile:
    """A file with access for this user only; `path` is valid while this object exists. On Linux it is in memory.

    Other processes cannot open `path`: it refers to a descriptor of this one.
    """

    def __init__(self, content: bytes) -> None:
        on_disk = None
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("mlbench")
            self.path = f"/proc/self/fd/{file}"
        else:
            file, self.path = tempfile.mkstemp(prefix="mlbench-")
            on_disk = self.path
        self._close = weakref.finalize(self, _remove, file, on_disk)
        with os.fdopen(os.dup(file), "wb") as stream:
            stream.write(content)


def _remove(file: int, path: str | None) -> None:
    os.close(file)
    if path is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)
