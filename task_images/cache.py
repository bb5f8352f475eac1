"""The data cache of all tasks: data are converted once per machine and memory-mapped by every rank.

    entry = cached_folder([data, own], "cifar10", key=1, sources=list_sources, build=convert, say=print)
    images = np.load(entry.folder / "images.npy", mmap_mode="r")

An entry is a folder NAME.cache, written under another name and renamed when it is complete. Read-only folders are
searched but not written. Standard library and numpy only.

`DataIdentity` says which data a run used, and whether they are the official ones.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from task_images.contract import Contract, EnvironmentUnfitError

Arrays = dict[str, npt.NDArray[np.generic]]
Say = Callable[[str], None]

_IDENTITY = "identity.json"


@dataclass(frozen=True)
class Entry:
    """A complete cache entry. `digest` is "sha256:HEX" of its contents, equal for equal data on every machine."""

    folder: Path
    digest: str


def data_folder(contract: Contract) -> Path:
    """The run's data folder, or mlbench's own below $XDG_CACHE_HOME (~/.cache). It may not exist yet."""
    if contract.data_dir:
        return Path(contract.data_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "mlbench", "datasets")


def require_data_dir(contract: Contract, what: str) -> Path:
    """The data folder that the user named. Raises EnvironmentUnfitError without one."""
    if contract.data_dir is None:
        raise EnvironmentUnfitError(
            f"no folder with {what} was given",
            "Run with --data-dir FOLDER, or --preset tiny, which makes its own data.",
        )
    return Path(contract.data_dir)


def writable_folder(folder: Path) -> Path:
    """`folder`, created if missing; mlbench's own folder if `folder` is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    own = data_folder(Contract({}))
    with as_task_error(own):
        own.mkdir(parents=True, exist_ok=True)
    return own


def cached_folder(
    folder: Path,
    name: str,
    key: object,
    sources: Callable[[], Sequence[Path]],
    build: Callable[[Path], None],
    say: Say = print,
) -> Entry:
    """The entry `name` in `folder` or, if that is not writable, in mlbench's own folder. The first caller builds it.

    It is rebuilt when `key` (a JSON value: version and parameters of `build`) or the files that `sources` lists have
    changed. Without source files (e.g. deleted after conversion) the entry stays valid. Raises EnvironmentUnfitError
    for errors of the file system, and whatever `build` raises.
    """
    with as_task_error(folder / name):
        for place in (folder, data_folder(Contract({}))):
            if (entry := _find(place / f"{name}.cache", key, sources)) is not None:
                return entry
    place = writable_folder(folder)
    target = place / f"{name}.cache"
    with hold_lock(place / f"{name}.lock", say), as_task_error(target):
        # Another process may have built it meanwhile.
        return _find(target, key, sources) or _build(target, key, sources, build)


def cached_arrays(
    folder: Path, name: str, key: object, sources: Callable[[], Sequence[Path]], build: Callable[[], Arrays]
) -> tuple[Arrays, Entry]:
    """Like `cached_folder`, for the arrays that `build` returns; they are mapped read-only."""

    def write(place: Path) -> None:
        for label, array in build().items():
            with open(place / f"{label}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)

    entry = cached_folder(folder, name, key, sources, write)
    files = sorted(entry.folder.glob("*.npy"))
    return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in files}, entry


@contextmanager
def hold_lock(path: Path, say: Say = print) -> Iterator[None]:
    """Hold the lock file `path`, after waiting for the process that holds it. The lock ends with the process."""
    with as_task_error(path), open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{path}: waiting for another process that is preparing this data")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def as_task_error(path: Path) -> Iterator[None]:
    """Convert an OSError into an EnvironmentUnfitError with the path and a hint."""
    try:
        yield
    except OSError as error:
        raise EnvironmentUnfitError(
            f"{error.filename or path}: {error.strerror or error}",
            f"{path.parent} must be writable, with room for the data; --data-dir chooses another place.",
        ) from None


def digest_folder(folder: Path) -> str:
    """ "sha256:HEX" of the lines "DIGEST  NAME" of all files in `folder`, sorted by name, without hidden files."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name != _IDENTITY and not path.name.startswith("."):
            with open(path, "rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def _find(target: Path, key: object, sources: Callable[[], Sequence[Path]]) -> Entry | None:
    """The entry in `target` if it is complete and current."""
    try:
        stored = json.loads((target / _IDENTITY).read_text("utf-8"))
        digest = stored["digest"]
        current = stored["key"] == json.loads(json.dumps(key))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if not current or [_state(path) for path in sources()] not in ([], stored["sources"]):
        return None
    return Entry(target, str(digest))


def _build(target: Path, key: object, sources: Callable[[], Sequence[Path]], build: Callable[[Path], None]) -> Entry:
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    origin = {"key": key, "sources": [_state(path) for path in sources()]}
    try:
        build(partial)
        digest = digest_folder(partial)
        (partial / _IDENTITY).write_text(json.dumps({**origin, "digest": digest}), "utf-8")
        for path in partial.rglob("*"):
            if path.is_file():
                _flush(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return Entry(target, digest)


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _state(path: Path) -> list[Any]:
    """A file's name, size and modification time, which change when the file does."""
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns]
