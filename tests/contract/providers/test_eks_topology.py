"""Where workers are in EC2's network: labels of AWS' cloud controller, or of EC2's answer if they are missing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from mlbench_cli.engines.kubernetes.topology import find_topology
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.eks import EksProvider
from providers.eks.options import EksOptions
from providers.lifecycle import up
from tests.contract.providers.eks_world import REGION, make, remove
from tests.fakes.aws_server import AwsClient

ASKED = "ec2:DescribeInstanceTopology"
FAST = EksOptions(machine_type="p4d.24xlarge", probe_image="none")


@pytest.fixture
def slow_controller(aws: AwsClient) -> Iterator[AwsClient]:
    """A cloud whose controller could not label the nodes."""
    aws.rules(topology_labels=False)
    yield aws
    aws.rules(topology_labels=True, topology_region=True, booting=0)


def places(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Of the workers' nodes, as runs record them."""
    with EksProvider().connect(cluster).client() as api:
        return find_topology(api.get("/api/v1/nodes", labelSelector="mlbench-role=worker")["items"])


def requests_for_topology(aws: AwsClient) -> int:
    return sum(entry["action"] == ASKED for entry in aws.log("me"))


def test_nodes_without_labels_get_those_of_ec2(slow_controller: AwsClient, tmp_path: Path) -> None:
    cluster = make("far-3", tmp_path / "home", FAST, nodes=3)
    found = places(cluster)
    last = [found[f"far-3-workers-{number}"]["layer_3"] for number in range(3)]
    assert last[0] == last[1] != last[2]  # two below one switch
    assert len({found[node]["layer_1"] for node in found}) == 1
    assert ClusterDetails.of(cluster).topology_problem is None
    remove("far-3", tmp_path / "empty")


def test_labels_of_the_cloud_controller_are_enough(aws: AwsClient, tmp_path: Path) -> None:
    cluster = make("near-2", tmp_path / "home", FAST)
    assert set(places(cluster)["near-2-workers-0"]) == {"zone", "layer_1", "layer_2", "layer_3"}
    assert requests_for_topology(aws) == 0
    remove("near-2", tmp_path / "empty")


def test_machines_that_ec2_tells_nothing_of_are_not_asked_about(slow_controller: AwsClient, tmp_path: Path) -> None:
    cluster = make("plain-2", tmp_path / "home", EksOptions(machine_type="m5.large"))
    assert set(places(cluster)["plain-2-workers-0"]) == {"zone"}
    assert requests_for_topology(slow_controller) == 0
    remove("plain-2", tmp_path / "empty")


def test_a_hundred_instances_are_asked_about_at_a_time(slow_controller: AwsClient, tmp_path: Path) -> None:
    cluster = make("wide-125", tmp_path / "home", FAST, nodes=125)
    assert all("layer_3" in place for place in places(cluster).values())
    assert requests_for_topology(slow_controller) == 2
    # The double refuses what EC2 refuses, and gives pages to who names no instance.
    client = boto3.client("ec2", region_name=REGION)
    for words in ({"InstanceIds": ["i-1"] * 101}, {"InstanceIds": ["i-1"], "MaxResults": 5}, {"MaxResults": 101}):
        with pytest.raises(ClientError, match=r"InvalidParameter|valid max value"):
            client.describe_instance_topology(**words)
    with pytest.raises(ClientError, match=r"InvalidInstanceID.NotFound"):
        client.describe_instance_topology(InstanceIds=["i-0123456789abcdef0"])
    assert len(client.describe_instance_topology()["Instances"]) == 20  # its default
    page = client.describe_instance_topology(MaxResults=100)
    rest = client.describe_instance_topology(MaxResults=100, NextToken=page["NextToken"])
    assert (len(rest["Instances"]), "NextToken" in rest) == (25, False)  # the system's machines are of another type
    remove("wide-125", tmp_path / "empty")


def test_machines_that_come_later_are_labeled_too(slow_controller: AwsClient, tmp_path: Path) -> None:
    cluster = make("more-2", tmp_path / "home", FAST, nodes=1)
    provider = EksProvider()
    up(cluster, provider.scale(cluster, 4), Store(tmp_path / "home"), times="scaling")
    assert len([place for place in places(cluster).values() if "layer_3" in place]) == 4
    remove("more-2", tmp_path / "empty")


# Trouble: the rules that make it, and what is said then.
TROUBLES: dict[str, tuple[dict[str, object], str]] = {
    "region": ({"topology_region": False}, "not supported in this Region"),
    "deny": ({}, "is not authorized"),
    "booting": ({"booting": 1}, "EC2 does not report the position of 1 of 2 machines"),
}


def test_a_cluster_is_ready_without_them_and_says_why(command: Callable[..., Any], slow_controller: AwsClient) -> None:
    words = ("create-cluster", "eks", "2", "odd", "-t", "p4d.24xlarge", "--probe-image", "none", "--yes")
    for trouble, (rules, says) in TROUBLES.items():  # repeated, the command asks again
        slow_controller.rules(**{"topology_region": True, "quotas": {"L-417A185B": 500.0}, **rules})
        if trouble == "deny":
            slow_controller.order("me", "deny", action=f"{ASKED}.*", code="UnauthorizedOperation", times=1000)
        result = command(*words)
        assert result.code == 0, result.err
        assert "Results will not include the workers' positions" in result.err, trouble
        assert says in result.err
        slow_controller.calm("me")
    slow_controller.rules(booting=0)
    assert "Results will not include" not in command(*words).err
    assert command("delete-cluster", "eks", "odd-2", "--yes").code == 0
    slow_controller.rules(quotas={})


def test_a_passing_trouble_is_waited_for(slow_controller: AwsClient, tmp_path: Path) -> None:
    slow_controller.order("me", "throttle", action=f"{ASKED}.*", code="RequestLimitExceeded", times=2)
    cluster = make("later-2", tmp_path / "home", FAST)
    assert all("layer_3" in place for place in places(cluster).values())
    remove("later-2", tmp_path / "empty")
