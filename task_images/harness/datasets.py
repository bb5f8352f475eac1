"""Data sets on disk: official archives fetched once per machine, checked, converted once, and mapped by all its ranks.

    folder = data_folder(contract)
    images = cached_arrays(folder, "cifar10", ...)          # the first rank builds, the others wait and map

`build` calls `fetch` for what is missing. Everything is written under another name and renamed when it is whole, so a
killed run leaves nothing that a later one could take for data. Standard library and numpy only.
"""

import errno
import fcntl
import hashlib
import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from task_images.contract import EXIT_RETRYABLE, Contract
from task_images.harness.errors import EnvironmentUnfitError, TaskError

Arrays = dict[str, npt.NDArray[np.generic]]
Say = Callable[[str], None]

TIMEOUT = 60.0
ATTEMPTS = 5
_BLOCK = 1 << 20
_SPEAK_EVERY = 10.0


class DownloadError(TaskError):
    """A download did not succeed, and might another time (exit 75)."""

    exit_code = EXIT_RETRYABLE


@dataclass(frozen=True)
class Archive:
    """One file of a data set as its authors publish it. `digest` is "md5:HEX" or "sha256:HEX", `bytes` its size."""

    name: str
    url: str
    bytes: int
    digest: str


def data_folder(contract: Contract) -> Path:
    """The run's data folder, or mlbench's own below $XDG_CACHE_HOME (~/.cache). Not necessarily there yet."""
    if contract.data_dir:
        return Path(contract.data_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mlbench", "datasets")


def writable_folder(folder: Path) -> Path:
    """`folder` itself, made if need be; where it cannot be written to, mlbench's own."""
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


def fetch(archive: Archive, folder: Path, say: Say) -> Path:
    """The archive in `folder`, downloaded if it is not there, and checked either way.

    A download that breaks off goes on where it stopped, here or in the next run. Not for two callers at once: hold
    `locked`. Raises DownloadError, or EnvironmentUnfitError for a wrong checksum or a full disk.
    """
    path = folder / archive.name
    if path.exists():
        check_archive(archive, path)
        return path
    partial = folder / f"{archive.name}.part"
    with as_task_error(partial):
        check_space(folder, archive.bytes - (partial.stat().st_size if partial.exists() else 0), archive.name)
        resumed = _download(archive, partial, say)
    try:
        check_archive(archive, partial)
    except EnvironmentUnfitError:
        partial.unlink()
        if not resumed:
            raise
        # The beginning may have come from another version, or from a proxy's error page.
        say(f"{archive.name}: what an earlier download left is no part of it; once more from the beginning")
        return fetch(archive, folder, say)
    partial.rename(path)
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; wait for whoever holds it. The lock goes with the process, however it ends."""
    with as_task_error(path), open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cached_arrays(
    folder: Path, name: str, form: int, sources: Callable[[], list[Path]], build: Callable[[], Arrays]
) -> Arrays:
    """The arrays that `build` makes, mapped read-only from `folder`/NAME.arrays; the first caller has them built.

    They are built anew where `form` (a number that changes with `build`) or the files that `sources` finds are others
    than then. Without sources, as after a download that was tidied away, what is stored is good.
    """
    target = folder / f"{name}.arrays"
    with locked(folder / f"{name}.lock"), as_task_error(target):
        stored = _stored_identity(target)
        identity = {"form": form, "sources": [_identity(path) for path in sources()]}
        if stored is None or stored["form"] != form or identity["sources"] not in ([], stored["sources"]):
            arrays = build()
            _store(target, {"form": form, "sources": [_identity(path) for path in sources()]}, arrays)
        return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(target.glob("*.npy"))}


def _identity(path: Path) -> list[Any]:
    """What changes when the file does."""
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns]


def _download(archive: Archive, partial: Path, say: Say) -> bool:
    """Bring `partial` to its full length; True if something of it was there before."""
    resumed = partial.exists() and partial.stat().st_size > 0
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _transfer(archive, partial, say)
            return resumed
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES):
                raise
            final = isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in (408, 416, 429)
            if final or attempt == ATTEMPTS:
                have = partial.stat().st_size if partial.exists() else 0
                raise DownloadError(
                    f"{archive.url} cannot be downloaded: {_words(error)}; {have} of {archive.bytes} bytes are here",
                    f"Start again to go on from there, or put the file {archive.name} into {partial.parent}.",
                ) from None
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:
                partial.unlink(missing_ok=True)
            say(f"{archive.name}: {_words(error)}; attempt {attempt + 1} of {ATTEMPTS}")
            time.sleep(min(10.0, 0.2 * 2**attempt))
    raise AssertionError("unreachable")


def _transfer(archive: Archive, partial: Path, say: Say) -> None:
    have = partial.stat().st_size if partial.exists() else 0
    if have == archive.bytes:
        return
    request = urllib.request.Request(archive.url, headers={"User-Agent": "mlbench", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        goes_on = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        said = time.monotonic()
        with open(partial, "ab" if goes_on else "wb") as file:
            done = file.tell()
            while block := response.read(_BLOCK):
                file.write(block)
                done += len(block)
                if done > archive.bytes:
                    raise http.client.HTTPException(f"the server sends more than the {archive.bytes} bytes expected")
                if time.monotonic() - said > _SPEAK_EVERY:
                    said = time.monotonic()
                    say(f"{archive.name}: {done / 1e6:.0f} of {archive.bytes / 1e6:.0f} MB")
    if done < archive.bytes:
        raise http.client.HTTPException(f"the connection broke off after {done} of {archive.bytes} bytes")


def check_archive(archive: Archive, path: Path, hint: str | None = None) -> None:
    """Compare the file's digest. Raises EnvironmentUnfitError with both, and with `hint` where to get it otherwise."""
    algorithm, _, expected = archive.digest.partition(":")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected:
        raise EnvironmentUnfitError(
            f"{path} has {path.stat().st_size} bytes and {algorithm} {found}, but {archive.name} has"
            f" {archive.bytes} bytes and {algorithm} {expected}",
            hint or f"Delete the file; it is downloaded again, or get it from {archive.url}.",
        )


def check_space(folder: Path, missing: int, what: str) -> None:
    """Raises EnvironmentUnfitError where `what` needs `missing` bytes and the disk of `folder` has fewer."""
    free = shutil.disk_usage(folder).free
    if free < missing:
        raise EnvironmentUnfitError(
            f"{folder} has {free / 1e6:.0f} MB free; {what} needs {missing / 1e6:.0f} MB more",
            "Make room, or choose another place with --data-dir.",
        )


def _stored_identity(target: Path) -> dict[str, Any] | None:
    try:
        stored = json.loads((target / "identity.json").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return stored if isinstance(stored, dict) and {"form", "sources"} <= set(stored) else None


def _store(target: Path, identity: Mapping[str, Any], arrays: Arrays) -> None:
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, array in arrays.items():
        with open(partial / f"{name}.npy", "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    (partial / "identity.json").write_text(json.dumps(identity))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


@contextmanager
def as_task_error(path: Path) -> Iterator[None]:
    """What the file system refuses, said with the path and what can be done."""
    try:
        yield
    except OSError as error:
        raise EnvironmentUnfitError(
            f"{error.filename or path}: {error.strerror or error}",
            f"{path.parent} must be writable, with room for the data; --data-dir chooses another place.",
        ) from None


def _words(error: Exception) -> str:
    reason = (
        error.reason
        if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError)
        else error
    )
    return " ".join(str(reason).split())[:200] or type(error).__name__
