"""The end of a cluster on GKE without the laptop: the CronJob's own script, run as a process once its time has come."""

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.storage.store import Store
from providers.gke import GkeProvider
from tests.fakes.gke import Google, World
from tests.fakes.gke_facts import ZONE

CREATE = ["create-cluster", "gke", "2", "rel", "-t", "n1-standard-4", "--yes"]
CRON_JOB = "/apis/batch/v1/namespaces/mlbench-end-rel-2/cronjobs/mlbench-end"
HOLD = "/apis/batch/v1/namespaces/mlbench-end-rel-2/jobs/mlbench-hold"
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


def test_the_clock_in_the_cluster_deletes_it_once_its_time_has_come(
    command: Any, google: Google, gke_world: World, metadata: str
) -> None:
    result = command(*CREATE, "--ttl", "2h")
    assert result.code == 0, result.err
    assert gke_world.policy["bindings"] == [{"role": "roles/container.clusterAdmin", "members": [MEMBER]}]
    expires = ClusterDetails.of(Store().cluster("rel-2")).expires
    assert gke_world.objects[CRON_JOB]["metadata"]["annotations"] == {"mlbench/expires": str(expires)}
    early = fire(gke_world, google, metadata, expires=time.time() + 60)
    assert (early.returncode, "s are left" in early.stdout) == (0, True)
    assert len(gke_world.clusters) == 1
    gke_world.own_upgrade = 3  # Google refuses while it upgrades: the next run of the CronJob asks again
    refused = fire(gke_world, google, metadata, expires=time.time() - 1)
    assert refused.returncode == 1
    gke_world.operations.clear()
    ended = fire(gke_world, google, metadata, expires=time.time() - 1)
    assert (ended.returncode, ended.stdout.strip()) == (0, "Google deletes the cluster")
    deleted = command("delete-cluster", "gke", "rel-2", "--yes")  # the laptop, later: nothing is left, nor a binding
    assert deleted.code == 0, deleted.err
    assert gke_world.clusters == {}
    assert gke_world.policy["bindings"] == []


def test_gc_deletes_what_the_clock_has_left(command: Any, google: Google, gke_world: World, metadata: str) -> None:
    assert command(*CREATE, "--ttl", "1h", "--registry", "auto").code == 0
    fire(gke_world, google, metadata, expires=0)
    gke_world.clusters.clear()
    (repository,) = gke_world.repositories.values()
    repository["labels"]["mlbench-expires"] = str(int(time.time()) - 60)
    cluster = Store().cluster("rel-2")
    Store().record_cluster(replace(cluster, details={**cluster.details, "expires": time.time() - 60}))
    result = command("gc", "gke", "--expired", "--yes")
    assert result.code == 0, result.err
    assert gke_world.repositories == {}
    assert gke_world.policy["bindings"] == []


def test_any_machine_finds_the_images_that_an_ended_cluster_has_left(
    command: Any, google: Google, gke_world: World, metadata: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert command(*CREATE, "--ttl", "1h", "--registry", "auto").code == 0
    fire(gke_world, google, metadata, expires=0)
    gke_world.clusters.clear()
    (repository,) = gke_world.repositories.values()
    repository["labels"]["mlbench-expires"] = str(int(time.time()) - 60)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "elsewhere"))  # CI's next runner
    assert [cluster.name for cluster in GkeProvider().discover({})] == ["rel-2"]
    result = command("gc", "gke", "--expired", "--yes")
    assert result.code == 0, result.err
    assert gke_world.repositories == {}
    assert gke_world.policy["bindings"] == []


def test_any_machine_finds_the_disks_that_an_ended_cluster_has_left(
    command: Any, google: Google, gke_world: World, metadata: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert command(*CREATE, "--ttl", "1h").code == 0
    fire(gke_world, google, metadata, expires=0)
    gke_world.clusters.clear()
    gke_world.outside.add(f"projects/demo-project/zones/{ZONE}/disks/pvc-1")
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "elsewhere"))  # CI's next runner
    assert [(item.name, item.location) for item in GkeProvider().discover({})] == [("rel-2", ZONE)]
    assert "rel-2" in command("list-clusters", "--cloud").out
    result = command("gc", "gke", "--expired", "--everybody", "--yes")
    assert result.code == 8, result.err
    assert f"gcloud compute disks delete pvc-1 --zone {ZONE} --project demo-project" in result.err
    assert gke_world.policy["bindings"] == []
    gke_world.outside.clear()
    assert command("gc", "gke", "--expired", "--everybody", "--yes").out == "Nothing to delete.\n"


def test_any_machine_finds_the_load_balancers_that_an_ended_cluster_has_left(
    command: Any, google: Google, gke_world: World, metadata: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the firewall rule of each, whose target names the cluster."""
    assert command(*CREATE, "--ttl", "1h").code == 0
    fire(gke_world, google, metadata, expires=0)
    gke_world.clusters.clear()
    for name, owner in (("a0b1", "rel-2"), ("a2c3", "theirs")):
        gke_world.balancers.add(name)
        rule = {"name": f"k8s-fw-{name}", "network": "default", "targetTags": [f"gke-{owner}-0a1b2c3d-node"]}
        gke_world.networks.found[f"global/firewalls/k8s-fw-{name}"] = rule
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "elsewhere"))  # CI's next runner
    assert [(item.name, item.location) for item in GkeProvider().discover({})] == [("rel-2", "europe-west1")]
    result = command("gc", "gke", "--expired", "--everybody", "--yes")
    assert result.code == 8, result.err
    assert "gcloud compute forwarding-rules delete a0b1 --region europe-west1 --project demo-project" in result.err
    assert "a2c3" not in result.err
    gke_world.balancers.clear()
    assert command("gc", "gke", "--expired", "--everybody", "--yes").out == "Nothing to delete.\n"


def test_disks_of_other_people_s_clusters_are_none_of_ours(command: Any, gke_world: World) -> None:
    assert command(*CREATE, "--ttl", "1h").code == 0
    gke_world.outside.add(f"projects/demo-project/zones/{ZONE}/disks/pvc-1")
    gke_world.claimant = "theirs"
    assert [item.name for item in GkeProvider().discover({})] == ["rel-2"]
    gke_world.policy_denied = True
    gke_world.claimant = "rel-2"
    assert [item.name for item in GkeProvider().discover({})] == ["rel-2"]


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


def test_another_account_cannot_delete_the_cluster(
    command: Any, google: Google, gke_world: World, metadata: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(*CREATE, "--ttl", "2h").code == 0
    monkeypatch.setattr(Metadata, "account", "ns/default/sa/default")
    refused = fire(gke_world, google, metadata, expires=0)
    assert (refused.returncode, "container.clusters.delete" in refused.stderr) == (1, True)
    assert len(gke_world.clusters) == 1


def test_extend_moves_the_clock(command: Any, gke_world: World) -> None:
    assert command(*CREATE, "--ttl", "1h").code == 0
    before = ClusterDetails.of(Store().cluster("rel-2")).expires or 0
    result = command("extend", "rel-2", "2h")
    assert result.code == 0, result.err
    annotations = gke_world.objects[CRON_JOB]["metadata"]["annotations"]
    assert annotations == {"mlbench/expires": str(int(before) + 7200)}


def test_the_workers_of_who_may_not_change_the_policy_end_without_any_right(command: Any, gke_world: World) -> None:
    gke_world.policy_denied = True
    gke_world.denied = {"resourcemanager.projects.setIamPolicy"}
    planned = command(*CREATE, "--ttl", "2h", "--dry-run")
    assert "You are not allowed to change the IAM policy of the project. So only the workers expire" in planned.err
    assert "remain and cost up to 0." in planned.err
    result = command(*CREATE, "--ttl", "2h")
    assert result.code == 0, result.err
    assert "Nothing in the cloud deletes this cluster" in result.err
    assert "Policy update access denied" in result.err
    assert CRON_JOB not in gke_world.objects
    (pool,) = [pool for pool in gke_world.find_cluster("rel-2").node_pools if pool.name == "workers"]
    end = ClusterDetails.of(Store().cluster("rel-2")).expires or 0
    for moment, machines in ((end - 60, 2), (end + 60, 0)):
        gke_world.autoscale(moment)
        assert pool.initial_node_count == machines
    pool.initial_node_count = 2
    assert command("extend", "rel-2", "1h").code == 0
    assert command("scale-cluster", "rel-2", "3", "--yes").code == 0
    assert pool.autoscaling.max_node_count == 3
    for moment, machines in ((end + 3500, 3), (end + 3700, 0)):
        gke_world.autoscale(moment)
        assert pool.initial_node_count == machines
    assert command("delete-cluster", "gke", "rel-2", "--yes").code == 0
    assert gke_world.clusters == {}


def test_workers_whose_hold_has_ended_are_held_again(command: Any, gke_world: World) -> None:
    gke_world.policy_denied = True
    assert command(*CREATE, "--ttl", "1h").code == 0
    hold = gke_world.objects[HOLD]
    hold["status"]["conditions"] = [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]
    result = command("extend", "rel-2", "1h")
    assert result.code == 0, result.err
    assert "conditions" not in gke_world.objects[HOLD]["status"]


def test_who_may_change_the_policy_has_a_pool_of_fixed_size(command: Any, gke_world: World) -> None:
    assert "if you may" not in command(*CREATE, "--ttl", "2h", "--dry-run").err
    assert command(*CREATE, "--ttl", "2h").code == 0
    assert HOLD not in gke_world.objects
    assert not any(pool.autoscaling.enabled for pool in gke_world.find_cluster("rel-2").node_pools)


def test_deleting_takes_the_binding_away_and_leaves_those_of_others(command: Any, gke_world: World) -> None:
    others = {"role": "roles/container.clusterAdmin", "members": ["user:me@example.com"]}
    conditional = {**others, "condition": {"expression": "true"}}
    gke_world.policy["bindings"] = [others, conditional]
    assert command(*CREATE, "--ttl", "2h").code == 0
    assert command("delete-cluster", "gke", "rel-2", "--yes").code == 0
    assert gke_world.policy["bindings"] == [others, conditional]


def test_a_binding_that_cannot_be_removed_does_not_keep_the_cluster(command: Any, gke_world: World) -> None:
    assert command(*CREATE, "--ttl", "2h").code == 0
    gke_world.trouble["PolicyPOST"] = "PERMISSION_DENIED-before"
    result = command("delete-cluster", "gke", "rel-2", "--yes")
    assert result.code == 0, result.err
    assert gke_world.clusters == {}


def test_the_script_needs_nothing_but_the_standard_library() -> None:
    source = (Path(__file__).parents[3] / "templates" / "kubernetes" / "gke_end.py").read_text("utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
