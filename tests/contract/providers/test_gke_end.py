"""The end of a cluster on GKE without the laptop: the CronJob's own script, run as a process once its time has come."""

import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.storage.store import Store
from tests.fakes.gke import Google, World

CREATE = ["create-cluster", "gke", "2", "rel", "-t", "n1-standard-4", "--yes"]
CRON_JOB = "/apis/batch/v1/namespaces/mlbench-end/cronjobs/mlbench-end"
HOLD = "/apis/batch/v1/namespaces/mlbench-end/jobs/mlbench-hold"
MEMBER = (
    "principal://iam.googleapis.com/projects/123456789/locations/global/workloadIdentityPools/"
    "demo-project.svc.id.goog/subject/ns/mlbench-end-rel-2/sa/mlbench-end"
)


class Metadata(BaseHTTPRequestHandler):
    """Google's metadata server as a pod of one service account sees it."""

    account = "ns/mlbench-end-rel-2/sa/mlbench-end"

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        body = f'{{"access_token": "ksa:{self.account}"}}'.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def fire(world: World, google: Google, metadata: str, *, expires: float) -> subprocess.CompletedProcess[str]:
    """Run the CronJob's container as Kubernetes would, with an end of the test's choice."""
    template = world.objects[CRON_JOB]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = template["containers"]
    assert template["nodeSelector"] == {"mlbench-role": "system"}
    given = {item["name"]: item["value"] for item in container["env"]}
    endpoint = google.environment["MLBENCH_COMPUTE_ENDPOINT"]
    return subprocess.run(
        [sys.executable, *container["command"][1:]],
        env={
            **os.environ, **given, "MLBENCH_EXPIRES": str(int(expires)), "GCE_METADATA_HOST": metadata,
            "MLBENCH_GKE_REST_ENDPOINT": endpoint,
        },
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_gc_leaves_images_that_were_kept_on_request(
    command: Any, gke_world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert command(*CREATE, "--ttl", "1h", "--registry", "auto").code == 0
    assert command("delete-cluster", "gke", "rel-2", "--yes", "--keep-images").code == 0
    (repository,) = gke_world.repositories.values()
    repository["labels"]["mlbench-expires"] = "1"
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "elsewhere"))
    assert command("gc", "gke", "--all", "--everybody", "--yes").out == "Nothing to delete.\n"
    assert len(gke_world.repositories) == 1


def test_the_workers_end_without_any_right_to_give_rights(command: Any, gke_world: World) -> None:
    gke_world.policy_denied = True
    gke_world.denied = {"resourcemanager.projects.setIamPolicy"}
    result = command(*CREATE, "--ttl", "2h")
    assert result.code == 0, result.err
    assert "The workers expire" in result.err
    assert "remain and cost up to 0." in result.err
    (pool,) = [pool for pool in gke_world.find_cluster("rel-2").node_pools if pool.name == "workers"]
    end = ClusterDetails.of(Store().cluster("rel-2")).expires or 0
    for moment, machines in ((end - 60, 2), (end + 60, 0)):
        gke_world.autoscale(moment)
        assert pool.initial_node_count == machines
    pool.initial_node_count = 2
    assert command(*CREATE, "--ttl", "3h").code == 0
    later = ClusterDetails.of(Store().cluster("rel-2")).expires or 0
    assert 3500 < later - end < 3700
    assert int(gke_world.find_cluster("rel-2").resource_labels["mlbench-expires"]) == later
    assert command("scale-cluster", "rel-2", "3", "--yes").code == 0
    assert pool.autoscaling.max_node_count == 3
    for moment, machines in ((later - 60, 3), (later + 60, 0)):
        gke_world.autoscale(moment)
        assert pool.initial_node_count == machines
    assert command("delete-cluster", "gke", "rel-2", "--yes").code == 0
    assert gke_world.clusters == {}
