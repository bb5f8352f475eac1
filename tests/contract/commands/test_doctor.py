"""`mlbench doctor`: what it reports of this machine, with real programs on PATH."""

from pathlib import Path

import pytest

from mlbench_cli.commands import doctor


def put_docker(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program named docker, alone on PATH."""
    program = folder / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_docker_client_without_its_daemon_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_docker(tmp_path, 'echo "Cannot connect to the Docker daemon" >&2; exit 1', monkeypatch)
    check = doctor._docker()
    assert check.state == "missing"
    assert check.found.endswith("Cannot connect to the Docker daemon")
    assert "docker ps" in (check.hint or "")


def test_docker_is_ok_if_its_daemon_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_docker(tmp_path, 'test "$1" = version && echo 27.1', monkeypatch)
    assert doctor._docker().found == f"{tmp_path}/docker, daemon 27.1"


def test_without_docker_the_program_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._docker().found == "not on PATH"
