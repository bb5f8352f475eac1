"""`mlbench run -f` of a file with runs, through real processes: resuming, failures, budgets, tables."""

import csv
import json
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.runs.matrix import MAX_CONFIRMED
from mlbench_cli.runs.request import matrix_of, parse_mapping
from mlbench_cli.storage.store import Store
from tests.contract.clients import answer

Captured = pytest.CaptureFixture[str]

FILE = """
title: Demo
num-cpus: 1
share-machine: true
workers: [1, 2]
runs:
  - {name: good, command: sh -c "echo $MLBENCH_RUN_ID >> OUT"}
  - {name: bad, command: sh -c "exit 3", workers: [1]}
"""


@pytest.fixture(autouse=True)
def demo(home: Path) -> None:
    Path("demo.yaml").write_text(FILE.replace("OUT", str(home.with_name("started"))))


def test_a_dry_run_lists_the_runs_in_their_order_and_starts_none(capsys: Captured, home: Path) -> None:
    document = answer(capsys, "run", "-f", "demo.yaml", "--dry-run")
    runs = [(entry["name"], entry["left"]) for entry in document["runs"]]
    assert runs == [("demo-good-1", True), ("demo-bad-1", True), ("demo-good-2", True)]
    assert not Store().runs()
    assert not (home / "tables").exists()


def test_a_folder_below_the_home_folder_needs_no_shell(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    entry = "{name: home, command: sh -c 'echo $MLBENCH_DATA_DIR', workers: [1], data-dir: ~/data}"
    Path("demo.yaml").write_text(f"runs:\n  - {entry}\n")
    answer(capsys, "run", "-f", "demo.yaml", "--yes")
    assert run(["logs", "demo-home-1"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'data'}\n"


def test_runs_for_gpus_are_listed_without_a_gpu_and_not_started(
    capsys: Captured, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(["run", "-f", "seed-252", "--dry-run", "-o", "json"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["runs"]) == 420
    assert "This machine has no GPU, so it cannot start these runs" in captured.err
    assert run(["run", "-f", "seed-252", "--yes"]) == 2
    assert "this machine has no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-f", "demo.yaml", "mine", "2", "--task", "mnist"], "describes several runs, so --task, NAME, N cannot"),
        (["mine", "1", "--command", "true", "--only-report"], "--only-report: only for a file with runs."),
    ],
)
def test_options_that_do_not_belong_to_the_file_are_named(capsys: Captured, words: list[str], message: str) -> None:
    assert run(["run", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Store().runs()


def test_a_file_goes_on_keeps_failures_and_writes_its_table(capsys: Captured, home: Path) -> None:
    document = answer(capsys, "run", "-f", "demo.yaml", code=7)
    rows = {row["settings"]["series"]: row for row in document["rows"]}
    assert [cell["workers"] for cell in rows["good"]["cells"]] == [1, 2]
    assert rows["bad"]["cells"][0]["value"] is None
    assert "exit" in rows["bad"]["cells"][0]["problems"][0]
    table = Path(document["folder"])
    assert table.parent.name == "tables"
    assert table.is_relative_to(home)
    assert not Path("demo").exists()
    assert sorted(path.name for path in table.iterdir()) == [
        *("table.csv", "table.json", "table.md"),
        *("throughput.csv", "throughput.png", "throughput.svg"),
    ]
    assert "- demo-bad-1:" in (table / "table.md").read_text()
    started = Path("started").read_text().split()
    assert sorted(set(started)) == ["demo-good-1", "demo-good-2"]
    again = answer(capsys, "run", "-f", "demo.yaml")
    assert again["rows"] == document["rows"]
    assert Path("started").read_text().split() == started
    assert len(Store().runs()) == 3
    assert answer(capsys, "run", "demo")["rows"] == document["rows"]  # from the record, without the file
    [experiment] = answer(capsys, "status", "demo")["experiments"]
    assert (experiment["name"], experiment["progress"]["total"]) == ("demo", 3)
    retried = answer(capsys, "run", "-f", "demo.yaml", "--retry-failed", code=7)
    assert "demo-bad-1-try2" in json.dumps(retried["rows"])


def test_the_time_in_the_table_is_that_of_status_and_compare(capsys: Captured) -> None:
    """The mean of the runs that succeeded, whatever figure the table is about."""
    Path("t.py").write_text(
        "import os, time\nfrom mlbench import emit\nemit('metric', name='score', value=1.0)\n"
        "time.sleep({'42': 0.1, '43': 0.6, '44': 1.2}[os.environ['MLBENCH_SEED']])\n"
        "os.environ['MLBENCH_SEED'] == '44' and os._exit(3)\n"
    )
    file = {"metric": "score", "repeat": 3, "workers": 1, "share-machine": True, "runs": [{"command": "python t.py"}]}
    Path("timed.yaml").write_text(json.dumps(file))
    folder = Path(answer(capsys, "run", "-f", "timed.yaml", code=7)["folder"])
    [row] = csv.DictReader((folder / "table.csv").read_text().splitlines())
    [repeats] = answer(capsys, "status", "timed")["repeats"]
    assert (repeats["seconds"]["count"], row["failed"]) == (2, "1")
    assert float(row["seconds"]) == pytest.approx(repeats["seconds"]["mean"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("published: [survey-1999]\n", "no published table"),
        ("max-hours: 1\n", "max-hours"),
        ("clusters: [nowhere]\n", "nowhere"),
    ],
)
def test_bad_input_starts_nothing_and_says_the_way_out(capsys: Captured, more: str, words: str) -> None:
    path = Path("demo.yaml")
    path.write_text(path.read_text() + more)
    assert run(["run", "-f", "demo.yaml"]) in (2, 4)
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message
    assert not Store().runs()


def test_more_runs_than_anybody_means_by_chance_have_to_be_confirmed(capsys: Captured) -> None:
    values = {"set.batch_size": [*range(1, 102)], "set.epochs": [*range(1, 101)]}
    file = {"name": "many", "task": "digits_resnet", "preset": "tiny", "num-cpus": 1, "workers": [1], "matrix": values}
    Path("many.yaml").write_text(json.dumps(file))
    assert run(["run", "-f", "many.yaml"]) == 2
    assert "10100 points, more than 10000." in (message := capsys.readouterr().err)
    assert "confirm it: --yes" in message
    assert not Store().runs()
    assert len(matrix_of(parse_mapping(file)).points(MAX_CONFIRMED)) == 10_100


@pytest.mark.slow
def test_a_file_is_left_to_a_process_of_its_own_and_tabulated_later(capsys: Captured) -> None:
    answer(capsys, "run", "-f", "demo.yaml", "--detach")
    assert run(["wait", "demo"]) == 7
    table = answer(capsys, "run", "demo", "--only-report")
    assert [cell["workers"] for cell in table["rows"][0]["cells"]] == [1, 2]


@pytest.mark.slow
def test_an_entry_that_contradicts_its_runs_is_refused_and_a_new_entry_is_added(capsys: Captured) -> None:
    path = Path("demo.yaml")
    path.write_text("num-cpus: 1\nworkers: [1]\nruns: [{name: good, command: 'true'}]\n")
    answer(capsys, "run", "-f", "demo.yaml")
    path.write_text("num-cpus: 1\nworkers: [1]\nruns: [{name: good, command: 'false'}]\n")
    assert run(["run", "-f", "demo.yaml"]) == 2
    assert 'The experiment "demo" exists and differs' in capsys.readouterr().err
    path.write_text(
        "num-cpus: 1\nworkers: [1]\nruns: [{name: good, command: 'true'}, {name: more, command: 'echo more'}]\n"
    )
    answer(capsys, "run", "-f", "demo.yaml")
    assert [row.run.name for row in Store().runs()] == ["demo-good-1", "demo-more-1"]
