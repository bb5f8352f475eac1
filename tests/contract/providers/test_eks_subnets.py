"""Clusters in networks of others, with private nodes, under policies of an organization."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, NotFoundError, UsageError
from providers.eks.api import aws_in
from providers.eks.options import EksOptions
from providers.eks.provider import EksProvider
from tests.contract.providers.eks_world import REGION, list_made, make, remove
from tests.fakes.aws_server import AwsClient

ZONES = ("eu-west-1a", "eu-west-1b")
BOUNDARY = "arn:aws:iam::123456789012:policy/limits"


@dataclass
class Company:
    """A network with a subnet in each of two zones, whose default route is `way`."""

    vpc: str
    subnets: list[str]
    table: str

    @property
    def words(self) -> str:
        return ",".join(self.subnets)


@pytest.fixture
def build(aws: AwsClient) -> Iterator[Callable[..., Company]]:
    """Makes networks as a company has them; they go afterwards."""
    ec2 = aws_in(REGION).client("ec2")
    made: list[Company] = []

    def build(
        way: str | None = "nat",
        bits: int = 24,
        *,
        public: bool = False,
        zones: tuple[str, ...] = ZONES,
        has_table: bool = True,
    ) -> Company:
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames={"Value": True})
        subnets = [
            ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{number}.0/{bits}", AvailabilityZone=zone)["Subnet"][
                "SubnetId"
            ]
            for number, zone in enumerate(zones)
        ]
        table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
        for subnet in subnets:
            if has_table:  # else the network's main one counts
                ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
            ec2.modify_subnet_attribute(SubnetId=subnet, MapPublicIpOnLaunch={"Value": public})
        if way == "igw":
            gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
            ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
            ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
        elif way == "nat":
            nat = ec2.create_nat_gateway(SubnetId=subnets[0])["NatGateway"]["NatGatewayId"]
            ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=nat)
        made.append(Company(vpc, subnets, table))
        return made[-1]

    yield build
    for company in made:  # the gateways cost nothing in a double
        for subnet in company.subnets:
            ec2.delete_subnet(SubnetId=subnet)


def plan(options: EksOptions, nodes: int = 2) -> Any:
    provider = EksProvider()
    return provider.plan(provider.new_cluster("given", nodes, options))


@pytest.mark.slow
def test_a_cluster_in_a_given_network_leaves_the_network_as_it_was(
    aws: AwsClient, build: Callable[..., Company], tmp_path: Path
) -> None:
    company = build()
    ec2 = aws_in(REGION).client("ec2")
    mine = {"Filters": [{"Name": "vpc-id", "Values": [company.vpc]}]}

    def look() -> list[Any]:
        interfaces = {
            item["NetworkInterfaceId"] for item in ec2.describe_network_interfaces(**mine)["NetworkInterfaces"]
        }
        groups, subnets = ec2.describe_security_groups(**mine), ec2.describe_subnets(**mine)
        return [groups["SecurityGroups"], subnets["Subnets"], interfaces]  # one is the gateway's

    before = look()
    aws.calm("me")
    options = EksOptions(machine_type="m5.large", subnets=company.words, permissions_boundary=BOUNDARY)
    make("given-2", tmp_path / "home", options)
    assert [given["subnets"] for given in list_made(aws, "eks:CreateNodegroup")] == [company.subnets[:1]] * 2
    (plane,) = list_made(aws, "eks:CreateCluster")
    assert plane["resourcesVpcConfig"]["subnetIds"] == company.subnets
    left = aws.list_left("given-2")
    assert not any(item.startswith("vpc") for item in left)
    roles = [item.removeprefix("role ") for item in left if item.startswith("role")]
    assert len(roles) == 3
    iam = aws_in(REGION).client("iam")
    limits = [iam.get_role(RoleName=role)["Role"].get("PermissionsBoundary", {}) for role in roles]
    assert {limit.get("PermissionsBoundaryArn") for limit in limits} == {BOUNDARY}
    make("given-2", tmp_path / "home", options)  # again: nothing differs
    with pytest.raises(UsageError, match="not in its own"):
        make("given-2", tmp_path / "home", EksOptions(machine_type="m5.large"))
    remove("given-2", tmp_path / "empty")
    assert aws.list_left("given-2") == []
    assert look() == before


@pytest.mark.slow
def test_private_nodes_are_all_behind_the_nat_gateway(aws: AwsClient, tmp_path: Path) -> None:
    aws.rules(public_access="block-ingress")
    try:
        with pytest.raises(UsageError, match="only through a NAT gateway") as caught:
            plan(EksOptions(machine_type="m5.large"))
        assert "--private-nodes" in str(caught.value.hint)
        options = EksOptions(machine_type="m5.large", private_nodes=True)
        names = [line.what for line in plan(options).lines]
        assert "public address" not in names
        assert any("NAT gateway" in name for name in names)
        aws.calm("me")
        make("inside-2", tmp_path / "home", options)
        used = [given["subnets"] for given in list_made(aws, "eks:CreateNodegroup")]
        assert len(used) == 2
        assert used[0] == used[1]
        (subnet,) = aws_in(REGION).call("ec2", "describe_subnets", SubnetIds=used[0])["Subnets"]
        assert not subnet["MapPublicIpOnLaunch"]
    finally:
        aws.rules(public_access="off")
        remove("inside-2", tmp_path / "empty")
    assert aws.list_left("inside-2") == []


def test_a_given_network_is_not_paid_for(build: Callable[..., Company]) -> None:
    made = plan(EksOptions(machine_type="m5.large", subnets=build().words, private_nodes=True))
    assert not any("NAT" in line.what or "address" in line.what for line in made.lines)


@pytest.mark.parametrize(
    ("network", "changes", "words", "hint"),
    [
        ({"way": "igw"}, {}, "assigns no public addresses", "--map-public-ip-on-launch"),
        ({"way": "igw", "public": True}, {"private_nodes": True}, "takes a public address", "NAT gateway"),
        (
            {"way": "igw", "public": True, "zones": ("eu-west-1a", "eu-west-1c")},
            {"efa": True},
            "several network cards",
            "NAT gateway",
        ),
        ({"bits": 27}, {}, "has 26 free addresses; .* take 28", "larger subnet"),  # of which the control plane has 6
    ],
)
def test_what_eks_would_refuse_is_refused_before_money_is_spent(
    build: Callable[..., Company], network: dict[str, Any], changes: dict[str, Any], words: str, hint: str
) -> None:
    company = build(**network)
    machine = "p4d.24xlarge" if "efa" in changes else "m5.large"
    with pytest.raises((UsageError, CapacityError), match=words) as caught:
        plan(EksOptions(machine_type=machine, subnets=company.words, **changes), nodes=1)
    assert hint in str(caught.value.hint)


def test_without_a_default_route_a_warning_names_the_endpoints(build: Callable[..., Company]) -> None:
    for company in (build(way=None), build(has_table=False)):
        found = plan(EksOptions(machine_type="m5.large", subnets=company.words))
        assert any("has no default route" in warning and "ecr.dkr" in warning for warning in found.warnings)


def test_names_of_the_network_that_are_off_are_named(aws: AwsClient, build: Callable[..., Company]) -> None:
    company = build()
    aws_in(REGION).client("ec2").modify_vpc_attribute(VpcId=company.vpc, EnableDnsHostnames={"Value": False})
    with pytest.raises(UsageError, match="enableDnsHostnames off") as caught:
        plan(EksOptions(machine_type="m5.large", subnets=company.words))
    assert "modify-vpc-attribute" in str(caught.value.hint)


def test_subnets_of_two_networks_or_nowhere_are_refused(build: Callable[..., Company]) -> None:
    one, two = build(), build()
    with pytest.raises(UsageError, match="all in one network"):
        plan(EksOptions(machine_type="m5.large", subnets=f"{one.subnets[0]},{two.subnets[1]}"))
    with pytest.raises(NotFoundError) as caught:
        plan(EksOptions(machine_type="m5.large", subnets="subnet-01234567,subnet-76543210"))
    assert "describe-subnets" in str(caught.value.hint)
    with pytest.raises(UsageError, match="has none in eu-west-1c"):
        plan(EksOptions(machine_type="m5.large", subnets=one.words, zone="eu-west-1c"))


@pytest.mark.parametrize("text", ["subnet-1", "vpc-01234567,subnet-01234567", "subnet-01234567,subnet-01234567", "x"])
def test_what_are_no_subnets_is_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError, match="--subnets"):
        EksProvider().new_cluster("given", 1, EksOptions(machine_type="m5.large", subnets=text))
    with pytest.raises(UsageError, match="--permissions-boundary"):
        EksProvider().new_cluster("given", 1, EksOptions(machine_type="m5.large", permissions_boundary=text))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "option"), [("ec2:CreateVpc", "--subnets"), ("iam:CreateRole", "--permissions-boundary")]
)
def test_a_policy_of_the_organization_names_the_option_that_does_without(
    aws: AwsClient, tmp_path: Path, action: str, option: str
) -> None:
    said = f"User: arn:aws:iam::123456789012:user/me is not authorized to perform: {action} on resource: * with an "
    aws.rules(stack_fails=f"{said}explicit deny in a service control policy (Service: Ec2, Status Code: 403)")
    try:
        with pytest.raises(CredentialError, match="service control policy") as caught:
            make("ruled-2", tmp_path / "home", EksOptions(machine_type="m5.large"))
        assert option in str(caught.value.hint)
    finally:
        aws.rules(stack_fails=None)
        remove("ruled-2", tmp_path / "empty")
    assert aws.list_left("ruled-2") == []


def test_an_account_that_blocks_internet_gateways_is_told_before(aws: AwsClient, build: Callable[..., Company]) -> None:
    aws.rules(public_access="block-bidirectional")
    try:
        with pytest.raises(UsageError, match="Block Public Access") as caught:
            plan(EksOptions(machine_type="m5.large", private_nodes=True))
        assert "--subnets" in str(caught.value.hint)
        assert plan(EksOptions(machine_type="m5.large", subnets=build().words)).lines
    finally:
        aws.rules(public_access="off")
