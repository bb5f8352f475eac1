"""The same on Slurm and on hosts: stories from attaching to deleting, with clients and agents killed."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.machines.fleet import Client, Fleet, agents, command_of, find_processes, kill, ranks, until

WAIT = "echo begun $RANK; sleep 6; echo result $RANK > $MLBENCH_OUTPUT_DIR/file; echo done"


@pytest.fixture(params=["slurm", "hosts"])
def machines(request: pytest.FixtureRequest) -> Client:
    client: Client = request.getfixturevalue(request.param)
    return client


def test_a_run_outlives_its_client_and_is_completed_by_another(machines: Client, tmp_path: Path) -> None:
    process = machines.start("run", "story", "3", "--command", f"sh -c '{WAIT}'", "--detach", "--yes")
    until(lambda: len(agents("story-3")) == 3)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    other = machines.elsewhere()
    other.ok("wait", "story-3")
    other.ok("download", "story-3", "--output", str(tmp_path / "story.zip"))
    other.ok("verify", str(tmp_path / "story.zip"))
    folder = other.folder("story-3")
    for rank in range(3):
        assert (folder / f"output/rank-{rank}/file").read_text() == f"result {rank}\n"
        assert (folder / f"logs/rank-{rank}.log").read_text() == f"begun {rank}\ndone\n"
    other.ok("delete", "story-3", "--yes")
    until(lambda: not agents("story-3") and not ranks("story-3"))


def test_one_experiment_spans_this_machine_and_the_cluster(machines: Client) -> None:
    words = ["--task", "digits_resnet", "--preset", "tiny", "--matrix", "cluster=local,lab", "--yes"]
    machines.ok("run", "span", "1", *words)
    status = json.loads(machines.ok("status", "span", "-o", "json"))
    assert {run["cluster"]: run["outcome"] for run in status["runs"]} == {
        "local": "goal_reached",
        "lab": "goal_reached",
    }
    assert status["experiments"][0]["state"] == "completed"
    assert "lab" in machines.run("compare", "span-local-1", "span-lab-1").stdout


def test_a_task_trains_to_an_archive_that_verifies(machines: Client) -> None:
    machines.ok("run", "task", "2", "--task", "allreduce", "--preset", "tiny", "--yes")
    machines.ok("verify", str(machines.folder("task-2")))
    assert machines.result("task-2")["outcome"] == "completed"


@pytest.mark.timeout(900)
def test_nodes_are_certified_and_the_archive_derives_the_certificate(machines: Client, tmp_path: Path) -> None:
    """Three nodes are no fleet with which one could be compared: nobody is named."""
    folder = tmp_path / "certificate"
    done = machines.run("certify", "lab", "--nodes", "3", "--yes", "--to", str(folder), seconds=800)
    assert done.returncode == 9, done.stderr
    document = json.loads((folder / "certificate.json").read_text())
    assert (document["scope"]["answered"], document["scope"]["not_tested"]) == (3, [])
    assert len(document["delivers"]["nodes"]) == 3
    assert (folder / "failing.txt").read_text() == ""
    machines.ok("verify", str(folder))


@pytest.mark.timeout(900)
def test_a_training_goes_on_after_a_lost_rank_with_the_curve_of_one_without(
    machines: Client, fleet: Fleet, tmp_path: Path
) -> None:
    words = ["--task", "digits_resnet", "--preset", "tiny", "--set", "goal_full=100", "--set", "epochs=4", "--yes"]
    words += ["--on-failure", "restart", "--set", "run.checkpoint_every=5"]
    machines.ok("run", "calm", "2", *words)
    machines.ok("run", "faulted", "2", *words, "--detach")
    checkpoints = "runs/faulted-2/nodes/0/.state/checkpoints/*"

    def newest() -> int:
        folders = [*fleet.shared.glob(checkpoints), *tmp_path.glob(f"disk-*/{checkpoints}")]
        return max((int(path.name) for path in folders if path.name.isdigit()), default=0)

    until(lambda: newest() >= 10, seconds=120, every=0.05)  # so the checkpoint after five updates is complete
    kill(find_processes("runs/faulted-2/nodes/1", "MLBENCH_OUTPUT_DIR="))
    machines.ok("wait", "faulted-2")
    machines.ok("verify", str(machines.folder("faulted-2")))
    calm, faulted = machines.result("calm-2"), machines.result("faulted-2")
    assert faulted["faults"]["attempts"] == 2
    assert "doubts" not in faulted
    for one, other in zip(calm["details"]["curve"], faulted["details"]["curve"], strict=True):
        for name in ("update", "train_loss", "loss", "Prec@1"):
            assert one[name] == pytest.approx(other[name], rel=1e-6), name
    assert faulted["details"]["resumed"]["updates"] > 0


def test_the_first_rank_that_fails_ends_the_run_and_is_named(machines: Client) -> None:
    done = machines.shell("crash", 3, "sleep 1; [ $RANK = 1 ] && exit 9; exec sleep 600")
    assert done.returncode == 7
    observation = machines.observation("crash-3")
    assert "Rank 1 exited with 9" in done.stderr + done.stdout
    assert [worker["exit_code"] for worker in observation["workers"]] == [143, 9, 143]
    assert observation["first_failed"] == 1


@pytest.mark.parametrize("node", [0, 2])
def test_a_killed_supervisor_leaves_nothing_and_ends_the_run_as_lost(machines: Client, node: int) -> None:
    machines.ok("run", "lost", "3", "--command", "sh -c 'sleep 600 & exec sleep 601'", "--detach", "--yes")
    until(lambda: len(ranks("lost-3")) >= 6)
    (victim,) = [pid for pid in agents("lost-3") if command_of(pid).rstrip(b"\0").endswith(b"/%d" % node)]
    kill([victim])
    done = machines.run("wait", "lost-3")
    assert done.returncode == 7, done.stderr
    assert machines.result("lost-3")["outcome"] == "lost"
    until(lambda: not ranks("lost-3") and not agents("lost-3"))
    assert "nothing" in machines.ok("gc", "slurm", "hosts").lower()


def test_cancelling_keeps_what_there_is(machines: Client) -> None:
    machines.ok(
        "run",
        "stop",
        "2",
        "--command",
        "sh -c 'echo kept > $MLBENCH_OUTPUT_DIR/f; echo ready; exec sleep 600'",
        "--detach",
        "--yes",
    )
    until(lambda: machines.ok("logs", "stop-2").count("ready") == 2, every=1.0)
    machines.ok("cancel", "stop-2")
    machines.run("wait", "stop-2")
    assert machines.result("stop-2")["outcome"] == "canceled"
    assert (machines.folder("stop-2") / "output/rank-1/f").read_text() == "kept\n"
    until(lambda: not ranks("stop-2"))


def test_a_rank_that_ignores_term_is_killed_at_the_deadline(machines: Client) -> None:
    done = machines.shell("late", 2, 'trap "" TERM; while :; do sleep 1; done', "--timeout", "3s")
    assert done.returncode == 124, done.stderr
    assert machines.result("late-2")["outcome"] == "deadline"
    until(lambda: not ranks("late-2"))


def test_logs_are_exact_to_the_byte(machines: Client) -> None:
    script = (
        "import sys; w = sys.stdout.buffer.write; line = bytes(set(range(256)) - {10}); "
        '[w(b"%d " % i + line + b"\\n") for i in range(20000)]; w(b"no end")'
    )
    machines.ok("run", "logs", "3", "--command", f"python3 -c '{script}'", "--yes")
    line = bytes(set(range(256)) - {10})
    wanted = b"".join(b"%d " % i + line + b"\n" for i in range(20000)) + b"no end"
    for rank in range(3):
        assert (machines.folder("logs-3") / f"logs/rank-{rank}.log").read_bytes() == wanted


def test_a_run_of_this_name_by_another_is_refused(machines: Client) -> None:
    machines.ok("run", "same", "1", "--command", "sleep 600", "--detach", "--yes")
    other = Client(machines.home.with_name("second"), machines.attach)
    other.ok(*other.attach)
    done = other.run("run", "same", "1", "--command", "sleep 1", "--detach", "--yes")
    assert done.returncode == 2
    assert "another run" in done.stderr
    machines.ok("cancel", "same-1")


def test_a_run_is_deleted_with_force_while_it_runs(machines: Client) -> None:
    machines.ok("run", "gone", "2", "--command", "sleep 600", "--detach", "--yes")
    until(lambda: len(ranks("gone-2")) >= 2)
    assert machines.run("delete", "gone-2", "--yes").returncode == 2
    machines.ok("delete", "gone-2", "--force", "--yes")
    until(lambda: not ranks("gone-2") and not agents("gone-2"))
