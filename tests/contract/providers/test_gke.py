"""GKE through the unmodified SDK on servers that speak Google's protocols: nothing leaks, whatever goes wrong when."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.base import CLUSTER_TAG
from providers.gke.options import GkeOptions
from providers.gke.provider import GkeProvider
from providers.lifecycle import down, up
from tests import NIGHTLY
from tests.contract.providers.conftest import error_of
from tests.fakes.gke import Google, World
from tests.fakes.gke_facts import PROJECT

L4 = GkeOptions(gpu_type="l4", spot=True)
CREATE = ["create-cluster", "gke", "2", "rel", "--gpu-type", "l4", "--yes"]
DELETE = ["delete-cluster", "gke", "rel-2", "--yes"]


@pytest.fixture
def world(gke_world: World) -> World:
    return gke_world


def _cluster(nodes: int = 2, options: GkeOptions = L4) -> Cluster:
    described = GkeProvider().new_cluster(f"rel-{nodes}", nodes, options)
    details = {**described.details, "owner": "tester", "expires": 4102444800}
    return Cluster(described.name, "gke", details=details)


def _make(cluster: Cluster, home: Path, patience: float = 1.0) -> Cluster:
    home.mkdir(exist_ok=True)
    return up(cluster, GkeProvider().resources(cluster), Store(home), patience=patience)


def _remove_from_nothing(home: Path) -> None:
    _remove(GkeProvider().discover({}), home)


def _remove(clusters: Iterable[Cluster], home: Path) -> None:
    home.mkdir()
    for cluster in clusters:
        down(cluster, GkeProvider().resources(cluster), Store(home), patience=1.0)


# --- the way it is meant to go --------------------------------------------------------------------------------------


def test_from_create_to_delete(command: Any, world: World) -> None:
    done = command(*CREATE, "--ttl", "2h", "-o", "json")
    assert done.code == 0, done.err
    details = done.json["cluster"]["details"]
    assert (details["project"], details["location"], details["gpus_per_node"]) == (PROJECT, "europe-west1-b", 1)
    assert [entry["kind"] for entry in details["provisioning"]] == [
        *("GKE cluster", "expiry timer", "node pool"),
        *("node registration", "GPU probe"),
    ]
    made = world.find_cluster("rel-2")
    assert made.resource_labels[CLUSTER_TAG] == "rel-2"
    assert set(made.resource_labels) == {CLUSTER_TAG, "mlbench-owner", "mlbench-expires"}
    system, workers = made.node_pools
    assert not system.config.accelerators
    assert workers.config.accelerators[0].gpu_driver_installation_config.gpu_driver_version.name == "LATEST"
    assert dict(workers.config.resource_labels) == dict(made.resource_labels)
    assert made.control_plane_endpoints_config.dns_endpoint_config.allow_external_traffic
    assert command(*DELETE).code == 0
    assert world.clusters == {}
    assert [cluster.name for cluster in Store().clusters()] == ["local"]
    kept = command("status", "--cluster", "rel-2", "-o", "json").json["resources"]
    assert {item["state"] for item in kept} == {"gone"}  # also of those that went with the cluster
    assert [item["kind"] for item in kept if item["removal"]] == ["GKE cluster"]


def test_without_a_terminal_it_asks_for_yes_and_a_paid_cluster_has_an_end(command: Any, world: World) -> None:
    done = command(*CREATE[:-1])
    assert done.code == 2
    assert "--yes" in done.err
    assert world.clusters == {}
    command(*CREATE)
    assert "expires" in Store().cluster("rel-2").details
    assert command(*DELETE, "--project", PROJECT, "--zone", "europe-west1-b").code == 0
    command(*CREATE, "--ttl", "none")
    assert "expires" not in Store().cluster("rel-2").details


def test_a_regional_cluster_with_workers_in_two_zones(command: Any, world: World) -> None:
    zones = ["--worker-zone", "europe-west1-b", "--worker-zone", "europe-west1-d"]
    words = ["create-cluster", "gke", "4", "wide", "--region", "europe-west1", *zones]
    planned = command(*words, "--dry-run", "-o", "json").json
    assert planned["plan"]["location"] == "europe-west1-b, europe-west1-d of project demo-project"
    assert [line["count"] for line in planned["plan"]["lines"]] == [1, 2, 4, 500, 6]
    assert "several zones" in planned["plan"]["warnings"][0]
    done = command(*words, "--yes", "-o", "json")
    assert done.code == 0, done.err
    assert done.json["cluster"]["details"]["location"] == "europe-west1"
    system, workers = world.find_cluster("wide-4").node_pools
    assert (system.initial_node_count, workers.initial_node_count) == (2, 2)
    assert list(workers.locations) == ["europe-west1-b", "europe-west1-d"]
    [found] = GkeProvider().discover({})
    assert found.details["options"]["region"] == "europe-west1"
    assert command("delete-cluster", "gke", "wide-4", "--yes").code == 0
    assert world.clusters == {}


def test_a_region_finds_a_zone_for_the_workers_itself(command: Any, world: World) -> None:
    done = command(
        "create-cluster", "gke", "2", "far", "--region", "europe-west1", "--gpu-type", "l4", "--spot", "--yes"
    )
    assert done.code == 0, done.err
    cluster = world.find_cluster("far-2")
    assert list(cluster.locations) == list(cluster.node_pools[1].locations) == ["europe-west1-b"]
    done = command("create-cluster", "gke", "2", "no", "--region", "europe-west1", "-t", "n9-standard-4", "--yes")
    assert (done.code, "No zone of europe-west1 has n9-standard-4" in done.err) == (2, True)
    assert "no-2" not in {cluster.name for cluster in world.clusters.values()}


# --- refused at every request ----------------------------------------------------------------------------------------


PASSING = ("UNAVAILABLE-before", "DEADLINE_EXCEEDED-after", "INTERNAL-after", "THROTTLED-before")
LASTING = {"RESOURCE_EXHAUSTED-before": CapacityError, "PERMISSION_DENIED-before": CredentialError}


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
@pytest.mark.parametrize("trouble", [*PASSING, *LASTING])
def test_an_error_at_any_request_leaks_nothing(
    google: Google, world: World, tmp_path: Path, trouble: str, stride: int
) -> None:
    """In a sample each trouble comes at other requests."""
    _make(_cluster(), tmp_path / "calm")
    for number in range([*PASSING, *LASTING].index(trouble) % stride, len(world.log), stride):
        world = google.reset(trouble={number: trouble})
        error = error_of(functools.partial(_make, _cluster(), tmp_path / f"home-{number}"))
        # Who may not change the project's policy gets a cluster all the same; by REST, 429 is about the rate only.
        if trouble in PASSING or world.log[number].startswith("Policy"):
            assert error is None
        else:
            assert isinstance(error, LASTING[trouble])
            assert bool(error.details.get("exists")) == bool(world.clusters)
        world.trouble = {}
        # A search that fails is repeated by whoever asked for it, so the trouble comes after it.
        found = GkeProvider().discover({})
        world.trouble = {len(world.log) + number % 4: trouble} if trouble in PASSING else {}
        _remove(found, tmp_path / f"empty-{number}")
        assert world.clusters == {}, f"{trouble} at {world.log[number]}"


def test_a_cluster_that_is_being_changed_is_waited_for(google: Google, world: World, tmp_path: Path) -> None:
    world = google.reset(trouble={"GetNodePool": "PERMISSION_DENIED-after"}, looks=10)
    with pytest.raises(CredentialError):
        _make(_cluster(), tmp_path / "home")
    world.trouble = {"GetOperation": "PERMISSION_DENIED-after"}
    with pytest.raises(CredentialError):  # now its pool is being made
        _make(_cluster(), tmp_path / "home")
    world.trouble = {}
    _remove_from_nothing(tmp_path / "empty")
    assert world.clusters == {}
    assert sum(line.startswith("DeleteCluster") for line in world.log) == 1


# --- no capacity ----------------------------------------------------------------------------------------------------


def test_a_stock_out_leaves_a_healthy_cluster_to_try_again_on(command: Any, world: World) -> None:
    world.failing = {"CreateNodePool": "stockout"}
    done = command(*CREATE)
    assert done.code == 5
    assert "--zones a,b,c" in done.err
    assert "GKE cluster rel-2 (ready)" in done.err
    assert "mlbench delete-cluster gke rel-2" in done.err
    assert Store().cluster("rel-2").state == "failed"
    world.failing = {}
    assert command(*CREATE, "--worker-zone", "europe-west1-c").code == 2  # a zone that the double does not know
    done = command(*CREATE)
    assert done.code == 0
    assert "has to be recreated: GCE_STOCKOUT" in done.err


def test_a_quota_is_told_apart_from_a_stock_out(command: Any, world: World) -> None:
    world.failing = {"CreateNodePool": "quota"}
    done = command(*CREATE, "-o", "json")
    assert done.code == 5
    assert done.json["error"]["details"]["reason"] == "quota"
    assert "iam-admin/quotas?project=demo-project" in done.json["error"]["hint"]


def test_a_cluster_whose_making_failed_is_made_anew(google: Google, world: World, tmp_path: Path) -> None:
    world.failing = {"CreateCluster": "quota"}
    with pytest.raises(CapacityError, match="NVIDIA_L4_GPUS"):
        _make(_cluster(), tmp_path / "home")
    world.failing = {}
    assert _make(_cluster(), tmp_path / "home").state == "ready"
    assert "DeleteCluster clusters/rel-2" in world.log


# --- what is not ours, not allowed, not possible --------------------------------------------------------------------


def test_a_cluster_with_other_machines_is_refused(world: World, tmp_path: Path) -> None:
    _make(_cluster(), tmp_path / "home")
    with pytest.raises(UsageError, match="machine type g2-standard-8 instead of n1-standard-4"):
        _make(_cluster(options=GkeOptions()), tmp_path / "home")


def test_a_zone_that_does_not_answer_is_not_taken_for_empty(command: Any, world: World) -> None:
    world.missing_zones = ["us-east1-b"]
    done = command("gc", "gke", "--all", "--yes")
    assert (done.code, "us-east1-b" in done.err) == (8, True)


def test_clusters_of_zones_that_answer_are_listed_and_deleted(command: Any, world: World, tmp_path: Path) -> None:
    _make(_cluster(), tmp_path / "home")
    world.missing_zones = ["us-east1-b"]
    listed = command("list-clusters", "--cloud")
    assert "rel-2" in listed.out
    assert "gke was not searched as a whole" in listed.err
    assert "us-east1-b" in listed.err
    missing = command("delete-cluster", "gke", "other-2", "--yes")  # it may be in the zone that is silent
    assert (missing.code, 'It is not known whether there is a cluster "other-2"' in missing.err) == (10, True)
    assert "--zone ZONE" in missing.err.partition("\nNext: ")[2]
    done = command("gc", "gke", "--all", "--everybody", "--yes")
    assert (done.code, world.clusters) == (8, {})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--zone", "europe"], "not a zone"),
        (["--zone", "us-mars1-a"], 'There is no zone "us-mars1-a"'),
        (["--zone", "europe-west1-b", "--worker-zone", "us-east1-b"], "another region"),
        (["--zone", "europe-west1-b", "--region", "europe-west1"], "exclude each other"),
        (["--region", "europe-west1-b"], "not a region"),
        (["--region", "us-mars1"], 'There is no region "us-mars1"'),
        (["--zones", "europe-west1-b,"], "is not a list of different zones"),
        (["--zones", "europe-west1-b,europe-west1-b"], "is not a list of different zones"),
        (["--zones", "europe-west1-b,europe-west4-a"], "these zones are in several regions"),
        (["--zones", "here"], "is not a zone"),
        (["--zones", "europe-west1-b,europe-west1-c"], 'There is no zone "europe-west1-c"'),
        (["--zones", "europe-west1-b", "--worker-zone", "europe-west1-d"], "exclude each other"),
        (["--zones", "europe-west1-b", "--region", "europe-west4"], "is in another region"),
        (["--worker-zone", "europe-west1-b", "--worker-zone", "europe-west1-b"], "given twice"),
        (["--flex-start", "--reservation", "mine"], "exclude each other"),
        (["--machine-type", "n9-standard-4"], "has no n9-standard-4"),
        (["--machine-type", "g2-standard-8", "--num-gpus", "2"], "--machine-type g2-standard-24"),
        (["--machine-type", "g2-standard-8", "--gpu-type", "t4"], "has nvidia-l4, not nvidia-tesla-t4"),
        (["--machine-type", "e2-standard-2", "--num-gpus", "1"], "only to n1 machines"),
        (["--gpu-type", "t4", "--num-gpus", "3"], "1, 2 or 4"),
        (["--gpu-type", "l4", "--gpus-per-node", "0"], "from 1 to 64"),
        (["--gpu-type", "k80"], "too old"),
        (["--gpu-type", "h1000"], 'Did you mean "h100"'),
        (["--gpu-type", "h100"], "only as spot"),
        (["--spot", "--reservation", "mine"], "exclude each other"),
        (["--kubernetes-version", "1.19"], "does not offer Kubernetes 1.19"),
        (["--kubernetes-version", "new"], "not of the form"),
        (["--num-cpus", "64"], "has 4 vCPUs"),
        (["--disk-size", "5"], "from 10 to"),
        (["--release-channel", "weekly"], "not one of rapid"),
        (["--compact-placement"], "not possible with n1-standard-4"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    command: Any, world: World, words: list[str], says: str
) -> None:
    done = command("create-cluster", "gke", "2", "rel", "--yes", *words)
    assert done.code == 2, done.err
    assert says in done.err
    assert not any(line.startswith("Create") for line in world.log)


@pytest.mark.parametrize(
    "options",
    [
        GkeOptions(),
        GkeOptions(gpu_type="t4", num_gpus=2),
        GkeOptions(machine_type="a2-highgpu-1g", compact_placement=True),
        GkeOptions(network="net", subnetwork="sub", service_account="a@b", kubernetes_version="1.36"),
    ],
)
def test_every_kind_of_pool_is_one_that_the_sdk_knows(world: World, tmp_path: Path, options: GkeOptions) -> None:
    _make(_cluster(options=options), tmp_path / "home")
    assert len(world.find_cluster("rel-2").node_pools) == 2
