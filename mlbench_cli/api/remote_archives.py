"""Archives from the web: an URL becomes a file in the data folder, which is then verified like any other."""

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from mlbench_cli.errors import NotFoundError, UnreachableError, UsageError
from mlbench_cli.runs.connect import Workspace
from mlbench_cli.util.text import one_line

MAX_BYTES = 2 << 30
ANSWER_SECONDS = 60.0  # without a byte, after which the download fails
MIN_RATE = 4096  # bytes per second on average, after the first ANSWER_SECONDS
ZIP = b"PK\x03\x04"
_CHUNK = 1 << 20
_SCHEMES = ("http", "https")


def is_url(word: str) -> bool:
    """Whether a word is the address of an archive, and no path or name."""
    return "://" in word


def fetch_archive(url: str, workspace: Workspace) -> Path:
    """Fetch the zip at `url` into the data folder, named by its SHA-256; the path. Nothing in it is read.

    Raises UsageError, NotFoundError or UnreachableError with the server's answer.
    """
    _check(url)
    folder = workspace.store.folder / "fetched"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{os.urandom(6).hex()}.part"
    workspace.notify(
        f"Fetching {one_line(url)} (gives up after {ANSWER_SECONDS:g} s without an answer, "
        f"or below {MIN_RATE} bytes/s) ..."
    )
    try:
        digest = _fetch(url, part)
        path = folder / f"{digest[:16]}.zip"
        part.replace(path)
    except urllib.error.HTTPError as error:
        kind = NotFoundError if error.code in (404, 410) else UnreachableError
        raise kind(f"{one_line(url)}: the server answers {error.code} {one_line(str(error.reason))}.") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = one_line(str(getattr(error, "reason", error)))
        raise UnreachableError(f"{one_line(url)} cannot be fetched: {reason}.", hint="Run the command again.") from None
    finally:
        part.unlink(missing_ok=True)
    workspace.notify(f"{path}: {path.stat().st_size} bytes, SHA-256 {digest}")
    return path


def _check(url: str) -> None:
    """Reject an invalid address, and one with a password, which would end up in receipts and logs."""
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in _SCHEMES and bool(parts.hostname) and url.isascii() and url.isprintable()
    except ValueError:
        usable = False
    if not usable or " " in url:
        raise UsageError(
            f'"{one_line(url)}" is not the address of an archive.', hint="It begins with https:// or http://."
        )
    if parts.username is not None or parts.password is not None:
        raise UsageError("The address contains a user name or password.", hint="Download the archive yourself.")


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to web servers only."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        if urllib.parse.urlsplit(newurl).scheme not in _SCHEMES:
            raise urllib.error.URLError(f"it redirects to {newurl[:100]}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch(url: str, path: Path) -> str:
    request = urllib.request.Request(url, headers={"User-Agent": "mlbench", "Accept-Encoding": "identity"})
    sha, done, begun = hashlib.sha256(), 0, time.monotonic()
    with urllib.request.build_opener(_SafeRedirects).open(request, timeout=ANSWER_SECONDS) as answer:
        declared = answer.headers.get("Content-Length")
        with open(path, "wb") as file:
            while chunk := answer.read1(_CHUNK):  # what has arrived: `read` would wait for all of a chunk
                if not done and not (ZIP.startswith(chunk[:4]) or chunk.startswith(ZIP)):
                    raise UsageError(f"{one_line(url)} is not an archive: it does not begin like a zip.")
                done += len(chunk)
                if done > MAX_BYTES:
                    raise UsageError(f"{one_line(url)} has more than {MAX_BYTES} bytes, the limit of an archive.")
                seconds = time.monotonic() - begun
                if seconds > ANSWER_SECONDS and done < MIN_RATE * seconds:
                    raise TimeoutError(f"it sent {done} bytes in {seconds:.0f} s, less than {MIN_RATE} bytes/s")
                sha.update(chunk)
                file.write(chunk)
    if declared is not None and declared.isdecimal() and done < int(declared):
        raise http.client.HTTPException(f"the connection broke after {done} of {declared} bytes")
    return sha.hexdigest()
