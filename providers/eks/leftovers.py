"""Deletes leftovers of others in a cluster's network: endpoints of AWS services, interfaces, security groups.

GuardDuty creates an endpoint and a security group in every network with EKS machines, and recreates them while there
are machines. Security groups of load balancers and of the control plane refer to each other. Sources: eksctl
`pkg/elb/cleanup.go`, terraform-provider-aws pull request 46953.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.errors import NotFoundError, UsageError
from providers.base import BusyError
from providers.eks.api import Aws

Item = Mapping[str, Any]  # an item of an EC2 response
# Only its owner can delete such an interface, and does so with itself: the stack, or an endpoint.
OWNED_INTERFACES = ("nat_gateway", "vpc_endpoint", "interface_endpoint")
GONE = ("deleted", "deleting")


def clear_network(aws: Aws, vpcs: Sequence[str]) -> None:
    """Delete leftovers in the networks. Raises BusyError while some still exist."""
    if not vpcs:
        return
    # Delete all endpoints: the stack has none, so others created them.
    found = aws.pages("ec2", "describe_vpc_endpoints", "VpcEndpoints", Filters=_within(vpcs))
    waiting = [item for item in found if item["State"].lower() not in GONE]
    if waiting:
        aws.call("ec2", "delete_vpc_endpoints", VpcEndpointIds=[item["VpcEndpointId"] for item in waiting])
    left = [item for item in found if item["State"].lower() != "deleted"]
    if left:
        raise BusyError(f"The endpoint {left[0]['VpcEndpointId']} ({left[0].get('ServiceName')}) is being deleted.")
    detaching = None
    for interface in list_interfaces(aws, vpcs):
        if interface["Status"] == "available":
            _delete(aws, "delete_network_interface", NetworkInterfaceId=interface["NetworkInterfaceId"])
        else:
            detaching = interface
    if detaching:
        raise BusyError(f"The network interface {detaching['NetworkInterfaceId']} is {detaching['Status']}.")
    _delete_groups(aws, _within(vpcs))


def clear_cluster(aws: Aws, name: str) -> None:
    """Delete what EKS and its network plugin created for a cluster in an existing network.

    Raises BusyError while some still exist. Sources: docs/clouds-assumptions.md.
    """
    marked = [{"Name": "tag:cluster.k8s.amazonaws.com/name", "Values": [name]}]
    for interface in aws.pages("ec2", "describe_network_interfaces", "NetworkInterfaces", Filters=marked):
        if interface["Status"] != "available":
            raise BusyError(f"The network interface {interface['NetworkInterfaceId']} is {interface['Status']}.")
        _delete(aws, "delete_network_interface", NetworkInterfaceId=interface["NetworkInterfaceId"])
    _delete_groups(aws, [{"Name": "tag:aws:eks:cluster-name", "Values": [name]}])


def list_interfaces(aws: Aws, vpcs: Sequence[str]) -> list[Item]:
    """The network interfaces that are not deleted with their owner."""
    if not vpcs:
        return []
    found = aws.pages("ec2", "describe_network_interfaces", "NetworkInterfaces", Filters=_within(vpcs))
    return [item for item in found if not _is_owned(item)]


def _is_owned(interface: Item) -> bool:
    """Whether it is deleted with its owner."""
    of_endpoint = str(interface.get("Description", "")).startswith("VPC Endpoint Interface ")
    return of_endpoint or interface.get("InterfaceType") in OWNED_INTERFACES


def is_in_use(interface: Item) -> bool:
    """Whether an interface is attached and will be released by itself, e.g. of a machine being terminated."""
    return interface["Status"] not in ("available", "detaching")


def _delete_groups(aws: Aws, filters: Sequence[Item]) -> None:
    """Delete security groups after revoking the rules between them: AWS does not delete a group while another refers to
    it."""
    groups = aws.pages("ec2", "describe_security_groups", "SecurityGroups", Filters=filters)
    for group in groups:
        for key, operation in (
            ("IpPermissions", "revoke_security_group_ingress"),
            ("IpPermissionsEgress", "revoke_security_group_egress"),
        ):
            if rules := _rules_with_groups(group.get(key) or ()):
                _delete(aws, operation, GroupId=group["GroupId"], IpPermissions=rules)
    refusals = []
    for group in groups:
        if group["GroupName"] == "default":
            continue
        try:
            _delete(aws, "delete_security_group", GroupId=group["GroupId"])
        except BusyError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


def _rules_with_groups(rules: Sequence[Item]) -> list[Item]:
    """The part of each rule that names other groups."""
    keys = ("IpProtocol", "FromPort", "ToPort", "UserIdGroupPairs")
    return [{key: rule[key] for key in keys if key in rule} for rule in rules if rule.get("UserIdGroupPairs")]


def _delete(aws: Aws, operation: str, **parameters: Any) -> None:
    try:
        aws.call("ec2", operation, **parameters)
    except NotFoundError:
        return
    except UsageError as error:
        raise BusyError(error.message) from None  # still in use for a moment


def _within(vpcs: Sequence[str]) -> list[Item]:
    return [{"Name": "vpc-id", "Values": list(vpcs)}]
