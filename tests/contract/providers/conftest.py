"""A world of stand-ins for `docker` and `kind`, and a data directory of its own."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from providers.gke import api
from tests.contract.providers.eks_world import become_for_a_test
from tests.fakes.aws_server import AwsServer
from tests.fakes.gke import Google
from tests.fakes.gke import World as GkeWorld
from tests.fakes.kind_tools import World

IMAGES = {"registry:3": "sha256:01", "my/task:1": "sha256:02", "node": "sha256:03"}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path / "world")
    made.change(images=IMAGES)
    monkeypatch.setenv("KIND_WORLD", str(made.path))
    monkeypatch.setenv("PATH", f"{made.bin}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    # tempfile looks at TMPDIR only once in a process.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return made


@pytest.fixture(scope="session")
def aws_server() -> Iterator[AwsServer]:
    """One double of AWS for all: that it starts takes longer than most tests. Who leaves things in it uses a copy."""
    server = AwsServer()
    yield server
    server.stop()


@pytest.fixture
def aws(aws_server: AwsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AwsServer:
    """The double, of which this process is a client."""
    become_for_a_test(aws_server, monkeypatch)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    return aws_server


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Google]:
    servers = Google(tmp_path_factory.mktemp("google"))
    yield servers
    servers.close()


@pytest.fixture
def gke_world(google: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GkeWorld]:
    """An empty project, of which this process is a client."""
    for key, value in google.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    _forget_credentials()
    yield google.reset()
    _forget_credentials()  # or the next test of another provider would still be logged in


def _forget_credentials() -> None:
    for cached in (api.client, api.credentials, api.token):
        cached.cache_clear()


@dataclass(frozen=True)
class Told:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """`mlbench WORDS` in this process."""
    return lambda *words: Told(run(list(words)), *capsys.readouterr())
