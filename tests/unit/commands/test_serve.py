"""`serve` and `get-dashboard-url`: how a dashboard is configured, where it listens, and what it leaves behind."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from mlbench_cli.commands import serve as module
from mlbench_cli.commands.serve import _listen, get_dashboard_url, serve
from mlbench_cli.console import Format
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.server import app, discovery, pages
from mlbench_cli.server.config import FILE, MIN_TOKEN, Grant, Limits, Role, ServerConfig, read_address
from mlbench_cli.server.connections import GuardedProtocol
from mlbench_cli.storage.store import Store

Captured = pytest.CaptureFixture[str]
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("MLBENCH_HOME", str(folder))
    return folder


class Thread:
    """A thread that does its work at once."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        assert daemon, "it must not keep the command from ending"
        self._target, self._args = target, args

    def start(self) -> None:
        self._target(*self._args)


class Served:
    """What a dashboard was served with: its configuration, the options of the server, and what ran beside it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.config: Any = None
        self.options: dict[str, Any] = {}
        self.beside: list[str] = []
        self.address: Any = None
        self.sockets: list[Any] = []
        self.listens_on: tuple[str, int] | None = None


@pytest.fixture
def served(home: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    found = Served(home)

    class Server:
        def __init__(self, options: Any) -> None:
            found.options = options

        def run(self, sockets: list[Any]) -> None:
            found.sockets = sockets
            found.address = json.loads((home / FILE).read_text())
            if found.options["app"] == "interrupted":
                raise KeyboardInterrupt

    def make_app(config: ServerConfig) -> str:
        found.config = config
        return "app"

    monkeypatch.setattr("uvicorn.Server", Server)
    monkeypatch.setattr("uvicorn.Config", lambda app, **options: {"app": app, **options})
    monkeypatch.setattr(app, "make_app", make_app)
    monkeypatch.setattr(module, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(pages, "warm_up", lambda config: found.beside.append("pages"))
    monkeypatch.setattr(discovery, "keep_discovering", lambda config: found.beside.append("discovery"))

    def listen(host: str, port: int) -> Any:
        found.listens_on = (host, port)
        return SimpleNamespace(getsockname=lambda: ("address", 4321))

    monkeypatch.setattr(module, "_listen", listen)
    return found


def test_a_dashboard_is_for_this_machine_and_only_shows(served: Served, capsys: Captured) -> None:
    assert serve() == 0
    token = served.config.token
    assert len(token) >= MIN_TOKEN
    assert served.config == ServerConfig(served.home, 4321, token=token, names=LOOPBACK)
    assert served.listens_on == ("127.0.0.1", 0)  # any free port
    assert len(served.sockets) == 1
    assert served.beside == ["pages"]
    assert served.address["url"] == f"http://127.0.0.1:4321/?token={token}"
    assert read_address(served.home) is None  # it has ended
    printed = capsys.readouterr()
    assert printed.out == f"http://127.0.0.1:4321/?token={token}\n"
    assert "It is read-only; start it with --allow-actions" in printed.err
    assert f'url="127.0.0.1:4321/t/{token}"' in printed.err


def test_the_server_trusts_no_proxy_and_tells_nothing_about_itself(served: Served) -> None:
    serve()
    options = served.options
    assert options["http"] is GuardedProtocol
    names = ("access_log", "proxy_headers", "server_header", "date_header")
    assert [options[name] for name in names] == [False] * 4
    assert (options["app"], options["lifespan"], options["log_level"]) == ("app", "off", "critical")
    assert (options["ssl_certfile"], options["ssl_keyfile"]) == (None, None)
    # Slow clients hold no connection for long, and long headers are refused.
    assert options["timeout_keep_alive"] <= 10
    assert options["timeout_graceful_shutdown"] <= 1
    assert options["h11_max_incomplete_event_size"] == 32768


def test_each_start_has_a_token_of_its_own(served: Served) -> None:
    serve()
    first = served.config.token
    serve()
    assert served.config.token != first


def test_options_of_a_dashboard(served: Served, tmp_path: Path, capsys: Captured) -> None:
    files = (tmp_path / "cert", tmp_path / "key")
    for file in files:
        file.touch()
    tokens = tmp_path / "tokens"
    tokens.write_text(f"act {'a' * MIN_TOKEN}\n")
    tokens.chmod(0o600)
    Store().record_cluster(Cluster("lab", "kind"))
    code = serve(
        80,
        "0.0.0.0",
        ["bench.example", "localhost", "bench.example"],
        *files,
        allows_actions=True,
        cluster="lab",
        token_file=tokens,
        public_url="https://mlbench.example.com/",
        max_workers=8,
        max_cpus=2.5,
        max_gpus=0,
        output=Format.json,
    )
    assert code == 0
    assert served.listens_on == ("0.0.0.0", 80)
    assert served.config == ServerConfig(
        served.home,
        4321,
        token="",
        host="0.0.0.0",
        names=("bench.example", "localhost", "0.0.0.0", "127.0.0.1", "[::1]"),
        allows_actions=True,
        has_tls=True,
        cluster="lab",
        grants=(Grant("a" * MIN_TOKEN, Role.ACT),),
        public_url="https://mlbench.example.com",
        limits=Limits(8, 2.5, 0),
    )
    assert (served.options["ssl_certfile"], served.options["ssl_keyfile"]) == files
    assert served.beside == ["pages", "discovery"]
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "schema_version": 1,
        "url": "https://mlbench.example.com/",
        "client_url": "bench.example:4321/t/",
        "port": 4321,
    }
    assert "Other machines can reach the dashboard, with TLS." in printed.err
    assert "It can start, stop and delete runs." in printed.err


@pytest.mark.parametrize(
    ("host", "names"),
    [
        ("127.0.0.1", LOOPBACK),
        ("localhost", LOOPBACK),
        ("::1", LOOPBACK),
        ("::", ("[::]", *LOOPBACK)),
        ("[fd00::1]", ("[fd00::1]", *LOOPBACK)),
        ("10.0.0.1", ("10.0.0.1", *LOOPBACK)),
    ],
)
def test_browsers_may_use_the_names_of_the_address(
    served: Served, capsys: Captured, host: str, names: tuple[str, ...]
) -> None:
    serve(host=host, is_insecure=True)
    assert (served.config.host, served.config.names) == (host, names)
    assert ("WITHOUT TLS" in capsys.readouterr().err) == (names != LOOPBACK)


@pytest.mark.parametrize(("cluster", "beside"), [("local", ["pages"]), ("lab", ["pages", "discovery"])])
def test_runs_of_other_machines_are_looked_for_on_a_cluster(served: Served, cluster: str, beside: list[str]) -> None:
    Store().record_cluster(Cluster("lab", "kind"))
    serve(cluster=cluster)
    assert served.config.cluster == cluster
    assert served.beside == beside
    with pytest.raises(NotFoundError, match="far"):
        serve(cluster="far")


def test_a_dashboard_that_is_interrupted_leaves_no_address(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "make_app", lambda config: "interrupted")
    with pytest.raises(KeyboardInterrupt):
        serve()
    assert served.address["pid"] == os.getpid()
    assert not (served.home / FILE).exists()


def test_the_url_of_the_dashboard_that_runs(home: Path, capsys: Captured) -> None:
    with pytest.raises(NotFoundError, match="No dashboard is running on this machine") as caught:
        get_dashboard_url()
    assert caught.value.hint == "mlbench serve"
    address = {"url": "http://x/?token=t", "client_url": "x/t/t", "pid": os.getpid()}
    (home / FILE).write_text(json.dumps(address))
    get_dashboard_url()
    assert capsys.readouterr().out == "http://x/?token=t\n"
    get_dashboard_url(Format.json)
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, **address}


# --- its address ------------------------------------------------------------------------------------------------------


def test_a_port_is_taken_before_anything_is_printed() -> None:
    with _listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        socket.create_connection((host, port), timeout=5).close()
        with pytest.raises(
            UsageError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"
        ) as caught:
            _listen("127.0.0.1", port)
        assert caught.value.hint == "mlbench serve --port 0"
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:0: Cannot assign requested address"):
        _listen("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "family", "address"),
    [
        ("127.0.0.1", "IPv4", ("127.0.0.1", 80)),
        ("::1", "IPv6", ("::1", 80)),
        ("[::1]", "IPv6", ("::1", 80)),
    ],
)
def test_an_address_with_colons_is_of_ipv6(
    monkeypatch: pytest.MonkeyPatch, host: str, family: str, address: tuple[str, int]
) -> None:
    class Listener:
        def __init__(self, kind: str) -> None:
            self.kind, self.options, self.bound, self.backlog = kind, list[Any](), None, 0

        def setsockopt(self, *option: Any) -> None:
            self.options.append(option)

        def bind(self, place: Any) -> None:
            self.bound = place

        def listen(self, backlog: int) -> None:
            self.backlog = backlog

    names = {"AF_INET": "IPv4", "AF_INET6": "IPv6", "SOL_SOCKET": "sockets", "SO_REUSEADDR": "reuse"}
    monkeypatch.setattr(module, "socket", SimpleNamespace(**names, socket=Listener))
    found: Any = _listen(host, 80)
    assert (found.kind, found.bound, found.options) == (family, address, [("sockets", "reuse", 1)])
    assert found.backlog > 100  # a browser opens several connections at once
