"""Credentials for API servers and their renewal. Kept in memory and not printed."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mlbench_cli.errors import CredentialError

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
