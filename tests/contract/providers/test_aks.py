"""AKS through Azure's own client on a server that speaks ARM: nothing leaks, whatever goes wrong when."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.aks.options import AksOptions
from providers.aks.provider import AksProvider
from providers.base import CLUSTER_TAG
from providers.lifecycle import down, up
from tests.fakes.azure_arm import World
from tests.fakes.azure_facts import SUBSCRIPTION

CREATE = ["create-cluster", "aks", "2", "rel", "--yes"]
DELETE = ["delete-cluster", "aks", "rel-2", "--yes"]
GROUP = "mlbench-rel-2-eastus"


@pytest.fixture
def world(azure_world: World) -> World:
    return azure_world


def make_cluster(nodes: int = 2, options: AksOptions | None = None) -> Cluster:
    described = AksProvider().new_cluster(f"rel-{nodes}", nodes, options or AksOptions(gpu_type="t4"))
    details = {**described.details, "owner": "tester", "expires": 4102444800}
    return Cluster(described.name, "aks", details=details, account=SUBSCRIPTION, location=described.location)


def create(cluster: Cluster, home: Path, patience: float = 1.0) -> Cluster:
    home.mkdir(exist_ok=True)
    return up(cluster, AksProvider().resources(cluster), Store(home), patience=patience)


def cluster_in(world: World) -> Any:
    """The only cluster."""
    (found,) = world.clusters.values()
    return found


# --- the way it is meant to go --------------------------------------------------------------------------------------


def test_from_create_to_delete_all_lies_in_one_group_that_goes(command: Any, world: World) -> None:
    done = command(*CREATE, "--ttl", "2h", "-o", "json")
    assert done.code == 0, done.err
    found = done.json["cluster"]
    assert (found["account"], found["location"]) == (SUBSCRIPTION, "eastus")
    assert [entry["kind"] for entry in found["details"]["provisioning"]] == [
        *("resource group", "AKS cluster", "expiry timer"),
        *("node pool", "node registration"),
    ]
    assert set(world.groups) == {GROUP, f"{GROUP}-nodes"}
    tags = world.groups[GROUP]["tags"]
    assert tags[CLUSTER_TAG] == "rel-2"
    assert set(tags) == {CLUSTER_TAG, "mlbench-owner", "mlbench-expires", "mlbench-created"}
    system, workers = cluster_in(world)["properties"]["agentPoolProfiles"]
    assert (system["mode"], system["count"], workers["mode"], workers["count"]) == ("System", 2, "User", 2)
    assert workers["vmSize"] == "Standard_D4s_v5"
    assert command(*DELETE).code == 0
    assert (world.groups, world.clusters, world.others) == ({}, {}, {})
    assert [cluster.name for cluster in Store().clusters()] == ["local"]
    kept = command("status", "--cluster", "rel-2", "-o", "json").json["resources"]
    assert {item["state"] for item in kept} == {"gone"}  # also of those that went with the group


def test_one_name_in_two_regions_is_two_clusters(command: Any, world: World) -> None:
    for region in ("eastus", "westeurope"):
        words = ["create-cluster", "aks", "0", "twin", "--region", region, "--yes"]
        if region != "eastus":  # the data folder of another machine
            Store().forget_cluster(Store().cluster("twin-0"))
        assert command(*words).code == 0
    done = command("delete-cluster", "aks", "twin-0", "--yes")
    assert done.code == 2
    assert f"mlbench delete-cluster aks twin-0 --subscription {SUBSCRIPTION} --region westeurope" in done.err
    assert command("delete-cluster", "aks", "twin-0", "--region", "westeurope", "--yes").code == 0
    assert [group["location"] for group in world.groups.values()] == ["eastus", "eastus"]
    assert command("delete-cluster", "aks", "twin-0", "--yes").code == 0
    assert world.groups == {}


# --- what is not ours, not allowed, not possible --------------------------------------------------------------------


def test_a_cluster_with_other_machines_is_refused(world: World, tmp_path: Path) -> None:
    create(make_cluster(), tmp_path / "home")
    with pytest.raises(UsageError, match="VM size standard_nc4as_t4_v3 instead of standard_d4s_v5"):
        create(make_cluster(options=AksOptions()), tmp_path / "home")


def test_a_group_without_its_cluster_is_collected_when_it_is_not_new(command: Any, world: World) -> None:
    tags = {CLUSTER_TAG: "half-1", "mlbench-owner": "tester", "mlbench-created": "1000000000"}
    world.put_group("mlbench-half-1-eastus", {"location": "eastus", "tags": tags})
    done = command("gc", "aks", "--everybody", "--yes")
    assert (done.code, "partly created" in done.out) == (0, True)
    assert world.groups == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--region", "Mars 1"], "not a region"),
        (["--region", "marsnorth"], "az account list-locations"),
        (["--zones", "1,1"], "not a list of different zones"),
        (["--zones", "a,b"], "not a list of different zones"),
        (["--machine-type", "Standard_D4s_v9"], "has no Standard_D4s_v9"),
        (["--machine-type", "Standard;D4"], "not the name of a VM size"),
        (["--machine-type", "Standard_NC6s_v3"], "do not support"),
        (["--machine-type", "NC24ads_A100_v4", "--num-gpus", "2"], "--machine-type Standard_NC48ads_A100_v4"),
        (["--machine-type", "NC4as_T4_v3", "--gpu-type", "h100"], "has t4, not h100"),
        (["--machine-type", "Standard_D4s_v5", "--num-gpus", "1"], "has no GPU"),
        (["--gpu-type", "v100"], "too old"),
        (["--gpu-type", "h1000"], 'Did you mean "h100"'),
        (["--gpu-type", "h100", "--num-gpus", "1"], "--gpu-type h100-nvl"),
        (["--num-gpus", "-1"], "the minimum is 0"),
        (["--num-cpus", "64"], "has 4 vCPUs"),
        (["--disk-size", "5"], "from 30 to"),
        (["--tier", "gold"], "not one of free"),
        (["--subnet", "mine"], "resource ID of a subnet"),
        (["--identity", "mine"], "az identity show --query id"),
        (["--tag", "team"], "--tag team=research"),
        (["--tag", "mlbench-owner=me"], "such names are reserved"),
        (["--tag", "Microsoft-Team=ml"], "without microsoft in front"),
        (["--tag", "team=a", "--tag", "Team=b"], "there is a tag of that name already"),
        (["--subscription", "prod"], "not the ID of a subscription"),
        (["--subscription", "99999999-9999-9999-9999-999999999999"], "az account list"),
        (["--system-machine-type", "Standard_B2s"], "not burstable"),
        (["--allow-from", "here"], "--allow-from"),
        (["--allow-from", "10.0.0.0/8"], "over the internet"),
        (["--kubernetes-version", "new"], "not of the form"),
        (["--kubernetes-version", "1.19"], "does not offer Kubernetes 1.19"),
        (["--kubernetes-version", "1.29"], "does not offer Kubernetes 1.29"),  # long-term support only
        (["--compact-placement", "--zones", "1,2"], "needs one zone"),
        (["--registry", "a b"], "not an image prefix"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_created(
    command: Any, world: World, words: list[str], says: str
) -> None:
    done = command(*CREATE, *words)
    assert done.code == 2, done.err
    assert says in done.err
    assert not any(line.startswith("PUT") for line in world.log)


def test_without_credentials_the_plan_is_shown_all_the_same(
    command: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.contract.providers.conftest import forget_azure_credentials

    for name in ("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "EnvironmentCredential")  # no question to a machine's own endpoint
    forget_azure_credentials()
    refused = command(*CREATE)
    assert (refused.code, "az login" in refused.err) == (3, True)
    done = command(*CREATE, "--dry-run", "-o", "json")
    assert done.code == 0, done.err
    assert "Not checked" in done.json["plan"]["warnings"][0]
    assert done.json["plan"]["price_per_hour"] == pytest.approx(0.714, abs=0.001)
    assert world.log == []


def remove_from_nothing(home: Path) -> None:
    """Delete all that discovery finds, from an empty data folder."""
    home.mkdir()
    for cluster in AksProvider().discover({}):
        down(cluster, AksProvider().resources(cluster), Store(home), patience=1.0)


def test_where_local_accounts_are_forbidden_members_of_a_group_log_in(command: Any, world: World) -> None:
    world.wants_entra = True
    refused = command(*CREATE)
    assert refused.code == 2
    assert "disable local accounts with --aad GROUP" in refused.err
    assert command(*CREATE, "--aad", "my group").code == 2
    group = "11111111-2222-3333-4444-555555555555"
    done = command(*CREATE, "--aad", group, "--ttl", "2h")  # whose hold on the workers needs the Kubernetes API
    assert done.code == 0, done.err
    assert cluster_in(world)["properties"]["aadProfile"]["adminGroupObjectIDs"] == [group]
    assert command(*DELETE).code == 0
    assert world.groups == {}
