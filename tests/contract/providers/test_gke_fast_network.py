"""Fast networks on GKE: GPUDirect-TCPX and TCPXO with networks of our own, RDMA with GKE's; what pods get."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from mlbench_cli.engines.kubernetes.manifests import manifests
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.conditions import check_fabric
from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request
from mlbench_cli.storage.store import Store
from providers.gke.provider import GkeProvider
from providers.gke.quota import read_error
from tests import NIGHTLY
from tests.fakes.gke import World
from tests.fakes.gke_fabric import NETWORKING, find_nccl_network
from tests.fakes.gke_facts import PROJECT, ZONE

Command = Callable[..., Any]
WAYS = {
    "a3-highgpu-8g": ("GPUDirectTCPX_v7", 4, ()),
    "a3-megagpu-8g": ("FasTrak", 8, ()),
    "a3-ultragpu-8g": ("gIB", 0, ("--spot",)),
    "a4-highgpu-8g": ("gIB", 0, ("--spot",)),
}
DELETE = ("delete-cluster", "gke", "rel-2", "--yes")


@pytest.fixture
def world(gke_world: World) -> World:
    gke_world.quotas = {}
    return gke_world


def create(command: Command, machine: str, *words: str, nodes: int = 2) -> Any:
    first = ("create-cluster", "gke", str(nodes), "rel", "-t", machine, "--fast-network", "--yes")
    return command(*first, *WAYS.get(machine, ("", 0, ()))[2], *words)


def resolve_run(**more: Any) -> RunSpec:
    options: Any = {"task": "allreduce", "registry": "ghcr.io/me", "gpu": True, "workers": (2,), **more}
    (spec,) = resolve(Request(name="r", **options), Store().cluster("rel-2"))
    return spec


def nccl_of(world: World, spec: RunSpec, image_has_ibverbs: bool = True) -> str:
    """What NCCL of the run's ranks would name, by the rules of the double."""
    job, *others = manifests(spec, "default")
    claims = [dict(item) for item in others if item["kind"] == "ResourceClaimTemplate"]
    return find_nccl_network(world, job["spec"]["template"], claims, image_has_ibverbs)


def list_left(world: World) -> list[str]:
    return [*world.clusters, *world.networks.found]


@pytest.mark.slow
@pytest.mark.parametrize("machine", WAYS)
def test_nccl_of_a_run_finds_the_fast_network_and_nothing_is_left(command: Command, world: World, machine: str) -> None:
    name, count, _ = WAYS[machine]
    result = create(command, machine)
    assert result.code == 0, result.err
    own = [name for name in world.networks.names("networks") if name.startswith("mlbench-")]
    assert len(own) == len(world.networks.names("subnetworks")) == count
    made = world.find_cluster("rel-2")
    assert made.network_config.enable_multi_networking == bool(count)
    assert len(made.node_pools[1].network_config.additional_node_network_configs) == count
    spec = resolve_run()
    assert nccl_of(world, spec) == name
    assert check_fabric(spec, {0: {"nccl": {"network": name}}}) is None
    deleted = command(*DELETE)
    assert deleted.code == 0, deleted.err
    assert list_left(world) == []  # also the rule that GKE itself put into the first network


@pytest.mark.parametrize("machine", ["a3-megagpu-8g", "a4-highgpu-8g"])
def test_without_the_option_nccl_falls_back_and_the_result_is_labeled(
    command: Command, world: World, machine: str
) -> None:
    result = command("create-cluster", "gke", "2", "rel", "-t", machine, "--spot", "--yes")
    assert result.code == 0, result.err
    assert "(--fast-network): between machines, NCCL will use TCP" in result.err
    spec = resolve_run()
    assert nccl_of(world, spec) == "Socket"
    condition = check_fabric(spec, {0: {"nccl": {"network": "Socket"}}})
    assert condition is not None
    assert condition.phrase.startswith("slow-network: NCCL used Socket")


@pytest.mark.slow
def test_only_runs_of_several_whole_machines_get_it(command: Command, world: World) -> None:
    assert create(command, "a3-megagpu-8g").code == 0
    for more in ({"workers": (1,)}, {"spread": False}):
        spec = resolve_run(**more)
        pod = manifests(spec, "default")[0]["spec"]["template"]
        assert "initContainers" not in pod["spec"], more
        assert not any(key.startswith("networking.gke.io") for key in pod["metadata"]["annotations"])


def test_an_image_without_ibverbs_does_not_reach_rdma(command: Command, world: World) -> None:
    result = create(command, "a4-highgpu-8g")
    assert "mlbench images push --base gib" in result.err
    assert nccl_of(world, resolve_run(), image_has_ibverbs=False) == "Socket"


@pytest.mark.parametrize(
    ("machine", "words", "code", "says"),
    [
        ("n1-standard-4", (), 2, "n1-standard-4 has no fast network"),
        ("a3-highgpu-4g", ("--spot",), 2, "a3-highgpu-8g, a3-megagpu-8g, a3-ultragpu-8g, a4-highgpu-8g"),
        ("a4-highgpu-8g", ("-k", "1.33"), 2, "needs GKE 1.34.1-gke.1829001 or later; this would be 1.33.6-gke.200"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    command: Command, world: World, machine: str, words: tuple[str, ...], code: int, says: str
) -> None:
    result = create(command, machine, *words)
    assert result.code == code, result.err
    assert says in result.err
    assert list_left(world) == []


def test_the_channel_s_default_version_counts_for_rdma(command: Command, world: World) -> None:
    words = ("create-cluster", "gke", "2", "rel", "-t", "a4-highgpu-8g", "--spot", "--fast-network", "--yes")
    refused = command(*words, "-k", "1.33")
    assert (refused.code, "--kubernetes-version 1.36.2-gke.100" in refused.err) == (2, True)
    assert command(*words).code == 0


@pytest.mark.slow
def test_a_quota_of_networks_is_checked_before_and_named_if_it_is_met_later(command: Command, world: World) -> None:
    world.quotas = {"NETWORKS": 10, "SUBNETWORKS": 100, "FIREWALLS": 100}
    world.used = {"NETWORKS": 6}
    refused = create(command, "a3-megagpu-8g")
    assert refused.code == 5
    assert "NETWORKS has 4 of 10 left, 8 needed" in refused.err
    assert list_left(world) == []
    world.quotas = {}
    world.networks.limits = {"NETWORKS": 2}
    refused = create(command, "a3-highgpu-8g")
    assert (refused.code, "Quota 'NETWORKS' exceeded" in refused.err) == (5, True)
    world.networks.limits, world.networks.failing = {}, "subnetworks"
    refused = create(command, "a3-highgpu-8g")
    assert (refused.code, "Quota 'SUBNETWORKS' exceeded" in refused.err) == (5, True)
    result = create(command, "a3-highgpu-8g")
    assert result.code == 0, result.err
    assert command(*DELETE).code == 0
    assert list_left(world) == []


def test_a_cluster_without_multi_networking_cannot_get_it_later(command: Command, world: World) -> None:
    assert command("create-cluster", "gke", "2", "rel", "-t", "a3-highgpu-8g", "--yes").code == 0
    refused = create(command, "a3-highgpu-8g")
    assert refused.code == 2
    assert "created without --fast-network, which cannot be added" in refused.err


def test_a_network_of_somebody_else_is_not_touched(command: Command, world: World) -> None:
    foreign = {"name": "mlbench-rel-2-net3", "description": "ours", "mtu": 1460}
    world.networks.found["global/networks/mlbench-rel-2-net3"] = foreign
    refused = create(command, "a3-highgpu-8g")
    assert (refused.code, "was not created by mlbench" in refused.err) == (2, True)
    command(*DELETE)
    assert list_left(world) == ["global/networks/mlbench-rel-2-net3"]


@pytest.mark.slow
def test_rules_of_load_balancers_that_come_while_a_network_is_deleted_go_with_it(
    command: Command, world: World
) -> None:
    """Firewall rules as in public reports: terraform-provider-google 5948, openshift/installer 2452."""
    assert create(command, "a3-highgpu-8g").code == 0
    world.networks.late_rules = ["gke-rel-2-43ae0aff-mcsd", "k8s-6b30d87a27edee2a-node-http-hc", "k8s-fw-abb7660d25"]
    world.networks.refuses_late = True
    result = command(*DELETE)
    assert result.code == 0, result.err
    assert world.networks.late_rules == []
    assert list_left(world) == []


class Once(dict[int | str, str]):
    """Trouble that comes once."""

    def get(self, key: int | str, default: Any = None) -> Any:
        return self.pop(key, default)


def test_too_many_requests_of_compute_engine_pass(command: Command, world: World) -> None:
    world.trouble = Once({"InsertNetwork": "THROTTLED-before", "GetNetwork": "THROTTLED-before"})
    made = create(command, "a3-highgpu-8g")
    assert made.code == 0, made.err
    assert not world.trouble


def test_what_is_on_later_pages_is_found(command: Command, world: World) -> None:
    """Compute Engine fills pages before it filters them: the first may be empty (libcloud 491, demisto 45690)."""
    assert create(command, "a3-highgpu-8g").code == 0
    world.networks.found = {"global/firewalls/theirs": {"name": "theirs", "network": "x"}, **world.networks.found}
    world.networks.page = 1
    world.networks.late_rules = ["k8s-fw-abb7660d25"]
    world.outside = {f"projects/{PROJECT}/zones/{ZONE}/disks/pvc-1"}
    result = command(*DELETE)
    assert (result.code, "gcloud compute disks delete pvc-1" in result.err) == (8, True), result.err
    assert list_left(world) == ["global/firewalls/theirs"]


@pytest.mark.slow
def test_what_others_have_in_a_network_is_waited_for_and_named(
    command: Command, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert create(command, "a3-highgpu-8g").code == 0
    group = "zones/europe-west1-b/networkEndpointGroups/k8s1-4f2a-ingress"
    world.networks.used_by["mlbench-rel-2-net3"].add(group)
    monkeypatch.setattr("providers.gke.resources.NetworkPart.delete_seconds", 2.0)
    result = command(*DELETE)
    assert result.code == 8
    assert f"is already being used by '{group}'" in result.err
    assert "gcloud compute networks delete mlbench-rel-2-net3" in result.err
    assert world.clusters == {}  # what costs money is gone
    world.networks.used_by["mlbench-rel-2-net3"].clear()
    assert command(*DELETE).code == 0
    assert list_left(world) == []


def test_networks_that_gke_made_itself_and_left_are_named(command: Command, world: World) -> None:
    assert create(command, "a4-highgpu-8g").code == 0
    own = {"name": "gke-rel-2-of-a-user", "creationTimestamp": "2026-01-01T00:00:00.000+00:00", "description": ""}
    world.networks.found["global/networks/gke-rel-2-of-a-user"] = own
    world.networks.stuck = True
    result = command(*DELETE)
    assert result.code == 8
    assert "network gke-rel-2-workers-rdma: GKE created it and has not deleted it" in result.err
    assert "gcloud compute networks delete gke-rel-2-workers-gvnic" in result.err
    assert "of-a-user" not in result.err
    assert world.clusters == {}


def test_what_google_has_not_accepted_yet_is_waited_for(command: Command, world: World) -> None:
    assert create(command, "a3-highgpu-8g").code == 0
    record = Store().cluster("rel-2")
    resources = GkeProvider().resources(record)
    (objects,) = [item for item in resources if item.kind == "Kubernetes' networks"]
    installer = resources[-1]
    assert [objects.poll().ready, installer.poll().ready] == [True, True]
    del world.networks.found["global/networks/mlbench-rel-2-net2"]
    assert "vpc2 is not ready: the VPC was not found" in objects.poll().reason
    world.find_cluster("rel-2").node_pools[1].config.labels["mlbench-role"] = "other"
    assert "is ready on 0 of 2 machines" in installer.poll().reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "program", "warns"),
    [("580.159.03", "v1.0.22", False), ("595.71.05", "v1.0.23", False), ("610.20", "v1.0.23", True)]
    if NIGHTLY
    else [("580.159.03", "v1.0.22", False), ("610.20", "v1.0.23", True)],
)
def test_plugin_and_program_are_those_of_the_driver(
    command: Command, world: World, driver: str, program: str, warns: bool
) -> None:
    world.drivers["LATEST"] = driver
    result = create(command, "a3-megagpu-8g")
    assert result.code == 0, result.err
    spec = resolve_run()
    (sidecar,) = manifests(spec, "default")[0]["spec"]["template"]["spec"]["initContainers"]
    assert sidecar["image"].endswith(f"tcpgpudmarxd-dev:{program}")
    assert nccl_of(world, spec) == ("Socket" if warns else "FasTrak")
    assert ("branch 610; Google's plugin for NCCL is known for 580, 595" in result.err) == warns
    assert create(command, "a3-megagpu-8g").code == 0  # repeated, the same one stays
    assert resolve_run().pods.fabric == spec.pods.fabric


def test_networks_whose_cluster_ended_by_itself_are_found_from_any_machine(
    command: Command, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert create(command, "a3-highgpu-8g", "--ttl", "2h").code == 0
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "elsewhere"))
    (found,) = GkeProvider().discover({})
    assert ClusterDetails.of(found).fabric == {"name": "GPUDirect-TCPX", "gbits": 800, "setup": "tcpx"}
    (path,) = world.clusters
    world.clusters.clear()  # by its own clock
    world.networks.detach(path)
    (remains,) = GkeProvider().discover({})
    assert (remains.name, remains.state, remains.location) == ("rel-2", "creating", "europe-west1-b")
    assert command("gc", "gke", "--yes").out == "Nothing to delete.\n"  # its cluster may be on its way
    for item in world.networks.found.values():
        item["creationTimestamp"] = "2026-11-20T10:00:00Z"
    (remains,) = GkeProvider().discover({})
    assert remains.state == "failed"
    early = command("gc", "gke", "--expired", "--everybody", "--yes")
    assert (early.code, len(world.networks.names("networks"))) == (0, 4)  # its end is in two hours
    for item in world.networks.found.values():
        words = str(item.get("description", "")).split()
        item["description"] = " ".join("mlbench-expires=1000" if "expires" in word else word for word in words)
    collected = command("gc", "gke", "--expired", "--everybody", "--yes")
    assert collected.code == 0, collected.err
    assert list_left(world) == []


@pytest.mark.slow
def test_machines_that_come_with_the_runs_find_the_plugin_s_installer(command: Command, world: World) -> None:
    result = create(command, "a3-megagpu-8g", "--flex-start")
    assert result.code == 0, result.err  # no machine is there yet to wait for
    pool = world.find_cluster("rel-2").node_pools[1]
    assert (pool.initial_node_count, len(pool.network_config.additional_node_network_configs)) == (0, 8)
    assert nccl_of(world, resolve_run()) == "FasTrak"
    assert command(*DELETE).code == 0
    assert list_left(world) == []


@pytest.mark.parametrize("body", [b"<html>Blocked by the proxy</html>", b"[]", b'{"error": "no document"}', b""])
def test_a_refusal_of_something_on_the_way_is_no_traceback(body: bytes) -> None:
    answer = requests.Response()
    answer._content = body
    assert read_error(answer) == {}


@pytest.mark.slow
def test_the_networks_stay_while_the_workers_move_to_the_next_zone(command: Command, world: World) -> None:
    world.empty_zones = {"europe-west1-b"}
    result = create(command, "a3-highgpu-8g", "--zones", "europe-west1-b,europe-west1-d")
    assert result.code == 0, result.err
    assert world.log.count("InsertNetwork global/networks") == 4
    assert nccl_of(world, resolve_run()) == "GPUDirectTCPX_v7"
    assert command(*DELETE).code == 0
    assert list_left(world) == []


def test_who_may_not_list_networks_still_finds_clusters(command: Command, world: World) -> None:
    assert command("create-cluster", "gke", "2", "rel", "-t", "n1-standard-4", "--yes").code == 0
    world.trouble = {"ListNetwork": "PERMISSION_DENIED-before"}
    assert [cluster.name for cluster in GkeProvider().discover({})] == ["rel-2"]


def test_names_of_networks_are_objects_of_clusters_with_multi_networking_only(command: Command, world: World) -> None:
    assert create(command, "a4-highgpu-8g").code == 0
    assert not any(path.startswith(NETWORKING) for path in world.objects)
    assert create(command, "a4-highgpu-8g").code == 0  # repeated, nothing is created twice
    assert sum(line.startswith("Create") for line in world.log) == 2
