"""Several sizes with --detach on this machine: one after the other, whatever becomes of the client or of one run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent.processes import stat_fields
from mlbench_cli.app import run
from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.runs.queue import QueueFolder
from mlbench_cli.storage.store import Store
from tests.contract.local_runs import until

Captured = pytest.CaptureFixture[str]
# Says when it began and ended, and waits for a file of its size.
WAITING = 'sh -c \'echo "$WORLD_SIZE begins" >> lines; until test -e "go-$WORLD_SIZE"; do sleep 0.02; done\''


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def status(capsys: Captured, name: str) -> Any:
    capsys.readouterr()
    assert run(["status", name, "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def list_begun() -> list[str]:
    return Path("lines").read_text().splitlines() if Path("lines").exists() else []


def background(experiment: str = "x") -> int:
    """The process that starts the runs of an experiment."""
    found = Store().find_experiment(experiment)
    assert found is not None
    holder = QueueFolder.of(Store().folder, found.id).read_holder()
    assert holder is not None
    return holder.pid


def has_ended(pid: int) -> bool:
    """Whether the process has closed its files, too, and with them its lock."""
    fields = stat_fields(pid)
    return fields is None or fields[0] in "ZX"


def start(capsys: Captured) -> None:
    argv = ["run", "x", "1", "2", "3", "--detach", "--set", "run.run_on_all=no", "--command", WAITING]
    assert run(argv) == 0
    out, err = capsys.readouterr()
    assert out == "x-1\nx-2\nx-3\n"
    assert "one after the other" in err
    assert until(list_begun) == ["1 begins"]


@pytest.mark.parametrize("command", ["logs x-2 --follow", "status x-2 --watch"])
def test_they_run_one_after_the_other_and_one_that_waits_can_be_followed(capsys: Captured, command: str) -> None:
    start(capsys)
    waiting = status(capsys, "x-2")
    assert waiting["state"] == "queued"
    assert {rank["reason"] for rank in waiting["ranks"]} == {"waiting for the runs before it"}
    words = [sys.executable, "-m", "mlbench_cli", *command.split()]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as looking:
        assert looking.stderr is not None
        assert looking.stderr.readline().startswith("x-2")  # it has not been started, or is pending
        for size in (1, 2):
            until(lambda size=size: len(list_begun()) == size)  # type: ignore[misc]
            assert looking.poll() is None
            Path(f"go-{size}").touch()
        assert looking.wait() == 0
    assert status(capsys, "x-2")["outcome"] == "completed"
    Path("go-3").touch()
    assert run(["wait", "x-3"]) == 0
    until(lambda: has_ended(background()))
    assert list_begun() == ["1 begins", "2 begins", "3 begins"]
    assert status(capsys, "x")["experiments"][0]["state"] == "completed"


def test_one_that_waits_can_be_canceled_or_deleted(capsys: Captured) -> None:
    start(capsys)
    assert run(["cancel", "x-2"]) == 0
    assert status(capsys, "x-2")["outcome"] == "canceled"
    assert run(["delete", "x-3", "--yes"]) == 0
    Path("go-1").touch()
    assert run(["wait", "x-1"]) == 0
    until(lambda: has_ended(background()))
    assert list_begun() == ["1 begins"]
    assert {row.run.name: row.outcome for row in Store().runs()} == {"x-1": "completed", "x-2": "canceled"}


def test_a_killed_queue_is_noticed_at_once_and_the_same_command_goes_on(capsys: Captured) -> None:
    start(capsys)
    os.kill(background(), signal.SIGKILL)
    until(lambda: has_ended(background()))
    assert run(["wait", "x-2"]) == 6  # what the queue has started does not keep its lock
    Path("go-1").touch()
    assert run(["wait", "x-1"]) == 0  # it is detached
    capsys.readouterr()
    assert run(["wait", "x-2"]) == 6
    err = capsys.readouterr().err
    assert 'the queue of the experiment "x" ended; its process' in err
    assert "mlbench run x" in err
    found = status(capsys, "x")["experiments"][0]
    assert (found["state"], found["progress"]) == ("stopped", {"finished": 1, "failed": 0, "canceled": 0, "total": 3})
    assert "was killed" in found["queue"]["text"]
    assert run(["status", "x"]) == 0
    assert "stopped, 1 of 3 runs finished" in capsys.readouterr().out
    Path("go-2").touch()
    Path("go-3").touch()
    assert run(["run", "x"]) == 0
    assert list_begun() == ["1 begins", "2 begins", "3 begins"]
    assert {row.run.name: row.outcome for row in Store().runs()} == dict.fromkeys(["x-1", "x-2", "x-3"], "completed")


def test_an_experiment_is_canceled_as_a_whole_and_resumed(capsys: Captured) -> None:
    start(capsys)
    assert run(["run", "x"]) == 2
    assert 'The experiment "x" is running' in capsys.readouterr().err
    assert run(["cancel", "x"]) == 0
    out, _ = capsys.readouterr()
    assert "x-2 was not started." in out
    until(lambda: has_ended(background()))
    assert status(capsys, "x")["experiments"][0]["queue"]["text"] == "ended: mlbench cancel stopped it"
    assert list_begun() == ["1 begins"]
    for size in (1, 2, 3):
        Path(f"go-{size}").touch()
    assert run(["run", "x", "--detach"]) == 0
    assert capsys.readouterr().out.splitlines() == ["x-1-try2", "x-2", "x-3"]
    assert run(["wait", "x"]) == 0
    assert list_begun() == ["1 begins", "1 begins", "2 begins", "3 begins"]
    assert run(["logs", "x", "--queue"]) == 0
    assert "x-3: starting" in capsys.readouterr().out
    assert run(["delete", "x", "--yes"]) == 0
    assert [row.run.name for row in Store().runs()] == ["x-1"]  # the first attempt is no member any more


def test_the_queue_is_not_shadowed_by_modules_of_the_current_folder(capsys: Captured) -> None:
    for name in ("signal", "typing", "mlbench_cli"):
        Path(f"{name}.py").write_text("raise SystemExit('shadowed')")
    start(capsys)
    for size in (1, 2, 3):
        Path(f"go-{size}").touch()
    assert run(["wait", "x"]) == 0


def test_the_end_of_the_queue_names_what_could_not_be_started(capsys: Captured, home: Path) -> None:
    start(capsys)
    store = Store(home)
    LocalEngine().cancel(store.run("x-2").run)  # its client was killed before it could write that down
    for size in (1, 2, 3):
        Path(f"go-{size}").touch()
    assert run(["wait", "x-3"]) == 0
    pid = background()
    until(lambda: has_ended(pid))
    assert "x-2" in status(capsys, "x")["experiments"][0]["queue"]["text"]
