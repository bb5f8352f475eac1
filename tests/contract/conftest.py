"""One process with torch loaded serves all tests of a session: each worker has a copy of it."""

import atexit
import sys
from pathlib import Path

import pytest

from tests.contract.task_images import launcher
from tests.contract.task_images.ranks import RankServer, SharedForks

_servers: list[RankServer] = []  # none or one
_shared: list[SharedForks] = []  # none or one, which workers inherit


def pytest_configure(config: pytest.Config) -> None:
    """Load torch for the workers while tests are still collected, on another core."""
    if config.option.workers and not config.option.collectonly:
        _share_forks()


def _share_forks() -> SharedForks:
    if not _shared:
        _shared.append(SharedForks())
        atexit.register(_shared[0].close)
    return _shared[0]


@pytest.fixture(scope="session")
def ranks() -> RankServer:
    """Kept beyond a unit of work (tests/workers.py): what it has loaded took seconds."""
    if not _servers:
        _servers.append(RankServer(_share_forks().address))
        atexit.register(_servers[0].close)
    return _servers[0]


@pytest.fixture
def forked_ranks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Local runs of this test fork the ranks of catalog tasks from that process, instead of starting Python and loading
    torch for each of them. The folder of a `python` that does so, and of an `mlbench` that uses it."""
    folder = tmp_path_factory.mktemp("launchers")
    launcher.write(folder, _share_forks().address)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder
