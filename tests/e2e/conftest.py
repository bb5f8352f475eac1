"""One KIND cluster for all tests here, made and deleted through the command line. `make e2e` sets up what it needs."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mlbench_cli
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import ApiError
from tests.e2e import real
from tests.e2e.runs import Cluster, Runs, restricted_namespace

CLUSTER = "mlbench-e2e-2"  # two machines for workers, and the control plane
TASKS = ("allreduce", "digits_resnet")


@dataclass(frozen=True)
class Mlbench:
    """The `mlbench` command with a data folder of its own."""

    home: Path

    def __call__(self, *words: str, exit_code: int = 0, timeout: float = 1200) -> str:
        """Standard output of one command line, which must end with `exit_code`."""
        environment = {**os.environ, "MLBENCH_HOME": str(self.home)}
        command = [sys.executable, "-m", "mlbench_cli", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == exit_code, f"mlbench {' '.join(words)}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "-o", "json"))

    def start(self, *words: str, log: Path) -> subprocess.Popen[bytes]:
        """One command line in the background; what it prints goes to `log`."""
        environment = {**os.environ, "MLBENCH_HOME": str(self.home)}
        command = [sys.executable, "-m", "mlbench_cli", *words]
        with log.open("wb") as file:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def attach(cluster: Cluster, home: Path, name: str = "there") -> Mlbench:
    """The command of a machine that knows the cluster by this name, which is its current one."""
    home.mkdir()
    command = Mlbench(home)
    words = ["--kubeconfig", str(cluster.kubeconfig), "--namespace", cluster.access.namespace]
    command("attach-cluster", name, *words)
    command("set-cluster", name)
    return command


@pytest.fixture(scope="session")
def mlbench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mlbench]:
    """The command, with a KIND cluster that is its current one and holds the images of TASKS."""
    for tool in ("docker", "kind"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on the path: run make e2e")
    image = os.environ.get("MLBENCH_TEST_NODE_IMAGE")
    command = Mlbench(tmp_path_factory.mktemp("home"))
    words = ["create-cluster", "kind", "2", CLUSTER.removesuffix("-2"), "--yes"]
    words += ["--image", image] if image else []
    for task in TASKS:
        words += ["--load", f"localhost/mlbench/{task}:{mlbench_cli.__version__}"]
    try:
        command(*words, timeout=1800)
        command("set-cluster", CLUSTER)
        yield command
    finally:
        command("delete-cluster", "kind", CLUSTER, "--yes", "--force")
    left = subprocess.run(["kind", "get", "clusters"], capture_output=True, text=True, check=True).stdout.split()
    assert CLUSTER not in left


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A namespace where Pod Security is restricted, on the cluster of MLBENCH_E2E_KUBECONFIG, whose nodes have the
    images LAB_TEST_IMAGE (sh, python3) and LAB_TORCH_IMAGE (torch); else on the one that is made here."""
    given = os.environ.get("MLBENCH_E2E_KUBECONFIG")
    if given:
        path = Path(given)
        if not path.exists():
            pytest.skip(f"there is no cluster: MLBENCH_E2E_KUBECONFIG names {path}, which does not exist")
        image, torch_image = os.environ.get("LAB_TEST_IMAGE"), os.environ.get("LAB_TORCH_IMAGE")
        if not image or not torch_image:
            pytest.skip("MLBENCH_E2E_KUBECONFIG is set, but not LAB_TEST_IMAGE and LAB_TORCH_IMAGE")
    else:
        if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
            pytest.skip("there is no cluster: MLBENCH_E2E_KUBECONFIG is not set, and no Docker answers to make one")
        request.getfixturevalue("mlbench")  # makes the cluster
        path = tmp_path_factory.mktemp("kube") / "config"
        subprocess.run(["kind", "export", "kubeconfig", "--name", CLUSTER, "--kubeconfig", str(path)], check=True)
        image = torch_image = f"localhost/mlbench/allreduce:{mlbench_cli.__version__}"
    try:
        with restricted_namespace(Access.from_kubeconfig(path)) as access:
            yield Cluster(access, image, torch_image, path)
    except ApiError as error:
        pytest.skip(f"the cluster of {path} cannot be used: {error.message}")


@pytest.fixture
def runs(cluster: Cluster) -> Iterator[Runs]:
    runs = Runs(cluster)
    yield runs
    runs.remove()


@pytest.fixture(scope="session")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    """A small real cluster for the doubles of the clouds to hand out."""
    with real.kubernetes(tmp_path_factory.mktemp("gate")) as access:
        yield access
