"""What a first cluster on GKE meets: disks and sale of machines, quotas as Google applies them, its own operations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request
from mlbench_cli.storage.store import Store
from providers.gke.options import SHAPED, GkeOptions
from providers.gke.provider import GkeProvider
from providers.lifecycle import up
from providers.machines import load_prices
from tests import NIGHTLY
from tests.fakes.gke import World
from tests.fakes.gke_facts import NEVER_ON_DEMAND

ENOUGH = dict.fromkeys(
    ("CPUS", "SSD_TOTAL_GB", "HDB_TOTAL_GB", "IN_USE_ADDRESSES", "INSTANCES", "GPUS_ALL_REGIONS", "NVIDIA_L4_GPUS"), 1e6
)
Command = Callable[..., Any]


def create(command: Command, *words: str, nodes: int = 2) -> Any:
    return command("create-cluster", "gke", str(nodes), "rel", "--yes", *words)


EVERY = [*SHAPED, "n1-standard-4", "n4-standard-4", "c4-standard-8", "c2-standard-8"]
SERIES = {machine.partition("-")[0]: machine for machine in reversed(EVERY)}  # the first of each, by day


@pytest.mark.slow
@pytest.mark.parametrize("machine", EVERY if NIGHTLY else SERIES.values())
def test_every_machine_gets_a_disk_and_a_way_to_buy_that_google_takes(
    command: Command, gke_world: World, machine: str
) -> None:
    gke_world.quotas = {}
    refused = create(command, "-t", machine, "--dry-run")
    if machine in NEVER_ON_DEMAND:
        assert refused.code == 2
        assert all(way in refused.err for way in ("--spot", "--flex-start", "--reservation"))
    else:
        assert refused.code == 0, refused.err
    way = ["--spot"] if machine in NEVER_ON_DEMAND else []
    result = create(command, "-t", machine, *way)
    assert result.code == 0, result.err
    assert len(gke_world.clusters) == 1


def test_a_disk_of_one_s_own_choice_is_asked_for(command: Command, gke_world: World) -> None:
    result = create(command, "-t", "n4-standard-4", "--disk-type", "pd-balanced")
    assert result.code == 2
    assert "pd-balanced disk type cannot be used by n4-standard-4 machine type" in result.err
    assert "GKE cluster rel-2 (ready)" in result.err


@pytest.mark.parametrize(
    ("quotas", "words", "lacking"),
    [
        ({"CPUS": 8}, ["-t", "n1-standard-4"], "CPUS has 8 of 8 left, 12 needed"),
        ({"SSD_TOTAL_GB": 250}, ["-t", "n1-standard-4"], "SSD_TOTAL_GB has 250 of 250 left, 300 needed"),
        ({"IN_USE_ADDRESSES": 3}, ["-t", "n1-standard-4"], "IN_USE_ADDRESSES has 3 of 3 left, 4 needed"),
        ({"HDB_TOTAL_GB": 100}, ["-t", "n4-standard-4"], "HDB_TOTAL_GB has 100 of 100 left, 200 needed"),
        ({"CPUS_ALL_REGIONS": 10}, ["-t", "n1-standard-4"], "CPUS_ALL_REGIONS has 10"),
        ({"N4_CPUS": 4}, ["-t", "n4-standard-4"], "N4_CPUS has 4 of 4 left, 8 needed"),
        ({"GPUS_ALL_REGIONS": 1}, ["--gpu-type", "l4"], "GPUS_ALL_REGIONS has 1 of 1 left, 2 needed"),
        ({"PREEMPTIBLE_NVIDIA_L4_GPUS": 0}, ["--gpu-type", "l4", "--flex-start"], "PREEMPTIBLE_NVIDIA_L4_GPUS has 0"),
        ({"PREEMPTIBLE_NVIDIA_L4_GPUS": 1}, ["--gpu-type", "l4", "--spot"], "PREEMPTIBLE_NVIDIA_L4_GPUS has 1"),
        ({"GPU_FAMILY:NVIDIA_B200": 8}, ["-t", "a4-highgpu-8g", "--reservation", "r"], "GPU_FAMILY:NVIDIA_B200 has 8"),
    ],
)
def test_every_quota_is_checked_before_anything_is_made(
    command: Command, gke_world: World, quotas: dict[str, float], words: list[str], lacking: str
) -> None:
    gke_world.reserve("r", "a4-highgpu-8g", 4)
    gke_world.quotas = {**ENOUGH, **quotas}
    result = create(command, *words, "--dry-run")
    assert result.code == 5, result.err
    assert lacking in result.err
    gke_world.quotas = {**ENOUGH, **dict.fromkeys(quotas, 1e6)}
    assert create(command, *words, "--dry-run").code == 0


def test_all_quotas_that_are_too_small_are_named_at_once(command: Command, gke_world: World) -> None:
    gke_world.quotas = {"CPUS": 8, "SSD_TOTAL_GB": 250, "IN_USE_ADDRESSES": 4}
    result = create(command, "--dry-run", nodes=50)
    assert result.code == 5
    assert all(name in result.err for name in gke_world.quotas)


def test_what_is_used_already_counts(command: Command, gke_world: World) -> None:
    gke_world.quotas, gke_world.used = {"CPUS": 24}, {"CPUS": 20}
    assert "CPUS has 4 of 24 left, 12 needed" in create(command, "--dry-run").err


def test_spot_without_a_granted_preemptible_quota_uses_the_standard_one(command: Command, gke_world: World) -> None:
    gke_world.quotas = {**ENOUGH, "PREEMPTIBLE_NVIDIA_L4_GPUS": 0, "PREEMPTIBLE_CPUS": 0}
    result = create(command, "--gpu-type", "l4", "--spot", "--dry-run")
    assert result.code == 0, result.err


def test_private_nodes_need_no_addresses(command: Command, gke_world: World) -> None:
    gke_world.quotas = {**ENOUGH, "IN_USE_ADDRESSES": 0}
    refused = create(command, "--dry-run")
    assert (refused.code, "or use --private-nodes" in refused.err) == (5, True)
    result = create(command, "--private-nodes")
    assert result.code == 0, result.err
    assert "Cloud NAT" in result.err
    assert gke_world.find_cluster("rel-2").network_config.default_enable_private_nodes


def test_the_new_family_quotas_are_not_taken_for_none(command: Command, gke_world: World) -> None:
    """Compute Engine shows 0 of the old quota although the family's was granted, which it may not show at all."""
    gke_world.quotas = {**ENOUGH, "NVIDIA_H100_GPUS": 0}
    result = create(command, "-t", "a3-highgpu-8g", "--dry-run")
    assert result.code == 0, result.err
    assert result.err.count("the request may still fail") == 1


def test_an_upgrade_that_google_starts_by_itself_is_waited_for(gke_world: World, tmp_path: Path) -> None:
    """Longer than errors are borne: it is none."""
    gke_world.own_upgrade = 60
    provider = GkeProvider()
    cluster = provider.new_cluster("rel-2", 2, GkeOptions())
    up(cluster, provider.resources(cluster), Store(tmp_path), patience=0.05)
    assert len(gke_world.find_cluster("rel-2").node_pools) == 2
    refused = [line for line in gke_world.log if line.startswith("CreateNodePool")]
    assert len(refused) > 1


def test_the_api_is_closed_by_address_or_open_to_some(command: Command, gke_world: World) -> None:
    assert create(command).code == 0
    endpoints = gke_world.find_cluster("rel-2").control_plane_endpoints_config
    assert endpoints.dns_endpoint_config.allow_external_traffic
    assert endpoints.ip_endpoints_config.enabled is False
    gke_world.clusters.clear()
    assert create(command, "--allow-from", "203.0.113.0/24").code == 0
    endpoints = gke_world.find_cluster("rel-2").control_plane_endpoints_config
    assert not endpoints.dns_endpoint_config.allow_external_traffic
    networks = endpoints.ip_endpoints_config.authorized_networks_config
    assert [block.cidr_block for block in networks.cidr_blocks] == ["203.0.113.0/24"]
    assert create(command, "--allow-from", "nowhere").code == 2


def test_machines_are_not_upgraded_while_the_cluster_is_used(command: Command, gke_world: World) -> None:
    """Until the version is no longer supported: an exclusion with a fixed end may not outlive that."""
    assert create(command).code == 0
    made = gke_world.find_cluster("rel-2")
    (exclusion,) = made.maintenance_policy.window.maintenance_exclusions.values()
    assert exclusion.maintenance_exclusion_options.scope.name == "NO_MINOR_OR_NODE_UPGRADES"
    assert exclusion.maintenance_exclusion_options.end_time_behavior.name == "UNTIL_END_OF_SUPPORT"
    assert not exclusion.end_time


def test_charts_find_an_untainted_pool_and_runs_stay_off_it(command: Command, gke_world: World) -> None:
    assert create(command).code == 0
    system = gke_world.find_cluster("rel-2").node_pools[0]
    assert (list(system.config.taints), system.initial_node_count) == ([], 2)
    request = Request(name="r", workers=(2,), task="digits_resnet", node_selector={"zone": "a"}, registry="ghcr.io/me")
    (spec,) = resolve(request, Store().cluster("rel-2"))
    assert spec.pods.node_selector == {"mlbench-role": "worker", "zone": "a"}


def test_machines_that_have_come_while_others_are_looked_for_are_named_with_their_price(
    command: Command, gke_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.gke.resources.PARTIAL_SECONDS", 0.0)
    gke_world.lacking, gke_world.looks = 1, 8
    gke_world.failing["CreateNodePool"] = "partial"
    result = create(command)
    assert result.code == 5
    price = load_prices("gke").price("n1-standard-4", "europe-west1")
    assert f"1 of 2 machines are running and cost {price:.2f} USD/h" in result.err
    assert "Google looks for the others" in result.err
    assert "does not have enough resources available" in result.err
    assert [cluster.name for cluster in GkeProvider().discover({})] == ["rel-2"]
    gke_world.failing.clear()
    gke_world.lacking = 0
    assert create(command).code == 0


def test_machines_with_a_fast_network_that_is_not_set_up_are_named(command: Command, gke_world: World) -> None:
    gke_world.quotas = {}
    result = create(command, "-t", "a3-highgpu-8g", "--dry-run")
    assert "a3-highgpu-8g has 800 Gbit/s of GPUDirect-TCPX, which this cluster does not set up" in result.err
    assert "results are labeled slow_network" in result.err
    assert "Gbit/s" not in create(command, "-t", "a3-highgpu-8g", "--dry-run", nodes=1).err
