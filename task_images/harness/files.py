"""Files that are whole or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when it is safely on the disk; after an error it does not."""
    partial = path.with_name(f".{path.name}")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
