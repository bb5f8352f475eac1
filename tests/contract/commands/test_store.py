"""Commands whose store another process has locked, or a newer mlbench has written."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from mlbench_cli.api import Client
from mlbench_cli.app import run
from mlbench_cli.errors import StoreError, StoreLockedError
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.store import Store
from tests.contract import clients
from tests.contract.commands.store_locks import lock_out
from tests.needs import needs

Captured = pytest.CaptureFixture[str]
PATIENCE = 150
SERVE = ["serve", "--host", "192.0.2.1", "--insecure"]  # which could not listen there: no test waits for its end


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with one run; commands do not wait for its lock."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))
    monkeypatch.setenv("MLBENCH_STORE_PATIENCE", "0.05")
    with Client(tmp_path) as client:
        client.store.record_run(RunSpec("demo-1", "local", "local", "custom", "custom", ("true",), "gloo", 1))
    return tmp_path


def test_a_store_that_is_locked_ends_commands_with_a_reason_and_loses_nothing(home: Path, capsys: Captured) -> None:
    reading = (["status"], ["status", "demo-1"], ["list-clusters"], ["set-cluster", "local"], ["wait", "demo-1"])
    starting = ["run", "x", "1", "--command", "true"]
    others = (["delete", "demo-1", "--yes"], ["report", "x.html", "demo-1"], ["run", "-f", "seed-252"], SERVE)
    with lock_out(home):
        for command in (*reading, starting, *others):
            assert run(command) == 124, command
            text = capsys.readouterr().err
            assert f"The store {home / 'mlbench.sqlite'} is locked" in text
            assert "Next: Wait for that process, or end it (lsof " in text
            assert "Traceback" not in text
        assert run(["status", "-o", "json"]) == 124
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "deadline"
    with lock_out(home, "writers"):
        assert run(["status"]) == 0  # readers are not in the way of a writer
        assert run(starting) == 124
        assert "is locked" in capsys.readouterr().err
    assert len(Store(home).runs()) == 1
    assert run([*starting, "--share-machine"]) == 0
    assert len(Store(home).runs()) == 2


def test_a_command_says_that_it_waits_and_goes_on_when_the_lock_is_released(home: Path) -> None:
    environment = {**os.environ, "MLBENCH_STORE_PATIENCE": str(PATIENCE)}
    with lock_out(home):
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = clients.start("status", environment=environment, **both)
        assert process.stderr is not None
        notice = process.stderr.readline()
        with pytest.raises(subprocess.TimeoutExpired):  # for seconds, not for milliseconds
            process.wait(1.0)
    assert f"Waiting for the store {home / 'mlbench.sqlite'}, which another process has locked; at most" in notice
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, "demo-1" in out) == (0, True), err


def test_completion_offers_nothing_while_the_store_is_locked(home: Path) -> None:
    environment = {**os.environ, "_MLBENCH_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "mlbench wait d"}
    for is_locked in (False, True):
        if is_locked:
            with lock_out(home):
                done = clients.finish(environment=environment)
        else:
            done = clients.finish(environment=environment)
        assert ("demo-1" in done.stdout) is not is_locked
        assert done.stderr == ""


def test_a_store_of_a_newer_version_ends_commands_with_a_reason_and_stays_as_it_is(
    home: Path, capsys: Captured
) -> None:
    client = Client(home)
    with sqlite3.connect(home / "mlbench.sqlite") as database:
        database.execute("PRAGMA user_version=99")
    for command in (["status"], ["list-clusters"], ["run", "x", "1", "--command", "true"], SERVE):
        assert run(command) == 2, command
        assert "was written by a newer mlbench (schema 99;" in capsys.readouterr().err
    with pytest.raises(StoreError, match="newer mlbench"):
        client.require_readable()
    with sqlite3.connect(home / "mlbench.sqlite") as database:
        assert database.execute("PRAGMA user_version").fetchone() == (99,)
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (1,)


def test_a_patience_that_is_no_number_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    for text in ("soon", "-1", "nan", "1e9"):
        monkeypatch.setenv("MLBENCH_STORE_PATIENCE", text)
        assert run(["status"]) == 2
        assert f'MLBENCH_STORE_PATIENCE is "{text}"' in capsys.readouterr().err


def test_a_client_has_its_own_patience(home: Path) -> None:
    with lock_out(home), pytest.raises(StoreLockedError, match=r"not released it within 0\.2 s"):
        Client(home, patience=0.2)


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    """Archived results on a disk that is mounted read-only, also while a run of another client is unfinished."""
    needs("unshare")
    home, tool = tmp_path / "home", Path(sys.executable).with_name("mlbench")
    environment = {**os.environ, "MLBENCH_HOME": str(home)}
    for name in ("a", "b"):
        words = ["run", name, "1", "--command", "echo hello", "--share-machine", "--quiet"]
        subprocess.run([tool, *words], env=environment, check=True, capture_output=True)
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    separate = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else []), "sh", "-c", mount, str(home)]

    def mlbench(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [*separate, str(tool), *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    for words, said in (
        (["status"], "b-1"),
        (["status", "a-1"], "completed"),
        (["logs", "a-1"], "hello"),
        (["wait", "a"], "completed"),
        (["download", "a", "b", "--to", "both.zip"], "both.zip"),
        (["verify", "a", "both.zip"], "ok (integrity, derivation)"),
        (["compare", "a-1", "b-1"], "CHANGE"),
        (["report", "out.html"], "out.html"),
        (["export", "csv", "out.csv", "a-1"], "out.csv"),
    ):
        done = mlbench(*words)
        assert done.returncode == 0, (words, done.stderr)
        assert said in done.stdout, words
    for words in (["run", "c", "1", "--command", "echo"], ["delete", "a-1", "--yes"]):
        done = mlbench(*words)
        assert done.returncode == 2
        assert "cannot be" in done.stderr, words
    client = Store(home)  # one that is at work has a log beside the store, which is read, too
    client.record_run(RunSpec("new-1", "local", "local", "custom", "custom", ("true",), "gloo", 1))
    assert "new-1" in mlbench("status").stdout
    client.close()
