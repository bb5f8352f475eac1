"""Experiments through the command line and real processes: resuming, matrices, names in every command, archives."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.storage.store import Store
from tests.contract import clients
from tests.contract.clients import answer
from tests.contract.local_runs import until

Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("home")


def outcomes(document: Any) -> dict[str, str]:
    return {entry["name"]: entry["outcome"] for entry in document["runs"]}


COMMAND = [
    "--set",
    "run.run_on_all=no",
    "--command",
    "sh -c 'echo \"$WORLD_SIZE $MLBENCH_SEED $MLBENCH_BACKEND\" >> lines'",
]


def read_output() -> list[str]:
    return Path("lines").read_text().splitlines()


# --- the same command line again ------------------------------------------------------------------------------------


def test_finished_members_are_skipped_and_repeats_added(capsys: Captured) -> None:
    argv = ["run", "x", "1", "2", *COMMAND]
    assert run([*argv, "--repeat", "1"]) == 0
    assert run(argv) == 0
    assert read_output() == ["1 42 gloo", "2 42 gloo"]
    assert outcomes(answer(capsys, *argv, "--repeat", "2")) == dict.fromkeys(
        ["x-1", "x-2", "x-1-r2", "x-2-r2"], "completed"
    )
    assert read_output() == ["1 42 gloo", "2 42 gloo", "1 43 gloo", "2 43 gloo"]
    assert run([*argv, "--backend", "mpi"]) == 2
    assert 'backend was "gloo", now "mpi"' in capsys.readouterr().err
    assert len(read_output()) == len(Store().runs()) == 4


def test_a_failed_member_stays_failed_unless_it_is_retried(capsys: Captured) -> None:
    argv = ["run", "x", "1", "2", "--command", "sh -c 'test $WORLD_SIZE = 1 || test -e better'"]
    assert outcomes(answer(capsys, *argv, code=7)) == {"x-1": "completed", "x-2": "failed"}
    Path("better").touch()
    assert outcomes(answer(capsys, *argv, code=7)) == {"x-1": "completed", "x-2": "failed"}
    assert outcomes(answer(capsys, *argv, "--retry-failed")) == {"x-1": "completed", "x-2-try2": "completed"}
    assert answer(capsys, "status", "x")["experiments"][0]["state"] == "completed"
    assert answer(capsys, "status", "x-2")["outcome"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_client_leaves_the_rest_pending(capsys: Captured, number: int, code: int) -> None:
    script = "sh -c 'touch begun; until test -e go; do sleep 0.02; done'"
    argv = ["run", "x", "1", "2", "3", "--command", script, "--set", "run.run_on_all=no"]
    client = clients.start(*argv, stderr=subprocess.PIPE)
    until(lambda: Path("begun").exists())
    assert run(["run", "x"]) == 2
    assert 'The experiment "x" is running: ' in capsys.readouterr().err
    client.send_signal(number)
    _, err = client.communicate(timeout=120)
    assert client.returncode == code
    assert "Not started: x-2, x-3" in err
    assert "mlbench run x" in err
    until(lambda: answer(capsys, "status", "x-1")["outcome"] == "canceled")
    found = answer(capsys, "status", "x")["experiments"][0]
    assert found["state"] == "stopped"
    assert found["queue"]["state"] == "ended"
    Path("go").touch()
    assert outcomes(answer(capsys, "run", "x")) == dict.fromkeys(["x-1-try2", "x-2", "x-3"], "completed")


def test_a_killed_client_leaves_the_rest_pending(capsys: Captured) -> None:
    script = "sh -c 'touch begun; until test -e go; do sleep 0.02; done'"
    argv = ["run", "x", "1", "2", "--command", script, "--set", "run.run_on_all=no"]
    client = clients.start(*argv, stderr=subprocess.DEVNULL)
    until(lambda: Path("begun").exists())
    assert run(["delete", "x", "--yes"]) == 2
    assert 'The experiment "x" is running.' in capsys.readouterr().err
    os.kill(client.pid, signal.SIGKILL)
    client.wait()
    assert run(["wait", "x-2"]) == 6
    assert "was killed" in capsys.readouterr().err
    Path("go").touch()
    assert run(["wait", "x-1"]) == 0  # it outlives its client
    assert run(["wait", "x"]) == 6
    assert run(["run", "x"]) == 0


# --- matrices, files -------------------------------------------------------------------------------------------------


def test_a_matrix_from_flags_to_compare(capsys: Captured) -> None:
    argv = ["run", "m", "1", *COMMAND, "--matrix", "backend=gloo,mpi", "--matrix", "seed=1,2"]
    document = answer(capsys, *argv, "--exclude", "backend=mpi,seed=2")
    assert [entry["name"] for entry in document["runs"]] == ["m-gloo-seed1-1", "m-gloo-seed2-1", "m-mpi-seed1-1"]
    assert read_output() == ["1 1 gloo", "1 2 gloo", "1 1 mpi"]
    members = answer(capsys, "status", "m")["experiments"][0]["members"]
    assert members[2]["point"] == {"backend": "mpi", "seed": "1"}
    assert outcomes(answer(capsys, *argv)) == dict.fromkeys(
        ["m-gloo-seed1-1", "m-gloo-seed2-1", "m-mpi-seed1-1", "m-mpi-seed2-1"], "completed"
    )
    assert len(read_output()) == 4


def test_an_experiment_is_resumed_where_its_home_has_moved(
    capsys: Captured, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a cache of CI restores it in another folder."""
    argv = ["run", "x", "1", *COMMAND, "--repeat"]
    assert outcomes(answer(capsys, *argv, "1")) == {"x-1": "completed"}
    moved = home.rename(home.with_name("restored"))
    monkeypatch.setenv("MLBENCH_HOME", str(moved))
    assert answer(capsys, "status", "x-1")["folder"].startswith(str(moved))
    assert outcomes(answer(capsys, *argv, "2")) == {"x-1": "completed", "x-1-r2": "completed"}
    assert run(["verify", "x"]) == 0
    assert run(["delete", "x", "--yes"]) == 0
    assert list((moved / "runs").iterdir()) == []
    assert not home.exists()


def test_a_resumed_experiment_may_share_the_machine(capsys: Captured) -> None:
    argv = ["run", "x", "1", *COMMAND, "--repeat"]
    assert outcomes(answer(capsys, *argv, "1")) == {"x-1": "completed"}
    assert outcomes(answer(capsys, *argv, "2", "--share-machine")) == {"x-1": "completed", "x-1-r2": "completed"}
    assert {row.run.name: row.run.spec.share_machine for row in Store().runs()} == {"x-1": False, "x-1-r2": True}
    assert len(read_output()) == 2


def test_repeats_count_among_the_runs_of_an_experiment(capsys: Captured) -> None:
    values = ",".join(map(str, range(11)))
    words = ["run", "x", "1", "--command", "echo {k}", "--matrix", f"set.k={values}", "--repeat", "1000", "--dry-run"]
    assert run(words) == 2
    assert "These are 11000 runs, more than 10000." in capsys.readouterr().err


def test_a_saved_file_asks_for_the_same(capsys: Captured) -> None:
    argv = ["run", "x", "1", *COMMAND, "--matrix", "seed=1,2", "--save", "x.yaml"]
    assert run([*argv, "--dry-run"]) == 0
    first = capsys.readouterr().out
    assert run(["run", "-f", "x.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out == first
    assert run([*argv, "--dry-run"]) == 0
    assert run(["run", "y", "2", "--command", "true", "--save", "x.yaml", "--dry-run"]) == 2
    assert "x.yaml already exists" in capsys.readouterr().err
    assert run(["run", "y", "2", "--command", "true", "--save", "x.yaml/x.yaml"]) == 2
    assert Store().runs() == []


# --- again, from an archive ------------------------------------------------------------------------------------------


def test_a_run_is_repeated_from_its_archive(capsys: Captured) -> None:
    assert run(["run", "x", "2", *COMMAND, "--seed", "7"]) == 0
    assert run(["download", "x", "--to", "x.zip"]) == 0
    assert outcomes(answer(capsys, "run", "--from", "x.zip")) == {"x-again-2": "completed"}
    assert outcomes(answer(capsys, "run", "y", "--from", "x-2")) == {"y-2": "completed"}
    assert read_output() == ["2 7 gloo"] * 3
    specs = {row.run.name: row.run.spec.content_hash for row in Store().runs()}
    assert len(set(specs.values())) == 1
    assert outcomes(answer(capsys, "run", "y", "--from", "x.zip")) == {"y-2": "completed"}
    assert len(read_output()) == 3


def test_what_cannot_be_repeated_is_refused_with_the_reason(capsys: Captured) -> None:
    Path("data").mkdir()
    assert run(["run", "x", "1", "--command", "true", "--data-dir", "data"]) == 0
    for argv, words in (
        (["--from", "x-1", "--seed", "3"], "--seed would change it"),
        (["y", "1", "--from", "x-1"], "a number of workers would change it"),
        (["--from", "nope"], "no archive nope"),
        (["--from", "x-1", "--save", "x.yaml"], "--save and --from exclude each other"),
    ):
        assert run(["run", *argv]) in (2, 4)
        assert words in capsys.readouterr().err
    Path("data").rmdir()
    assert run(["run", "--from", "x-1"]) == 2
    assert "cannot be repeated here exactly: its data folder" in capsys.readouterr().err
    assert [row.run.name for row in Store().runs()] == ["x-1"]


# --- names and filters -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_command_takes_several_names_and_filters(capsys: Captured) -> None:
    assert run(["run", "a", "1", "2", *COMMAND]) == 0
    assert run(["run", "b", "1", "--command", "false"]) == 7
    assert answer(capsys, "wait", "a", "b", code=7)["runs"][-1]["name"] == "b-1"
    assert outcomes(answer(capsys, "status", "--state", "failed")) == {"b-1": "failed"}
    assert outcomes(answer(capsys, "status", "--task", "custom", "--state", "completed")).keys() == {"a-1", "a-2"}
    assert answer(capsys, "delete", "--older-than", "1h", "--yes")["runs"] == []
    assert len(answer(capsys, "status", "--since", "1h")["runs"]) == 3
    assert run(["logs", "a", "b"]) == 0
    assert "--- a-2 ---" in capsys.readouterr().err
    assert run(["download", "a", "b", "--to", "archives"]) == 0
    assert sorted(path.name for path in Path("archives").iterdir()) == ["a-1.zip", "a-2.zip", "b-1.zip"]
    assert answer(capsys, "cancel", "--all")["runs"] == []
    assert run(["charts", "figures", "a"]) == 0
    assert run(["delete", "--state", "failed", "--yes"]) == 0
    assert [row.run.name for row in Store().runs()] == ["a-1", "a-2"]
    assert run(["delete", "a", "--yes"]) == 0
    assert Store().experiments() == []


def test_bad_input_records_nothing(capsys: Captured) -> None:
    assert run(["run", "a", "1", "2", "--command", "true"]) == 0
    bad: list[tuple[list[str], int, str]] = [
        (["delete", "--yes"], 2, "No run given"),
        (["cancel", "a", "--all"], 2, "cannot be combined with names"),
        (["wait", "aa"], 4, 'Did you mean "a"'),
        (["delete", "--yes", "--older-than", "soon"], 2, "--older-than"),
        (["status", "a", "--watch"], 2, "--metric and --watch need one run, not 2."),
        (["logs", "a-1", "--queue"], 2, "--queue needs an experiment"),
        (["run", "c", "1", "--matrix", "bakend=x", "--command", "true"], 2, 'Did you mean "backend"'),
        (["run", "c", "1", "--exclude", "backend=x", "--command", "true"], 2, "exclude needs a matrix"),
        (["run", "c", "1", "--set", "run.parallel=2", "--command", "true"], 2, "run.parallel is for clusters"),
        (["run", "c", "1", "--set", "run.parallel=0", "--command", "true"], 2, "run.parallel=0"),
    ]
    for argv, code, words in bad:
        capsys.readouterr()
        assert run(argv) == code, argv
        assert words in capsys.readouterr().err
    assert len(Store().runs()) == 2
    assert [path.name for path in (Store().folder / "experiments").iterdir()] == [Store().experiments()[0].id]


def test_a_required_goal_is_required_of_whoever_waits(capsys: Captured) -> None:
    assert run(["run", "x", "1", "--command", "true", "--detach", "--require-goal"]) == 0
    assert run(["wait", "x"]) == 7
    assert answer(capsys, "status", "x")["experiments"][0]["require_goal"] is True
