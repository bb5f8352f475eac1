"""The configuration of a dashboard, and the files in which `get-dashboard-url` finds the running ones."""

import hmac
import json
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from mlbench_cli.agent.processes import is_alive, process_note
from mlbench_cli.errors import UsageError
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.util.files import read_object, write_atomically

FILES = "dashboard-*.json"  # one for each dashboard, named after its process
MIN_TOKEN = 24  # characters
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Limits:
    """Limits for runs that are started here; None: no limit."""

    workers: int | None = None
    cpus: float | None = None  # of each worker
    gpus: int | None = None  # of each worker

    def check(self, specs: Iterable[RunSpec]) -> None:
        """Raises UsageError for a run above the limits."""
        for spec in specs:
            asked: tuple[tuple[str, float | None, float | None], ...] = (
                ("workers", spec.workers, self.workers),
                ("CPUs per worker", spec.cpus, self.cpus),
                ("GPUs per worker", spec.gpus_per_worker, self.gpus),
            )
            for what, wanted, limit in asked:
                if limit is not None and wanted is not None and wanted > limit:
                    raise UsageError(
                        f"{spec.name} requests {wanted:g} {what}; the limit of this dashboard is {limit:g}."
                    )


def read_token(path: Path) -> str:
    """The token in a file. Raises UsageError for a file that other users can read, or a weak token."""
    try:
        mode, text = path.stat().st_mode, path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The token file {path} cannot be read: {error}.") from None
    if mode & 0o007:
        raise UsageError(
            f"Every user of this machine can access the token file {path}.", hint=f"chmod 600 {shlex.quote(str(path))}"
        )
    if len(text) < MIN_TOKEN or not re.fullmatch(r"[A-Za-z0-9_.~-]+", text):
        raise UsageError(
            f"The token in {path} is weak: it needs {MIN_TOKEN} letters, digits, - or _, and nothing else.",
            hint=f"openssl rand -hex 24 > {shlex.quote(str(path))}",
        )
    return text


@dataclass(frozen=True)
class ServerConfig:
    """Every request must have the `token`, and one of the host `names`. `cluster`: show only runs of this cluster.
    `public_url` is the URL of the dashboard at a proxy or ingress, e.g. https://mlbench.example.com."""

    home: Path
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    host: str = "127.0.0.1"
    names: tuple[str, ...] = LOOPBACK
    allows_actions: bool = False
    has_tls: bool = False
    cluster: str | None = None
    public_url: str | None = None
    limits: Limits = Limits()

    def is_valid(self, given: str) -> bool:
        """Whether `given` is the token. Takes constant time."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    @property
    def scheme(self) -> str:
        """ "https" or "http"."""
        return "https" if self.has_tls else "http"

    @property
    def hosts(self) -> frozenset[str]:
        """Accepted values of the Host header."""
        default = {443: True, 80: False}.get(self.port)
        bare = self.names if default is self.has_tls else ()
        public = {urlsplit(self.public_url).netloc} if self.public_url else set()
        return frozenset(map(str.lower, (*(f"{name}:{self.port}" for name in self.names), *bare, *public)))

    @property
    def origins(self) -> frozenset[str]:
        """Accepted Origin headers of requests that change something."""
        own = {f"{self.scheme}://{host}" for host in self.hosts}
        return frozenset(own | ({self.public_url.lower()} if self.public_url else set()))

    def is_secure(self, host: str) -> bool:
        """Whether browsers use HTTPS for this Host header."""
        public = urlsplit(self.public_url or "")
        return self.has_tls or (public.scheme == "https" and host.lower() == public.netloc.lower())

    @property
    def cookie(self) -> str:
        """The name of the cookie. It contains the port, because browsers share cookies between ports."""
        return f"mlbench-{self.port}"

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        return f"{self.public_url}/" if self.public_url else f"{self.scheme}://{self.names[0]}:{self.port}/"

    @property
    def url(self) -> str:
        """The address with the token, for a browser."""
        return f"{self.address}?token={self.token}"


def write_address(config: ServerConfig) -> Path:
    """Store the address for other commands of this user, and forget those of dashboards that were killed."""
    for path in config.home.glob(FILES):
        if is_alive(read_object(path)) is False:  # not on another machine that has the same folder
            path.unlink(missing_ok=True)
    path = config.home / FILES.replace("*", str(os.getpid()))
    document = {"schema_version": 1, "url": config.url, "started": time.time(), **process_note(os.getpid())}
    write_atomically(path, (json.dumps(document) + "\n").encode(), mode=0o600)
    return path


@dataclass(frozen=True)
class Address:
    """A running dashboard on this machine."""

    url: str
    pid: int
    started: float  # seconds since 1970


def read_address(home: Path) -> Address | None:
    """The running dashboard of this data folder, of several the latest; None if there is none."""
    found = [address for path in home.glob(FILES) if (address := _read(path)) is not None]
    return max(found, key=lambda address: address.started, default=None)


def _read(path: Path) -> Address | None:
    document = read_object(path)
    if document is None or not is_alive(document):
        return None
    try:
        return Address(str(document["url"]), int(document["pid"]), float(document["started"]))
    except (ValueError, KeyError, TypeError):
        return None
