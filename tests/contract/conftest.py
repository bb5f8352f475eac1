"""Ranks are forked from one process that has torch loaded; each worker of pytest-xdist has a copy of it."""

import atexit
import sys
from pathlib import Path

import pytest

from tests.contract.task_images import launcher
from tests.contract.task_images.ranks import RankServer, share_forks


@pytest.fixture(scope="session")
def ranks() -> RankServer:
    server = RankServer(share_forks())
    atexit.register(server.close)
    return server


@pytest.fixture
def forked_ranks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Local runs of this test fork the ranks of catalog tasks from that process, instead of starting Python and loading
    torch for each of them. The folder of a `python` that does so, and of an `mlbench` that uses it."""
    folder = tmp_path_factory.mktemp("launchers")
    launcher.write(folder, share_forks())
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder
