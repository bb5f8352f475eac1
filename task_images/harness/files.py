"""Atomic writes of files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` once it is on disk; after an error, `path` is unchanged."""
    partial = path.with_name(f".{path.name}")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
