"""`mlbench run --search` with real runs: trials, the choice, the measured run, and the same command again."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlbench_cli.api import Client
from mlbench_cli.app import run

SEARCH = ("--search", "set.learning_rate=1e-7,0.02", "--search-budget", "1")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_search_chooses_what_then_runs_and_a_second_one_starts_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["run", "s", "1", "--task", "digits_resnet", "--preset", "tiny", "--set", "goal_full=50", "--yes", *SEARCH]
    words += ["--set", "epochs=8", "--num-cpus", "1", "--share-machine"]
    assert run(words) == 0
    assert "Chosen: set.learning_rate=0.02" in capfd.readouterr().err
    client = Client()
    assert sorted(each.name for each in client.runs()) == [*("s-1", "s-search1-1e-7-1", "s-search1-learningrate0p02-1")]
    with client.find_run("s-1").archive() as archive:
        provenance = archive.run["provenance"]
        assert provenance is not None
        found = provenance["search"]
        assert archive.run["spec"]["parameters"]["learning_rate"] == 0.02
        assert archive.run["spec"]["parameters"]["hold_out"] == 0.0
    assert found["chosen"] == {"set.learning_rate": "0.02"}
    assert (found["workers"], found["hold_out"], found["limited_by"]) == (1, 0.2, "epochs")
    values = {each["point"]["set.learning_rate"]: each["value"] for each in found["tried"]}
    assert values["1e-7"] < values["0.02"]
    with client.find_run("s-search1-1e-7-1").archive() as trial:
        assert trial.result["division"]["word"] is None
        assert trial.run["spec"]["parameters"]["hold_out"] == 0.2
    assert run([*words, "-o", "json"]) == 0
    captured = capfd.readouterr()
    assert "Started" not in captured.err
    assert len(client.runs()) == 3
    assert [each["name"] for each in json.loads(captured.out)["runs"]] == ["s-1"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--detach",), "does not work with --detach"),
        (("--search", "set.lerning_rate=1,2"), "no parameter"),
        (("--matrix", "method=bsp,dear"), "exclude each other"),
    ],
)
def test_a_search_that_cannot_work_starts_nothing(
    words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", "s", "1", "--task", "digits_resnet", "--yes", *SEARCH, *words]) == 2
    assert text in capsys.readouterr().err
    assert not Client().runs()


def test_other_ways_to_start_runs_refuse_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "many.yaml"
    path.write_text("runs: [{task: digits_resnet, workers: 1, search: 'set.depth=8,14'}]\n")
    assert run(["run", "-f", str(path), "--dry-run"]) == 2
    assert "--search" in capsys.readouterr().err
    assert run(["run", "s", "1", "--task", "digits_resnet", "--search-budget", "3", "--dry-run"]) == 2
    assert "--search-budget" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_command_resumes_a_search_after_ctrl_c(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["run", "s", "1", "--task", "digits_resnet", "--preset", "tiny", "--set", "goal_full=50", "--yes", *SEARCH]
    words += ["--num-cpus", "1", "--share-machine"]
    command = [sys.executable, "-m", "mlbench_cli", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as search:
        while not list((tmp_path / "home").glob("runs/*/result.json")):  # the first trial has not ended
            assert search.poll() is None
            time.sleep(0.05)
        search.send_signal(signal.SIGINT)
        assert search.stderr is not None
        err = search.stderr.read()
    assert search.returncode == 130, err
    assert "The search was stopped in round 1; repeat the command to resume." in err
    assert "s-1" not in {each.name for each in Client().runs()}
    assert run(words) == 0
    err = capfd.readouterr().err
    assert "Chosen: set.learning_rate=0.02" in err
    assert "Started s-search1-1e-7-1" not in err, "a trial that had ended was run again"
    with Client().find_run("s-1").archive() as archive:
        provenance = archive.run["provenance"]
    assert provenance is not None
    assert [each["point"]["set.learning_rate"] for each in provenance["search"]["tried"]] == ["1e-7", "0.02"]
