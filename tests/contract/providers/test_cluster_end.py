"""The end of a cluster: AWS keeps it itself, `extend` moves it everywhere, `gc` passes over no cloud in silence."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.storage.store import Store
from providers.eks.options import EksOptions
from providers.eks.provider import EksProvider
from providers.gke import api
from providers.gke.provider import GkeProvider
from providers.lifecycle import up
from tests.contract.providers.eks_world import REGION
from tests.fakes.aws_server import AwsClient
from tests.fakes.gke import World
from tests.fakes.gke_facts import PROJECT, ZONE
from tests.fakes.kind_tools import World as KindWorld
from tests.fakes.kube_api import KubeApi

EKS = ["create-cluster", "eks", "1", "t", "-t", "m5.large", "--region", REGION, "--yes"]
Command = Callable[..., Any]


@pytest.mark.slow
def test_aws_takes_the_machines_away_although_nobody_asks(command: Command, aws: AwsClient) -> None:
    result = command(*EKS[:3], "ends", *EKS[4:], "--ttl", "2h")
    assert result.code == 0, result.err
    assert "It expires after 2h. Then AWS terminates the machines" in result.err
    assert "The control plane will remain" in result.err
    assert aws.pass_time(3600) == []
    assert sorted(aws.pass_time(7300)) == ["ends-1-system", "ends-1-workers"]
    assert command("delete-cluster", "eks", "ends-1", "--yes").code == 0
    assert aws.list_left("ends-1") == []


@pytest.mark.slow
def test_aws_takes_machines_away_that_never_joined(command: Command, aws: AwsClient) -> None:
    aws.rules(unjoined=True, started=1, seconds=0.5)
    try:
        assert command("create-cluster", "eks", "2", "half", *EKS[4:], "--ttl", "2h").code not in (0, 1, 2)
    finally:
        aws.rules(unjoined=False, started=0, seconds=0.0)
    assert "half-2-system" in aws.pass_time(7300)
    assert command("delete-cluster", "eks", "half-2", "--yes").code == 0


@pytest.mark.slow
def test_repeating_the_command_moves_the_end(command: Command, aws: AwsClient) -> None:
    assert command(*EKS[:3], "long", *EKS[4:], "--ttl", "1h").code == 0
    assert command(*EKS[:3], "long", *EKS[4:], "--ttl", "3h").code == 0
    assert aws.pass_time(2 * 3600) == []
    assert len(aws.pass_time(3 * 3600 + 60)) == 2
    assert command("delete-cluster", "eks", "long-1", "--yes").code == 0


@pytest.mark.slow
def test_a_cluster_that_is_ready_after_its_end_ends_at_once(command: Command, aws: AwsClient) -> None:
    provider = EksProvider()
    planned = provider.new_cluster("late-1", 1, EksOptions(machine_type="m5.large", region=REGION))
    cluster = replace(planned, details={**planned.details, "expires": int(time.time())})
    up(cluster, provider.resources(cluster), Store())
    assert len(aws.pass_time(120)) == 2
    assert command("delete-cluster", "eks", "late-1", "--yes").code == 0


def test_another_machine_without_a_ttl_does_not_move_the_end(
    command: Command, aws: AwsClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*EKS[:3], "kept", *EKS[4:]]
    assert command(*words, "--ttl", "3d").code == 0
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "another"))
    again = command(*words)
    assert (again.code, "It still expires in" in again.err) == (0, True), again.err
    assert aws.pass_time(9 * 3600) == []
    assert command(*words, "--ttl", "5d").code == 0
    (found,) = [item for item in EksProvider().discover({"location": REGION}) if item.name == "kept-1"]
    assert ClusterDetails.of(found).expires == ClusterDetails.of(Store().cluster("kept-1")).expires
    assert command("delete-cluster", "eks", "kept-1", "--yes").code == 0


@pytest.mark.parametrize(("words", "minutes"), [(EKS, 17), (["create-cluster", "gke", "1", "t", "--yes"], 8)])
def test_an_end_before_the_cluster_is_there_is_refused(
    command: Command, aws: AwsClient, gke_world: World, words: list[str], minutes: int
) -> None:
    for ttl in ("8", "5m"):
        refused = command(*words, "--ttl", ttl)
        assert refused.code == 2, refused.err
        assert f"--ttl {ttl}: the cluster would end before it is there, which takes about {minutes} min" in refused.err


def test_a_run_on_a_cluster_that_ends_soon_is_warned(command: Command, world: KindWorld, nodes: KubeApi) -> None:
    run = ("run", "a", "1", "--image", "my/task:1", "--command", "true")
    assert command("create-cluster", "kind", "1", "rel", "--ttl", "10m").code == 0
    assert "The cluster rel-1 expires in " in command(*run).err
    store = Store()
    store.record_cluster(replace(store.cluster("rel-1"), details={**store.cluster("rel-1").details, "expires": 1}))
    assert "The cluster rel-1 expired " in command(*run[:1], "b", *run[2:]).err


def test_an_unattended_paid_cluster_ends_by_itself(command: Command, aws: AwsClient) -> None:
    assert command(*EKS[:3], "alone", *EKS[4:]).code == 0
    assert len(aws.pass_time(8 * 3600 + 60)) == 2
    assert command("delete-cluster", "eks", "alone-1", "--yes").code == 0


def test_a_region_that_is_switched_off_is_named(command: Command, aws: AwsClient) -> None:
    aws.rules(off_regions=["eu-central-1"])
    try:
        result = command("create-cluster", "eks", "1", "off", "-t", "m5.large", "--region", "eu-central-1", "--yes")
    finally:
        aws.rules(off_regions=[])
    assert result.code == 2
    assert "The region eu-central-1 is not enabled for the account 123456789012" in result.err
    assert "aws account enable-region --region-name eu-central-1" in result.err


# --- garbage collection ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which AWS was never set up."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    from tests.contract.providers.eks_world import forget

    forget()


@pytest.mark.parametrize("docker", [True, False])
def test_a_cloud_that_refuses_is_not_passed_over(
    command: Command, gke_world: World, no_aws: None, docker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not docker:  # then nothing here can be searched, and yet the cloud may hold paid clusters
        monkeypatch.setenv("PATH", "/nowhere")
    assert command("gc", "--yes").code == 0  # AWS was never set up here
    api.token.cache_clear()
    gke_world.trouble = {"ListClusters": "UNAUTHENTICATED-before"}
    result = command("gc", "--yes", "-o", "json")
    assert result.code == 8
    assert result.json["not_searched"]["gke"].startswith("Google refused to list clusters")
    assert result.json["error"]["details"] == {"not_searched": ["gke"], "kept": []}


def test_a_cloud_of_known_clusters_is_searched_or_named(
    command: Command, gke_world: World, no_aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("create-cluster", "gke", "1", "rel", "--yes").code == 0
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    for cached in (api.client, api.credentials, api.token):
        cached.cache_clear()
    result = command("gc", "--yes")
    assert result.code in (2, 8)
    assert "gke" in result.err
    assert "rel-1" in command("list-clusters").out  # nobody knows whether it is gone


def test_a_cloud_whose_sign_in_has_expired_or_cannot_be_read_is_not_passed_over(
    command: Command, world: KindWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS was never set up here."""
    program = tmp_path / "bin" / "az"
    program.parent.mkdir()
    said = "ERROR: AADSTS70043: The refresh token has expired. To re-authenticate, please run: az login"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    result = command("gc", "--yes", "-o", "json")
    assert result.code == 8
    assert set(result.json["error"]["details"]["not_searched"]) == {"aks", "gke"}


def test_clusters_of_a_cloud_that_refuses_are_not_forgotten(command: Command, gke_world: World, no_aws: None) -> None:
    assert command("create-cluster", "gke", "1", "rel", "--yes").code == 0
    gke_world.trouble = {"ListClusters": "UNAUTHENTICATED-before"}
    assert command("gc", "--yes").code == 8
    assert "rel-1" in {cluster.name for cluster in Store().clusters()}


def test_every_project_that_the_store_knows_is_searched(command: Command, gke_world: World, no_aws: None) -> None:
    assert command("create-cluster", "gke", "1", "rel", "--yes").code == 0
    (path,) = gke_world.clusters
    moved = path.replace(PROJECT, "other-project")
    gke_world.clusters[moved] = gke_world.clusters.pop(path)
    gke_world.clusters[moved].resource_labels["mlbench-expires"] = "1000000000"
    store = Store()
    (known,) = [cluster for cluster in store.clusters() if cluster.name == "rel-1"]
    store.forget_cluster(known)
    details = {**known.details, "project": "other-project"}
    store.record_cluster(replace(known, account="other-project", details=details))
    result = command("gc", "--expired", "--yes")
    assert result.code == 0, result.err
    assert gke_world.clusters == {}


def test_disks_of_a_cluster_that_was_deleted_elsewhere_are_not_forgotten(
    command: Command, gke_world: World, no_aws: None
) -> None:
    assert command("create-cluster", "gke", "2", "rel", "-t", "n1-standard-4", "--yes").code == 0
    gke_world.clusters.clear()  # with gcloud, and its claims remain
    disks = [f"projects/{PROJECT}/zones/{place}/disks/pvc-{place}" for place in (ZONE, "us-east1-b")]
    gke_world.outside = {*disks}  # one of a cluster of the same name elsewhere
    rule = {"name": "k8s-fw-a1b2", "targetTags": ["gke-rel-2-0123abcd-node"]}
    gke_world.networks.found["global/firewalls/k8s-fw-a1b2"] = rule  # the one trace of whose load balancer it is
    gke_world.balancers = {"a1b2", "a3c4"}
    found = command("gc", "gke")
    assert (found.code, f"rel-2 has disk pvc-{ZONE}, load balancer a1b2 left" in found.err) == (0, True), found.err
    deleted = command("delete-cluster", "gke", "rel-2", "--yes")
    assert (deleted.code, f"gcloud compute disks delete pvc-{ZONE}" in deleted.err) == (8, True), deleted.err
    assert "gcloud compute forwarding-rules delete a1b2 --region europe-west1" in deleted.err
    assert not [name for name in ("pvc-us-east1-b", "a3c4") if name in deleted.err]
    gke_world.outside, gke_world.balancers = set(), set()
    del gke_world.networks.found["global/firewalls/k8s-fw-a1b2"]
    assert "rel-2" not in command("gc", "gke").out


def test_clusters_of_other_owners_are_named(command: Command, gke_world: World, no_aws: None, tmp_path: Path) -> None:
    assert command("create-cluster", "gke", "1", "rel", "--yes").code == 0
    labels = gke_world.find_cluster("rel-1").resource_labels
    labels["mlbench-owner"], labels["mlbench-expires"] = "runner", "1000000000"
    result = command("gc", "--expired", "--yes")
    assert (result.code, result.out) == (0, "Nothing to delete.\n")
    assert "rel-1 of runner" in result.err
    assert GkeProvider().discover({"location": ZONE})
