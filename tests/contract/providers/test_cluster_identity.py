"""A cluster is one of a provider, account, location and name: namesakes elsewhere are neither hidden nor mixed up."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.clusters import changes as cluster_changes
from mlbench_cli.errors import CredentialError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.eks.options import EksOptions
from providers.eks.provider import EksProvider
from tests.contract.providers.eks_world import REGION, make
from tests.fakes.aws_server import AwsClient
from tests.fakes.azure_arm import World as AzureWorld
from tests.fakes.gke import World
from tests.fakes.gke_facts import PROJECT

OTHER = "us-west-2"
CPU = EksOptions(machine_type="m5.xlarge")


def _regions_of(name: str) -> list[str]:
    return sorted(cluster.location for cluster in EksProvider().discover({}) if cluster.name == name)


@pytest.mark.slow
def test_a_name_that_is_taken_in_another_region_is_refused(
    aws: AwsClient, command: Callable[..., Any], tmp_path: Path
) -> None:
    created = ("create-cluster", "eks", "0", "x", "-t", "m5.xlarge", "--yes", "--region")
    assert command(*created, REGION).code == 0
    done = command(*created, OTHER)
    assert done.code == 2
    assert f"mlbench delete-cluster eks x-0 --region {REGION}" in done.err
    assert _regions_of("x-0") == [REGION]
    assert command("delete-cluster", "eks", "x-0", "--yes").code == 0
    assert _regions_of("x-0") == []


@pytest.mark.slow
def test_of_two_namesakes_none_is_hidden_and_none_is_guessed(
    aws: AwsClient, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("twin-0", tmp_path / "first", CPU, nodes=0)
    make("twin-0", tmp_path / "second", replace(CPU, region=OTHER), nodes=0)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "second"))
    listed = command("list-clusters", "--cloud", "-o", "json").json["clusters"]
    twins = sorted((item["location"], item["known"]) for item in listed if item["name"] == "twin-0")
    assert twins == [(REGION, False), (OTHER, True)]
    for home in ("second", "empty"):
        monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / home))
        done = command("delete-cluster", "eks", "twin-0", "--yes")
        assert done.code == 2
        assert all(f"mlbench delete-cluster eks twin-0 --region {region}" in done.err for region in (REGION, OTHER))
    found = command("gc", "eks", "--all", "--everybody", "--dry-run", "-o", "json").json["clusters"]
    assert sorted(item["location"] for item in found if item["name"] == "twin-0") == [REGION, OTHER]
    assert command("delete-cluster", "eks", "twin-0", "--region", OTHER, "--yes").code == 0
    assert _regions_of("twin-0") == [REGION]
    assert command("delete-cluster", "eks", "twin-0", "--yes").code == 0
    assert _regions_of("twin-0") == []


def test_with_credentials_of_another_account_nothing_is_called_deleted(
    aws: AwsClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    cluster = store.record_cluster(Cluster("far-0", "eks", account="999999999999", location=REGION))
    with pytest.raises(CredentialError, match="999999999999"):
        cluster_changes.delete_cluster(store, cluster, lambda step: None, lambda warning: None)
    assert store.clusters()[1:] == [cluster]


@pytest.mark.parametrize("name", ["eks", "aws"])
def test_gc_does_not_pass_over_another_account(name: str, aws: AwsClient, command: Callable[..., Any]) -> None:
    Store().record_cluster(Cluster("far-0", "eks", "ready", account="999999999999", location=REGION))
    done = command("gc", name, "--dry-run")
    assert (done.code, "eks account 999999999999 could not be searched" in done.err) == (8, True), done.err
    assert "deleted elsewhere" not in done.out


def test_a_zonal_and_a_regional_cluster_of_one_name_are_two(
    gke_world: World, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for home, place in (("first", ("--zone", "europe-west1-b")), ("second", ("--region", "europe-west1"))):
        monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / home))
        assert command("create-cluster", "gke", "0", "rel", *place, "--yes").code == 0
    assert len(gke_world.clusters) == 2
    done = command("delete-cluster", "gke", "rel-0", "--yes")
    assert done.code == 2
    assert f"mlbench delete-cluster gke rel-0 --project {PROJECT} --zone europe-west1-b" in done.err
    assert f"mlbench delete-cluster gke rel-0 --project {PROJECT} --region europe-west1" in done.err
    assert command("delete-cluster", "gke", "rel-0", "--zone", "europe-west1-b", "--yes").code == 0
    assert [path.split("/")[3] for path in gke_world.clusters] == ["europe-west1"]
    assert Store().cluster("rel-0").location == "europe-west1"


@pytest.mark.slow
def test_a_region_that_does_not_answer_hides_no_other(
    command: Callable[..., Any], aws: AwsClient, tmp_path: Path
) -> None:
    make("seen-0", tmp_path / "elsewhere", EksOptions(machine_type="m5.large"), nodes=0)
    aws.order("me", "error", action="cloudformation:DescribeStacks.*", region="eu-central-1", times=1000)
    listed = command("list-clusters", "--cloud")
    assert "seen-0" in listed.out
    assert "AWS did not answer for eu-central-1" in listed.err
    missing = command("delete-cluster", "eks", "not-there-0", "--yes")
    assert (missing.code, "eu-central-1" in missing.err) == (10, True)
    done = command("gc", "eks", "--all", "--everybody", "--yes")
    assert done.code == 8, done.err
    aws.calm("me")
    assert _regions_of("seen-0") == []


@pytest.mark.parametrize("provider", ["gke", "eks", "aks"])
def test_a_cluster_of_somebody_else_is_not_taken_over(
    *, provider: str, command: Callable[..., Any], aws: AwsClient, gke_world: World, azure_world: object,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Two people in one account follow the same page: the second must neither use the first one's cluster, nor move
    its end."""

    def become(person: str) -> None:
        monkeypatch.setenv("LOGNAME", person)
        monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / person))

    def read_end() -> str:
        listed = command("list-clusters", "--cloud", "-o", "json").json["clusters"]
        (end,) = [item["expires"] for item in listed if (item["provider"], item["name"]) == (provider, "shared-0")]
        return str(end)

    become("Ada")
    assert command("create-cluster", provider, "0", "shared", "--yes", "--ttl", "8h").code == 0
    end = read_end()
    become("Ida")
    refused = command("create-cluster", provider, "0", "shared", "--yes", "--ttl", "1h")
    assert refused.code == 2, refused.err
    assert "ada created it" in refused.err
    assert "Choose another RELEASE" in refused.err
    assert read_end() == end
    become("Ada")
    assert command("create-cluster", provider, "0", "shared", "--yes").code == 0
    assert command("delete-cluster", provider, "shared-0", "--yes").code == 0


@pytest.mark.parametrize("provider", ["gke", "eks"])
def test_of_two_creations_at_once_on_two_machines_one_is_refused(
    provider: str, command: Callable[..., Any], aws: AwsClient, gke_world: World
) -> None:
    """Jobs of one pipeline have the same owner: the first to end would delete the cluster of both."""
    gke_world.trouble["CreateCluster"] = "ALREADY_EXISTS-after"
    words = {"code": "AlreadyExistsException", "message": "Stack [mlbench-race-0] already exists"}
    aws.order("me", "error-after", action="cloudformation:CreateStack mlbench-race-0", times=1, **words)
    refused = command("create-cluster", provider, "0", "race", "--yes")
    assert refused.code == 2, refused.err
    assert "Somebody else is creating it at this moment" in refused.err
    assert "Next: Choose another name.\n" in refused.err
    assert [cluster.name for cluster in Store().clusters()] == ["local"]
    gke_world.trouble.clear()
    assert command("delete-cluster", provider, "race-0", "--yes").code == 0  # by its tags


def test_a_cluster_that_the_caller_may_not_describe_hides_no_other(
    aws: AwsClient, command: Callable[..., Any], tmp_path: Path
) -> None:
    make("theirs-0", tmp_path / "theirs", CPU, nodes=0)
    make("ours-0", tmp_path / "ours", CPU, nodes=0)
    aws.order("me", "deny", action="eks:DescribeCluster theirs-0", times=99)
    listed = command("list-clusters", "--cloud", "-o", "json").json["clusters"]
    assert [item["state"] for item in listed if item["name"] == "ours-0"] == ["ready"]
    aws.calm("me")
    for name in ("ours-0", "theirs-0"):
        assert command("delete-cluster", "eks", name, "--yes").code == 0


@pytest.mark.parametrize("provider", ["gke", "eks", "aks"])
def test_gc_leaves_a_cluster_that_another_machine_may_be_creating(
    *, provider: str, command: Callable[..., Any], aws: AwsClient, gke_world: World, azure_world: AzureWorld,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Until its workers are there, it looks like one whose creation has failed. The owner of jobs in CI is the same."""
    gke_world.trouble["CreateNodePool"] = "PERMISSION_DENIED-before"
    azure_world.failing = {"agentPools": "stockout"}
    aws.order("me", "deny", action="cloudformation:CreateStack mlbench-new-0-workers", times=99)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "creator"))
    assert command("create-cluster", provider, "0", "new", "--yes").code in (3, 5)
    gke_world.trouble.clear()
    aws.calm("me")
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "other"))
    kept = command("gc", provider, "--yes")
    assert (kept.code, kept.out) == (0, "Nothing to delete.\n")
    assert "new-0 is incomplete, but may still be being created on another machine" in kept.err
    assert f"mlbench delete-cluster {provider} new-0" in kept.err
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "creator"))
    done = command("gc", provider, "--yes")
    assert (done.code, "partly created" in done.out) == (0, True), done.err
    assert "The cluster new-0 is deleted" in done.out
