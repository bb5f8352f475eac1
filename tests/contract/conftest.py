"""Ranks are forked from one process that has torch loaded; each worker of pytest-xdist has a copy of it."""

import atexit
import sys
from pathlib import Path

import pytest

from tests.contract.task_images import launcher
from tests.contract.task_images.ranks import RankServer, share_forks


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of the commands that this test runs; their current folder is the one that it will be in."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture(scope="session")
def ranks() -> RankServer:
    server = RankServer(share_forks())
    atexit.register(server.close)
    return server


@pytest.fixture
def quick_torch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that this test starts import a torch that is there at once, where the real one takes two seconds."""
    package = tmp_path_factory.mktemp("packages") / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from types import SimpleNamespace\n__version__ = '2.12'\n"
        "version, cuda = SimpleNamespace(hip=None, cuda=None), SimpleNamespace(device_count=lambda: 0)\n"
    )
    (package / "distributed.py").write_text(
        "def is_available(): return True\ndef is_backend_available(name): return name == 'gloo'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


@pytest.fixture
def forked_ranks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Local runs of this test fork the ranks of catalog tasks from that process, instead of starting Python and loading
    torch for each of them. The folder of a `python` that does so, and of an `mlbench` that uses it."""
    folder = tmp_path_factory.mktemp("launchers")
    launcher.write(folder, share_forks())
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder
