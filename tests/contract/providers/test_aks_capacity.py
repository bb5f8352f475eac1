"""GPUs, quotas, stock-outs and zones on AKS, and what Azure's other refusals become."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.storage.store import Store
from providers.aks.options import AksOptions
from providers.aks.provider import AksProvider
from tests.contract.providers.test_aks import CREATE, DELETE, cluster_in, create, make_cluster
from tests.fakes.azure_arm import World
from tests.fakes.azure_facts import SUBSCRIPTION, Message
from tests.fakes.azure_rules import SPOT_TAINT

T4 = [*CREATE, "--gpu-type", "t4"]
SUBNET = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/net/providers/Microsoft.Network/virtualNetworks/n/subnets/x"


@pytest.fixture
def world(azure_world: World) -> World:
    return azure_world


# --- GPUs -----------------------------------------------------------------------------------------------------------


def test_a_cluster_with_gpus_ends_with_a_probe_that_uses_them(command: Any, world: World) -> None:
    done = command(*T4, "--spot", "-o", "json")
    assert done.code == 0, done.err
    details = done.json["cluster"]["details"]
    assert details["gpu_probe"]["gpus"] == "1"
    assert details["tolerations"] == [SPOT_TAINT]  # so that runs come onto machines that AKS taints
    kinds = [entry["kind"] for entry in details["provisioning"]]
    assert kinds[2:5] == ["expiry timer", "node pool", "GPU device plugin"]
    assert kinds[-2:] == ["node registration", "GPU probe"]
    pool = cluster_in(world)["properties"]["agentPoolProfiles"][1]
    assert (pool["vmSize"], pool["gpuProfile"]) == ("Standard_NC4as_T4_v3", {"driver": "Install"})
    assert set(pool["nodeTaints"]) == {"nvidia.com/gpu=present:NoSchedule", SPOT_TAINT}
    assert (pool["scaleSetPriority"], pool["scaleSetEvictionPolicy"], pool["spotMaxPrice"]) == ("Spot", "Delete", -1)


def test_a_driver_that_is_too_old_for_the_images_is_told(command: Any, world: World) -> None:
    world.driver, world.pods.torch = "535.274.02", True
    done = command(*T4)
    assert done.code == 1
    assert "driver on your system is too old" in done.err


def test_machines_of_the_newest_families_are_whole_ones_with_a_warning_about_their_network(
    command: Any, world: World
) -> None:
    done = command(*CREATE, "--gpu-type", "h100", "--slow-network-ok", "--spot", "--dry-run", "-o", "json")
    assert done.code == 0, done.err
    prices = {line["what"]: line["price_per_hour"] for line in done.json["plan"]["lines"]}
    assert prices["worker Standard_ND96isr_H100_v5 (spot)"] == 19.66  # as Azure's list has it, and ours does not
    assert any("3200 Gbit/s of InfiniBand" in warning for warning in done.json["plan"]["warnings"])
    assert done.json["cluster"]["details"]["gpus_per_node"] == 8


# --- quotas and restrictions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "words", "quota"),
    [
        ({"limits": {"standard ncasv3_t4 family": 4}}, (), "Standard NCASv3_T4 Family"),
        ({"cores": 8}, (), "cores"),
        ({"spot_cores": 4}, ("--spot",), "lowPriorityCores"),
    ],
)
def test_a_quota_that_is_too_small_is_found_before_anything_is_created(
    command: Any, world: World, limits: Message, words: tuple[str, ...], quota: str
) -> None:
    for key, value in limits.items():
        setattr(world, key, {**world.limits, **value} if key == "limits" else value)
    done = command(*T4, *words, "-o", "json")
    assert done.code == 5, done.err
    error = done.json["error"]
    assert (error["details"]["reason"], error["details"]["quota"]) == ("quota", quota)
    assert "myQuotas" in error["hint"]
    assert not any(line.startswith("PUT") for line in world.log)


def test_spot_machines_use_the_spot_quota_only(command: Any, world: World) -> None:
    world.limits = {**world.limits, "standard ncasv3_t4 family": 0}
    assert command(*T4, "--spot").code == 0


def test_a_size_that_the_subscription_may_not_use_is_refused(command: Any, world: World) -> None:
    world.refused_sizes = {"Standard_D2s_v5"}  # which the user has not chosen
    system = command(*T4)
    assert (system.code, "or --system-machine-type" in system.err) == (5, True), system.err
    world.refused_sizes = {"Standard_NC4as_T4_v3"}
    done = command(*T4)
    assert (done.code, "NotAvailableForSubscription" in done.err) == (5, True)
    assert "az vm list-skus" in done.err
    world.refused_sizes, world.refused_zones = set(), {"Standard_NC4as_T4_v3": ["1"]}
    done = command(*T4, "--zones", "1")
    assert (done.code, "--zones 2,3" in done.err) == (5, True)
    assert world.groups == {}


def test_a_quota_that_somebody_else_takes_meanwhile_is_told_with_what_exists(command: Any, world: World) -> None:
    world.hidden = {"standard ncasv3_t4 family": 1000}
    done = command(*T4, "-o", "json")
    assert done.code == 5
    error = done.json["error"]
    assert error["details"]["reason"] == "quota"
    assert "Insufficient vcpu quota requested 8" in error["message"]
    assert {item["kind"] for item in error["details"]["exists"]} >= {"resource group", "AKS cluster"}
    assert command(*DELETE).code == 0
    assert world.groups == {}


# --- stock-outs and zones -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["stockout", "zone", "placement"])
def test_a_stock_out_leaves_a_healthy_cluster_to_try_again_on(command: Any, world: World, failure: str) -> None:
    world.failing = {"agentPools": failure}
    done = command(*T4)
    assert done.code == 5
    assert "--zones 1,2,3" in done.err
    assert "AKS cluster rel-2 (ready)" in done.err
    assert f"mlbench delete-cluster aks rel-2 --subscription {SUBSCRIPTION} --region eastus" in done.err
    assert Store().cluster("rel-2").state == "failed"
    world.failing = {}
    done = command(*T4)
    assert done.code == 0, done.err
    assert "has to be recreated: it is in the state Failed" in done.err


def test_machines_that_have_come_although_others_have_not_are_told(command: Any, world: World) -> None:
    world.failing, world.lacking = {"agentPools": "stockout"}, 1
    done = command(*T4)
    assert (done.code, "1 of 2 machines are running and cost money." in done.err) == (5, True)


def test_the_next_zone_is_tried_when_one_has_no_machines(command: Any, world: World) -> None:
    world.empty_zones = {"1", "2"}
    done = command(*T4, "--zones", "1,2,3", "-o", "json")
    assert done.code == 0, done.err
    assert done.json["cluster"]["details"]["location"] == "eastus-3"
    pool = cluster_in(world)["properties"]["agentPoolProfiles"][1]
    assert pool["availabilityZones"] == ["3"]
    assert "then trying eastus-2" in done.err
    (found,) = AksProvider().discover({})
    assert found.details["location"] == "eastus-3"
    assert command(*DELETE).code == 0
    assert world.groups == {}


def test_a_cluster_whose_creation_failed_is_created_again(command: Any, world: World) -> None:
    world.failing = {"managedClusters": "internal"}
    done = command(*CREATE)
    assert (done.code, "InternalOperationError" in done.err) == (1, True)
    world.failing = {}
    assert command(*CREATE).code == 0
    assert sum(line == "PUT managedClusters/rel-2" for line in world.log) == 2


# --- operations -----------------------------------------------------------------------------------------------------


def test_an_operation_of_somebody_else_is_waited_for(command: Any, world: World) -> None:
    assert command(*CREATE, "--ttl", "none").code == 0
    path = cluster_in(world)["id"]
    operation = world.begin(path, lambda failed: None, None)
    operation.looks = 6
    done = command(*CREATE, "--ttl", "3h")
    assert done.code == 0, done.err
    assert "Another operation" in done.err
    assert cluster_in(world)["properties"]["agentPoolProfiles"][1]["enableAutoScaling"]


def test_azure_is_not_asked_before_the_time_that_it_wants(world: World, tmp_path: Path) -> None:
    world.retry_after = 1
    create(make_cluster(options=AksOptions()), tmp_path / "home")
    assert world.too_early == 0
    assert any(line == "GET operations/1" for line in world.log)


def test_an_operation_that_has_a_location_only_is_waited_for(world: World, tmp_path: Path) -> None:
    world.by_location, world.looks = True, 6
    create(make_cluster(options=AksOptions()), tmp_path / "home")
    asked = [line for line in world.log if line == "GET operations/1"]
    shown = [line for line in world.log if line == "GET managedClusters/rel-2"]
    assert len(asked) >= 10
    assert len(shown) <= 4  # the cluster itself is asked for when its operation is done


def test_an_operation_that_azure_has_forgotten_is_judged_by_what_it_makes(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(world, "answer_operation", lambda name: world.find_group("no-such-operation"))
    create(make_cluster(options=AksOptions()), tmp_path / "home")
    assert {pool["provisioningState"] for pool in world.pools()} == {"Succeeded"}


def test_an_identity_that_entra_does_not_know_everywhere_yet_is_waited_for(command: Any, world: World) -> None:
    world.unknown_looks = 4
    done = command(*CREATE, "--registry", "auto")
    assert done.code == 0, done.err
    assert sum(line.startswith("PUT roleAssignments") for line in world.log) == 5


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("service", "words"),
    [
        ("ContainerService", ()),
        ("Compute", ()),
        ("Network", ()),
        ("ManagedIdentity", ("--subnet", SUBNET)),
        ("ContainerRegistry", ("--registry", "auto")),
    ],
)
def test_a_service_that_is_not_registered_is_told_with_the_command(
    command: Any, world: World, service: str, words: tuple[str, ...]
) -> None:
    """A new subscription has registered none, and AKS or a registry finds out after a part has been made."""
    world.unregistered = {f"Microsoft.{service}"}
    done = command(*CREATE, *words)
    assert done.code == 2, done.err
    register = f"az provider register --namespace Microsoft.{service} --wait --subscription {SUBSCRIPTION}"
    assert register in done.err
    assert not any(line.startswith("PUT") for line in world.log)


def test_a_service_that_a_running_operation_misses_is_told_with_the_command(command: Any, world: World) -> None:
    world.failing = {"managedClusters": "unregistered"}
    done = command(*CREATE)
    assert done.code == 2, done.err
    assert "az provider register --namespace Microsoft.Network --wait" in done.err
    world.failing = {}
    assert command(*DELETE).code == 0


def test_one_of_several_subscriptions_has_to_be_chosen(
    command: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.subscriptions = [SUBSCRIPTION, "22222222-2222-2222-2222-222222222222"]
    done = command(*CREATE)
    assert done.code == 2
    assert "--subscription 22222222-2222-2222-2222-222222222222" in done.err
    assert command(*CREATE, "--subscription", SUBSCRIPTION, "--dry-run").code == 0
    monkeypatch.setenv("AZURE_SUBSCRIPTION_ID", SUBSCRIPTION)
    assert command(*CREATE, "--dry-run").code == 0
