"""Copies of the ranks' logs in the run's folder: read and written by offset, so that two clients write the same."""

import os
import shutil
from pathlib import Path


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def read_at(path: Path, offset: int, size: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)
    except FileNotFoundError:
        return b""


def write_at(path: Path, offset: int, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, data, offset)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        return
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}.deleted")
    os.replace(folder, hidden)
    shutil.rmtree(hidden)
