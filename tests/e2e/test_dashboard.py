"""A dashboard of one cluster on a real API server: what another machine has started there, live, and its archive."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlbench_cli.api import Client
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.runs.request import Request
from tests.contract.server.dashboards import Dashboard, serve
from tests.contract.server.test_cluster import follow_log
from tests.e2e.conftest import attach
from tests.e2e.runs import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
NAME, RUN = "there", "watched-2"
SCRIPT = "echo rank $RANK begins; sleep 45; echo rank $RANK ends"  # the dashboard looks for runs every 30 s
PATIENCE = 600.0


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.5)


def list_names(dashboard: Dashboard) -> list[str]:
    return [run["name"] for run in dashboard.ask("/api/v1/runs").document["runs"]]


def test_a_dashboard_shows_a_cluster_through_its_api_server(cluster: Cluster, tmp_path: Path) -> None:
    """One machine starts a run; the dashboard of another one finds it, follows its log and has its archive."""
    attach(cluster, tmp_path / "one", NAME)
    watching = attach(cluster, tmp_path / "other", NAME)
    request = Request(
        name="watched", workers=(2,), cluster=NAME, command=f"sh -c '{SCRIPT}'", image=cluster.image, backend="gloo"
    )
    with Client(tmp_path / "one") as client, serve(tmp_path / "other", "--cluster", NAME) as dashboard:
        with client.prepare(request).open() as opened:
            opened.record()
            (run,) = opened.left
            opened.start_run(run)  # and nobody on this machine follows it
        try:
            until(lambda: RUN in list_names(dashboard))
            lines = follow_log(dashboard, RUN)
            assert next(line for line in lines if "begins" in line) in ("rank 0 begins", "rank 1 begins")
            assert next(line for line in lines if "ends" in line) in ("rank 0 ends", "rank 1 ends")
            workers = dashboard.ask(f"/api/v1/runs/{RUN}").document["ranks"]
            assert len({worker["node"] for worker in workers}) == 2
            assert dashboard.ask(f"/api/v1/runs/{RUN}/archive").status == 400  # not yet: it is on the cluster
            watching("wait", RUN)
            answer = dashboard.ask(f"/api/v1/runs/{RUN}/archive")
            assert answer.status == 200
            (tmp_path / "watched.zip").write_bytes(answer.body)
            assert not verify(tmp_path / "watched.zip").problems
            assert list_names(dashboard) == [RUN]
        finally:
            run.delete(force=True)
