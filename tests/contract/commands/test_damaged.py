"""One damaged folder never hides the others: it is a row with the reason, in every list of runs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.results.archive.seal import write_sums
from mlbench_cli.storage import run_folder
from mlbench_cli.storage.store import Store
from tests import NIGHTLY
from tests.contract.clients import answer
from tests.contract.server.dashboards import serve
from tests.unit.results.runs import record_sealed

Captured = pytest.CaptureFixture[str]
NAMES = ("good-2", "bad-2", "fine-2")


def null_seconds(folder: Path) -> None:
    """A document that has fresh sums, but not the fields that it must have."""
    result = json.loads((folder / run_folder.RESULT).read_text())
    (folder / run_folder.RESULT).write_text(json.dumps({**result, "task_seconds": None}))
    (folder / run_folder.SUMS).unlink()
    write_sums(folder)


def cut_document(folder: Path) -> None:
    (folder / run_folder.RESULT).write_text("{")


def other_number(folder: Path) -> None:
    path = folder / run_folder.RESULT
    path.write_text(path.read_text().replace('"wall": 100.0', '"wall": 0.001'))


def deep_nesting(folder: Path) -> None:
    (folder / run_folder.RESULT).write_text("[" * 100_000)


def no_findings(folder: Path) -> None:
    (folder / run_folder.FINDINGS).unlink()


@pytest.fixture(params=[null_seconds, cut_document, other_number, deep_nesting, no_findings])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with three sealed runs; the second one is damaged."""
    return make_store(tmp_path, monkeypatch, request.param)


# Pages and charts take longer. The first is read and lacks fields, the second cannot be read.
SLOWLY = pytest.mark.parametrize(
    "home",
    [null_seconds, cut_document, other_number, deep_nesting, no_findings] if NIGHTLY else [null_seconds, cut_document],
    indirect=True,
)


@pytest.fixture
def one_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_store(tmp_path, monkeypatch, cut_document)


def make_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path)
    for name in NAMES:
        recorded = record_sealed(store, name, 2, 100.0)
        if name == "bad-2":
            damage(recorded.folder)
    store.close()
    return tmp_path


def test_lists_show_it_as_damaged_with_the_reason(home: Path, capsys: Captured) -> None:
    assert run(["status", "--limit", "0"]) == 0
    out, err = capsys.readouterr()
    rows = {line.split()[0]: line.split()[2] for line in out.splitlines() if line.startswith(NAMES)}
    assert rows == {"good-2": "finished", "bad-2": "damaged", "fine-2": "finished"}
    (reason,) = [line for line in err.splitlines() if line.startswith("Warning: bad-2: ")]
    assert ".json: " in reason
    assert {entry["name"]: entry["state"] for entry in answer(capsys, "status")["runs"]} == rows
    assert run(["status", "bad-2"]) == 2
    assert "mlbench verify" in capsys.readouterr().err
    assert run(["download", "bad-2"]) == 2
    assert not Path("results.zip").exists()


def test_waiting_goes_on_with_the_others_and_has_a_row_for_it(home: Path, capsys: Captured) -> None:
    assert run(["wait", *NAMES]) == 2
    out, err = capsys.readouterr()
    assert "bad-2 is damaged: " in err
    rows = {line.split()[0]: line.split()[2] for line in out.splitlines() if line.startswith(NAMES)}
    assert rows == {"good-2": "goal_reached", "fine-2": "goal_reached", "bad-2": "damaged"}
    entries = {entry["name"]: entry for entry in answer(capsys, "wait", *NAMES, code=2)["runs"]}
    assert {name: entry["outcome"] for name, entry in entries.items()} == rows
    assert entries["bad-2"]["exit_code"] == 2
    assert ".json" in entries["bad-2"]["summary"]
    assert entries["bad-2"]["result"] is None


def test_lists_can_be_asked_for_what_is_damaged(home: Path, capsys: Captured) -> None:
    for state, names in (
        ("damaged", {"bad-2"}),
        ("finished", {"good-2", "fine-2"}),
        ("goal_reached", {"good-2", "fine-2"}),
    ):
        assert {entry["name"] for entry in answer(capsys, "status", "--state", state)["runs"]} == names


@pytest.mark.slow
@SLOWLY
def test_reports_and_figures_have_the_others(home: Path, capsys: Captured) -> None:
    assert run(["report", "out.md"]) == 0
    page = Path("out.md").read_text().replace("\\", "")
    assert "left out, damaged: " in page
    assert "good-2" in page
    assert run(["charts", "figures", "--yes"]) == 0
    assert run(["export", "csv", "board.csv"]) == 0
    assert capsys.readouterr().err.count("left out, damaged") == 3
    assert run(["report", "out.md", "bad-2"]) == 2  # that was asked for by its name


@pytest.mark.slow
@SLOWLY
def test_the_dashboard_shows_the_others(home: Path) -> None:
    with serve(home) as dashboard:
        runs = dashboard.ask("/api/v1/runs").document["runs"]
        assert sorted((entry["name"], entry["state"]) for entry in runs) == [
            ("bad-2", "damaged"), ("fine-2", "finished"), ("good-2", "finished")
        ]  # fmt: skip
        assert dashboard.ask("/runs/bad-2").status == 400
        assert dashboard.ask("/runs/good-2").status == 200


# --- a store that was emptied ----------------------------------------------------------------------------------------


def test_an_emptied_store_is_rebuilt_from_the_sealed_folders(one_home: Path, capsys: Captured) -> None:
    for path in one_home.glob("mlbench.sqlite*"):
        path.unlink()
    assert run(["status"]) == 0
    out, err = capsys.readouterr()
    assert not out
    assert "contains 3 sealed run folders.\nNext: mlbench status --refresh" in err
    assert run(["status", "--refresh"]) == 0  # one of them is damaged
    assert "bad-2: " in capsys.readouterr().err
    assert run(["status"]) == 0
    rows = {line.split()[0]: line.split()[2:4] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows == {
        "good-2": ["finished", "goal_reached"],
        "fine-2": ["finished", "goal_reached"],
        "bad-2": ["damaged", "-"],
    }
    assert run(["status", "--refresh"]) == 0
    assert len(Store(one_home).runs()) == 3


def next_id(one_home: Path) -> str:
    return next(row.run.id for row in Store(one_home).runs() if row.run.name == "good-2")


def test_a_damaged_database_names_the_way_back(one_home: Path, capsys: Captured) -> None:
    for path in one_home.glob("mlbench.sqlite-*"):
        path.unlink()
    path = one_home / "mlbench.sqlite"
    path.write_bytes(b"no database at all, but long enough to be looked at" * 100)
    assert run(["status"]) == 2
    assert "mlbench status --refresh" in capsys.readouterr().err
    path.rename(one_home / "mlbench.sqlite.damaged")
    assert run(["status", "--refresh"]) == 0
    assert len(Store(one_home).runs()) == 3


def test_a_folder_of_another_run_and_a_name_that_is_taken_are_not_recorded(one_home: Path, capsys: Captured) -> None:
    identity = next_id(one_home)
    (one_home / "runs" / identity).rename(one_home / "runs" / "somewhere")
    assert run(["status", "--refresh"]) == 0
    assert f"somewhere contains the run {identity}, but its name differs" in capsys.readouterr().err
