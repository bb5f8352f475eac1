"""The stories of the README, from run to charts, through the command line and real processes."""

import csv
import json
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest
import yaml

from mlbench_cli.app import run
from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import canonical_json
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.storage.store import Store
from providers.pins import require_pin
from task_images.contract import PREFIX
from tests.contract import clients
from tests.contract.clients import answer
from tests.contract.local_runs import until

Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("home")
EVENT = PREFIX + '{"v":1,"event":"metric","rank":0,"time":1.0,"name":"val_global_Prec@1","value":81.5}'


def shell(script: str) -> list[str]:
    return ["--command", f"sh -c '{script}'"]


# --- the whole story -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_ranks")
def test_from_run_to_charts(tmp_path: Path, capsys: Captured) -> None:
    argv = ["run", "demo", "1", "2", "--task", "digits_resnet", "--preset", "tiny", "--yes"]
    document = answer(capsys, *argv)
    assert [(entry["name"], entry["outcome"], entry["exit_code"]) for entry in document["runs"]] == [
        ("demo-1", "goal_reached", 0),
        ("demo-2", "goal_reached", 0),
    ]
    assert document["runs"][1]["result"]["world_size"] == 2

    assert run(["status"]) == 0
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["demo-1", "1", "finished", "goal_reached"],
        ["demo-2", "2", "finished", "goal_reached"],
    ]
    status = answer(capsys, "status", "demo-2", "-m", "Prec@1")
    assert status["metric"]["value"] >= 80
    assert [rank["exit_code"] for rank in status["ranks"]] == [0, 0]

    for number in (1, 2):
        assert run(["download", f"demo-{number}", "-o", f"demo-{number}.zip"]) == 0
    capsys.readouterr()
    assert run(["verify", "demo-1.zip", "demo-2.zip"]) == 0
    assert capsys.readouterr().out == "".join(f"demo-{number}.zip: ok (integrity, derivation)\n" for number in (1, 2))
    assert run(["charts", "figures", "demo-1.zip", "demo-2.zip", "--yes", "--min-runs", "2"]) == 0
    assert "total_time, speedup" in capsys.readouterr().out
    figures = list(Path("figures").iterdir())
    assert {"total_time.png", "speedup.png", "time_for_all_phases.png"} <= {path.name for path in figures}
    assert all(path.stat().st_size > 0 for path in figures)
    with open("figures/summary.csv", newline="") as file:
        assert [row["speedup"] for row in csv.DictReader(file)] == ["", ""]  # of single runs

    compared = answer(capsys, "compare", "demo-1", "demo-2.zip")
    assert compared["differences"]["workers"] == [1, 2]
    assert "workers" in compared["obstacle_words"]
    across = [word for name in compared["obstacle_words"] for word in ("--across", name)]
    assert answer(capsys, "compare", "demo-1", "demo-2", *across)["obstacles"] == []
    assert run(["compare", "demo-1", "demo-2", "--metric", "throughput"]) == 0
    assert run(["compare", "demo-1", "demo-2", "--metric", "nonsense"]) == 2
    assert run(["compare", "demo-1", "demo-2", "--across", "wokers"]) == 2
    assert 'Did you mean "workers"' in capsys.readouterr().err

    assert run(["delete", "demo-2", "--yes"]) == 0
    assert run(["status", "demo-2"]) == 4
    assert (tmp_path / "demo-2.zip").exists()


# --- running ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_goal_on_samples_that_were_held_out_is_reached_in_its_own_words_and_is_in_no_division() -> None:
    rules = ["--set", "goal_full=98", "--set", "goal_light=90", "--light"]  # the task's own, which tiny eases
    words = ["run", "held", "1", "--task", "digits_resnet", "--preset", "tiny", *rules, "--set", "hold_out=0.2"]
    assert run([*words, "--share-machine"]) == 0
    assert run(["download", "held", "--to", "held.zip"]) == 0
    with Archive.open(Path("held.zip")) as archive:
        text = archive.read("official_result.txt", 4096).decode()
    reason = "the goal was changed: hold_out 0.2 instead of 0"
    assert f"\nDivision: none ({reason}), not comparable with official results.\n" in text
    assert "90% Top 1 Validation Accuracy" in text.partition("\n")[0]


def test_several_sizes_end_with_the_worst_code(capsys: Captured) -> None:
    document = answer(capsys, "run", "x", "1", "3", "2", *shell('test "$WORLD_SIZE" != 3'), code=7)
    assert [(entry["name"], entry["outcome"]) for entry in document["runs"]] == [
        ("x-1", "completed"),
        ("x-3", "failed"),
        ("x-2", "completed"),
    ]


def test_what_is_said_of_a_failed_run(capsys: Captured) -> None:
    assert run(["run", "x", "2", *shell('test $RANK = 0 || { echo "no such thing" >&2; exit 3; }; sleep 20')]) == 7
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:3] == ["x-2", "2", "failed"]
    assert "Rank 1 exited with 3" in err
    assert "Next: mlbench logs x-2 --rank 1" in err
    document = answer(capsys, "status", "x-2")
    assert document["first_failed"] == 1
    evidence = document["findings"][0]["evidence"]
    assert evidence
    assert answer(capsys, "status")["runs"][0]["seconds"] is None  # how long it took to fail is no time of a run
    assert run(["status", "x-2"]) == 0
    out, err = capsys.readouterr()
    assert "mlbench status x-2 --verbose" in err
    assert document["findings"][0]["code"] not in out
    assert run(["status", "x-2", "--verbose"]) == 0
    out, _ = capsys.readouterr()
    assert f"\n  {document['findings'][0]['code']}" in out
    assert all(f"\n  {name}:" in out for name in evidence)
    assert "no such thing" in out


def test_a_goal_may_be_required(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "events").write_text(PREFIX + '{"v":1,"event":"result","rank":0,"time":1.0,"outcome":"goal_missed"}\n')
    assert run(["run", "a", "1", "--command", "cat events"]) == 0
    assert "goal_missed" in capsys.readouterr().out
    assert run(["wait", "a-1", "--require-goal"]) == 7
    assert run(["run", "b", "1", "--command", "cat events", "--require-goal"]) == 7
    assert run(["run", "c", "--from", "a-1", "--require-goal"]) == 7


def test_a_spec_file_is_enough(tmp_path: Path, capsys: Captured) -> None:
    spec = {"name": "file", "workers": [1], "command": ["sh", "-c", "echo $MLBENCH_PARAMETERS"], "set": {"a": 1}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    assert run(["run", "-f", "spec.yaml", "--set", "b=2"]) == 0
    capsys.readouterr()
    assert run(["logs", "file-1"]) == 0
    assert json.loads(capsys.readouterr().out) == {"a": 1, "b": 2}


def test_a_dry_run_prints_what_would_be_submitted(capsys: Captured) -> None:
    argv = ["run", "x", "1", "2", "--command", "echo {rank} of {hosts}", "--dry-run"]
    assert run(argv) == 0
    first = capsys.readouterr().out
    assert run(argv) == 0
    assert capsys.readouterr().out == first
    documents = list(yaml.safe_load_all(first))
    assert [document["name"] for document in documents] == ["x-1", "x-2"]
    assert answer(capsys, "status") == {"schema_version": 1, "runs": [], "repeats": []}
    shown = answer(capsys, *argv)["submissions"]
    assert [entry["documents"][0] for entry in shown] == documents
    # What is submitted is what was printed.
    assert run(argv[:-1]) == 0
    spec = Store().run("x-2").run.spec
    assert canonical_json(LocalEngine().render(spec).documents[0]) == canonical_json(documents[1])


def test_a_detached_run(capsys: Captured) -> None:
    assert run(["run", "far", "2", "--detach", *shell("echo begun; until test -e go; do sleep 0.05; done")]) == 0
    out, err = capsys.readouterr()
    assert out == "far-2\n"
    assert "Started far-2" in err
    logs = [Store().run("far-2").run.folder / f"logs/rank-{rank}.log" for rank in (0, 1)]
    until(lambda: all(log.read_bytes() for log in logs))
    assert answer(capsys, "status")["runs"][0]["state"] == "running"
    assert run(["download", "far-2"]) == 2
    assert "has not ended yet" in capsys.readouterr().err
    assert run(["download", "far-2", "--partial", "--to", "partial.zip"]) == 0
    assert run(["verify", "partial.zip"]) == 0
    with Archive.open(Path("partial.zip")) as archive:
        assert archive.result["summary"].startswith("far-2 had not ended. This archive was written during the run")
        assert archive.result["outcome"] == "canceled"
        assert b"begun" in archive.read("logs/rank-1.log", 1000)
    capsys.readouterr()
    assert answer(capsys, "status")["runs"][0]["state"] == "running"
    assert run(["delete", "far-2", "--yes"]) == 2
    assert run(["wait", "far-2", "--timeout", "0.1s"]) == 124
    capsys.readouterr()
    Path("go").touch()
    assert run(["logs", "far-2", "--follow"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] begun", "[1] begun"]
    assert answer(capsys, "wait", "far-2")["runs"][0]["outcome"] == "completed"
    assert run(["download", "far-2"]) == 0
    assert Path("results.zip").exists()


@pytest.mark.slow
@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_the_timeout_of_a_command_is_printed_with_what_the_machines_cost_until_then(
    capsys: Captured, detach: list[str]
) -> None:
    command = ["2", "--command", "true", "--share-machine", *detach]
    assert run(["run", "paid", *command, "--set", "run.worker_hour=1.5"]) == 0
    assert "Timeout 4 h (at most 12.00 USD)" in capsys.readouterr().err
    assert run(["run", "short", *command, "--set", "run.worker_hour=1.5", "--timeout", "30m"]) == 0
    assert "Timeout 30 min (at most 1.50 USD)" in capsys.readouterr().err
    assert run(["run", "own", *command]) == 0
    told = capsys.readouterr().err
    assert "Timeout 4 h" in told
    assert "USD" not in told
    assert run(["wait", "paid", "short", "own"]) == 0


def test_a_detached_run_is_finalized_by_its_supervisor_and_status_only_reads(capsys: Captured) -> None:
    assert run(["run", "a", "1", "--detach", *shell("exit 5")]) == 0
    run_ = Store().run("a-1").run
    until(lambda: answer(capsys, "status")["runs"][0]["state"] == "finished")
    shown = answer(capsys, "status")["runs"][0]
    assert (shown["state"], shown["outcome"]) == ("finished", "failed")
    assert run(["verify", str(run_.folder)]) == 0


def test_status_counts_restarts_and_not_the_first_attempt(capsys: Captured) -> None:
    script = "test -e again || { touch again; exit 3; }"
    assert run(["run", "a", "1", *shell(script), "--on-failure", "restart"]) == 0
    capsys.readouterr()
    assert run(["status", "a-1"]) == 0
    assert ", 0 faults, 1 restart\n" in capsys.readouterr().out


def test_cancel_keeps_what_there_is(capsys: Captured) -> None:
    assert run(["run", "a", "1", "--detach", *shell("echo partial; sleep 60")]) == 0
    while "partial" not in capsys.readouterr().out:
        assert run(["logs", "a-1"]) == 0
    assert answer(capsys, "cancel", "--since", "2100-01-01T00:00:00Z")["runs"] == []
    assert run(["cancel", "a-1"]) == 0
    assert "was canceled" in capsys.readouterr().out
    assert run(["cancel", "a-1"]) == 0
    assert "had ended already: canceled" in capsys.readouterr().out
    assert run(["wait", "a-1"]) == 7
    capsys.readouterr()
    assert run(["logs", "a-1"]) == 0
    assert capsys.readouterr().out == "partial\n"


def test_a_running_run_is_deleted_by_force(capsys: Captured) -> None:
    assert run(["run", "a", "1", "--detach", *shell("sleep 60")]) == 0
    folder = Store().run("a-1").run.folder
    assert run(["delete", "a-1", "--yes", "--force"]) == 0
    assert not folder.exists()
    assert run(["run", "a", "1", *shell("true")]) == 0


# --- logs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file with what a rank writes: an event behind a progress bar, bytes that are no text, no end of line."""
    path = tmp_path / "written"
    path.write_bytes(b"one\n" + EVENT.encode() + b"\n\r 50%|## " + EVENT.encode() + b"\n\xff\t@mlbench {\ntwo")
    return path


def test_logs(written: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(["run", "a", "2", "--command", f"cat {written}"]) == 0
    capfdbinary.readouterr()

    def show_log(*argv: str) -> bytes:
        assert run(["logs", "a-2", *argv]) == 0
        return capfdbinary.readouterr().out

    plain = b"one\n\r 50%|## \n\xff\t@mlbench {\ntwo"
    assert show_log("--rank", "1", "--raw") == written.read_bytes()
    assert show_log("--rank", "1") == plain
    lines = plain.split(b"\n")
    merged = show_log().split(b"\n")[:-1]
    for rank in (0, 1):  # each in its own order
        prefix = b"[%d] " % rank
        assert [line.removeprefix(prefix) for line in merged if line.startswith(prefix)] == lines
    assert len(merged) == 2 * len(lines)
    document = json.loads(show_log("-o", "json"))
    assert "".join(line["text"] for line in document["lines"] if line["rank"] == 1) == plain.decode("utf-8", "replace")
    assert run(["logs", "a-2", "-o", "json", "--follow"]) == 2


# --- results ---------------------------------------------------------------------------------------------------------


def test_a_download_replaces_nothing_by_accident(tmp_path: Path, capsys: Captured) -> None:
    """And is the archive of one run, whatever the run has written."""
    assert run(["run", "a", "1", *shell("echo PK > $MLBENCH_OUTPUT_DIR/model.zip")]) == 0
    Path("results.zip").write_text("mine")
    assert run(["download", "a-1"]) == 2
    assert "Add --force" in capsys.readouterr().err
    assert Path("results.zip").read_text() == "mine"
    assert run(["download", "a-1", "--force"]) == 0
    assert run(["verify", "results.zip"]) == 0
    assert run(["run", "b", "--from", "results.zip"]) == 0
    assert run(["download", "a-1", "-o", str(tmp_path)]) == 0
    assert (tmp_path / "a-1.zip").exists()


# --- the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.slow  # by the real torch
def test_doctor(capsys: Captured) -> None:
    checks = {check["what"]: check for check in answer(capsys, "doctor")["checks"]}
    assert checks["store"]["state"] == checks["torch"]["state"] == "ok"
    assert "gloo" in checks["torch"]["found"]


def test_tasks(capsys: Captured) -> None:
    names = [task["name"] for task in answer(capsys, "tasks")["tasks"]]
    assert {"digits_resnet", "allreduce"} <= set(names)
    for name in names:
        assert answer(capsys, "tasks", name)["presets"]["spec"]
        assert run(["tasks", name]) == 0
    assert f"--task {names[-1]} --set " in capsys.readouterr().err


def test_what_clusters_cost(home: Path, capsys: Captured) -> None:
    home.mkdir()
    plan = {"price_per_hour": 1.5, "currency": "USD"}
    details = {"nodes": 3, "expires": 4102444800, "plan": plan}
    Store(home).record_cluster(Cluster("far-3", "gke", details=details))
    Store(home).record_cluster(
        Cluster("odd-1", "eks", "failed", details={"expires": 1, "plan": {"price_per_hour": None}})
    )
    shown = {cluster["name"]: cluster for cluster in answer(capsys, "list-clusters")["clusters"]}
    assert (shown["far-3"]["price_per_hour"], shown["far-3"]["expires"]) == (1.5, "2100-01-01T00:00:00.000Z")
    assert run(["list-clusters"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    # Without the column of locations: none has one.
    assert rows["far-3"][1:7] == ["gke", "ready", "3", "1.50", "USD", "in"]
    assert rows["odd-1"][1:6] == ["eks", "failed", "-", "unknown", "overdue"]
    assert run(["set-cluster", "gcloud", "far-3"]) == 0
    assert answer(capsys, "list-clusters")["clusters"][1]["current"]


def test_two_clients_at_once(home: Path, tmp_path: Path) -> None:
    """Two sweeps into one store, from two processes."""
    started = [
        clients.start("run", name, "1", "2", "--command", "true", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for name in ("a", "b")
    ]
    for client in started:
        _, err = client.communicate(timeout=280)
        assert client.returncode == 0, err
    rows = Store(home).runs()
    assert {(row.run.name, row.outcome) for row in rows} == {
        (f"{name}-{size}", "completed") for name in ("a", "b") for size in (1, 2)
    }


def test_a_dry_run_for_a_cluster_reaches_nothing(home: Path, capsys: Captured) -> None:
    home.mkdir()
    Store(home).record_cluster(Cluster("far", "kind", details={"nodes": 2}))
    argv = ["run", "x", "1", "2", "--task", "digits_resnet", "--cluster", "far", "--memory", "2Gi", "--dry-run"]
    assert run(argv) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    jobs = [document for document in documents if document["kind"] == "Job"]
    assert [job["metadata"]["name"] for job in jobs] == ["x-1", "x-1-head", "x-2", "x-2-head"]
    assert require_pin("images", "torch") in json.dumps(jobs[0])
    names = [document["metadata"]["name"] for document in documents if "binaryData" in document]
    assert names == ["x-1", "x-2"]  # the task's code, as it is installed here
    assert answer(capsys, "status")["runs"] == []


@pytest.mark.usefixtures("forked_ranks")
def test_a_network_of_a_formula_delays_every_message_and_is_labeled(tmp_path: Path, capsys: Captured) -> None:
    """20 ms and 8 ns a byte for each of the messages; a bare loopback takes a thousandth of that."""
    options = ["--task", "digits_resnet", "--preset", "tiny", "--set", "epochs=1", "--network", "model:1gbit,20ms"]
    assert run(["run", "modeled", "2", *options, "--timeout", "4m"]) == 0
    assert run(["download", "modeled-2", "--to", str(tmp_path / "a.zip")]) == 0
    assert run(["verify", str(tmp_path / "a.zip")]) == 0
    with zipfile.ZipFile(tmp_path / "a.zip") as file:
        texts = {Path(name).name: file.read(name).decode() for name in file.namelist() if not name.endswith("/")}
    result, summary = json.loads(texts["result.json"]), json.loads(texts["network.json"])["summary"]
    sent = result["details"]["communication"]
    assert sent["communication_seconds"] >= 0.999999 * (0.02 * sent["messages"] + 8e-9 * sent["bytes"])  # rounding
    assert "not the task's own" in texts["official_result.txt"]
    assert (summary["asked"], summary["method"], summary["held"]) == ("model:1gbit,20ms", "model", None)
    assert "modeled 1gbit,20ms" in texts["official_result.txt"]


def test_waiting_for_several_runs_ends_with_the_worst_of_them() -> None:
    assert run(["run", "bad", "1", "--command", "false", "--detach"]) == 0
    assert run(["run", "good", "1", "--command", "true", "--detach"]) == 0
    assert run(["wait", "good-1", "bad-1"]) == 7


def test_the_timeout_of_a_wait_is_for_all_of_its_runs(tmp_path: Path) -> None:
    """The first run takes 8 of the 10 s, and the second would end after 16."""
    assert run(["run", "b", "1", *shell("until test -e go; do sleep 0.1; done"), "--detach"]) == 0
    assert run(["run", "a", "1", "--command", "sleep 8", "--detach"]) == 0
    timer = threading.Timer(16, (tmp_path / "go").touch)
    timer.start()
    try:
        assert run(["wait", "a-1", "b-1", "--timeout", "10s"]) == 124
    finally:
        timer.cancel()
        (tmp_path / "go").touch()
    assert run(["wait", "a-1", "b-1"]) == 0
