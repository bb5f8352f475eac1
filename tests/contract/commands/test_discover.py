"""`mlbench discover` on a machine that knows the cluster and none of its runs."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import Cluster, Run, RunState
from mlbench_cli.storage.store import Store
from tests.contract import clients
from tests.contract.engines.kubernetes.test_engine import a_run, job_of, put_pod, submit, terminated_pod
from tests.contract.engines.kubernetes.test_keeper import a_kept_run
from tests.fakes.kube_api import KubeApi


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


class Machine:
    """Another machine, with a data directory of its own and the cluster attached as "there"."""

    def __init__(self, server: KubeApi, home: Path) -> None:
        self.home = home
        home.mkdir()
        server.write_kubeconfig(home / "kubeconfig")
        with_details = {"kubeconfig": str(home / "kubeconfig"), "context": "x", "namespace": "default"}
        self.store.record_cluster(Cluster("there", "attached", details=with_details))

    @property
    def store(self) -> Store:
        return Store(self.home)

    def run(self, *words: str, code: int = 0) -> str:
        done = clients.finish(*words, environment={**os.environ, "MLBENCH_HOME": str(self.home)})
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    def discover(self, code: int = 0) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.run("discover", "there", "-o", "json", code=code))["runs"]
        return rows


@pytest.fixture
def machine(server: KubeApi, tmp_path: Path) -> Machine:
    return Machine(server, tmp_path / "home")


def test_a_run_of_another_machine_is_recorded_once_with_its_own_id(
    server: KubeApi, machine: Machine, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "first")
    submit(server, run)
    put_pod(server, 0, **terminated_pod(0))
    (row,) = machine.discover()
    assert (row["name"], row["id"], row["created"], row["here"]) == ("r-2", run.id, run.created, "recorded")
    recorded = machine.store.run("r-2")
    assert (recorded.run.id, recorded.run.created, recorded.state) == (run.id, run.created, RunState.RUNNING)
    assert recorded.run.spec.cluster == "there"  # by which this machine knows the cluster
    (again,) = machine.discover()
    assert again["here"] == "known"
    assert len(machine.store.runs()) == 1


def test_the_other_machine_fetches_what_the_keeper_has(server: KubeApi, machine: Machine, tmp_path: Path) -> None:
    a_kept_run(server, tmp_path)
    machine.discover()
    assert "Kept:      on the cluster until 2033-05-18T03:33:20" in machine.run("status", "r-2")
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
    (row,) = machine.discover(code=8)
    assert row["here"] == "name_taken"
    assert "mlbench delete r-2" in row["problem"]
    assert [item.run.id for item in machine.store.runs()] == [own.id]


def test_what_a_newer_version_started_is_named(server: KubeApi, machine: Machine, tmp_path: Path) -> None:
    submit(server, a_run(tmp_path / "run"))
    job = job_of(server)
    spec = {**json.loads(job["metadata"]["annotations"]["mlbench/spec"]), "newfield": 1}
    job["metadata"]["annotations"]["mlbench/spec"] = json.dumps(spec)
    (row,) = machine.discover(code=8)
    assert (row["name"], row["here"]) == ("r-2", "unreadable")
    assert "newfield" in row["problem"]


def test_the_local_cluster_has_nothing_to_discover(machine: Machine) -> None:
    assert machine.run("discover", "local") == ""  # no sealed folder that the store does not know
    machine.run("discover", "nowhere", code=4)
