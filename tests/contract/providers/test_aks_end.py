"""The end of a cluster on AKS, what `doctor` and the printed role know, prices, and Azure's own models."""

import re
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import __version__
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.storage.store import Store
from providers.aks.options import AksOptions
from providers.aks.provider import AksProvider
from providers.doctor import load_policy
from tests.contract.providers.test_aks import CREATE, DELETE, GROUP, make_cluster
from tests.fakes.azure_arm import World
from tests.fakes.azure_facts import SUBSCRIPTION, Message
from tests.fakes.azure_web import AzureDouble
from tests.fakes.registry import FakeDocker, FakeRegistry

ALLOWED = set(load_policy("aks")["Actions"])


@pytest.fixture
def world(azure_world: World) -> World:
    return azure_world


# --- the end --------------------------------------------------------------------------------------------------------


def test_the_workers_end_without_any_right_to_give_rights(
    command: Any, azure_double: AzureDouble, world: World
) -> None:
    world.denied = {"Microsoft.Authorization/roleAssignments/write"}
    done = command(*CREATE, "--ttl", "1h")
    assert done.code == 0, done.err
    assert "the autoscaler removes workers" in done.err
    end = ClusterDetails.of(Store().cluster("rel-2")).expires or 0

    def machines(moment: float) -> int:
        jobs = [item for (kind, _, _), item in azure_double.kube.objects.items() if kind == "jobs"]
        world.autoscale(jobs, moment)
        return next(int(pool["count"]) for pool in world.pools() if pool["name"] == "workers")

    assert machines(end - 60) == 2
    assert command(*CREATE, "--ttl", "3h").code == 0
    later = ClusterDetails.of(Store().cluster("rel-2")).expires or 0
    assert later > end
    assert (machines(later - 30), machines(later + 90)) == (2, 0)
    assert command(*DELETE).code == 0
    assert world.groups == {}


def test_workers_end_although_their_creation_failed_and_nobody_came_back(
    command: Any, azure_double: AzureDouble, world: World
) -> None:
    world.failing, world.lacking = {"agentPools": "stockout"}, 1
    assert command(*CREATE, "--ttl", "1h").code == 5
    end = int(world.groups[GROUP]["tags"]["mlbench-expires"])
    jobs = [item for (kind, _, _), item in azure_double.kube.objects.items() if kind == "jobs"]
    for moment, machines in ((end - 60, 2), (end + 60, 0)):
        world.autoscale(jobs, moment)
        assert [pool["count"] for pool in world.pools() if pool["name"] == "workers"] == [machines]


# --- doctor and rights ----------------------------------------------------------------------------------------------


def checks_of(done: Any) -> Message:
    return {item["what"]: item for item in done.json["checks"]}


def test_doctor_shows_what_a_subscription_has(command: Any, world: World) -> None:
    world.refused_sizes = {"Standard_ND96isr_H100_v5"}
    world.taken = {"standard ncasv3_t4 family": 1000}
    done = command("doctor", "aks", "-o", "json")
    checks = checks_of(done)
    assert SUBSCRIPTION in checks["aks credentials"]["found"]
    assert checks["aks Kubernetes"]["found"] == "1.36, 1.35 in eastus"
    assert "not for this subscription: Standard_ND96isr_H100_v5" in checks["aks GPUs"]["found"]
    assert checks["aks quota cores"]["found"] == "2000 of 2000 vCPUs left"
    assert checks["aks quota Standard NCASv3_T4 Family"]["state"] == "missing"
    assert checks["aks clock"]["state"] == "ok"
    assert checks["aks rights"]["state"] == "ok"
    assert checks["aks API Microsoft.Compute"]["found"] == "Registered"
    assert all(line.startswith("GET") for line in world.log)


def test_doctor_names_what_is_missing_with_the_next_command(command: Any, world: World) -> None:
    world.unregistered = {"Microsoft.ContainerService"}
    world.denied = {"Microsoft.Authorization/roleAssignments/write"}
    checks = checks_of(command("doctor", "aks", "-o", "json"))
    assert (
        "az provider register --namespace Microsoft.ContainerService"
        in checks["aks API Microsoft.ContainerService"]["hint"]
    )
    assert "Microsoft.Authorization/roleAssignments/write" in checks["aks rights"]["found"]
    world.token_answer = {"error": "invalid_client", "error_description": "AADSTS7000222: keys are expired."}
    from tests.contract.providers.conftest import forget_azure_credentials

    forget_azure_credentials()
    done = command("doctor", "aks", "-o", "json")
    assert (done.code, checks_of(done)["aks credentials"]["state"]) == (3, "failed")


def test_an_endpoint_that_does_not_answer_is_told_within_the_deadline(
    command: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("list-clusters").code == 0
    monkeypatch.setenv("MLBENCH_AZURE_ENDPOINT", "https://127.0.0.1:9")
    monkeypatch.setenv("AZURE_SUBSCRIPTION_ID", SUBSCRIPTION)
    monkeypatch.setenv("MLBENCH_CALL_SECONDS", "2")
    done = command(*CREATE)
    assert (done.code, "Azure cannot be reached" in done.err) == (10, True)


COMMANDS = (
    (*CREATE, "--gpu-type", "t4", "--spot", "--ttl", "2h", "--compact-placement", "--zones", "1", "--registry", "auto"),
    ("list-clusters", "--cloud"),
    ("gc", "aks", "--dry-run"),
    tuple(DELETE),
    CREATE,
    ("gc", "aks", "--all", "--everybody", "--yes"),
    ("doctor", "aks"),
)


@pytest.mark.slow
def test_every_request_of_every_command_is_allowed_by_the_printed_role(
    command: Any, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number, words in enumerate(COMMANDS):
        if "--all" in words:  # clusters that this machine does not know
            monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / f"elsewhere{number}"))
        world.actions.clear()
        done = command(*words)
        assert done.code == 0, (words, done.err)
        assert world.actions, words
        assert sorted(world.actions - ALLOWED) == [], words


# --- a subnet of somebody else's ------------------------------------------------------------------------------------

SUBNET = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/net/providers/Microsoft.Network/virtualNetworks/n/subnets/x"


@pytest.fixture
def foreign_network(world: World) -> None:
    world.groups["net"] = {"id": f"/subscriptions/{SUBSCRIPTION}/resourceGroups/net", "name": "net",
                           "location": "eastus", "properties": {"provisioningState": "Succeeded"}}  # fmt: skip
    world.vnets[SUBNET.partition("/subnets/")[0].lower()] = ["10.0.0.0/8", "fd00::/64"]


@pytest.mark.usefixtures("foreign_network")
def test_a_cluster_in_a_subnet_has_a_role_there_as_long_as_it_exists(command: Any, world: World) -> None:
    done = command(*CREATE, "--ttl", "none", "--subnet", SUBNET)
    assert done.code == 0, done.err
    assert sorted(world.actions - ALLOWED) == []
    assert [path for path in world.others if path.startswith(f"{SUBNET.lower()}/providers/")]
    (made,) = world.clusters.values()
    assert made["properties"]["networkProfile"]["serviceCidr"] == "172.16.0.0/16"  # AKS' own is in the network
    world.actions.clear()
    done = command(*DELETE)
    assert done.code == 0, done.err
    assert sorted(world.actions - ALLOWED) == []
    assert (list(world.groups), world.others) == (["net"], {})


@pytest.mark.usefixtures("foreign_network")
def test_who_may_not_give_a_role_on_the_subnet_is_told_before_a_cluster_costs_money(command: Any, world: World) -> None:
    world.denied = {"Microsoft.Authorization/roleAssignments/write"}
    done = command(*CREATE, "--ttl", "none", "--subnet", SUBNET)
    assert (done.code, "the role Network Contributor on the subnet" in done.err) == (3, True)
    assert world.clusters == {}
    assert command(*DELETE).code == 0
    assert list(world.groups) == ["net"]


@pytest.mark.usefixtures("foreign_network")
def test_a_network_that_is_not_there_is_named_before_anything_is_made(command: Any, world: World) -> None:
    done = command(*CREATE, "--subnet", SUBNET.replace("/n/", "/m/"))
    assert (done.code, "az network vnet list" in done.err) == (2, True), done.err
    assert list(world.groups) == ["net"]


# --- deletion -------------------------------------------------------------------------------------------------------


def test_a_lock_that_keeps_the_cluster_is_told_with_the_commands(command: Any, world: World) -> None:
    assert command(*CREATE, "--ttl", "none").code == 0
    world.locked = True
    done = command(*DELETE)
    assert (done.code, "cannot perform delete operation" in done.err) == (8, True), done.err
    assert f"az group delete --name {GROUP} --subscription {SUBSCRIPTION}" in done.err
    advice = done.err.rpartition("Next:")[2]
    assert "az lock list" in advice
    assert "mlbench delete-cluster aks rel-2" in advice
    world.locked = False
    assert command(*DELETE).code == 0
    assert world.groups == {}


# --- images ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_registry_comes_with_its_cluster_is_filled_used_by_digest_and_goes(
    command: Any, world: World, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = command(*CREATE, "--registry", "auto", "--spot", "--ttl", "2h", "-o", "json")
    assert result.code == 0, result.err
    prefix = result.json["cluster"]["details"]["registry"]
    assert re.fullmatch("mlbench" r"[0-9a-f]{20}\.azurecr\.io/mlbench", prefix)
    assert set(world.groups) == {GROUP, f"{GROUP}-nodes", f"{GROUP}-images"}
    roles = [item["properties"].get("principalId") for path, item in world.others.items() if "/registries/" in path]
    assert "kubelet-of-rel-2" in roles
    registry.world.users = {"00000000-0000-0000-0000-000000000000": f"of-{prefix.partition('/')[0]}"}
    monkeypatch.setenv("PATH", str(FakeDocker(tmp_path / "programs").folder))
    pushed = command("images", "push", "allreduce")
    assert pushed.code == 0, pushed.err
    (digest,) = {found[__version__] for found in registry.world.manifests.values() if __version__ in found}
    dry = command("run", "x", "2", "--task", "allreduce", "--dry-run", "-o", "json")
    assert f"{prefix}/allreduce@{digest}" in dry.out
    # Its workers come onto the pool's machines, which AKS taints.
    assert "mlbench-role" in dry.out
    assert "kubernetes.azure.com/scalesetpriority" in dry.out
    # From another machine, which knows it by its tags only.
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "elsewhere"))
    deleted = command(*DELETE)
    assert deleted.code == 0, deleted.err
    assert (world.groups, world.clusters, world.others) == ({}, {}, {})


def test_a_registry_is_kept_on_request_with_what_deletes_it(command: Any, world: World, registry: FakeRegistry) -> None:
    assert command(*CREATE, "--registry", "auto").code == 0
    deleted = command(*DELETE, "--keep-images")
    assert deleted.code == 0, deleted.err
    assert f"az group delete --name {GROUP}-images" in deleted.err
    assert set(world.groups) == {f"{GROUP}-images"}
    assert AksProvider().discover({}) == []


def test_any_machine_finds_the_registry_that_an_ended_cluster_has_left(
    command: Any, world: World, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert command(*CREATE, "--registry", "auto", "--ttl", "1h").code == 0
    left = world.groups[f"{GROUP}-images"]
    world.groups.clear()  # the clock in the cluster has deleted its group
    world.groups[f"{GROUP}-images"] = left
    left["tags"]["mlbench-expires"] = "1"
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "elsewhere"))  # CI's next runner
    assert [cluster.name for cluster in AksProvider().discover({})] == ["rel-2"]
    result = command("gc", "aks", "--expired", "--everybody", "--yes")
    assert result.code == 0, result.err
    assert world.groups == {}


def test_who_may_not_assign_roles_is_told_that_machines_could_not_pull(command: Any, world: World) -> None:
    world.denied = {"Microsoft.Authorization/roleAssignments/write"}
    done = command(*CREATE, "--registry", "auto", "--ttl", "none")
    assert (done.code, "--registry PREFIX" in done.err) == (3, True)
    assert world.groups == {}


# --- prices ---------------------------------------------------------------------------------------------------------


def test_what_has_no_price_is_named(command: Any, world: World) -> None:
    done = command(*CREATE, "--gpu-type", "h200", "--slow-network-ok", "--dry-run", "-o", "json")
    assert done.code == 0, done.err
    assert done.json["plan"]["price_per_hour"] is None
    unknown = [line["what"] for line in done.json["plan"]["lines"] if line["price_per_hour"] is None]
    assert unknown == ["worker Standard_ND96isr_H200_v5"]


# --- Azure's own models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        AksOptions(kubernetes_version="1.36", allow_from=("8.8.8.0/24",), tier="standard"),
        AksOptions(gpu_type="h100", spot=True, compact_placement=True, zones="2", slow_network_ok=True),
        AksOptions(subnet=SUBNET),
    ],
)
@pytest.mark.usefixtures("foreign_network")
def test_every_field_that_is_sent_is_one_of_azure_s_models(world: World, options: AksOptions) -> None:
    from azure.mgmt.containerservice import models

    cluster = make_cluster(options=options)
    resources = {item.kind: item for item in AksProvider().resources(cluster)}
    plane, pool = (resources[kind].request() for kind in ("AKS cluster", "node pool"))  # type: ignore[attr-defined]
    for model, document in ((models.ManagedCluster, plane), (models.AgentPool, pool)):
        assert find_unknown_fields(model, document) == []


def find_unknown_fields(model: Any, document: Message, path: str = "") -> list[str]:
    """Fields of a document that the SDK's model does not have, at any depth."""
    model.__new__(model)  # only then the SDK's models know their fields
    names = {"_models": sys.modules["azure.mgmt.containerservice.models"]}
    hints = typing.get_type_hints(model, vars(sys.modules[model.__module__]), names)
    fields = {field._rest_name: hints.get(name) for name, field in model._attr_to_rest_field.items()}
    unknown = []
    for key, value in document.items():
        if key not in fields:
            unknown.append(f"{path}{key}")
            continue
        inner = [item for item in _classes_in(fields[key]) if hasattr(item, "_is_model")]
        parts = value if isinstance(value, list) else [value]
        if inner and _is_map(fields[key]):
            parts = list(value.values())
        for part in parts:
            if inner and isinstance(part, dict):
                unknown += find_unknown_fields(inner[0], part, f"{path}{key}.")
    return unknown


def _is_map(kind: Any) -> bool:
    """Whether a type hint is of a mapping from names, or of one that may be missing."""
    return typing.get_origin(kind) is dict or any(map(_is_map, typing.get_args(kind)))


def _classes_in(kind: Any) -> list[Any]:
    """The classes that a type hint is made of."""
    parts = typing.get_args(kind)
    return [item for part in parts for item in _classes_in(part)] if parts else [kind]
