"""The list of `mlbench status`: the newest runs, chosen by state, task and age, with goal and seconds."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.model.run import Outcome, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.select import Filter, select
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import timestamp
from tests.contract.clients import answer
from tests.contract.terminal import Terminal

Captured = pytest.CaptureFixture[str]
DAY = 86400.0


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Sixty runs, one a day, of which every tenth has failed and every fifteenth is a task's."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = Store(tmp_path)
    for number in range(60):
        task = "digits_resnet" if number % 15 == 0 else "custom"
        spec = RunSpec(f"run-{number}", "local", "local", task, "spec", ("true",), "gloo", 1)
        created = timestamp(os.stat(tmp_path).st_mtime - (59 - number) * DAY)
        recorded = found.record_run(spec, created=created)
        outcome = Outcome.FAILED if number % 10 == 0 else Outcome.COMPLETED
        found.advance(recorded, RunState.FINISHED, outcome)
    yield found
    found.close()


def names(capsys: Captured, *argv: str) -> list[str]:
    return [row["name"] for row in answer(capsys, "status", *argv)["runs"]]


def test_the_newest_fifty_are_listed(capsys: Captured) -> None:
    assert names(capsys) == [f"run-{number}" for number in range(10, 60)]
    assert names(capsys, "--limit", "2") == ["run-58", "run-59"]
    assert len(names(capsys, "--limit", "0")) == 60
    assert run(["status"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 51
    assert "10 older runs are hidden; --limit 0 shows all." in printed.err


def test_filters_look_at_all_runs(capsys: Captured, store: Store) -> None:
    assert names(capsys, "--state", "failed") == [f"run-{number}" for number in range(0, 60, 10)]
    assert names(capsys, "--state", "failed", "--limit", "1") == ["run-50"]
    assert names(capsys, "--task", "digits_resnet") == ["run-0", "run-15", "run-30", "run-45"]
    assert names(capsys, "--since", "60h") == ["run-57", "run-58", "run-59"]
    assert names(capsys, "--since", "20d", "--task", "digits_resnet", "--state", "finished") == ["run-45"]
    assert names(capsys, "--state", "running") == []
    for state in (RunState.QUEUED, RunState.SUBMITTED):
        spec = RunSpec(f"now-{state}", "far", "kubernetes", "custom", "custom", ("true",), "gloo", 1)
        store.advance(store.record_run(spec), state)
    rows, _ = select(store, all_runs=True, filter=Filter(("pending",)))  # as in mlbench delete --state pending
    assert [row.run.name for row in rows] == ["now-queued", "now-submitted"]
    assert run(["status", "--state", "lost"]) == 0
    assert "No run matches." in capsys.readouterr().err


def test_a_selection_by_age_is_what_it_says(capsys: Captured) -> None:
    assert run(["delete", "--older-than", "57.5d", "--yes"]) == 0
    assert names(capsys, "--limit", "0")[0] == "run-2"
    assert run(["delete", "--since", "1.5d", "--yes"]) == 0
    assert names(capsys, "--limit", "0")[-1] == "run-57"


def test_goal_and_seconds_of_finished_runs(capsys: Captured) -> None:
    measure = 'from task_images.contract import emit; emit("metric", name="val_global_Prec@1", value=99.25)'
    argv = ["run", "open", "1", "--task", "digits_resnet", "--command", f"python -c '{measure}'"]
    assert run(argv) == 0
    (row,) = answer(capsys, "status", "--limit", "1")["runs"]
    assert row["goal"]["value"] == 99.25
    assert row["seconds"] >= 0
    assert run(["status", "--limit", "2"]) == 0
    header, failed, shown = capsys.readouterr().out.splitlines()
    assert header.split()[:6] == ["RUN", "WORKERS", "STATE", "OUTCOME", "GOAL", "TIME"]
    assert "Prec@1 99.2 % (>= 98)" in shown
    assert failed.split()[4:6] == ["-", "-"]
    (rank,) = answer(capsys, "status", "open-1")["ranks"]
    assert rank["started"].endswith("Z")
    assert rank["finished"].endswith("Z")


@pytest.mark.parametrize(("columns", "kept"), [(40, 0), (60, 1), (160, 4)])  # no run has a goal or a time
def test_columns_give_way_on_a_narrow_terminal(store: Store, columns: int, kept: int) -> None:
    store.close()
    _, printed = Terminal(
        "status", "--limit", "0", home=store.folder, columns=columns, environment={"TERM": "dumb"}
    ).finish()
    header = printed.splitlines()[0].split()
    assert header[:4] == ["RUN", "WORKERS", "STATE", "OUTCOME"]
    assert len(header) - 4 == kept
    assert max(map(len, printed.splitlines())) <= columns


def test_runs_that_go_on_are_looked_at_whatever_state_is_recorded(store: Store, capsys: Captured) -> None:
    """Recorded as created, and now at an end without an archive: the store alone does not know it."""
    spec = RunSpec("live-1", "local", "local", "custom", "spec", ("true",), "gloo", 1)
    recorded = store.record_run(spec)
    store.advance(recorded, RunState.RUNNING)
    (shown,) = [row for row in answer(capsys, "status")["runs"] if row["name"] == "live-1"]
    assert shown["state"] != "finished"
    assert names(capsys, "--state", shown["state"]) == ["live-1"]


def test_a_run_that_cannot_be_read_is_found_as_unknown(store: Store, capsys: Captured) -> None:
    with closing(sqlite3.connect(store.folder / "mlbench.sqlite")) as db, db:
        db.execute("UPDATE runs SET spec = 'no JSON' WHERE name = 'run-3'")
    assert names(capsys, "--state", "unknown") == ["run-3"]
    assert names(capsys, "--task", "digits_resnet") == ["run-0", "run-15", "run-30", "run-45"]
