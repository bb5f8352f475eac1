"""One experiment on every kind of machine at once: this one, Slurm, hosts, and a double of Kubernetes' API."""

import json
from pathlib import Path

import pytest

from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from tests.e2e.machines.fleet import Client, Fleet
from tests.fakes.kube_api import KubeApi
from tests.fakes.kubelet import Kubelet


@pytest.mark.parametrize("cluster", ["slurm", "hosts"])
def test_one_experiment_spans_every_engine(
    cluster: str, request: pytest.FixtureRequest, fleet: Fleet, tmp_path: Path
) -> None:
    client: Client = request.getfixturevalue(cluster)
    with KubeApi() as server, Kubelet(server, tmp_path / "pods"):
        server.write_kubeconfig(client.home / "kubeconfig")
        details = {"kubeconfig": str(client.home / "kubeconfig"), "context": "x", "namespace": "default"}
        Store(client.home).record_cluster(Cluster("pods", "attached", details=details))
        words = ["--task", "allreduce", "--preset", "tiny", "--matrix", "cluster=local,lab,pods", "--yes"]
        (client.home / "config.toml").write_text('registry = "127.0.0.1:1/nobody"\n')
        client.ok("run", "span", "1", *words)
        status = json.loads(client.ok("status", "span", "-o", "json"))
        assert {run["cluster"]: run["outcome"] for run in status["runs"]} == {
            "local": "completed",
            "lab": "completed",
            "pods": "completed",
        }
        (experiment,) = status["experiments"]
        assert experiment["state"] == "completed"
        names = [f"span-{name}-1" for name in ("local", "lab", "pods")]
        client.ok("verify", *(str(client.folder(name)) for name in names))
        specs = [json.loads((client.folder(name) / "run.json").read_text())["spec"] for name in names]
        assert [spec["engine"] for spec in specs] == ["local", cluster, "kubernetes"]
        page = tmp_path / "report.html"
        client.ok("report", str(page), "span")
        assert all(name in page.read_text() for name in names)
        client.ok("delete", "span", "--yes")
