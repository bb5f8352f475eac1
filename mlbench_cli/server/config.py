"""How a dashboard was started, and the file by which `get-dashboard-url` finds it."""

import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from mlbench_cli.util.files import write_atomically

FILE = "dashboard.json"
ADMIT = "mlbench.admit"  # in a request's scope: what the guard calls once the token is right
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class ServerConfig:
    """`names` are the host names under which the dashboard may be addressed. `cluster`: only runs of that cluster."""

    home: Path
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    host: str = "127.0.0.1"
    names: tuple[str, ...] = LOOPBACK
    allows_actions: bool = False
    has_tls: bool = False
    cluster: str | None = None

    @property
    def scheme(self) -> str:
        """ "https" or "http"."""
        return "https" if self.has_tls else "http"

    @property
    def hosts(self) -> frozenset[str]:
        """Values of the Host header that are accepted."""
        default = {443: True, 80: False}.get(self.port)
        bare = self.names if default is self.has_tls else ()
        return frozenset({f"{name}:{self.port}" for name in self.names} | set(bare))

    @property
    def origins(self) -> frozenset[str]:
        """The origins from which a browser may change something."""
        return frozenset(f"{self.scheme}://{host}" for host in self.hosts)

    @property
    def cookie(self) -> str:
        """Its name has the port, since browsers share cookies between ports."""
        return f"mlbench-{self.port}"

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        return f"{self.scheme}://{self.names[0]}:{self.port}/"

    @property
    def url(self) -> str:
        """The address with the token, for a person's browser."""
        return f"{self.address}?token={self.token}"

    @property
    def client_url(self) -> str:
        """What the client of the original takes as its `url`."""
        return f"{self.names[0]}:{self.port}/t/{self.token}"


def write_address(config: ServerConfig) -> Path:
    """Note the address for other commands of this user."""
    path = config.home / FILE
    document = {"schema_version": 1, "url": config.url, "client_url": config.client_url, "pid": os.getpid()}
    write_atomically(path, (json.dumps(document) + "\n").encode())
    path.chmod(0o600)
    return path


@dataclass(frozen=True)
class Address:
    """A dashboard that runs on this machine."""

    url: str
    client_url: str
    pid: int


def read_address(home: Path) -> Address | None:
    """The dashboard of this data folder; None if none runs."""
    try:
        document = json.loads((home / FILE).read_bytes())
        found = Address(str(document["url"]), str(document["client_url"]), int(document["pid"]))
        os.kill(found.pid, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found
