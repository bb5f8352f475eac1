"""What `mlbench doctor` says of this machine and of attached ones, and the exit code that follows."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.commands import _machine_checks, doctor
from mlbench_cli.commands._machine_checks import _check_folder, _check_partition, _check_ssh, check_machines
from mlbench_cli.console import Format
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.runs.launch import Machine
from mlbench_cli.storage.store import Store
from providers.checks import Check

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))
    return tmp_path


# --- the command ------------------------------------------------------------------------------------------------------

FINE = Check("python", "ok", "3.14", "Never shown.")
LACKING = Check("disk", "missing", "1 GiB free", "Free up space.")
BROKEN = Check("store", "failed", "damaged", None, 4)
WRONG = Check("machine", "failed", "wrong")


def run_checks(monkeypatch: pytest.MonkeyPatch, *checks: Check, output: Format = Format.text) -> int:
    monkeypatch.setattr(doctor, "CHECKS", [lambda check=check: check for check in checks])
    return doctor.doctor(output=output)


@pytest.mark.parametrize(
    ("checks", "code"),
    [((FINE,), 0), ((LACKING,), 0), ((FINE, BROKEN), 4), ((WRONG, BROKEN), 2), ((LACKING, BROKEN, WRONG), 4)],
)
def test_the_exit_code_is_that_of_the_first_failed_check(
    monkeypatch: pytest.MonkeyPatch, checks: tuple[Check, ...], code: int
) -> None:
    assert run_checks(monkeypatch, *checks) == code


def test_checks_are_a_table_with_hints_for_what_is_not_ok(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    run_checks(monkeypatch, FINE, LACKING, BROKEN)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "CHECK   STATE    FOUND",
        "python  ok       3.14",
        "disk    missing  1 GiB free",
        "store   failed   damaged",
    ]
    assert printed.err == "\ndisk: Free up space.\n\nMore checks: mlbench doctor gke|eks|aks|slurm|hosts\n"


def test_checks_as_a_document(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert run_checks(monkeypatch, LACKING, BROKEN, output=Format.json) == 4
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "checks": [
            {"what": "disk", "state": "missing", "found": "1 GiB free", "hint": "Free up space."},
            {"what": "store", "state": "failed", "found": "damaged", "hint": None},
        ],
    }


def test_providers_are_checked_in_their_order(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    asked: list[Any] = []

    def run(*words: Any) -> list[Check]:
        asked.append(words)
        return [BROKEN]

    monkeypatch.setattr("providers.doctor.run_checks", run)
    monkeypatch.setattr(doctor, "check_machines", lambda name: [Check(name, "ok", "here")])
    assert doctor.doctor(["slurm", "gke", "hosts"], "me", "near") == 4
    assert asked == [("gke", "me", "near")]
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["CHECK", "slurm", "store", "hosts"]
    assert "More checks" not in printed.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": Path("x")}, "--to needs --first-day"),
        ({"command": "gc"}, "--for needs --policy"),
        ({"policy": True}, "--policy needs one provider"),
        ({"policy": True, "providers": ["gke", "eks"]}, "--policy needs one provider"),
        ({"policy": True, "providers": ["kind"]}, "--policy needs one provider"),
        ({"first_day": True}, "--first-day needs one cloud"),
        ({"first_day": True, "providers": ["gke", "eks"]}, "--first-day needs one cloud"),
    ],
)
def test_options_that_need_others_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        doctor.doctor(**options)


def test_the_policy_of_a_cloud_is_a_document(capsys: Captured) -> None:
    assert doctor.doctor(["aws"], policy=True) == 0
    whole = json.loads(capsys.readouterr().out)
    assert doctor.doctor(["eks"], policy=True, command="list-clusters") == 0
    part = json.loads(capsys.readouterr().out)
    assert whole["Version"] == part["Version"] == "2012-10-17"  # the language of IAM's policies

    def actions(policy: Any) -> set[str]:
        found = [each["Action"] for each in policy["Statement"]]
        return {action for each in found for action in ([each] if isinstance(each, str) else each)}

    patterns = actions(whole)
    assert all(any(fnmatchcase(action, pattern) for pattern in patterns) for action in actions(part))
    assert "eks:CreateCluster" in patterns
    assert not any("Create" in action for action in actions(part))


@pytest.mark.parametrize(
    ("cloud", "project", "location", "options"),
    [
        ("gke", "me", "europe-west4-a", ["--project", "me", "--zone", "europe-west4-a"]),
        ("gke", "me", "europe-west4", ["--project", "me", "--region", "europe-west4"]),
        ("gke", None, None, []),
        ("eks", None, "eu-west-1", ["--region", "eu-west-1"]),
        ("aks", "me", "westeurope", ["--subscription", "me", "--region", "westeurope"]),
        ("eks", "me", None, ["--project", "me"]),
    ],
)
def test_project_and_place_as_options(
    cloud: str, project: str | None, location: str | None, options: list[str]
) -> None:
    assert doctor._scope_options(cloud, project, location) == options


# --- this machine -----------------------------------------------------------------------------------------------------


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=count))


@pytest.mark.parametrize(("count", "state"), [(2 << 30, "ok"), ((2 << 30) - 1, "missing"), (0, "missing")])
def test_a_run_needs_two_gibibytes(monkeypatch: pytest.MonkeyPatch, home: Path, count: int, state: str) -> None:
    free(monkeypatch, count)
    assert doctor._disk().state == state
    assert doctor._disk().hint == "Runs need 2.0 GiB or more; free up disk space."


@pytest.mark.parametrize(("count", "state"), [(256 << 20, "ok"), ((256 << 20) - 1, "missing")])
def test_shared_memory_of_a_quarter_gibibyte(monkeypatch: pytest.MonkeyPatch, count: int, state: str) -> None:
    free(monkeypatch, count)
    check = doctor._shared_memory()
    assert (check.what, check.state, check.hint) == ("shared memory", state, "In a container: --shm-size=1g")
    assert check.found == "256.0 MiB free in /dev/shm"


def test_folders_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def refuse(path: object) -> None:
        raise OSError("No such device")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert (doctor._disk().state, doctor._disk().found) == ("failed", "No such device")
    assert (doctor._shared_memory().state, doctor._shared_memory().found) == ("missing", "no /dev/shm")


def test_the_store_counts_its_runs_and_clusters(home: Path) -> None:
    Store(home).record_cluster(Cluster("lab-2", "kind"))
    check = doctor._store()
    assert (check.what, check.state, check.found) == ("store", "ok", f"{home} (runs: 0, clusters: 2)")


def test_a_store_that_cannot_be_read_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise UsageError("The store is damaged.", hint="Restore it.")

    monkeypatch.setattr(doctor, "Store", refuse)
    assert doctor._store() == Check("store", "failed", "The store is damaged.", "Restore it.")


@pytest.mark.parametrize(
    ("cores", "gpus", "quota", "words"),
    [
        (2, 0, None, "2 cores, 0 GPUs, 4.0 GiB memory"),
        (2, 1, 1.5, "2 cores (CPU quota of 1.5), 1 GPU, 4.0 GiB memory"),
    ],
)
def test_the_machine(monkeypatch: pytest.MonkeyPatch, cores: int, gpus: int, quota: float | None, words: str) -> None:
    monkeypatch.setattr(doctor, "local_machine", lambda: Machine(cores, gpus))
    monkeypatch.setattr(doctor, "cpu_quota", lambda: quota)
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}.__getitem__)
    assert doctor._cores() == Check("machine", "ok", words)


def test_the_lock_of_the_machine_is_free_held_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_lock", lambda: (Path("/run/lock"), None))
    monkeypatch.setattr(doctor, "find_holder", lambda: None)
    assert doctor._machine_lock() == Check("machine lock", "ok", "/run/lock: free")
    monkeypatch.setattr(doctor, "find_holder", lambda: SimpleNamespace(phrase="in use by demo-2"))
    assert doctor._machine_lock().found == "/run/lock: in use by demo-2"
    monkeypatch.setattr(doctor, "probe_lock", lambda: (Path("/run/lock"), "read-only"))
    check = doctor._machine_lock()
    assert (check.state, check.found) == ("missing", "read-only")


def answer(monkeypatch: pytest.MonkeyPatch, code: int = 0, out: str = "", err: str = "") -> list[Any]:
    asked: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append((command, options))
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_torch_is_asked_in_a_folder_that_nobody_else_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, out="a warning\n2.15.0\t4\tgloo,nccl\tNVIDIA\n")
    assert doctor._torch() == Check("torch", "ok", "2.15.0, backends gloo,nccl, built for NVIDIA GPUs, 4 of them here")
    ((command, options),) = asked
    assert command[:3] == [sys.executable, "-P", "-c"]
    assert options["cwd"] == "/"


@pytest.mark.parametrize(
    ("err", "found"),
    [("Traceback\nModuleNotFoundError: no torch\n", "ModuleNotFoundError: no torch"), ("", "it cannot be imported")],
)
def test_without_torch_the_last_line_says_why(monkeypatch: pytest.MonkeyPatch, err: str, found: str) -> None:
    answer(monkeypatch, 1, err=err)
    check = doctor._torch()
    assert (check.state, check.found) == ("missing", found)
    assert check.hint is not None
    assert check.hint.startswith("The tasks need torch on this machine: ")


def test_programs_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*words: Any, timeout: float, **options: Any) -> None:
        raise subprocess.TimeoutExpired("it", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert doctor._torch().state == "missing"
    assert doctor._docker().found == "/bin/docker: Command 'it' timed out after 10 seconds"


@pytest.mark.parametrize(("err", "reason"), [("a\nNo daemon.\n", "No daemon."), ("", "its daemon does not respond")])
def test_a_docker_without_its_daemon(monkeypatch: pytest.MonkeyPatch, err: str, reason: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    answer(monkeypatch, 1, err=err)
    assert doctor._docker() == Check("docker", "missing", f"/bin/docker: {reason}", doctor.DOCKER_HINT)
    answer(monkeypatch, 0, out="27.1\n")
    assert doctor._docker() == Check("docker", "ok", "/bin/docker, daemon 27.1")


def test_packages_and_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._package("tests", "pytest", "mpi", "x")() == Check("tests", "ok", f"pytest {pytest.__version__}")
    check = doctor._package("mpi", "no-such-package", "mpi", "the backend mpi")()
    assert (check.state, check.found) == ("missing", "no no-such-package")
    assert check.hint is not None
    assert check.hint.startswith("For the backend mpi: ")
    assert "mpi" in check.hint.removeprefix("For the backend mpi: ")
    monkeypatch.setattr(shutil, "which", {"kind": "/bin/kind"}.get)
    assert doctor._program("kind", "x")() == Check("kind", "ok", "/bin/kind")
    assert doctor._program("helm", "charts")() == Check("helm", "missing", "not on PATH", "Needed for charts.")


# --- attached machines ------------------------------------------------------------------------------------------------


def test_without_an_attached_cluster_it_is_missing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", {"ssh": "/bin/ssh", "sinfo": "/bin/sinfo"}.get)
    assert list(check_machines("slurm")) == [
        Check("ssh", "ok", "/bin/ssh"),
        Check("slurm here", "ok", "/bin/sinfo"),
        Check("slurm", "missing", "no such cluster attached", "mlbench attach-slurm NAME"),
    ]
    assert [check.what for check in check_machines("hosts")] == ["ssh", "hosts"]
    monkeypatch.setattr(shutil, "which", {}.get)
    assert [check.what for check in check_machines("slurm")] == ["ssh", "slurm"]
    assert _check_ssh().state == "missing"


def test_each_attached_cluster_is_checked_for_itself(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(home)
    for name, provider in (("a", "slurm"), ("b", "slurm"), ("c", "hosts")):
        store.record_cluster(Cluster(name, provider))

    def check(cluster: Cluster) -> Iterator[Check]:
        if cluster.name == "a":
            raise NotFoundError("It is gone.", hint="Look.")
        yield Check(cluster.name, "ok", "fine")

    monkeypatch.setattr(_machine_checks, "_check_slurm", check)
    monkeypatch.setattr(_machine_checks, "_check_hosts", lambda cluster: iter([Check(cluster.name, "ok", "hosts")]))
    assert list(check_machines("slurm"))[1:] == [
        Check("a", "failed", "It is gone.", "Look.", 4),
        Check("b", "ok", "fine"),
    ]
    assert list(check_machines("hosts"))[1:] == [Check("c", "ok", "hosts")]


def partition(chosen: str | None, default: str | None, **fields: Any) -> Check:
    facts: Any = SimpleNamespace(
        default_partition=default, partitions={"gpu": {"max_seconds": 3600, "gpus_per_node": 4, "nodes": 2, **fields}}
    )
    return _check_partition("lab", SimpleNamespace(partition=chosen), facts)  # type: ignore[arg-type]


def test_the_partition_of_a_slurm_cluster() -> None:
    assert partition("gpu", "other") == Check("lab: partition", "ok", "gpu: 2 nodes, 4 GPUs each, 3600 s at most")
    small = partition(None, "gpu", max_seconds=None, gpus_per_node=0, nodes=1)
    assert small.found == "gpu: 1 node, no GPUs, no time limit"
    missing = partition("big", "gpu")
    assert (missing.state, missing.found) == ("failed", "no big, only gpu")
    assert partition(None, None).found == "no default, only gpu"


def test_the_shared_folder_must_be_writable() -> None:
    assert _check_folder("lab", "True", 5 << 30, "/scratch") == Check("lab: folder", "ok", "/scratch, 5 GiB free")
    assert _check_folder("lab", "True", (5 << 30) - 1, "/scratch").found == "/scratch, 4 GiB free"
    check = _check_folder("lab", "False", 5 << 30, "/scratch")
    assert (check.state, check.found) == ("failed", "cannot write to /scratch")
