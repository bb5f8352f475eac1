"""What shells complete: commands, tasks, presets, backends, clusters, runs, settings; in bash, zsh and fish."""

import os
from pathlib import Path

import pytest

from mlbench_cli.model.run import Cluster, Experiment
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.store import Store
from tests.contract import clients


@pytest.fixture
def home(tmp_path: Path) -> Path:
    store = Store(tmp_path)
    for name in ("demo-1", "many-2-r1", "many-2-r2"):
        store.record_run(RunSpec(name, "local", "local", "custom", "custom", ("true",), "gloo", 1))
    store.record_experiment(Experiment("0123456789ab", "some", "2026-01-31T10:00:00.000Z", {}), [])
    store.record_cluster(Cluster("gke-4", "gke"))
    return tmp_path


def complete(home: Path, line: str, shell: str = "zsh") -> str:
    variables = {
        "MLBENCH_HOME": str(home),
        "_MLBENCH_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    done = clients.finish(environment=os.environ | variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("line", "offered", "withheld"),
    [
        ("mlbench stat", "status", "delete"),
        ("mlbench status ", "demo-1", "gke-4"),
        ("mlbench status ma", "many-2", "demo-1"),
        ("mlbench wait demo", "demo-1", "many"),
        ("mlbench compare demo-1 m", "many-2", "demo-1"),
        ("mlbench charts out d", "demo-1", "many"),
        ("mlbench run x --task digits", "digits_resnet", "mnist"),
        ("mlbench run x --task digits_resnet --preset t", "tiny", "spec"),
        ("mlbench run x --backend g", "gloo", "nccl"),
        ("mlbench run x --method pow", "powersgd", "bsp"),
        ("mlbench run x --task digits_resnet --set ba", "batch_size=", "run."),
        ("mlbench run x --set run.pa", "run.parallel=", "run.pin"),
        ("mlbench run x --method powersgd --set comm.r", "comm.rank=", "batch_size"),
        ("mlbench run x --task digits_resnet --matrix set.ba", "set.batch_size", "method"),
        ("mlbench run x --create e", "eks", "gke"),
        ("mlbench run x --on-failure r", "restart", "fail"),
        ("mlbench export c", "csv", "parquet"),
        ("mlbench compare a b --across ma", "machine", "method"),
        ("mlbench certify local --level s", "soak", "quick"),
        ("mlbench certify --from d", "demo-1", "many"),
        ("mlbench help cl", "clusters", "runs"),
        ("mlbench doctor g", "gke", "eks"),
        ("mlbench gate demo-1 --baseline m", "many-2", "demo-1"),
        ("mlbench run x --task cifar10_resnet20_tensorflow --backend ", "grpc", "gloo"),
        ("mlbench run x --cluster ", "gke-4", "demo-1"),
        ("mlbench set-cluster g", "gke-4", "local"),
        ("mlbench delete-cluster ", "gke-4", "local"),
        ("mlbench status --state fa", "failed", "running"),
        ("mlbench tasks mn", "mnist", "digits"),
        ("mlbench run so", "some", "demo-1"),
        ("mlbench delete --task mn", "mnist", "digits"),
        ("mlbench gc h", "hosts", "gke"),
    ],
)
def test_names_are_completed(home: Path, line: str, offered: str, withheld: str) -> None:
    found = complete(home, line)
    assert offered in found
    assert withheld not in found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_completes_options(home: Path, shell: str) -> None:
    assert "digits_resnet" in complete(home, "mlbench run x --task digi", shell)
