"""What only a Slurm with accounting can do to a run: limits of accounts and QOS, preemption, ends known from sacct."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.machines.accounted_slurm import accounted_slurm, change_associations
from tests.e2e.machines.fleet import Client, Fleet, agents, ranks, until


@pytest.fixture(scope="module")
def configuration(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with accounted_slurm(tmp_path_factory.mktemp("accounted")) as conf:
        yield conf


@pytest.fixture
def lab(configuration: Path, client: Client, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    client.attach = attach_words("lab", fleet)
    client.ok(*client.attach)
    return client


def attach_words(name: str, fleet: Fleet, *more: str) -> list[str]:
    words = ["attach-slurm", name, "--shared", str(fleet.shared), "--python", sys.executable, "--no-probe"]
    return [*words, *more]


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


def start(client: Client, name: str, workers: int, script: str, *more: str) -> None:
    client.ok("run", name, str(workers), "--command", f"sh -c '{script}'", "--detach", "--yes", *more)


def job_of(fleet: Fleet, name: str) -> str:
    path = fleet.shared / "runs" / name / "job.json"
    until(path.exists)
    return str(json.loads(path.read_text())["job"])


def codes(client: Client, name: str) -> list[str]:
    return [finding["code"] for finding in json.loads((client.folder(name) / "findings.json").read_text())["findings"]]


def until_forgotten(number: str) -> None:
    until(lambda: number not in command("squeue", "-h", "-t", "all", "-o", "%i").split(), seconds=250, every=1.0)


def test_a_cluster_with_accounting_is_found_and_checked(lab: Client, fleet: Fleet) -> None:
    assert "slurmdbd" in lab.ok("doctor", "slurm")
    for more, known in (
        (["--account", "bensh"], 'no account "bensh"'),
        (["--account", "nope"], "bench, full"),
        (["--qos", "nope"], "normal, tight"),
        (["--account", "full", "--qos", "tight"], "normal"),
    ):
        done = lab.run(*attach_words("other", fleet, *more))
        assert done.returncode == 4, (more, done.stderr)
        assert known in done.stderr
    assert "other" not in lab.ok("list-clusters")


def test_limits_of_accounts_and_qos_are_explained_while_a_job_waits(lab: Client, fleet: Fleet) -> None:
    lab.ok(*attach_words("lab", fleet, "--qos", "tight"))
    start(lab, "one", 1, "exec sleep 600")
    until(lambda: len(ranks("one-1")) >= 1)
    start(lab, "two", 1, "true")
    assert_waits(lab, "two-1", "QOSMaxJobsPerUserLimit", "A limit of its QOS is reached")
    lab.ok("cancel", "two-1")
    lab.ok("cancel", "one-1")
    lab.ok(*attach_words("lab", fleet, "--account", "full"))
    start(lab, "three", 1, "true")
    assert_waits(lab, "three-1", "AssocGrpCpuLimit", "A limit of its account is reached")
    lab.ok("cancel", "three-1")


def assert_waits(client: Client, name: str, *texts: str) -> None:
    def is_explained() -> Any:
        text = " ".join(client.ok("status", name, "--verbose").split())
        return all(item in text for item in texts)

    until(is_explained, every=0.5)


def test_a_job_above_a_limit_of_its_qos_is_given_up_at_once(lab: Client, fleet: Fleet) -> None:
    lab.ok(*attach_words("lab", fleet, "--qos", "tight"))
    done = lab.run("run", "wide", "2", "--command", "true", "--yes")
    assert done.returncode == 6, done.stderr
    assert "QOSMaxNodePerJobLimit" in done.stderr
    assert lab.result("wide-2")["outcome"] == "never_started"
    assert not command("squeue", "-h", "-n", "mlbench-wide-2", "-o", "%i").strip()


def test_an_account_that_was_taken_away_is_refused_at_submission(
    lab: Client, fleet: Fleet, configuration: Path
) -> None:
    change_associations(configuration, "add account brief")
    change_associations(configuration, "add user root account=brief")
    lab.ok(*attach_words("lab", fleet, "--account", "brief"))
    change_associations(configuration, "modify user root account=brief set maxsubmitjobs=0")
    done = lab.run("run", "limit", "1", "--command", "true", "--yes")
    assert done.returncode == 5, done.stderr
    assert "AssocMaxSubmitJobLimit" in done.stderr
    change_associations(configuration, "delete user root account=brief")
    done = lab.run("run", "late", "1", "--command", "true", "--yes")
    assert done.returncode == 3, done.stderr
    assert "Invalid account" in done.stderr
    assert "--account A" in done.stderr


def test_a_preempted_run_is_lost_and_says_why(lab: Client, fleet: Fleet) -> None:
    start(lab, "low", 2, "exec sleep 600")
    until(lambda: len(ranks("low-2")) >= 2)
    preempt(fleet)
    assert lab.run("wait", "low-2").returncode == 7
    assert lab.result("low-2")["outcome"] == "lost"
    assert codes(lab, "low-2")[0] == "preempted"
    until(lambda: not ranks("low-2") and not agents("low-2"))


def test_ends_of_forgotten_jobs_are_known_from_accounting(lab: Client, fleet: Fleet) -> None:
    """Nobody has followed the runs, and the controller has forgotten their jobs: only sacct knows why they ended."""
    start(lab, "gone", 2, "exec sleep 600")
    until(lambda: len(ranks("gone-2")) >= 2)
    preempt(fleet)
    start(lab, "taken", 1, "exec sleep 600")
    until(lambda: len(ranks("taken-1")) >= 1)
    command("scancel", job_of(fleet, "taken-1"))
    start(lab, "well", 1, "true")
    for name in ("gone-2", "taken-1", "well-1"):
        until_forgotten(job_of(fleet, name))
    assert lab.run("wait", "gone-2").returncode == 7
    assert codes(lab, "gone-2")[0] == "preempted"
    lab.run("wait", "taken-1")
    assert lab.result("taken-1")["outcome"] == "canceled"
    assert "canceled_by_other" in codes(lab, "taken-1")
    lab.ok("wait", "well-1")


def preempt(fleet: Fleet) -> None:
    """A short job of the partition that preempts the others, on all nodes; it has ended when this returns."""
    words = ["sbatch", "--wait", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null"]
    script = "#!/bin/bash\nexit 0\n"
    subprocess.run(words, input=script, text=True, check=True, timeout=120, capture_output=True)


def test_a_run_killed_by_the_memory_limit_of_its_cgroup_is_named_so(lab: Client) -> None:
    script = "import time; time.sleep(1); x = bytearray(700 << 20); time.sleep(60)"
    done = lab.run("run", "oom", "2", "--command", f"python3 -c '{script}'", "--yes")
    assert done.returncode == 7, done.stderr
    assert codes(lab, "oom-2")[0] == "out_of_memory"
    assert lab.result("oom-2")["outcome"] == "failed"
    until(lambda: not ranks("oom-2"))
