"""Commands with --dashboard-url, against a real dashboard process that has runs which this machine does not know."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.results.archive.verify import find_problems
from mlbench_cli.storage.store import Store
from tests.contract.server.conftest import record_sealed
from tests.contract.server.dashboards import Dashboard, serve

READ, ACT = "r" * 24, "a" * 24


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "home").mkdir()
    store = Store(folder / "home")
    record_sealed(store, "alpha-1", 1, 90.0)
    record_sealed(store, "alpha-2", 2, 60.0)
    store.close()
    tokens = folder / "tokens"
    tokens.write_text(f"read {READ}\nact {ACT}\n")
    tokens.chmod(0o600)
    with serve(folder / "home", "--allow-actions", "--token-file", str(tokens)) as found:
        yield found


@pytest.fixture
def url(shared: Dashboard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "empty"))  # this machine knows none of the runs
    monkeypatch.setenv("MLBENCH_DASHBOARD_TOKEN", ACT)
    return f"http://127.0.0.1:{shared.port}"


def test_status_shows_the_runs_of_the_dashboard(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "-u", url]) == 0
    shown = capsys.readouterr().out
    assert "alpha-1" in shown
    assert "alpha-2" in shown
    assert run(["status", "alpha-2", "-u", url]) == 0
    one = capsys.readouterr().out
    assert "2 workers" in one
    assert "Folder:" not in one
    assert run(["status", "alpha-2", "-u", url, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "alpha-2"


def test_logs_and_download_bring_what_the_dashboard_has(
    url: str, shared: Dashboard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["logs", "alpha-2", "-u", url, "--rank", "1", "--raw"]) == 0
    (log,) = shared.home.rglob("*/logs/rank-1.log")  # only alpha-2 has a second rank
    assert capsys.readouterr().out == log.read_text()
    target = tmp_path / "alpha.zip"
    assert run(["download", "alpha-2", "-u", url, "--to", str(target)]) == 0
    assert find_problems(target) == []
    assert run(["download", "alpha-2", "-u", url, "--to", str(target)]) == 2  # it exists


def test_a_run_is_started_followed_and_cancelled_there(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('hello from there')\n")
    command = f"{sys.executable} {program}"
    assert run(["run", "there", "1", "--command", command, "--share-machine", "-u", url, "-o", "json"]) == 0
    (ended,) = json.loads(capsys.readouterr().out)["runs"]
    assert (ended["name"], ended["outcome"], ended["exit_code"]) == ("there-1", "completed", 0)
    assert run(["logs", "there", "-u", url, "--follow"]) == 0
    assert "hello from there" in capsys.readouterr().out
    program.write_text("import time\nprint('begun', flush=True)\ntime.sleep(300)\n")
    assert run(["run", "long", "1", "--command", command, "--share-machine", "-u", url, "--detach"]) == 0
    assert run(["wait", "long", "-u", url, "--timeout", "1s"]) == 124
    assert run(["cancel", "long-1", "-u", url]) == 0
    assert run(["wait", "long", "-u", url, "--timeout", "60s"]) == 7


def test_errors_say_what_the_dashboard_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "nothing", "-u", url]) == 4
    assert run(["status", "--cloud", "-u", url]) == 2
    assert "--cloud does not work with --dashboard-url" in capsys.readouterr().err
    assert run(["status", "-u", "ftp://example"]) == 2
    assert run(["status", "-u", "http://127.0.0.1:1"]) == 10
    monkeypatch.setenv("MLBENCH_DASHBOARD_TOKEN", READ)
    assert run(["cancel", "alpha-1", "-u", url]) == 3
    assert "is read-only" in capsys.readouterr().err
    monkeypatch.setenv("MLBENCH_DASHBOARD_TOKEN", "x" * 24)
    assert run(["status", "-u", url]) == 3
    monkeypatch.delenv("MLBENCH_DASHBOARD_TOKEN")
    assert run(["status", "-u", url]) == 3
    assert run(["status", "-u", f"{url}/?token={READ}"]) == 0
