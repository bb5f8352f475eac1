"""`mlbench status --refresh` on a machine that knows the cluster and none of its runs."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.model.run import Cluster, Run, RunState
from mlbench_cli.storage.store import Store
from tests.contract import clients
from tests.contract.engines.kubernetes.test_engine import a_run, job_of, put_pod, submit, terminated_pod
from tests.contract.local_runs import until
from tests.fakes.kube_api import KubeApi
from tests.fakes.kubelet import Kubelet


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


class Machine:
    """Another machine, with a data folder of its own and the cluster attached as "there"."""

    def __init__(self, server: KubeApi, home: Path) -> None:
        self.home = home
        home.mkdir()
        server.write_kubeconfig(home / "kubeconfig")
        with_details = {"kubeconfig": str(home / "kubeconfig"), "context": "x", "namespace": "default"}
        self.store.record_cluster(Cluster("there", "attached", details=with_details))

    @property
    def store(self) -> Store:
        return Store(self.home)

    def run(self, *words: str) -> tuple[str, str]:
        done = clients.finish(*words, environment={**os.environ, "MLBENCH_HOME": str(self.home)})
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout, done.stderr

    def refresh(self) -> str:
        """What is said about runs that cannot be recorded."""
        return self.run("status", "--refresh")[1]


@pytest.fixture
def machine(server: KubeApi, tmp_path: Path) -> Machine:
    return Machine(server, tmp_path / "home")


def test_a_run_of_another_machine_is_recorded_once_with_its_own_id(
    server: KubeApi, machine: Machine, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "first")
    submit(server, run)
    put_pod(server, 0, **terminated_pod(0))
    assert "r-2:" not in machine.refresh()
    recorded = machine.store.run("r-2")
    assert (recorded.run.id, recorded.run.created, recorded.state) == (run.id, run.created, RunState.RUNNING)
    assert recorded.run.spec.cluster == "there"  # by which this machine knows the cluster
    machine.refresh()
    assert len(machine.store.runs()) == 1


@pytest.mark.slow
def test_the_other_machine_fetches_what_the_head_has(server: KubeApi, machine: Machine, tmp_path: Path) -> None:
    with Kubelet(server, tmp_path / "pods"):
        submit(server, a_run(tmp_path / "run", argv=("sh", "-c", "printf 42 > $MLBENCH_OUTPUT_DIR/answer")))
        until(lambda: job_of(server).get("status", {}).get("conditions"))
        for worker in (0, 1):
            server.remove("pods", f"r-2-{worker}-x")
        machine.refresh()
        until(lambda: "Kept:      on the cluster until 20" in machine.run("status", "r-2")[0])
        machine.run("wait", "r-2")
    machine.run("download", "r-2", "-o", str(tmp_path / "z"))
    machine.run("verify", str(tmp_path / "z"))
    folder = machine.store.run("r-2").run.folder
    assert (folder / "output/rank-0/answer").read_bytes() == b"42"


def test_a_name_that_is_taken_is_said_and_nothing_is_replaced(
    server: KubeApi, machine: Machine, tmp_path: Path
) -> None:
    own: Run = machine.store.record_run(a_run(tmp_path / "mine").spec)
    submit(server, a_run(tmp_path / "theirs"))
    assert "mlbench delete r-2" in machine.refresh()
    assert [item.run.id for item in machine.store.runs()] == [own.id]


def test_what_a_newer_version_started_is_named(server: KubeApi, machine: Machine, tmp_path: Path) -> None:
    submit(server, a_run(tmp_path / "run"))
    job = job_of(server)
    spec = {**json.loads(job["metadata"]["annotations"]["mlbench/spec"]), "newfield": 1}
    job["metadata"]["annotations"]["mlbench/spec"] = json.dumps(spec)
    assert "newfield" in machine.refresh()


def test_a_cluster_that_does_not_answer_hides_no_runs_of_others(
    server: KubeApi, machine: Machine, tmp_path: Path
) -> None:
    gone = {"kubeconfig": str(tmp_path / "nowhere"), "context": "x", "namespace": "default"}
    machine.store.record_cluster(Cluster("gone", "attached", details=gone))
    submit(server, a_run(tmp_path / "run"))
    assert "gone: " in machine.refresh()
    assert [item.run.name for item in machine.store.runs()] == ["r-2"]
