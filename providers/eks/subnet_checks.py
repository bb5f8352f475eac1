"""Checks that existing subnets (`--subnets`) meet the requirements of EKS and machines, before money is spent.

Sources: docs/clouds-assumptions.md.
"""

from collections.abc import Collection, Sequence
from typing import Any

from mlbench_cli.errors import CapacityError, CredentialError, UsageError
from providers.eks.api import Aws
from providers.eks.given_subnets import BLOCK, Subnets, find_subnets
from providers.eks.network import zones_for, zones_with
from providers.eks.nodes import Group

# Interfaces of the control plane during an upgrade. Source: EKS' user guide on network requirements.
PLANE_ADDRESSES = 6


def check_subnets(aws: Aws, names: Sequence[str], groups: Sequence[Group]) -> tuple[str, list[str]]:
    """Check the subnets for system machines and workers. Returns the workers' zone, and warnings.

    Raises UsageError or CapacityError if EKS would reject them, or machines could not join.
    """
    subnets = find_subnets(aws, names)
    ordered = zones_for(aws, list(groups[-1].types), groups[-1].zone)
    if barred := [zone for zone in subnets.by_zone if zone not in ordered]:
        raise UsageError(f"--subnets: EKS has no control planes in the zone {barred[0]}.", hint=BLOCK)
    zone = _place_workers(subnets, groups[-1], zones_with(aws, list(groups[-1].types)))
    _check_dns(aws, subnets.vpc)
    warnings = _check_way_out(aws, subnets, zone, groups[-1])
    needed = dict.fromkeys(subnets.by_zone, 0)
    # The system machines are in the first subnet, too.
    needed[zone] = sum(group.count * _addresses(aws, group) for group in groups)
    for place, free in subnets.free.items():
        if free < needed[place] + PLANE_ADDRESSES:
            raise CapacityError(
                f"The subnet {subnets.by_zone[place]} has {free} free addresses; control plane and machines with "
                f"the addresses that they keep for pods take {needed[place] + PLANE_ADDRESSES}.",
                hint="Use a larger subnet with --subnets, or fewer machines.",
            )
    return zone, warnings


def _addresses(aws: Aws, group: Group) -> int:
    """Addresses that a machine takes when it joins: its own, and those that EKS' network plugin reserves for pods, a
    whole interface of them. Interfaces for EFA only take none. One without the right to ask EC2.

    Source: amazon-vpc-cni-k8s `docs/eni-and-ip-target.md`.
    """
    try:
        found = aws.call("ec2", "describe_instance_types", InstanceTypes=[group.types[0]])["InstanceTypes"]
    except CredentialError:
        return 1
    network = (found[0] if found else {}).get("NetworkInfo") or {}
    return max(1, int(network.get("Ipv4AddressesPerInterface") or 1))


def _place_workers(subnets: Subnets, workers: Group, offered: Collection[str]) -> str:
    """The zone of the workers. Raises UsageError if no subnet is in a zone with such machines."""
    wanted = [workers.zone] if workers.zone else [zone for zone in subnets.by_zone if zone in offered]
    found = next((zone for zone in wanted if zone in subnets.by_zone), None)
    if found is None:
        raise UsageError(
            f"--subnets has none in {workers.zone or ' or '.join(sorted(offered))}, where {workers.types[0]} is "
            f"available: they are in {' and '.join(subnets.by_zone)}.",
            hint=BLOCK,
        )
    return found


def _check_dns(aws: Aws, vpc: str) -> None:
    """Check DNS support of the network, through which EKS nodes find the control plane."""
    for attribute, key in (("enableDnsSupport", "EnableDnsSupport"), ("enableDnsHostnames", "EnableDnsHostnames")):
        try:
            answer = aws.call("ec2", "describe_vpc_attribute", VpcId=vpc, Attribute=attribute)
        except CredentialError:  # an optional permission
            return
        if not answer[key]["Value"]:
            change = attribute.removeprefix("enableDns").lower()
            raise UsageError(
                f"The network {vpc} has {attribute} off, so machines would not find the control plane.",
                hint=f"aws ec2 modify-vpc-attribute --region {aws.region} --vpc-id {vpc} --enable-dns-{change}",
            )


def _check_way_out(aws: Aws, subnets: Subnets, zone: str, group: Group) -> list[str]:
    """Check that machines can reach EKS and registries. Returns warnings; raises UsageError if they certainly
    cannot."""
    subnet = subnets.by_zone[zone]
    try:
        target = _default_route(aws, subnets.vpc, subnet)
    except CredentialError:
        return [f"The routes of {subnet} cannot be read, so mlbench cannot check whether machines there reach EKS."]
    if target is None:
        return [
            f"{subnet} has no default route: machines join only if the network has endpoints for ec2, ecr.api, "
            "ecr.dkr, s3, sts and eks, and pull images only from ECR."
        ]
    if not target.startswith("igw-"):
        return []
    if zone not in subnets.public:
        raise UsageError(
            f"{subnet} goes out by {target}, but assigns no public addresses, so machines would not join the cluster.",
            hint=f"aws ec2 modify-subnet-attribute --region {aws.region} --subnet-id {subnet} "
            "--map-public-ip-on-launch, or name a subnet with a NAT gateway",
        )
    if group.private:
        raise UsageError(
            f"{subnet} goes out by {target}, which takes a public address: machines with several network cards get "
            "none from EC2, and those of --private-nodes are to have none.",
            hint="Name subnets whose default route is a NAT gateway or another way of your network.",
        )
    return []


def _default_route(aws: Aws, vpc: str, subnet: str) -> str | None:
    """The target of the subnet's default route: igw-…, nat-…, tgw-…, or similar; None without one."""

    def ask(name: str, value: str) -> list[dict[str, Any]]:
        return aws.pages("ec2", "describe_route_tables", "RouteTables", Filters=[{"Name": name, "Values": [value]}])

    tables = ask("association.subnet-id", subnet)
    if not tables:  # the network's main table applies
        tables = [
            table for table in ask("vpc-id", vpc) if any(item.get("Main") for item in table.get("Associations", ()))
        ]
    for route in (route for table in tables for route in table["Routes"]):
        if route.get("DestinationCidrBlock") == "0.0.0.0/0" and route.get("State") != "blackhole":
            ways = (str(value) for key, value in route.items() if key.endswith(("GatewayId", "InterfaceId")))
            return next(ways, "another way")
    return None
