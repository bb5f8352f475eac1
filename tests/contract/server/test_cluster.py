"""A dashboard of one cluster: its runs through its API server, and nothing of other clusters."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.model.run import Experiment, Member
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import now
from tests.contract.engines.kubernetes.test_engine import a_run, submit
from tests.contract.local_runs import until
from tests.contract.server.conftest import record_sealed
from tests.contract.server.dashboards import Dashboard, serve
from tests.fakes.kube_api import KubeApi
from tests.fakes.kubelet import Kubelet


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as found:
        yield found


@pytest.fixture
def dashboard(server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    """Of the cluster "there", on a machine that has runs of its own. It looks for new ones every second."""
    monkeypatch.setattr("mlbench_cli.server.discovery.SECONDS", 1.0)
    home = tmp_path / "home"
    home.mkdir()
    server.record(home)
    store = Store(home)
    record_sealed(store, "mine-1", 1, 20.0)
    run = store.run("mine-1").run
    members = (Member(0, run.id, "x", {}),)
    store.record_experiment(Experiment("e" * 12, "mine", now(), {"name": "mine"}, members), [])
    store.close()
    with serve(home, "--cluster", "there", "--allow-actions") as found:
        yield found


@pytest.mark.slow
def test_a_cluster_shows_its_runs_and_nothing_of_others(server: KubeApi, dashboard: Dashboard, tmp_path: Path) -> None:
    """Another machine's run is found, and its log followed, over the connection of all commands."""
    gate = tmp_path / "gate"
    script = f"echo first line; while [ ! -e {gate} ]; do sleep 0.05; done; echo second line"
    with Kubelet(server, tmp_path / "pods"):
        submit(server, a_run(tmp_path / "elsewhere", argv=("sh", "-c", script)))
        until(lambda: dashboard.ask("/api/v1/runs").document["total"] == 1)
        listed = dashboard.ask("/api/v1/runs").document
        assert [run["name"] for run in listed["runs"]] == ["r-2"]
        lines = follow_log(dashboard, "r-2")
        assert {next(lines), next(lines)} == {"first line"}  # of both workers
        gate.touch()
        assert {next(lines), next(lines)} == {"second line"}
    for path in ("/runs/mine-1", "/api/v1/runs/mine-1", "/api/v1/runs/mine-1/archive", "/report?run=mine-1"):
        assert dashboard.ask(path).status == 404, path
    for path in ("/experiments/mine", "/api/v1/experiments/mine", "/report?run=mine", "/compare?a=mine-1&b=mine-1"):
        assert dashboard.ask(path).status == 404, path
    for path in ("/", "/listing", "/experiment-list", "/api/v1/experiments"):
        answer = dashboard.ask(path)
        assert (answer.status, b"mine" in answer.body) == (200, False), path
    questions = dashboard.ask("/api/v1/questions").document
    assert [cluster["name"] for cluster in questions["clusters"]] == ["there"]
    wanted = {"name": "x", "workers": [1], "command": "true", "cluster": "local"}
    refused = dashboard.post("/api/v1/runs", wanted)
    assert (refused.status, "the cluster there" in refused.document["message"]) == (400, True)
    planned = dashboard.post("/api/v1/runs?check=true", {**wanted, "cluster": None, "image": "own/image:1"})
    assert (planned.status, planned.document["runs"]) == (200, ["x-1"])
    assert "--cluster there" in planned.document["command"]


def follow_log(dashboard: Dashboard, run: str) -> Iterator[str]:
    for kind, document in dashboard.follow(run):
        if kind == "log":
            yield from (item["text"] for item in document["lines"])
