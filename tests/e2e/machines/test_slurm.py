"""What only a real Slurm can do to a run: cancellations, failed nodes, a controller that goes away or forgets."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.machines.fleet import Client, Fleet, agents, kill, ranks, until


def slurm_command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


def job_file(fleet: Fleet, name: str) -> Path:
    return fleet.shared / "runs" / name / "job.json"


def job_of(fleet: Fleet, name: str) -> str:
    path = job_file(fleet, name)
    until(path.exists)
    return str(json.loads(path.read_text())["job"])


def codes(client: Client, name: str) -> list[str]:
    return [finding["code"] for finding in json.loads((client.folder(name) / "findings.json").read_text())["findings"]]


def start(client: Client, name: str, workers: int, script: str) -> None:
    client.ok("run", name, str(workers), "--command", f"sh -c '{script}'", "--detach", "--yes")


def test_the_printed_script_is_accepted(slurm: Client) -> None:
    script = slurm.ok("run", "dry", "2", "--command", "true", "--dry-run")
    assert slurm.ok("run", "dry", "2", "--command", "true", "--dry-run") == script
    done = subprocess.run(["sbatch", "--test-only"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_job_whose_number_nobody_noted_is_adopted(slurm: Client, fleet: Fleet) -> None:
    start(slurm, "adopt", 2, "sleep 5; echo once")
    number = job_of(fleet, "adopt-2")
    job_file(fleet, "adopt-2").unlink()
    slurm.ok("wait", "adopt-2")
    assert slurm.result("adopt-2")["outcome"] == "completed"
    found = slurm_command("squeue", "-h", "-t", "all", "-n", "mlbench-adopt-2", "-o", "%i %k").splitlines()
    assert [line.split()[0] for line in found if slurm.folder("adopt-2").name in line] == [number]


def test_a_second_job_of_the_same_run_is_refused(slurm: Client, fleet: Fleet) -> None:
    start(slurm, "twice", 1, "sleep 3; echo once")
    job_of(fleet, "twice-1")
    until(lambda: len(ranks("twice-1")) >= 1)
    slurm_command("sbatch", str(fleet.shared / "runs" / "twice-1" / "job.sh"))
    slurm.ok("wait", "twice-1")
    until((fleet.shared / "runs" / "twice-1" / "refused").exists)
    assert (slurm.folder("twice-1") / "logs/rank-0.log").read_text() == "once\n"


def test_a_cancellation_by_somebody_else_is_said(slurm: Client, fleet: Fleet) -> None:
    start(slurm, "scancel", 2, "exec sleep 600")
    until(lambda: len(ranks("scancel-2")) >= 2)
    slurm_command("scancel", job_of(fleet, "scancel-2"))
    slurm.run("wait", "scancel-2")
    assert slurm.result("scancel-2")["outcome"] == "canceled"
    assert "canceled_by_other" in codes(slurm, "scancel-2")


@pytest.fixture
def broken_node() -> Iterator[str]:
    yield "n2"
    subprocess.run(["scontrol", "update", "nodename=n2", "state=resume"], check=False)  # it may have come back itself


def test_a_failed_node_is_no_success(slurm: Client, fleet: Fleet, broken_node: str) -> None:
    start(slurm, "node", 3, "exec sleep 600")
    until(lambda: len(ranks("node-3")) >= 3)
    slurm_command("scontrol", "update", f"nodename={broken_node}", "state=down", "reason=test")
    done = slurm.run("wait", "node-3")
    assert done.returncode == 7, done.stderr
    assert slurm.result("node-3")["outcome"] == "lost"
    assert "node_failed" in codes(slurm, "node-3")
    until(lambda: not ranks("node-3"))


def test_a_job_that_slurm_forgot_ends_right_by_its_files(slurm: Client, fleet: Fleet) -> None:
    start(slurm, "forgot", 2, "sleep 6; exit 0")
    job_of(fleet, "forgot-2")
    note = json.loads(job_file(fleet, "forgot-2").read_text())
    job_file(fleet, "forgot-2").write_text(json.dumps({**note, "job": "999999"}))
    slurm.ok("wait", "forgot-2")
    assert slurm.result("forgot-2")["outcome"] == "completed"


def test_a_controller_that_is_away_changes_nothing(slurm: Client, fleet: Fleet) -> None:
    start(slurm, "away", 2, "sleep 8; echo end")
    until(lambda: len(ranks("away-2")) >= 2)
    time.sleep(3)
    pid = int((Path(os.environ["SLURM_CONF"]).parent / "controller.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    try:
        waiting = slurm.start("wait", "away-2")
        time.sleep(2)
    finally:
        slurm_command("slurmctld")
    assert waiting.wait(120) == 0
    assert slurm.result("away-2")["outcome"] == "completed"


def test_a_job_that_waits_says_why(slurm: Client, fleet: Fleet) -> None:
    start(slurm, "first", 3, "exec sleep 600")
    until(lambda: len(ranks("first-3")) >= 3)
    start(slurm, "second", 1, "echo second")
    number = job_of(fleet, "second-1")
    slurm_command("scontrol", "hold", number)

    def is_explained() -> Any:
        return "JobHeld" in slurm.ok("status", "second-1")

    until(is_explained)
    slurm.ok("cancel", "second-1")
    slurm.run("wait", "second-1")
    assert slurm.result("second-1")["outcome"] == "canceled"
    slurm.ok("cancel", "first-3")
    until(lambda: not agents("first-3"))


def test_what_can_never_start_is_refused_before_anything_is_recorded(slurm: Client, fleet: Fleet) -> None:
    assert slurm.run("run", "big", "9", "--command", "true", "--yes").returncode == 5
    assert slurm.run("run", "gpu", "1", "--command", "true", "--gpu", "--yes").returncode in (2, 5)
    slurm.ok("attach-slurm", "short", "--shared", str(fleet.shared), "--partition", "short", "--no-probe")
    done = slurm.run("run", "long", "1", "--command", "true", "--timeout", "1h", "--yes")
    assert done.returncode == 2
    assert "--timeout 60s" in done.stderr
    assert slurm.run("status", "long-1").returncode == 4


def test_bad_input_is_refused_when_a_cluster_is_attached(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    shared = str(fleet.shared)
    assert client.run("attach-slurm", "a", "--shared", shared, "--partition", "nope").returncode == 4
    assert client.run("attach-slurm", "a", "--shared", shared, "--account", "nope").returncode == 2
    assert client.run("attach-slurm", "a", "--shared", "relative").returncode == 2
    assert client.run("attach-slurm", "a", "--shared", shared, "--setup", str(tmp_path / "no")).returncode == 4
    assert client.run("attach-slurm", "a", "--shared", shared, "--python", "/no/python").returncode == 2
    assert client.run("attach-slurm", "a", "--login", "-oProxyCommand=id").returncode == 2
    assert client.run("attach-slurm", "a", "--login", "nowhere.invalid").returncode == 10
    done = client.run("attach-slurm", "a", "--shared", shared)
    assert done.returncode == 0, done.stderr


def test_a_laptop_reaches_the_cluster_through_its_login_node(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    """From attaching to deleting through ssh alone: this client has no command of Slurm."""
    words = ["attach-slurm", "far", "--login", "m1", "--ssh-config", str(fleet.ssh_config)]
    client.attach = [*words, "--shared", str(fleet.shared), "--python", sys.executable]
    client.path = str(write_only_ssh(tmp_path / "bin"))
    client.ok(*client.attach)
    client.ok("doctor", "slurm")
    process = client.start("run", "far", "2", "--command", "sh -c 'echo begun; sleep 4; echo end'", "--yes")
    until(lambda: len(ranks("far-2")) >= 2)
    kill([process.pid])
    other = Client(client.home.with_name("elsewhere"), client.attach, path=client.path)
    other.ok(*other.attach)
    other.ok("status", "--refresh")
    other.ok("wait", "far-2")
    other.ok("verify", str(other.folder("far-2")))
    assert (other.folder("far-2") / "logs/rank-1.log").read_text() == "begun\nend\n"
    other.ok("delete", "far-2", "--yes")
    assert not (fleet.shared / "runs" / "far-2").exists()


def write_only_ssh(folder: Path) -> Path:
    """A folder for PATH with ssh, and the system's commands besides those of Slurm."""
    folder.mkdir()
    for name in ("ssh", "sh", "env", "git", "uname"):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return folder


@pytest.mark.slow
def test_a_client_killed_at_any_step_of_a_submission_gets_one_job_and_its_results(slurm: Client, fleet: Fleet) -> None:
    for number, file in enumerate(("run.json", "job.sh", "plan.json", "job.json", "started/job")):
        name = f"step{number}-2"
        words = ["--command", "sh -c 'sleep 1; echo once'", "--detach", "--yes"]
        process = slurm.start("run", f"step{number}", "2", *words)
        until((fleet.shared / "runs" / name / file).exists, every=0.002)
        kill([process.pid])
        process.wait()
        slurm.ok("wait", name)
        assert slurm.result(name)["outcome"] == "completed", file
        assert [(slurm.folder(name) / f"logs/rank-{rank}.log").read_text() for rank in range(2)] == ["once\n"] * 2
        own = slurm_command("squeue", "-h", "-t", "all", "-n", f"mlbench-{name}", "-o", "%i %k").splitlines()
        assert len([line for line in own if slurm.folder(name).name in line]) == 1, file
        assert not (fleet.shared / "runs" / name / "refused").exists()


def test_a_node_daemon_that_is_killed_and_started_again_changes_nothing(slurm: Client, fleet: Fleet) -> None:
    start(slurm, "daemon", 3, "sleep 6; echo end")
    until(lambda: len(ranks("daemon-3")) >= 3)
    conf = Path(os.environ["SLURM_CONF"])
    kill([int((conf.parent / "n2.pid").read_text())])
    time.sleep(2)
    slurm_command("slurmd", "-N", "n2")
    slurm.ok("wait", "daemon-3")
    assert slurm.result("daemon-3")["outcome"] == "completed"
    until(lambda: not ranks("daemon-3"))


@pytest.mark.slow
def test_a_job_that_slurm_ends_at_its_time_limit_is_a_deadline(slurm: Client, fleet: Fleet) -> None:
    start(slurm, "limit", 2, "exec sleep 600")
    until(lambda: len(ranks("limit-2")) >= 2)
    slurm_command("scontrol", "update", f"jobid={job_of(fleet, 'limit-2')}", "timelimit=1")
    assert slurm.run("wait", "limit-2").returncode == 124
    assert slurm.result("limit-2")["outcome"] == "deadline"
    assert "time_limit" in codes(slurm, "limit-2")
    until(lambda: not ranks("limit-2"))


def test_a_folder_that_one_node_does_not_share_is_refused_with_its_name(client: Client, fleet: Fleet) -> None:
    conf = Path(os.environ["SLURM_CONF"])
    pid = conf.parent / "n3.pid"
    fleet.shared.mkdir(exist_ok=True)
    stop_daemon(pid)
    try:
        hide = f"mount -t tmpfs none {shlex.quote(str(fleet.shared))} && exec slurmd -N n3"
        subprocess.run(["unshare", "-m", "sh", "-c", hide], check=True)
        all_nodes = ["srun", "--nodes=3", "--immediate=5", "--chdir=/", "true"]  # idle nodes may not take a job yet
        until(lambda: subprocess.run(all_nodes, check=False, capture_output=True).returncode == 0)
        done = client.run("attach-slurm", "a", "--shared", str(fleet.shared), "--python", sys.executable)
        assert done.returncode == 2
        assert "n3 cannot read" in done.stderr
    finally:
        stop_daemon(pid)
        slurm_command("slurmd", "-N", "n3")
        until(lambda: "n3" in slurm_command("sinfo", "-h", "-N", "-t", "idle", "-o", "%N"))


def stop_daemon(path: Path) -> None:
    number = int(path.read_text())
    kill([number], signal.SIGTERM)
    until(lambda: not Path(f"/proc/{number}").exists())
