"""How one cluster is reached: server, trust, credentials, namespace. Held in memory; nothing of it is ever printed."""

import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_cli.errors import CredentialError, UsageError

if TYPE_CHECKING:
    from mlbench_cli.kube.api import Api

RENEW_AT = 0.75  # of a token's life


class Token:
    """A bearer token that renews itself; safe for many threads.

    `fetch` returns the token and the moment it expires (seconds since 1970, None: unknown). It is called on first use,
    at 75 % of the token's life, and after the server has refused the token.
    """

    def __init__(self, fetch: Callable[[], tuple[str, float | None]]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._value: str | None = None
        self._renew_at = float("inf")

    def __call__(self) -> str:
        with self._lock:
            if self._value is None or time.time() >= self._renew_at:
                began = time.time()
                self._value, expires = self._fetch()
                self._renew_at = float("inf") if expires is None else began + RENEW_AT * (expires - began)
            return self._value

    def refused(self, value: str) -> None:
        """The server did not take `value`: the next call fetches a new one, once for all threads that hold `value`."""
        with self._lock:
            if self._value == value:
                self._value = None


@dataclass(frozen=True)
class Access:
    """One cluster's API server and the right to use it. What `providers` return from `connect()`.

    `server` is a URL; `ca` holds PEM certificates, None stands for the system's trust store. Credentials are a `token`,
    or a client `certificate` with its `key` (PEM), or neither.
    """

    server: str
    namespace: str = "default"
    ca: bytes | None = field(default=None, repr=False)
    token: Token | None = field(default=None, repr=False, compare=False)
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None  # the name in the server's certificate where it is not the host of `server`
    verify: bool = True
    proxy: str | None = None  # None: as the environment says

    def __post_init__(self) -> None:
        if not self.server.startswith(("https://", "http://")):
            raise UsageError(f'The address of the cluster, "{self.server}", is not an http or https URL.')

    def client(self) -> "Api":
        """A fresh client with connections of its own."""
        from mlbench_cli.kube.api import Api

        return Api(self)

    @classmethod
    def from_kubeconfig(
        cls, path: str | Path | None = None, context: str | None = None, namespace: str | None = None
    ) -> "Access":
        """The access that a kubeconfig describes; `path` None reads $KUBECONFIG or ~/.kube/config. Only reads.

        Raises UsageError or NotFoundError where the file, the context or an entry is missing or malformed.
        """
        from mlbench_cli.kube.kubeconfig import read

        return read(path, context, namespace)

    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS side of it, or None for a plain http server."""
        if not self.server.startswith("https://"):
            return None
        try:
            context = ssl.create_default_context(cadata=self.ca.decode("ascii") if self.ca else None)
        except (ssl.SSLError, ValueError) as error:
            raise CredentialError(f"The certificate authority of {self.server} cannot be read: {error}.") from None
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate:
            self._load_certificate(context)
        return context

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        # The ssl module reads a client certificate from a file only; this one is 0600 and gone at once.
        with tempfile.NamedTemporaryFile() as file:
            file.write((self.certificate or b"") + b"\n" + (self.key or b""))
            file.flush()
            try:
                context.load_cert_chain(file.name)
            except (ssl.SSLError, ValueError) as error:
                raise CredentialError(f"The client certificate for {self.server} cannot be read: {error}.") from None
