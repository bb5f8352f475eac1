"""The end of a cluster on AKS, what `doctor` and the printed role know, prices, and Azure's own models."""

import os
import re
import subprocess
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import __version__
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.storage.store import Store
from providers.aks import AksProvider
from providers.aks.options import AksOptions
from providers.aks.rights import list_denied, role_of
from providers.pricing import load_prices
from providers.rights import load_rights
from tests.contract.providers.test_aks import CREATE, DELETE, GROUP, make_cluster
from tests.fakes.azure_arm import World
from tests.fakes.azure_facts import SUBSCRIPTION, Message
from tests.fakes.azure_web import AzureDouble
from tests.fakes.registry import FakeDocker, FakeRegistry

ACCOUNT = "system:serviceaccount:mlbench-end:mlbench-end"


@pytest.fixture
def world(azure_world: World) -> World:
    return azure_world


@pytest.fixture
def mlbench(world: World, command: Callable[..., Any]) -> Callable[..., Any]:
    return command


# --- the end --------------------------------------------------------------------------------------------------------


def fire(
    double: AzureDouble, folder: Path, *, expires: float, account: str = ACCOUNT
) -> subprocess.CompletedProcess[str]:
    """Run the CronJob's container as Kubernetes would, with an end of the test's choice."""
    job = double.kube.objects["cronjobs", "mlbench-end", "mlbench-end"]
    template = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = template["containers"]
    assert template["nodeSelector"] == {"mlbench-role": "system"}
    (source,) = template["volumes"][0]["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "api://AzureADTokenExchange"
    token = folder / "token"
    token.write_text(account)
    given = {item["name"]: item["value"] for item in container["env"]}
    places = {name: double.environment[name] for name in ("MLBENCH_AZURE_ENDPOINT", "AZURE_AUTHORITY_HOST")}
    trust = {"SSL_CERT_FILE": double.environment["REQUESTS_CA_BUNDLE"], "AZURE_FEDERATED_TOKEN_FILE": str(token)}
    return subprocess.run(
        [sys.executable, *container["command"][1:]],
        env={**os.environ, **given, **places, **trust, "MLBENCH_EXPIRES": str(int(expires))},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_the_clock_in_the_cluster_deletes_its_group_once_its_time_has_come(
    mlbench: Any, azure_double: AzureDouble, world: World, tmp_path: Path
) -> None:
    done = mlbench(*CREATE, "--ttl", "2h")
    assert done.code == 0, done.err
    expires = ClusterDetails.of(Store().cluster("rel-2")).expires
    job = azure_double.kube.objects["cronjobs", "mlbench-end", "mlbench-end"]
    assert job["metadata"]["annotations"] == {"mlbench/expires": str(expires)}
    early = fire(azure_double, tmp_path, expires=time.time() + 60)
    assert (early.returncode, "s are left" in early.stdout) == (0, True)
    assert GROUP in world.groups
    other = fire(azure_double, tmp_path, expires=time.time() - 1, account="system:serviceaccount:default:default")
    assert other.returncode == 1  # an account that the identity does not trust
    assert world.groups[GROUP]["properties"]["provisioningState"] == "Succeeded"
    late = fire(azure_double, tmp_path, expires=time.time() - 1)
    assert late.returncode == 0, late.stderr
    assert AksProvider().discover({})[0].state == "deleting"
    while world.groups:
        world.look(f"group {GROUP}")
    assert (world.clusters, world.others) == ({}, {})
    assert mlbench("gc", "aks", "--all", "--yes").code == 0


def test_the_identity_of_the_end_may_change_nothing_but_its_group(
    mlbench: Any, azure_double: AzureDouble, world: World, tmp_path: Path
) -> None:
    assert mlbench(*CREATE, "--ttl", "2h").code == 0
    assert mlbench("create-cluster", "aks", "0", "safe", "--ttl", "none", "--yes").code == 0
    container = azure_double.kube.objects["cronjobs", "mlbench-end", "mlbench-end"]["spec"]["jobTemplate"]["spec"][
        "template"
    ]["spec"]["containers"][0]
    (path,) = [item for item in container["env"] if item["name"] == "MLBENCH_GROUP_PATH"]
    path["value"] = path["value"].replace(GROUP, "mlbench-safe-0-eastus")
    refused = fire(azure_double, tmp_path, expires=time.time() - 1)
    assert (refused.returncode, "AuthorizationFailed" in refused.stderr) == (1, True)
    assert "mlbench-safe-0-eastus" in world.groups


def test_extend_moves_the_tag_and_the_clock(mlbench: Any, azure_double: AzureDouble, world: World) -> None:
    assert mlbench(*CREATE, "--ttl", "1h").code == 0
    before = int(world.groups[GROUP]["tags"]["mlbench-expires"])
    done = mlbench("extend", "rel-2", "30m")
    assert done.code == 0, done.err
    assert int(world.groups[GROUP]["tags"]["mlbench-expires"]) == before + 1800
    assert "mlbench-created" in world.groups[GROUP]["tags"]  # a PATCH replaces all tags
    job = azure_double.kube.objects["cronjobs", "mlbench-end", "mlbench-end"]
    assert job["metadata"]["annotations"] == {"mlbench/expires": str(before + 1800)}
    assert AksProvider().discover({})[0].details["expires"] == before + 1800


def test_the_workers_of_who_may_not_assign_roles_end_without_any_right(
    mlbench: Any, azure_double: AzureDouble, world: World
) -> None:
    world.denied = {"Microsoft.Authorization/roleAssignments/write"}
    planned = mlbench(*CREATE, "--ttl", "1h", "--dry-run")
    assert "You are not allowed to assign roles in the subscription. So only the workers expire" in planned.err
    done = mlbench(*CREATE, "--ttl", "1h")
    assert done.code == 0, done.err
    assert "Nothing in the cloud deletes this cluster" in done.err
    end = ClusterDetails.of(Store().cluster("rel-2")).expires or 0

    def machines(moment: float) -> int:
        jobs = [item for (kind, _, _), item in azure_double.kube.objects.items() if kind == "jobs"]
        world.autoscale(jobs, moment)
        return next(int(pool["count"]) for pool in world.pools() if pool["name"] == "workers")

    assert machines(end - 60) == 2
    for words in (("scale-cluster", "rel-2", "3", "--yes"), ("extend", "rel-2", "1m")):
        world.actions.clear()
        done = mlbench(*words)
        assert done.code == 0, done.err
        assert sorted(world.actions - set(load_rights("aks")[words[0]])) == []
    assert (machines(end + 30), machines(end + 90)) == (3, 0)
    assert mlbench(*DELETE).code == 0
    assert world.groups == {}


def test_without_an_end_there_is_neither_identity_nor_role(mlbench: Any, world: World) -> None:
    assert mlbench(*CREATE, "--ttl", "none").code == 0
    assert world.others == {}


# --- doctor and rights ----------------------------------------------------------------------------------------------


def checks_of(done: Any) -> Message:
    return {item["what"]: item for item in done.json["checks"]}


def test_doctor_shows_what_a_subscription_has(mlbench: Any, world: World) -> None:
    world.refused_sizes = {"Standard_ND96isr_H100_v5"}
    world.taken = {"standard ncasv3_t4 family": 1000}
    done = mlbench("doctor", "aks", "-o", "json")
    checks = checks_of(done)
    assert SUBSCRIPTION in checks["aks credentials"]["found"]
    assert checks["aks Kubernetes"]["found"] == "1.34, 1.33 in eastus"
    assert "not for this subscription: Standard_ND96isr_H100_v5" in checks["aks GPUs"]["found"]
    assert checks["aks quota cores"]["found"] == "2000 of 2000 vCPUs left"
    assert checks["aks quota Standard NCASv3_T4 Family"]["state"] == "missing"
    assert checks["aks clock"]["state"] == "ok"
    assert checks["aks rights"]["state"] == "ok"
    assert checks["aks Microsoft.Compute"]["found"] == "Registered"
    assert all(line.startswith("GET") for line in world.log)


def test_doctor_names_what_is_missing_with_the_next_command(mlbench: Any, world: World) -> None:
    world.unregistered = {"Microsoft.ContainerService"}
    world.denied = {"Microsoft.Authorization/roleAssignments/write"}
    checks = checks_of(mlbench("doctor", "aks", "-o", "json"))
    assert (
        "az provider register --namespace Microsoft.ContainerService"
        in checks["aks Microsoft.ContainerService"]["hint"]
    )
    assert "Microsoft.Authorization/roleAssignments/write" in checks["aks rights"]["found"]
    world.token_answer = {"error": "invalid_client", "error_description": "AADSTS7000222: keys are expired."}
    from tests.contract.providers.conftest import forget_azure_credentials

    forget_azure_credentials()
    done = mlbench("doctor", "aks", "-o", "json")
    assert (done.code, checks_of(done)["aks credentials"]["state"]) == (3, "failed")


def test_an_endpoint_that_does_not_answer_is_told_within_the_deadline(
    mlbench: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mlbench("list-clusters").code == 0
    monkeypatch.setenv("MLBENCH_AZURE_ENDPOINT", "https://127.0.0.1:9")
    monkeypatch.setenv("AZURE_SUBSCRIPTION_ID", SUBSCRIPTION)
    monkeypatch.setenv("MLBENCH_CALL_SECONDS", "2")
    done = mlbench(*CREATE)
    assert (done.code, "Azure cannot be reached" in done.err) == (124, True)


COMMANDS = (
    (*CREATE, "--gpu-type", "t4", "--spot", "--ttl", "2h", "--compact-placement", "--zones", "1", "--registry", "auto"),
    ("scale-cluster", "rel-2", "3", "--yes"),
    ("extend", "rel-2", "1h"),
    ("list-clusters", "--cloud"),
    ("gc", "aks", "--dry-run"),
    tuple(DELETE),
    CREATE,
    ("gc", "aks", "--all", "--everybody", "--yes"),
    ("doctor", "aks"),
)


def test_every_request_of_every_command_is_allowed_by_the_printed_role(
    mlbench: Any, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rights = load_rights("aks")
    for number, words in enumerate(COMMANDS):
        if "--all" in words:  # clusters that this machine does not know
            monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / f"elsewhere{number}"))
        world.actions.clear()
        done = mlbench(*words)
        assert done.code == 0, (words, done.err)
        assert world.actions, words
        assert sorted(world.actions - set(rights[words[0]])) == [], words


def test_the_role_is_printed_for_an_administrator(mlbench: Any) -> None:
    role = mlbench("doctor", "aks", "--policy").json
    assert role["Actions"] == role_of(None)["Actions"]
    assert mlbench("doctor", "aks", "--policy", "--for", "gc").json["Name"] == "mlbench gc"
    wrong = mlbench("doctor", "aks", "--policy", "--for", "list-cluster")
    assert (wrong.code, 'Did you mean "list-clusters"' in wrong.err) == (2, True)
    granted = [{"actions": ["Microsoft.Compute/*/read"], "notActions": ["microsoft.compute/skus/read"]}]
    assert list_denied(["Microsoft.Compute/skus/read", "Microsoft.Compute/locations/usages/read"], granted) == [
        "Microsoft.Compute/skus/read"
    ]


# --- a subnet of somebody else's ------------------------------------------------------------------------------------

SUBNET = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/net/providers/Microsoft.Network/virtualNetworks/n/subnets/x"


@pytest.fixture
def foreign_network(world: World) -> None:
    world.groups["net"] = {"id": f"/subscriptions/{SUBSCRIPTION}/resourceGroups/net", "name": "net",
                           "location": "eastus", "properties": {"provisioningState": "Succeeded"}}  # fmt: skip


@pytest.mark.usefixtures("foreign_network")
def test_a_cluster_in_a_subnet_has_a_role_there_as_long_as_it_exists(mlbench: Any, world: World) -> None:
    rights = load_rights("aks")
    done = mlbench(*CREATE, "--ttl", "none", "--subnet", SUBNET)
    assert done.code == 0, done.err
    assert sorted(world.actions - set(rights["create-cluster"])) == []
    assert [path for path in world.others if path.startswith(f"{SUBNET.lower()}/providers/")]
    world.actions.clear()
    done = mlbench(*DELETE)
    assert done.code == 0, done.err
    assert sorted(world.actions - set(rights["delete-cluster"])) == []
    assert (list(world.groups), world.others) == (["net"], {})


@pytest.mark.usefixtures("foreign_network")
def test_who_may_not_give_a_role_on_the_subnet_is_told_before_a_cluster_costs_money(mlbench: Any, world: World) -> None:
    world.denied = {"Microsoft.Authorization/roleAssignments/write"}
    done = mlbench(*CREATE, "--ttl", "none", "--subnet", SUBNET)
    assert (done.code, "the role Network Contributor on the subnet" in done.err) == (3, True)
    assert world.clusters == {}
    assert mlbench(*DELETE).code == 0
    assert list(world.groups) == ["net"]


# --- images ---------------------------------------------------------------------------------------------------------


def test_a_registry_comes_with_its_cluster_is_filled_used_by_digest_and_goes(
    mlbench: Any, world: World, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = mlbench(*CREATE, "--registry", "auto", "--spot", "--ttl", "2h", "-o", "json")
    assert result.code == 0, result.err
    prefix = result.json["cluster"]["details"]["registry"]
    assert re.fullmatch("mlbench" r"[0-9a-f]{20}\.azurecr\.io/mlbench", prefix)
    assert set(world.groups) == {GROUP, f"{GROUP}-nodes", f"{GROUP}-images"}
    roles = [item["properties"].get("principalId") for path, item in world.others.items() if "/registries/" in path]
    assert "kubelet-of-rel-2" in roles
    registry.world.users = {"00000000-0000-0000-0000-000000000000": f"of-{prefix.partition('/')[0]}"}
    monkeypatch.setenv("PATH", str(FakeDocker(tmp_path / "programs").folder))
    pushed = mlbench("images", "push", "allreduce")
    assert pushed.code == 0, pushed.err
    (digest,) = {found[__version__] for found in registry.world.manifests.values() if __version__ in found}
    dry = mlbench("run", "x", "2", "--task", "allreduce", "--dry-run", "-o", "json")
    assert f"{prefix}/allreduce@{digest}" in dry.out
    # Its workers come onto the pool's machines, which AKS taints.
    assert "mlbench-role" in dry.out
    assert "kubernetes.azure.com/scalesetpriority" in dry.out
    # From another machine, which knows it by its tags only.
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "elsewhere"))
    deleted = mlbench(*DELETE)
    assert deleted.code == 0, deleted.err
    assert (world.groups, world.clusters, world.others) == ({}, {}, {})


def test_a_registry_is_kept_on_request_with_what_deletes_it(mlbench: Any, world: World, registry: FakeRegistry) -> None:
    assert mlbench(*CREATE, "--registry", "auto").code == 0
    deleted = mlbench(*DELETE, "--keep-images")
    assert deleted.code == 0, deleted.err
    assert f"az group delete --name {GROUP}-images" in deleted.err
    assert set(world.groups) == {f"{GROUP}-images"}
    assert AksProvider().discover({}) == []


def test_any_machine_finds_the_registry_that_an_ended_cluster_has_left(
    mlbench: Any, world: World, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert mlbench(*CREATE, "--registry", "auto", "--ttl", "1h").code == 0
    left = world.groups[f"{GROUP}-images"]
    world.groups.clear()  # the clock in the cluster has deleted its group
    world.groups[f"{GROUP}-images"] = left
    left["tags"]["mlbench-expires"] = "1"
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "elsewhere"))  # CI's next runner
    assert [cluster.name for cluster in AksProvider().discover({})] == ["rel-2"]
    result = mlbench("gc", "aks", "--expired", "--everybody", "--yes")
    assert result.code == 0, result.err
    assert world.groups == {}


def test_who_may_not_assign_roles_is_told_that_machines_could_not_pull(mlbench: Any, world: World) -> None:
    world.denied = {"Microsoft.Authorization/roleAssignments/write"}
    done = mlbench(*CREATE, "--registry", "auto", "--ttl", "none")
    assert (done.code, "--registry PREFIX" in done.err) == (3, True)
    assert mlbench(*DELETE).code == 0
    assert world.groups == {}


# --- prices ---------------------------------------------------------------------------------------------------------


def test_prices_are_those_of_linux_machines_by_the_hour_on_demand_and_spot(mlbench: Any) -> None:
    done = mlbench("prices", "update", "aks", "--region", "eastus")
    assert done.code == 0, done.err
    table = load_prices("aks")
    assert table.price("Standard_D4s_v5", "eastus") == 0.192  # neither Windows nor cloud services nor low priority
    assert table.price("Standard_D4s_v5", "eastus", spot=True) == 0.0384
    assert table.price("Standard_NC4as_T4_v3", "eastus") == 0.526
    assert table.price("Standard_NC4as_T4_v3", "eastus", spot=True) == 0.1052
    assert table.price("Standard_ND96isr_H100_v5", "eastus") == 98.32
    assert table.price("Standard_ND96isr_H200_v5", "eastus") is None  # unknown stays unknown
    unknown = mlbench("prices", "update", "aks", "--region", "marsnorth")
    assert (unknown.code, "no prices of aks for marsnorth" in unknown.err) == (2, True)


def test_what_has_no_price_is_named(mlbench: Any) -> None:
    done = mlbench(*CREATE, "--gpu-type", "h200", "--slow-network-ok", "--dry-run", "-o", "json")
    assert done.code == 0, done.err
    assert done.json["plan"]["price_per_hour"] is None
    unknown = [line["what"] for line in done.json["plan"]["lines"] if line["price_per_hour"] is None]
    assert unknown == ["worker Standard_ND96isr_H200_v5"]


# --- Azure's own models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        AksOptions(kubernetes_version="1.34", allow_from=("203.0.113.0/24",), tier="standard"),
        AksOptions(gpu_type="h100", spot=True, compact_placement=True, zones="2", slow_network_ok=True),
        AksOptions(subnet="/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/n/subnets/x"),
    ],
)
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
