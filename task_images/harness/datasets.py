"""Official archives of data sets: fetched once per machine and checked. Conversion: see harness.cache.

A download is written under another name and renamed when complete, so a killed run leaves no partial file that a later
one could use. Standard library only.
"""

import errno
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from task_images.contract import EXIT_RETRYABLE
from task_images.harness.cache import Say, as_task_error
from task_images.harness.errors import EnvironmentUnfitError, TaskError
from task_images.harness.object_stores import SCHEMES, Source, open_object
from task_images.harness.progress import ProgressLines

TIMEOUT = 60.0
ATTEMPTS = 5
_BLOCK = 1 << 20


class DownloadError(TaskError):
    """A download failed, and may succeed later (exit 75)."""

    exit_code = EXIT_RETRYABLE


@dataclass(frozen=True)
class Archive:
    """One file of a data set as published by its authors. `digest` is "md5:HEX" or "sha256:HEX", `bytes` its size; ""
    and 0 if unpublished. `mirrors` are other addresses of the same file, tried in turn; `is_mirrored`: a site's own
    mirror (MLBENCH_DATA_MIRROR) has it, too."""

    name: str
    url: str
    bytes: int
    digest: str
    mirrors: tuple[str, ...] = ()
    is_mirrored: bool = True

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses in order of preference. MLBENCH_DATA_MIRROR names a server with all files as HOST/PATH, which is
        then the only address."""
        site = os.environ.get("MLBENCH_DATA_MIRROR", "").rstrip("/")
        return (f"{site}/{self.url.partition('://')[2]}",) if site and self.is_mirrored else (self.url, *self.mirrors)


def fetch(archive: Archive, folder: Path, say: Say) -> Path:
    """The archive in `folder`, downloaded if missing, and checked either way.

    An interrupted download resumes where it stopped, now or in the next run. Only one caller at a time: use
    `hold_lock`. Raises DownloadError, or EnvironmentUnfitError for a wrong checksum or a full disk.
    """
    path = folder / archive.name
    if path.exists():
        check_archive(archive, path)
        return path
    partial = folder / f"{archive.name}.part"
    with as_task_error(partial):
        check_space(folder, archive.bytes - (partial.stat().st_size if partial.exists() else 0), archive.name)
        resumed = _download_from_any(archive, partial, say)
    try:
        check_archive(archive, partial)
    except EnvironmentUnfitError:
        partial.unlink()
        if not resumed:
            raise
        # The partial file may be from another version, or a proxy's error page.
        say(f"{archive.name}: the partial file of an earlier download does not belong to it; starting again")
        return fetch(archive, folder, say)
    partial.rename(path)
    return path


def _download_from_any(archive: Archive, partial: Path, say: Say) -> bool:
    """Like `_download`, from the first address that has the file."""
    addresses = archive.addresses
    for number, url in enumerate(addresses, 1):
        try:
            return _download(replace(archive, url=url), partial, say)
        except DownloadError as error:
            if number == len(addresses):
                raise
            say(f"{error}; next: {addresses[number]}")
    raise AssertionError("unreachable")


def _download(archive: Archive, partial: Path, say: Say) -> bool:
    """Download the rest of `partial`; returns whether a part of it existed before."""
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
                    f"{archive.url} cannot be downloaded: {_words(error)}; {have} of {archive.bytes or 'unknown'}"
                    " bytes are here",
                    f"Start again to resume from there, or put the file {archive.name} into {partial.parent}.",
                ) from None
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:
                partial.unlink(missing_ok=True)
            say(f"{archive.name}: {_words(error)}; attempt {attempt + 1} of {ATTEMPTS}")
            time.sleep(min(10.0, 0.2 * 2**attempt))
    raise AssertionError("unreachable")


def _transfer(archive: Archive, partial: Path, say: Say) -> None:
    have = partial.stat().st_size if partial.exists() else 0
    if have and have == archive.bytes:
        return
    is_object = archive.url.partition("://")[0] in SCHEMES
    with (open_object if is_object else _open_web)(archive.url, have, TIMEOUT) as (read, goes_on, length):
        total = archive.bytes or length
        if not total:
            raise http.client.HTTPException("the server does not report the size of the file")
        progress = ProgressLines(archive.name, total, say)
        progress.add(have if goes_on else 0, is_old=True)
        with open(partial, "ab" if goes_on else "wb") as file:
            done = file.tell()
            while block := read(_BLOCK):
                file.write(block)
                done += len(block)
                if done > total:
                    raise http.client.HTTPException(f"the server sends more than the {total} bytes expected")
                progress.reach(done)
    if done < total:
        raise http.client.HTTPException(f"the connection broke after {done} of {total} bytes")


@contextmanager
def _open_web(url: str, start: int, timeout: float) -> Iterator[Source]:
    """The file, from byte `start` if the server supports ranges."""
    request = urllib.request.Request(url, headers={"User-Agent": "mlbench", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with urllib.request.urlopen(request, timeout=timeout) as response:
        goes_on = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        stated = response.headers.get("Content-Length", "")
        yield Source(response.read, goes_on, int(stated) + (start if goes_on else 0) if stated.isdecimal() else 0)


def check_archive(archive: Archive, path: Path, hint: str | None = None) -> None:
    """Check the file's digest. Raises EnvironmentUnfitError with both digests, and with `hint`, which says where else
    to get the file."""
    algorithm, _, expected = archive.digest.partition(":")
    if not expected:
        return
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected:
        raise EnvironmentUnfitError(
            f"{path} has {path.stat().st_size} bytes and {algorithm} {found}, but {archive.name} has"
            f" {archive.bytes} bytes and {algorithm} {expected}",
            hint or f"Delete the file; it is downloaded again, or get it from {archive.url}.",
        )


def check_space(folder: Path, missing: int, what: str) -> None:
    """Raises EnvironmentUnfitError if `what` needs `missing` bytes and the disk of `folder` has fewer."""
    free = shutil.disk_usage(folder).free
    if free < missing:
        raise EnvironmentUnfitError(
            f"{folder} has {free / 1e6:.0f} MB free; {what} needs {missing / 1e6:.0f} MB more",
            "Free some space, or choose another folder with --data-dir.",
        )


def _words(error: Exception) -> str:
    reason = (
        error.reason
        if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError)
        else error
    )
    return " ".join(str(reason).split())[:200] or type(error).__name__
