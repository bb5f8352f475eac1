"""A world of stand-ins for `docker` and `kind`, and a data directory of its own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.aws_server import AwsServer
from tests.fakes.kind_tools import World

IMAGES = {"registry:2": "sha256:01", "my/task:1": "sha256:02", "node": "sha256:03"}


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
