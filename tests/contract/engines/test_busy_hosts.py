"""Hosts that are in use refuse another run at once, and say whose run it is."""

import contextlib
from pathlib import Path

import pytest

from mlbench_cli.model.run import Ending
from mlbench_cli.runs import supervise
from tests.contract.engines.labs import EngineLab, install_commands
from tests.contract.local_runs import shell, until


def test_a_lock_that_cannot_be_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example because another user has put something else in its place."""
    for name, value in install_commands(tmp_path / "commands").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLBENCH_MACHINE_LOCK", str(tmp_path))
    (tmp_path / "home").mkdir()
    with contextlib.closing(EngineLab("hosts", tmp_path / "home")) as lab:
        run = lab.start(shell("true"), workers=2)
        finished = supervise.follow(run, lab.engine, lab.store)
    assert finished.result is not None
    shared = finished.result["conditions"]["shared"]
    assert shared is not None
    assert "Is a directory" in shared["reason"]


@pytest.mark.slow
def test_a_run_on_hosts_that_are_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in install_commands(tmp_path / "commands").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLBENCH_MACHINE_LOCK", str(tmp_path / "machine.lock"))
    (tmp_path / "home").mkdir()
    with contextlib.closing(EngineLab("hosts", tmp_path / "home")) as lab:
        first = lab.start(shell("exec sleep 300"), workers=2, name="first-2")
        until(lambda: len(lab.processes(first)) == 2)  # both agents of a run may use one machine
        second = lab.start(shell("true"), workers=2, name="second-2")
        end = lab.end(second)
        assert end.ended == Ending.NEVER_STARTED
        assert any("in use: first-2 of user" in finding.summary for finding in end.findings)
        finished = supervise.follow(second, lab.engine, lab.store)
        assert [finding.code for finding in finished.findings] == ["not_started"]  # nothing of logs that never began
        assert finished.result is not None
        assert finished.result["conditions"]["labels"] == []
        lab.engine.cancel(first)
        lab.end(first)
        third = lab.start(shell("true"), workers=2, name="third-2")  # at once: the last one may still be ending
        assert lab.end(third).ended == Ending.EXITED
