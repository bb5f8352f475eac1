"""Credentials for API servers and their renewal. Kept in memory and not printed."""

import contextlib
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from mlbench_cli.errors import CredentialError

MEMORY = "/dev/shm"
RENEW_AT = 0.75  # of a credential's lifetime


@dataclass(frozen=True)
class Credential:
    """A bearer token, a client certificate with its key (PEM), or both.

    `expires`: seconds since 1970, None: unknown.
    """

    token: str | None = field(default=None, repr=False)
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    expires: float | None = None

    @property
    def pem(self) -> bytes | None:
        """Certificate and key as the content of one file."""
        return None if self.certificate is None else self.certificate + b"\n" + (self.key or b"")


class CredentialSource:
    """A credential that renews itself; thread-safe.

    `fetch` is called on first use, at 75 % of the credential's lifetime, and after the server rejected it.
    """

    def __init__(self, fetch: Callable[[], Credential]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._credential: Credential | None = None
        self._renew_at = float("inf")

    def credential(self) -> Credential:
        """The current credential. Raises CredentialError if it cannot be fetched."""
        with self._lock:
            if self._credential is None or time.time() >= self._renew_at:
                began = time.time()
                self._credential = self._fetch()
                expires = self._credential.expires
                self._renew_at = float("inf") if expires is None else began + RENEW_AT * (expires - began)
            return self._credential

    def __call__(self) -> str:
        """The current token. Raises CredentialError if the source gives certificates instead."""
        token = self.credential().token
        if token is None:
            raise CredentialError("The cluster is reached with a client certificate, which has no token.")
        return token

    def discard(self, value: str | bytes) -> None:
        """Forget the credential with token or PEM `value`, because the server rejected it.

        The next call fetches a new one, once for all threads that use the old one.
        """
        with self._lock:
            if self._credential is not None and value in (self._credential.token, self._credential.pem):
                self._credential = None


class Token(CredentialSource):
    """A bearer token that renews itself. `fetch` returns the token and when it expires (None: unknown)."""

    def __init__(self, fetch: Callable[[], tuple[str, float | None]]) -> None:
        def fetch_credential() -> Credential:
            token, expires = fetch()
            return Credential(token=token, expires=expires)

        super().__init__(fetch_credential)


# --- for libraries that read them only from files ----------------------------------------------------------------


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
