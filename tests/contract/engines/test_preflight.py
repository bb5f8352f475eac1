"""Backends are checked before a run is queued: on hosts and Slurm by what their Python had when they were attached, on
Kubernetes by what the image has."""

import json
import os
import subprocess
import venv
from pathlib import Path

import pytest

from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from tests.contract import clients
from tests.contract.engines.labs import install_commands


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        **install_commands(tmp_path / "commands"),
        "MLBENCH_HOME": str(tmp_path / "home"),
        "KUBECONFIG": "",
    }


def mlbench(environment: dict[str, str], *words: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    done = clients.finish(*words, environment=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hosts", "slurm"])
def test_a_backend_that_machines_lack_is_refused_before_anything_is_queued(
    kind: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    bare = str(tmp_path / "bare/bin/python")
    nodes = [{"names": "n1", "count": 1, "state": "idle", "partition": "debug"}]
    Path(environment["SLURM_CONF"]).with_name("nodes.json").write_text(json.dumps(nodes))
    where = {
        "hosts": ("--hosts", "m0,m1", "--interface", "lo", "--dir", str(tmp_path / "far")),
        "slurm": ("--shared", str(tmp_path / "far")),
    }[kind]
    run = ("run", "x", "1", "--task", "allreduce", "--preset", "tiny", "--yes")
    mlbench(environment, f"attach-{kind}", "lab", *where, "--python", bare)
    done = mlbench(environment, *run, code=2)
    assert f"The backend gloo needs torch, which {bare} on lab did not have when it was attached." in done.stderr
    assert f"mlbench attach-{kind} lab" in done.stderr
    # What it has is looked at again whenever the cluster is attached.
    packages = next((tmp_path / "bare/lib").glob("python*/site-packages"))
    (packages / "torch").mkdir()
    (packages / "torch/__init__.py").touch()
    mlbench(environment, f"attach-{kind}", "lab", *where, "--python", bare)
    assert "needs mpi4py" in mlbench(environment, *run, "--backend", "mpi", code=2).stderr
    assert json.loads(mlbench(environment, "status", "-o", "json").stdout)["runs"] == []


@pytest.mark.parametrize(("backend", "lacks"), [("mpi", "mpi4py"), ("grpc", "tensorflow")])
def test_a_backend_that_the_public_image_lacks_is_refused_before_anything_is_made(
    backend: str, lacks: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "home").mkdir()
    store = Store(tmp_path / "home")
    store.record_cluster(Cluster("k", "attached", details={"nodes": 2, "gpus_per_node": 0}))
    store.close()
    run = ("run", "x", "2", "--task", "allreduce", "--preset", "tiny", "--cluster", "k", "--yes", "--dry-run")
    done = mlbench(environment, *run, "--backend", backend, code=2)
    assert f"The backend {backend} needs {lacks}, which PyTorch's public image does not have." in done.stderr
    # With an image of one's own, nothing is known before the cluster is asked.
    done = mlbench(environment, *run, "--backend", backend, "--image", "registry.example/me:1", code=4)
    assert "There is no kubeconfig" in done.stderr
