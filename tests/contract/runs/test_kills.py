"""`mlbench run` killed (SIGKILL) right before its first, second, ... write: the same command completes its runs."""

import os
import signal
import sqlite3
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent.lock import VARIABLE
from mlbench_cli.app import run
from mlbench_cli.results.archive.verify import find_problems
from mlbench_cli.storage.store import Store
from tests import NIGHTLY

WRITES = ("os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.posix_spawn")
COMMAND = ["run", "x", "1", "2", "--command", "sh -c 'echo $RANK'"]


@pytest.mark.slow
def test_the_same_command_completes_what_a_killed_one_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "machine.lock"))
    killed = 0
    for moment in range(0, 1000, 2 if NIGHTLY else 7):
        home = tmp_path / str(moment)
        monkeypatch.setenv("MLBENCH_HOME", str(home))
        if not run_and_die(moment):
            break
        killed += 1
        assert run(COMMAND) == 0, moment
        assert run(["wait", "x"]) == 0  # which records what only the archive of a run tells
        store = Store(home)
        rows = store.runs()
        store.close()
        assert [(row.run.name, row.outcome) for row in rows] == [("x-1", "completed"), ("x-2", "completed")], moment
        for row in rows:
            assert find_problems(row.run.folder) == [], moment
            logs = [path.read_bytes() for path in sorted((row.run.folder / "logs").iterdir())]
            assert logs == [b"%d\n" % rank for rank in range(row.run.spec.workers)], moment
    assert killed >= (25 if NIGHTLY else 7)


def run_and_die(moment: int) -> bool:
    """Run the command in a child that kills itself before the given write; whether it had so many."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            die_at_write(moment)
            os._exit(run(COMMAND))
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    return status != 0


def die_at_write(left: int) -> None:
    """Have this process killed before it writes to files or to the store for the given time."""

    def count() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in WRITES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT):
            count()

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        found: sqlite3.Connection = real(*arguments, **options)
        found.set_trace_callback(lambda statement: None if statement.startswith("SELECT") else count())
        return found

    real: Any = sqlite3.connect
    pytest.MonkeyPatch().setattr(sqlite3, "connect", connect)
    sys.addaudithook(hook)
