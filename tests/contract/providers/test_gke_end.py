"""The end of a cluster on GKE without the laptop: the hold on its workers, which the autoscaler removes after it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import timestamp
from tests.fakes.gke import World

CREATE = ["create-cluster", "gke", "2", "rel", "-t", "n1-standard-4", "--yes"]


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
    gke_world.policy_denied, gke_world.unknown_looks = True, 3
    gke_world.denied = {"resourcemanager.projects.setIamPolicy"}
    result = command(*CREATE, "--ttl", "2h")
    assert result.code == 0, result.err
    assert "the autoscaler removes workers" in result.err
    lines = json.loads(command(*CREATE, "--dry-run", "-o", "json").out)["cluster"]["details"]["plan"]["lines"]
    rest = [line for line in lines if not line["what"].startswith("worker ")]
    assert max(line["count"] for line in rest) > 1
    left = sum(line["count"] * line["price_per_hour"] for line in rest)
    assert f"remain and cost up to {left:.2f} USD/h" in result.err
    (pool,) = [pool for pool in gke_world.find_cluster("rel-2").node_pools if pool.name == "workers"]
    end = ClusterDetails.of(Store().cluster("rel-2")).expires or 0
    for moment, machines in ((end - 60, 2), (end + 60, 0)):
        gke_world.autoscale(moment)
        assert pool.initial_node_count == machines
    pool.initial_node_count = 2
    (job,) = (item for path, item in gke_world.objects.items() if "/jobs/" in path)
    job["status"]["startTime"] = timestamp(time.time() - 1800)  # a Job's deadline counts from its start
    assert command(*CREATE, "--ttl", "3h").code == 0
    later = ClusterDetails.of(Store().cluster("rel-2")).expires or 0
    assert 3500 < later - end < 3700
    assert int(gke_world.find_cluster("rel-2").resource_labels["mlbench-expires"]) == later
    for moment, machines in ((later - 60, 2), (later + 60, 0)):
        gke_world.autoscale(moment)
        assert pool.initial_node_count == machines
    assert command("delete-cluster", "gke", "rel-2", "--yes").code == 0
    assert gke_world.clusters == {}


def test_workers_end_although_their_creation_failed_and_nobody_came_back(command: Any, gke_world: World) -> None:
    gke_world.failing = {"CreateNodePool": "stockout"}
    assert command(*CREATE, "--ttl", "2h").code == 5
    (pool,) = [pool for pool in gke_world.find_cluster("rel-2").node_pools if pool.name == "workers"]
    end = int(gke_world.find_cluster("rel-2").resource_labels["mlbench-expires"])
    for moment, machines in ((end - 60, 2), (end + 60, 0)):
        gke_world.autoscale(moment)
        assert pool.initial_node_count == machines


def test_a_limit_that_google_refused_is_set_by_the_next_command(command: Any, gke_world: World) -> None:
    """The Job already holds the workers then, and only the pool tells that something is missing."""
    assert command(*CREATE, "--ttl", "none").code == 0
    (pool,) = [pool for pool in gke_world.find_cluster("rel-2").node_pools if pool.name == "workers"]
    gke_world.trouble = {"SetNodePoolAutoscaling": "PERMISSION_DENIED-before"}
    assert command(*CREATE, "--ttl", "2h").code == 3  # an end that comes later
    assert not pool.autoscaling.enabled
    (job,) = [item for path, item in gke_world.objects.items() if "/jobs/" in path]
    gke_world.trouble = {}
    assert command(*CREATE, "--ttl", "2h").code == 0
    assert pool.autoscaling.max_node_count == 2
    job["status"]["conditions"] = [{"type": "Failed", "status": "True"}]  # and holds nothing any more
    assert command(*CREATE).code == 0
    (again,) = [item for path, item in gke_world.objects.items() if "/jobs/" in path]
    assert "conditions" not in again["status"]
