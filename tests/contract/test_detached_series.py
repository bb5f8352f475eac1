"""Several sizes with --detach on this machine: one after the other, whatever becomes of the client or of one run."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.engines.local.state import stand_in_line
from mlbench_cli.errors import UsageError
from mlbench_cli.store import Store
from tests.contract.local_runs import Lab, until

Captured = pytest.CaptureFixture[str]
# Says when it began and ended, and waits for a file of its size.
WAITING = 'sh -c \'echo "$WORLD_SIZE begins" >> told; until test -e "go-$WORLD_SIZE"; do sleep 0.02; done\''


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def status(capsys: Captured, name: str) -> Any:
    capsys.readouterr()
    assert run(["status", name, "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def begun() -> list[str]:
    return Path("told").read_text().splitlines() if Path("told").exists() else []


def background(name: str) -> int:
    """The process that will start a run."""
    note = Store().run(name).run.folder / ".state" / "in_line.json"
    return int(json.loads(note.read_text())["pid"])


def start(capsys: Captured) -> None:
    argv = ["run", "x", "1", "2", "3", "--detach", "--no-run-on-all", "--command", WAITING]
    assert run(argv) == 0
    out, err = capsys.readouterr()
    assert out == "x-1\nx-2\nx-3\n"
    assert "one after the other" in err
    assert until(begun) == ["1 begins"]


def test_they_run_one_after_the_other(capsys: Captured) -> None:
    start(capsys)
    waiting = status(capsys, "x-2")
    assert waiting["state"] == "created"
    assert {rank["reason"] for rank in waiting["ranks"]} == {"waits for the runs before it"}
    for size in (1, 2):
        assert begun() == [f"{number} begins" for number in range(1, size + 1)]
        Path(f"go-{size}").touch()
        assert run(["wait", f"x-{size}"]) == 0
        assert until(lambda size=size: len(begun()) > size)  # type: ignore[misc]
    Path("go-3").touch()
    assert run(["wait", "x-3"]) == 0
    pid = background("x-1")
    until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes())


def test_one_that_waits_can_be_cancelled_or_deleted(capsys: Captured) -> None:
    start(capsys)
    assert run(["cancel", "x-2"]) == 0
    assert status(capsys, "x-2")["outcome"] == "cancelled"
    assert run(["delete", "x-3", "--yes"]) == 0
    pid = background("x-1")
    Path("go-1").touch()
    assert run(["wait", "x-1"]) == 0
    until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes())
    assert begun() == ["1 begins"]
    assert {row.run.name: row.outcome for row in Store().runs()} == {"x-1": "completed", "x-2": "cancelled"}


def test_without_the_process_that_starts_them_the_rest_never_starts(capsys: Captured) -> None:
    start(capsys)
    os.kill(background("x-1"), signal.SIGKILL)
    Path("go-1").touch()
    assert run(["wait", "x-1"]) == 0  # it is detached
    note = Store().run("x-2").run
    created = time.time() - 120  # a run that was recorded just now may still be on its way
    db = Store()._db
    moment = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(created))
    db.execute("UPDATE runs SET created = ? WHERE id = ?", (moment, note.id))
    assert run(["wait", "x-2"]) == 6
    assert "was not started" in capsys.readouterr().err
    assert begun() == ["1 begins"]


def test_one_that_was_cancelled_is_not_started_after_all(home: Path) -> None:
    """The process that starts them may have looked just before."""
    home.mkdir()
    lab = Lab(home)
    waiting = lab.record(["true"])
    stand_in_line(waiting, os.getpid())
    lab.engine.cancel(waiting)
    with pytest.raises(UsageError, match="was cancelled before it was started"):
        lab.engine.submit(waiting, lab.engine.render(waiting.spec), detach=True)
    assert lab.end(waiting).ended == "cancelled"
    lab.close()
