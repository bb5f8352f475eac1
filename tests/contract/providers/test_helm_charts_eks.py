"""What workloads have left in AWS, on moto: volumes and load balancers of all kinds, by their tags."""

from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.errors import CredentialError
from mlbench_cli.model.run import Cluster
from providers.eks import discover
from providers.eks.api import aws_in
from providers.workloads import WorkloadObject
from tests.contract.providers.eks_world import REGION, become_for_a_test
from tests.fakes.aws_server import AwsClient

NAME = "left-0"
CLUSTER = Cluster(NAME, "eks", details={"region": REGION})
OWNED = [{"Key": f"kubernetes.io/cluster/{NAME}", "Value": "owned"}]
OTHERS = [{"Key": "kubernetes.io/cluster/other-1", "Value": "owned"}]


@pytest.fixture
def account(aws_server: AwsClient, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes clients of AWS' services."""
    become_for_a_test(aws_server, monkeypatch)
    return aws_in(REGION).client


def _volume(account: Any, tags: list[dict[str, str]]) -> str:
    specification = [{"ResourceType": "volume", "Tags": tags}] if tags else []
    made = account("ec2").create_volume(AvailabilityZone=f"{REGION}a", Size=8, TagSpecifications=specification)
    return str(made["VolumeId"])


def _list_balancers(account: Any, tags: list[dict[str, str]], name: str) -> None:
    subnets = [item["SubnetId"] for item in account("ec2").describe_subnets()["Subnets"]][:2]
    account("elbv2").create_load_balancer(Name=f"{name}-net", Subnets=subnets, Type="network", Tags=tags)
    listeners = [{"Protocol": "TCP", "LoadBalancerPort": 80, "InstancePort": 80}]
    zones = [f"{REGION}a"]
    account("elb").create_load_balancer(LoadBalancerName=name, Listeners=listeners, AvailabilityZones=zones, Tags=tags)


@pytest.mark.slow
def test_found_by_their_tags_and_told_with_commands(account: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["create-cluster", "eks", "0", "left", "--yes"]) == 0
    mine, seen = _volume(account, OWNED), _volume(account, [])
    _volume(account, OTHERS)
    _list_balancers(account, OWNED, "mine")
    _list_balancers(account, OTHERS, "theirs")
    found = discover.list_orphans(CLUSTER, [WorkloadObject("PersistentVolume", "", "pv", seen)])
    assert {(item.kind, item.name) for item in found} == {
        ("volume", mine), ("volume", seen), ("load balancer", "mine-net"), ("load balancer", "mine"),
    }  # fmt: skip
    capsys.readouterr()
    assert run(["delete-cluster", "eks", NAME, "--yes"]) == 8
    printed = capsys.readouterr().err
    assert f"aws ec2 delete-volume --region {REGION} --volume-id {mine}" in printed
    assert f"aws elb delete-load-balancer --region {REGION} --load-balancer-name mine\n" in printed
    assert f"aws elbv2 delete-load-balancer --region {REGION} --load-balancer-arn arn:aws:" in printed
    assert seen not in printed
    assert "theirs" not in printed


@pytest.mark.slow
def test_who_may_not_look_is_told_only_where_something_was(
    aws_server: AwsClient, account: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    aws_server.order("me", "deny", action="elasticloadbalancing:.*", times=9)
    with pytest.raises(CredentialError, match="not authorized"):
        discover.list_orphans(CLUSTER, [])
    assert run(["create-cluster", "eks", "0", "calm", "--yes"]) == 0
    assert run(["delete-cluster", "eks", "calm-0", "--yes"]) == 0
    captured = capsys.readouterr()
    assert "is not known" not in captured.err
    assert "no resources remain" in captured.out


def test_commands_for_what_was_seen() -> None:
    volume = WorkloadObject("PersistentVolume", "", "pv", "vol-1")
    assert discover.orphan_command(CLUSTER, volume) == f"aws ec2 delete-volume --region {REGION} --volume-id vol-1"
    service = WorkloadObject("Service", "default", "web", "x.elb.amazonaws.com")
    assert "DNSName=='x.elb.amazonaws.com'" in discover.orphan_command(CLUSTER, service)
    assert f"kubernetes.io/cluster/{NAME}" in discover.orphan_command(CLUSTER, None)
