"""`mlbench run` killed (SIGKILL) right before its first, second, ... write: the same command completes its runs."""

import os
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

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
            sys.addaudithook(watch_writes(moment))
            os._exit(run(COMMAND))
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    return status != 0


def watch_writes(left: int) -> Callable[[str, tuple[object, ...]], None]:
    """An audit hook that kills this process before it writes to files or to the store for the given time."""

    def count() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "sqlite3.connect/handle" and isinstance(arguments[0], sqlite3.Connection):
            arguments[0].set_trace_callback(lambda statement: count() if not statement.startswith("SELECT") else None)
        elif event in WRITES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT):
            count()

    return hook
