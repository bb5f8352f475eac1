"""Official archives of data sets: fetched once per machine and checked. Conversion: see `cache`.

A download is written under another name and renamed when complete, so a killed run leaves no partial file that a later
one could use. Addresses may be in object stores: s3://BUCKET/KEY is read by boto3, gs://BUCKET/KEY by Google's JSON
API, with the credentials that boto3 and google.auth find; without any, requests are unsigned, which works for public
buckets. AWS_ENDPOINT_URL and STORAGE_EMULATOR_HOST select other servers, as in the vendors' own tools.
"""

import errno
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from email.message import Message
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from task_images.cache import Say, as_task_error
from task_images.contract import EXIT_RETRYABLE, EnvironmentUnfitError, TaskError, install_hint

INTERVAL_SECONDS = float(os.environ.get("MLBENCH_PROGRESS_SECONDS", "10"))


class ProgressLines:
    """Progress lines for `total` bytes of work, e.g. "packing: 40% of 12.0 GB, 3 minutes left"."""

    def __init__(
        self, what: str, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._total, self._say, self._clock = what, total, say, clock
        self._done = self._kept = 0
        self._begin = self._shown = clock()

    def add(self, size: int, is_old: bool = False) -> None:
        """Count `size` more bytes as done; `is_old`: by an earlier attempt, so not used for the speed."""
        self._kept += size if is_old else 0
        self.reach(self._done + size)

    def reach(self, done: int) -> None:
        """Set the total of done bytes."""
        self._done = done
        now = self._clock()
        if now - self._shown < INTERVAL_SECONDS:
            return
        self._shown = now
        rate = (done - self._kept) / (now - self._begin)
        left = f", {_format_time(max(0.0, self._total - done) / rate)} left" if rate > 0 else ""
        share = min(1.0, done / self._total) if self._total else 1.0
        self._say(f"{self._what}: {share:.0%} of {_format_size(self._total)}{left}")


def _format_time(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _format_size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"
GOOGLE = "https://storage.googleapis.com"


class Source(NamedTuple):
    """An open file. `read(n)` returns the next bytes; `goes_on`: whether it starts at the requested offset; `total`:
    the size of the whole file, 0 if unknown."""

    read: Callable[[int], bytes]
    goes_on: bool
    total: int


@contextmanager
def open_address(url: str, start: int, timeout: float) -> Iterator[Source]:
    """The file, from byte `start` if the server supports ranges. Raises HTTPError if the request is rejected,
    HTTPException for a broken connection."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme == "s3":
        yield _open_s3(url, bucket, key, start, timeout)
        return
    headers = {"User-Agent": "mlbench", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    if scheme == "gs":
        server = os.environ.get("STORAGE_EMULATOR_HOST", GOOGLE).rstrip("/")
        bucket, key = (urllib.parse.quote(part, safe="") for part in (bucket, key))
        url = f"{server}/storage/v1/b/{bucket}/o/{key}?alt=media"
        if token := _google_token():
            headers["Authorization"] = f"Bearer {token}"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
        goes_on = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        stated = response.headers.get("Content-Length", "")
        yield Source(response.read, goes_on, int(stated) + (start if goes_on else 0) if stated.isdecimal() else 0)


def _open_s3(url: str, bucket: str, key: str, start: int, timeout: float) -> Source:
    boto3, config, errors = (
        _need("boto3", "eks"),
        import_module("botocore.config"),
        import_module("botocore.exceptions"),
    )
    session = boto3.Session()
    more: dict[str, Any] = {"connect_timeout": timeout, "read_timeout": timeout}
    if session.get_credentials() is None:
        more["signature_version"] = import_module("botocore").UNSIGNED
    client = session.client("s3", config=config.Config(**more))
    try:
        answer = client.get_object(Bucket=bucket, Key=key, **({"Range": f"bytes={start}-"} if start else {}))
    except errors.ClientError as error:
        status = int(error.response["ResponseMetadata"]["HTTPStatusCode"])
        raise urllib.error.HTTPError(url, status, str(error), Message(), None) from None
    except errors.BotoCoreError as error:
        raise http.client.HTTPException(str(error)) from None

    def read(count: int) -> bytes:
        try:
            data: bytes = answer["Body"].read(count)
        except (errors.BotoCoreError, errors.HTTPClientError) as error:
            raise http.client.HTTPException(str(error)) from None
        return data

    total = str(answer.get("ContentRange", "")).rpartition("/")[2] or answer["ContentLength"]
    return Source(read, start > 0 and "ContentRange" in answer, int(total))


def _google_token() -> str | None:
    """An access token from the credentials found; None without credentials."""
    auth, transport = _need("google.auth", "gke"), _need("google.auth.transport.requests", "gke")
    try:
        credentials, _ = auth.default(scopes=[READ_ONLY])
        credentials.refresh(transport.Request())
    except auth.exceptions.DefaultCredentialsError:
        return None
    except auth.exceptions.GoogleAuthError as error:
        raise EnvironmentUnfitError(
            f"Google refused the login: {error}", "gcloud auth application-default login"
        ) from None
    return str(credentials.token)


def _need(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise EnvironmentUnfitError(
            f"{module} is not installed; it is needed to read object stores", install_hint(extra)
        ) from None


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
    with open_address(archive.url, have, TIMEOUT) as (read, goes_on, length):
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
            f" {f'{archive.bytes} bytes and ' if archive.bytes else ''}{algorithm} {expected}",
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
