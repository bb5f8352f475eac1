"""The resources of an EKS cluster: a CloudFormation stack with network and roles, the control plane, node groups that
EKS manages, add-ons, and what goes with them.
"""

import base64
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlbench_cli.errors import (
    CapacityError,
    CredentialError,
    MlbenchError,
    NeverStartedError,
    NotFoundError,
    UsageError,
)
from mlbench_cli.kube.access import Access
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from providers.base import (
    CLUSTER_TAG,
    BusyError,
    Part,
    Readiness,
    Resource,
    ResourceStatus,
    TransientError,
    ownership_tags,
    reason_to_keep_images,
)
from providers.cluster_end import EndMark
from providers.eks.api import (
    Aws,
    access_to,
    error_from_cause,
    error_from_code,
    error_from_issues,
    error_from_message,
    find_raw_cluster,
    session,
    tag_list,
    tags_of,
)
from providers.eks.options import AL2023, BOTTLEROCKET, EFA, GPU, Group, Machine
from providers.eks.quota import find_reservation, find_subnets, version_for, zones_for, zones_with
from providers.kubernetes_calls import ClusterObjects, Document, count_allocatable, list_workers
from providers.pins import find_pin, require_pin
from templates import documents, render

# --- network and roles ------------------------------------------------------------------------------------------------

TEMPLATE = "cloudformation/network.yaml"
ZONE_PARAMETERS = ("FirstZone", "SecondZone", "ThirdZone", "FourthZone")
MAX_ZONES = len(ZONE_PARAMETERS)
# What organizations' policies commonly deny, and the option that avoids it.
FORBIDDEN = (
    (
        r"\biam:(CreateRole|AttachRolePolicy|PutRolePolicy)\b",
        "If roles must be limited, pass the policy with --permissions-boundary ARN; otherwise ask for the "
        "permission, or have a "
        "cluster made and mlbench attach-cluster",
    ),
    (
        r"\bec2:(Create(Vpc|Subnet|InternetGateway|NatGateway|Route\w*)|AttachInternetGateway|AllocateAddress)\b",
        "Use an existing network: --subnets subnet-…,subnet-…",
    ),
)
CREATE_MINUTES = 20
# After this time the stack's deletion is requested even if interfaces are still attached: its NAT gateway and address,
# which cost money, are deleted at once; subnets and network, which are free, once the interfaces are gone.
OCCUPIED_SECONDS = 600.0
BROKEN = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED")
# Includes stacks changed by users in CloudFormation.
WHOLE = ("CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE")


@dataclass(frozen=True)
class Network:
    """The stack's outputs: subnets by zone, and the roles' ARNs."""

    vpc: str
    subnets: dict[str, str]  # public subnets by zone; the first is for the machines
    private_subnets: dict[str, str]  # by zone; empty unless machines need them
    control_role: str
    machine_role: str
    volume_role: str  # "" for a stack of an older version
    nat: str  # ID of its NAT gateway; "" without one
    public: frozenset[str]  # zones where machines get public addresses


class Stack(Resource):
    """Network and roles. All other resources need it; it is created first and deleted last."""

    kind = "CloudFormation stack"
    create_seconds = CREATE_MINUTES * 60.0
    # Interfaces of AWS services in the network take up to 22 minutes to detach.
    delete_seconds = 3600.0

    def __init__(
        self,
        cluster: Cluster,
        aws: Aws,
        machine_types: list[str],
        zone: str | None = None,
        private: bool = False,
        zones: Sequence[str] = (),
        subnets: Sequence[str] = (),
        boundary: str | None = None,
    ) -> None:
        """`subnets`: of an existing network; then the stack has only roles, with the permissions boundary
        `boundary`."""
        self.cluster = cluster
        self.aws = aws
        self.name = f"mlbench-{cluster.name}"
        self.subnets = subnets
        self.boundary = boundary
        self.machine_types = machine_types
        self.zone = zone
        self.private = private
        self.zones = zones  # to which machines may move
        self.token = uuid.uuid4().hex
        self.remove_command = f"aws cloudformation delete-stack --region {aws.region} --stack-name {self.name}"
        self._network: Network | None = None
        self._occupied_since: float | None = None
        self._requested = False  # whether this process has requested its deletion

    def find(self) -> ResourceStatus | None:
        """The status from the stack's state: rolled back is broken; stacks without mlbench's tag are not touched."""
        stack = self._describe()
        if stack is None:
            return None
        state = stack["StackStatus"]
        found = ResourceStatus(state, ours=tags_of(stack.get("Tags")).get(CLUSTER_TAG) == self.cluster.name)
        # During a rollback it can neither be used nor deleted.
        if not found.ours or state in ("DELETE_IN_PROGRESS", "ROLLBACK_IN_PROGRESS"):
            return ResourceStatus(state, found.ours, deleting=True)
        if state in BROKEN:
            return ResourceStatus(state, broken=stack.get("StackStatusReason") or state, busy=self._find_users())
        if state == "CREATE_IN_PROGRESS":
            return ResourceStatus(state)
        return ResourceStatus(state, busy=self._find_users(), differs=self._difference(stack))

    def create(self) -> None:
        """Request the stack in the first two zones with the machine types.

        CloudFormation has its own timeout.
        """
        if self.subnets:
            subnets = self._order_subnets()
            zones = list(subnets)[:2]
        else:
            subnets = {}
            offered = zones_for(self.aws, self.machine_types, self.zone)
            zones = [*self.zones, *(zone for zone in offered if zone not in self.zones)][: max(2, len(self.zones))]
        parameters = dict(zip(ZONE_PARAMETERS, zones, strict=False))
        parameters |= {"Subnets": ",".join(subnets.values()), "Boundary": self.boundary or ""}
        parameters |= {"PrivateMachines": "yes" if self.private else "no", "Moving": "yes" if self.zones else "no"}
        self.aws.call(
            "cloudformation",
            "create_stack",
            StackName=self.name,
            TemplateBody=render(TEMPLATE, {}),
            Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
            Capabilities=["CAPABILITY_IAM"],
            TimeoutInMinutes=CREATE_MINUTES,
            OnFailure="ROLLBACK",
            Tags=tag_list(ownership_tags(self.cluster)),
            ClientRequestToken=self.token,
        )

    def poll(self) -> Readiness:
        """Ready when the stack is complete. Raises with CloudFormation's first failed event."""
        stack = self._describe()
        if stack is None:
            raise MlbenchError(f"The stack {self.name} disappeared while it was being created.")
        state = stack["StackStatus"]
        if state in WHOLE:
            return Readiness(True)
        if state == "CREATE_IN_PROGRESS":
            return Readiness(False, "its network and roles are being created")
        raise self._failure(stack)

    def delete(self) -> None:
        """Delete leftovers of others in the network, which would block the deletion, then the stack."""
        self.token = uuid.uuid4().hex
        self._network = None
        # CloudFormation uses the caller's permissions, and may have lacked one.
        stack = self._describe() if self._requested else None
        reason = str(stack.get("StackStatusReason")) if stack and stack["StackStatus"] == "DELETE_FAILED" else ""
        if "not authorized" in reason:
            raise CredentialError(
                f'CloudFormation could not delete the stack {self.name}: "{reason}"',
                hint="mlbench doctor eks   names the permissions that you lack",
            )
        try:
            clear_network(self.aws, self._vpcs())
            clear_cluster(self.aws, self.cluster.name)
        except BusyError:
            if not self._is_late():
                raise
        self.aws.call("cloudformation", "delete_stack", StackName=self.name)
        self._requested = True

    def network(self) -> Network:
        """The stack's outputs, cached. Raises NotFoundError if it is incomplete."""
        if self._network is None:
            stack = self._describe() or {}
            made = {item["OutputKey"]: item["OutputValue"] for item in stack.get("Outputs", [])}
            if stack.get("StackStatus") not in WHOLE or "MachineRole" not in made:
                raise NotFoundError(f"The stack {self.name} is not complete: {stack.get('StackStatus', 'absent')}.")
            own = _subnets_by_zone(made, ("FirstSubnet", "SecondSubnet", "ThirdSubnet", "FourthSubnet"))
            given = find_subnets(self.aws, made["Subnets"].split(",")) if made.get("Subnets") else None
            self._network = Network(
                given.vpc if given else made["Vpc"],
                given.by_zone if given else own,
                _subnets_by_zone(made, ("PrivateSubnet", "SecondPrivate", "ThirdPrivate", "FourthPrivate")),
                made["ControlRole"],
                made["MachineRole"],
                made.get("VolumeRole", ""),
                made.get("Nat", ""),
                given.public if given else frozenset(own),
            )
        return self._network

    def _order_subnets(self) -> dict[str, str]:
        """The given subnets by zone, the machines' first, as `subnet_checks` has told: in the wanted zone, or else the
        first in a zone with such machines."""
        by_zone = find_subnets(self.aws, self.subnets).by_zone
        offering = zones_with(self.aws, self.machine_types)
        return dict(sorted(by_zone.items(), key=lambda item: (item[0] != self.zone, item[0] not in offering)))

    def _describe(self) -> dict[str, Any] | None:
        stacks = self.aws.find("cloudformation", "describe_stacks", "Stacks", StackName=self.name)
        present = [stack for stack in stacks or () if stack["StackStatus"] != "DELETE_COMPLETE"]
        return present[0] if present else None

    def _difference(self, stack: dict[str, Any]) -> str | None:
        given = {item["ParameterKey"]: item.get("ParameterValue") for item in stack.get("Parameters", [])}
        has = given.get("Subnets") or ""
        if set(self.subnets) != set(filter(None, has.split(","))):
            return f"it is in {has or 'its own network'}, not in {','.join(self.subnets) or 'its own'}"
        if self.subnets:
            return None
        zones = [zone for key in ZONE_PARAMETERS if (zone := given.get(key))]
        lacking = [zone for zone in (self.zone, *self.zones) if zone and zone not in zones]
        if lacking:
            return f"it is in the zones {' and '.join(zones)}, not in {lacking[0]}"
        if self.private and given.get("PrivateMachines") != "yes":
            return "it has no private subnet, which machines with several network cards need"
        return None

    def _failure(self, stack: dict[str, Any]) -> MlbenchError:
        """The first failure, with CloudFormation's message."""
        events = self.aws.pages("cloudformation", "describe_stack_events", "StackEvents", StackName=self.name)
        causes = [
            f"{event['LogicalResourceId']} ({event['ResourceType']}): {event.get('ResourceStatusReason')}"
            for event in reversed(events)
            if event.get("ResourceStatus") == "CREATE_FAILED"
            and "cancelled" not in event.get("ResourceStatusReason", "")
        ]
        cause = causes[0] if causes else stack.get("StackStatusReason") or stack["StackStatus"]
        message = f'The stack {self.name} was not created ({stack["StackStatus"]}): "{cause}"'
        for code in ("LimitExceeded", "AccessDenied", "UnauthorizedOperation"):
            if (
                code in cause
                or (code == "AccessDenied" and "not authorized" in cause)
                or (code == "LimitExceeded" and "maximum number of" in cause)
            ):
                error = error_from_code(code, message, cause)
                hint = next((hint for pattern, hint in FORBIDDEN if re.search(pattern, cause)), None)
                return CredentialError(message, hint=hint) if hint and isinstance(error, CredentialError) else error
        return MlbenchError(message, hint=f"aws cloudformation describe-stack-events --stack-name {self.name}")

    # --- leftovers in the network -----------------------------------------------------------------------

    def _find_users(self) -> str | None:
        """What is still attached to the network and will detach by itself, e.g. machines being terminated."""
        used = [item for item in list_interfaces(self.aws, self._vpcs()) if is_in_use(item)]
        if not used or self._is_late():
            return None
        first = used[0]
        what = first.get("Description") or first.get("InterfaceType") or "no description"
        return f"{len(used)} network interfaces are still in use, one is {first['NetworkInterfaceId']} ({what})"

    def _is_late(self) -> bool:
        """Whether interfaces have blocked the network for so long that its paid parts should be deleted first."""
        if self._occupied_since is None:
            self._occupied_since = time.monotonic()
        return time.monotonic() - self._occupied_since > OCCUPIED_SECONDS

    def _vpcs(self) -> list[str]:
        """The VPCs, found by tag, because a partly deleted stack has no outputs."""
        filters = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [self.cluster.name]}]
        return [item["VpcId"] for item in self.aws.pages("ec2", "describe_vpcs", "Vpcs", Filters=filters)]


class PlacementGroup(Resource):
    """A placement group, which puts machines close together for low latency."""

    kind = "placement group"
    create_seconds = delete_seconds = 120.0

    def __init__(self, cluster: Cluster, aws: Aws, stack: Stack) -> None:
        self.cluster = cluster
        self.aws = aws
        self.name = f"mlbench-{cluster.name}"
        self.needs = (stack,)
        self.remove_command = f"aws ec2 delete-placement-group --region {aws.region} --group-name {self.name}"

    def find(self) -> ResourceStatus | None:
        """The status of the placement group; None if it does not exist or is deleted."""
        filters = [{"Name": "group-name", "Values": [self.name]}]
        groups = self.aws.call("ec2", "describe_placement_groups", Filters=filters)["PlacementGroups"]
        if not groups:
            return None
        state = groups[0]["State"]
        ours = tags_of(groups[0].get("Tags")).get(CLUSTER_TAG) == self.cluster.name
        return None if state == "deleted" else ResourceStatus(state, ours=ours, deleting=state == "deleting")

    def create(self) -> None:
        """Request the group with strategy "cluster", tags in the call."""
        tags = [{"ResourceType": "placement-group", "Tags": tag_list(ownership_tags(self.cluster))}]
        self.aws.call("ec2", "create_placement_group", GroupName=self.name, Strategy="cluster", TagSpecifications=tags)

    def poll(self) -> Readiness:
        """Ready when its state is available."""
        found = self.find()
        return Readiness(
            found is not None and found.state == "available", found.state if found else "it is not there yet"
        )

    def delete(self) -> None:
        """Request the deletion; succeeds if it does not exist. Raises BusyError while machines in it are
        terminating."""
        try:
            self.aws.call("ec2", "delete_placement_group", GroupName=self.name)
        except NotFoundError:
            return
        except UsageError as error:
            raise BusyError(error.message) from None  # machines in it are still terminating


def _subnets_by_zone(made: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The subnets among the stack's outputs, by zone. Stacks of older versions have fewer outputs."""
    pairs = ((made.get(zone), made.get(name)) for zone, name in zip(ZONE_PARAMETERS, names, strict=True))
    return {zone: subnet for zone, subnet in pairs if zone and subnet}


# --- what others leave in a network -----------------------------------------------------------------------------------

# GuardDuty creates an endpoint and a security group in every network with EKS machines, and recreates them while there
# are machines. Security groups of load balancers and of the control plane refer to each other. Sources: eksctl
# `pkg/elb/cleanup.go`, terraform-provider-aws pull request 46953.

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

    Raises BusyError while some still exist. Sources: docs/development/clouds-assumptions.md.
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


# --- the control plane, add-ons and administrators --------------------------------------------------------------------

ADMIN_POLICY = "arn:{}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"  # of the partition
# Without this agent, a run's NetworkPolicy would not be enforced.
SETTINGS = {"vpc-cni": '{"enableNetworkPolicy": "true"}'}
CREATION_STATES = ("PENDING", "CREATING", "UPDATING")


def admin_policy(region: str) -> str:
    """The ARN of EKS' administrator policy in the region's partition: of AWS, China or GovCloud."""
    return ADMIN_POLICY.format(session().get_partition_for_region(region))


class EksResource(Resource):
    """A resource that EKS creates: found by name, tagged in the create call, with one operation at a time."""

    def __init__(self, cluster: Cluster, aws: Aws) -> None:
        self.cluster = cluster
        self.aws = aws
        self.token = uuid.uuid4().hex
        self.refused: str | None = None  # why EKS last rejected its deletion

    def find_raw(self) -> dict[str, Any] | None:
        """AWS' description of the resource; None if it does not exist."""
        raise NotImplementedError

    def remove(self) -> None:
        """Send the delete call of this kind of resource. Raises NotFoundError if it does not exist."""
        raise NotImplementedError

    def find_difference(self, described: dict[str, Any]) -> str | None:
        """How the resource differs from the request; None if it does not."""
        return None

    def find_flaw(self, described: dict[str, Any]) -> str | None:
        """Why it will never be ready; None if it may be."""
        return _issues(described) or described["status"] if described["status"] == "CREATE_FAILED" else None

    def find(self) -> ResourceStatus | None:
        """The status from AWS' description; a failed deletion and reported issues count as broken."""
        described = self.find_raw()
        if described is None:
            return None
        state = described["status"]
        return ResourceStatus(
            state,
            ours=(described.get("tags") or {}).get(CLUSTER_TAG) == self.cluster.name,
            deleting=state == "DELETING",
            # EKS may reject deleting a resource that it is creating: try, and wait if rejected.
            busy=self.refused if state in CREATION_STATES else None,
            broken=self.find_flaw(described) or (_issues(described) or state if state == "DELETE_FAILED" else None),
            differs=self.find_difference(described),
        )

    def delete(self) -> None:
        """Request the deletion; succeeds if it does not exist. Raises BusyError while another operation uses the
        resource."""
        self.token = uuid.uuid4().hex
        self.refused = None
        try:
            self.remove()
        except NotFoundError:
            return
        except UsageError as error:
            if not str(error.details.get("aws", "")).startswith("ResourceInUse"):
                raise
            self.refused = error.message
            raise BusyError(error.message) from None

    def require_raw(self) -> dict[str, Any]:
        """AWS' description of the resource. Raises TransientError if AWS does not show it (yet)."""
        found = self.find_raw()
        if found is None:
            raise TransientError(f'AWS does not show the {self.kind} "{self.name}" yet.')
        return found


class ControlPlane(EksResource):
    """The EKS cluster without machines; creation takes 7 to 12 minutes."""

    kind = "EKS cluster"
    create_seconds = 2400.0
    delete_seconds = 2400.0

    def __init__(
        self, cluster: Cluster, aws: Aws, stack: Stack, version: str | None = None, allowed: tuple[str, ...] = ()
    ) -> None:
        super().__init__(cluster, aws)
        self.name = cluster.name
        self.stack = stack
        self.needs = (stack,)
        self.version = version
        self.allowed = allowed
        self.addons: dict[str, str] = {}  # versions of the ready add-ons
        self.remove_command = f"aws eks delete-cluster --region {aws.region} --name {self.name}"

    def find_raw(self) -> dict[str, Any] | None:
        """AWS' description of the cluster; None if it does not exist."""
        return find_raw_cluster(self.aws, self.name)

    def create(self) -> None:
        """Request the cluster with API access entries, standard support only, and without default add-ons."""
        network = self.stack.network()
        access: dict[str, Any] = {"subnetIds": list(network.subnets.values())[:2]}
        access |= {"endpointPublicAccess": True, "endpointPrivateAccess": True}
        if self.allowed:
            access["publicAccessCidrs"] = list(self.allowed)
        version = version_for(self.aws, self.version)
        self.aws.call(
            "eks",
            "create_cluster",
            name=self.name,
            roleArn=network.control_role,
            resourcesVpcConfig=access,
            accessConfig={"authenticationMode": "API", "bootstrapClusterCreatorAdminPermissions": True},
            # Standard support ends by itself; extended support costs six times as much.
            upgradePolicy={"supportType": "STANDARD"},
            bootstrapSelfManagedAddons=False,
            tags=ownership_tags(self.cluster),
            clientRequestToken=self.token,
            **({"version": version} if version else {}),
        )

    def poll(self) -> Readiness:
        """Ready when ACTIVE. Raises with AWS' issues if the creation has failed."""
        found = self.require_raw()
        if found["status"] == "ACTIVE":
            return Readiness(True)
        if found["status"] == "FAILED":
            raise error_from_issues(found, f"The EKS cluster {self.name} was not created")
        return Readiness(False, f"its control plane is {found['status']}")

    def remove(self) -> None:
        """Send the delete call. Raises NotFoundError if the cluster does not exist."""
        self.aws.call("eks", "delete_cluster", name=self.name)

    def find_flaw(self, described: dict[str, Any]) -> str | None:
        """The issues of a cluster whose creation failed; None if it did not fail."""
        return _issues(described) or "FAILED" if described["status"] == "FAILED" else None

    def find_difference(self, described: dict[str, Any]) -> str | None:
        """The cluster's version of Kubernetes, if it differs from the requested one."""
        if self.version and described.get("version") != self.version:
            return f"it has Kubernetes {described.get('version')}, not {self.version}"
        return None

    def access(self) -> Access:
        """Connect to the cluster's API with a token of the caller's AWS identity."""
        return access_to(self.aws, self.name)


class AddOn(EksResource):
    """A part of Kubernetes installed by EKS and deleted with `goes_with`."""

    kind = "add-on"
    create_seconds = 1200.0

    def __init__(
        self,
        plane: ControlPlane,
        addon: str,
        needs: tuple[Resource, ...] = (),
        *,
        account: str | None = None,
        plain: bool = False,
    ) -> None:
        """`account`: the service account that gets the stack's role for volumes. `plain`: without mlbench's
        settings."""
        super().__init__(plane.cluster, plane.aws)
        self.addon = addon
        self.account = account
        self.settings = None if plain else SETTINGS.get(addon)
        self.name = f"{plane.name}/{addon}"
        self.plane = plane
        self.needs = needs or (plane,)
        # Deleted with its machines, which are deleted before the control plane.
        self.goes_with = self.needs[-1]
        self.remove_command = (
            f"aws eks delete-addon --region {self.aws.region} --cluster-name {plane.name} --addon-name {addon}"
        )

    def find_raw(self) -> dict[str, Any] | None:
        """Describe the add-on in AWS' own fields; None if it is not installed."""
        names = {"clusterName": self.plane.name, "addonName": self.addon}
        addon: dict[str, Any] | None = self.aws.find("eks", "describe_addon", "addon", **names)
        return addon

    def create(self) -> None:
        """Request the add-on with `SETTINGS`, overwriting existing objects with its names."""
        settings: dict[str, Any] = {"configurationValues": self.settings} if self.settings else {}
        if self.account and (role := self.plane.stack.network().volume_role):
            settings["podIdentityAssociations"] = [{"serviceAccount": self.account, "roleArn": role}]
        if version := self._choose_version():
            settings["addonVersion"] = version
        self.aws.call(
            "eks",
            "create_addon",
            clusterName=self.plane.name,
            addonName=self.addon,
            resolveConflicts="OVERWRITE",
            tags=ownership_tags(self.cluster),
            clientRequestToken=self.token,
            **settings,
        )

    def poll(self) -> Readiness:
        """Ready when ACTIVE; DEGRADED until its pods run. Raises with AWS' issues if the creation failed."""
        found = self.require_raw()
        if found["status"] == "ACTIVE":
            self.plane.addons[self.addon] = str(found.get("addonVersion") or "")
            return Readiness(True, facts={"addons": dict(self.plane.addons)})
        if found["status"] == "CREATE_FAILED":
            raise error_from_issues(found, f"The add-on {self.name} was not created")
        return Readiness(False, _issues(found) or f"it is {found['status']}")  # DEGRADED, until its pods run

    def _choose_version(self) -> str | None:
        """The pinned version if EKS offers it, else EKS' default for the cluster's Kubernetes; None: EKS chooses."""
        version = (self.plane.find_raw() or {}).get("version")
        if not version:
            return None
        try:
            answer = self.aws.call("eks", "describe_addon_versions", addonName=self.addon, kubernetesVersion=version)
        except CredentialError:  # a permission that earlier versions of mlbench did not need
            return None
        offered = {item["addonVersion"]: item for group in answer["addons"] for item in group["addonVersions"]}
        known = find_pin("eks", self.addon, str(version))
        if known in offered:
            return known
        defaults = [
            name for name, item in offered.items() if any(fit.get("defaultVersion") for fit in item["compatibilities"])
        ]
        return defaults[0] if defaults else None

    def remove(self) -> None:
        """Send the delete call. Raises NotFoundError if the add-on is not installed."""
        self.aws.call("eks", "delete_addon", clusterName=self.plane.name, addonName=self.addon)


class Admin(Part):
    """Another principal with administrator access to the cluster."""

    kind = "access entry"
    create_seconds = 120.0

    def __init__(self, plane: ControlPlane, principal: str) -> None:
        self.plane = plane
        self.aws = plane.aws
        self.principal = principal
        self.name = f"{plane.name}/{principal}"
        self.needs = (plane,)
        self.goes_with = plane
        self.token = uuid.uuid4().hex
        self._named = {"clusterName": plane.name, "principalArn": principal}

    def find(self) -> ResourceStatus | None:
        """Find the administrator policy among the principal's policies on the cluster."""
        try:
            policies = self.aws.pages(
                "eks", "list_associated_access_policies", "associatedAccessPolicies", **self._named
            )
        except NotFoundError:
            return None
        return (
            ResourceStatus("there")
            if any(item["policyArn"] == admin_policy(self.aws.region) for item in policies)
            else None
        )

    def create(self) -> None:
        """Create the access entry, unless it exists, and associate the administrator policy with it."""
        try:
            self.aws.call(
                "eks",
                "create_access_entry",
                **self._named,
                tags=ownership_tags(self.plane.cluster),
                clientRequestToken=self.token,
            )
        except UsageError as error:
            if not str(error.details.get("aws", "")).startswith("ResourceInUse"):
                raise  # it exists, perhaps without its policy
        scope = {"type": "cluster"}
        self.aws.call(
            "eks", "associate_access_policy", **self._named, policyArn=admin_policy(self.aws.region), accessScope=scope
        )


def _issues(described: dict[str, Any]) -> str | None:
    issues = (described.get("health") or {}).get("issues") or []
    return "; ".join(f"{item.get('code')}: {item.get('message')}" for item in issues) or None


# --- machines: managed node groups, and the launch template for those with fast networks ------------------------------

# The disk for images and logs. Bottlerocket's system has its own small disk before it.
DISKS = {AL2023: "/dev/xvda", BOTTLEROCKET: "/dev/xvdb"}
CONSOLE_TROUBLE = re.compile(r"error|fail|timed? ?out|denied|refused|unreachable", re.IGNORECASE)
# Newest activities of an auto scaling group to check for failures; each started machine is one.
MAX_ACTIVITIES = 50


class LaunchTemplate(Resource):
    """How machines start: close together, with one EFA interface per network card."""

    kind = "launch template"
    create_seconds = delete_seconds = 120.0

    def __init__(
        self,
        plane: ControlPlane,
        disk: int,
        machine: Machine | None,
        placement: PlacementGroup | None = None,
        system: str = AL2023,
        reservation: str | None = None,
        private: bool = False,
    ) -> None:
        self.private = private
        self.cluster = plane.cluster
        self.aws = plane.aws
        self.plane = plane
        self.name = f"mlbench-{plane.name}"
        self.disk = disk
        self.device = DISKS[system]
        self.reservation = reservation
        self.machine = machine  # None: ordinary interfaces
        self.placement = placement
        self.needs = (plane, *((placement,) if placement else ()))
        self.token = uuid.uuid4().hex
        self.remove_command = (
            f"aws ec2 delete-launch-template --region {self.aws.region} --launch-template-name {self.name}"
        )

    def find(self) -> ResourceStatus | None:
        """Look for the template by its name; None if it does not exist."""
        question = ("ec2", "describe_launch_templates", "LaunchTemplates")
        found = self.aws.find(*question, LaunchTemplateNames=[self.name])
        if found is None:
            return None
        return ResourceStatus("there", ours=tags_of(found[0].get("Tags")).get(CLUSTER_TAG) == self.cluster.name)

    def create(self) -> None:
        """Request the template: disk, tags of started machines, IMDSv2, placement, an interface per network card."""
        tags = tag_list(ownership_tags(self.cluster))
        kinds = ("instance", "volume", "network-interface")
        volume = {"VolumeSize": self.disk, "VolumeType": "gp3", "DeleteOnTermination": True}
        data: dict[str, Any] = {
            "BlockDeviceMappings": [{"DeviceName": self.device, "Ebs": volume}],
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in kinds],
            "MetadataOptions": {
                "HttpTokens": "required",
                "HttpPutResponseHopLimit": 1,
            },  # pods cannot take the machine's role,
        }
        if self.reservation:
            data |= find_reservation(self.aws, self.reservation).template
        if self.placement:
            data["Placement"] = {"GroupName": self.placement.name}
        if self.machine:
            data["NetworkInterfaces"] = self._interfaces(self.machine)
        self.aws.call(
            "ec2",
            "create_launch_template",
            LaunchTemplateName=self.name,
            LaunchTemplateData=data,
            TagSpecifications=[{"ResourceType": "launch-template", "Tags": tags}],
            ClientToken=self.token,
        )

    def poll(self) -> Readiness:
        """Ready when AWS shows it."""
        return Readiness(self.find() is not None, "it is not shown yet")

    def delete(self) -> None:
        """Delete the template with all versions; succeeds if it does not exist."""
        self.token = uuid.uuid4().hex
        with suppress(NotFoundError):
            self.aws.call("ec2", "delete_launch_template", LaunchTemplateName=self.name)

    def _interfaces(self, machine: Machine) -> list[dict[str, Any]]:
        """Network interfaces in the cluster's security group, which allows all traffic between members, as EFA
        requires.

        The first card has the machine's address, with EFA or without (P6-B300: aws-parallelcluster 7143). The others
        are for EFA only and take none, as EC2's guide on EFA has them since 2026 (terraform-aws-eks 3653).
        """
        plane = find_raw_cluster(self.aws, self.plane.name)
        if plane is None:
            raise TransientError(f"AWS does not show the EKS cluster {self.plane.name}.")
        group = plane["resourcesVpcConfig"]["clusterSecurityGroupId"]
        cards = machine.efa + machine.plain_first
        kinds = ["interface" if machine.plain_first else "efa", *["efa-only"] * (cards - 1)]
        interfaces: list[dict[str, Any]] = [
            {
                "NetworkCardIndex": card,
                "DeviceIndex": 0,
                "InterfaceType": kind,
                "Groups": [group],
                "DeleteOnTermination": True,
            }
            for card, kind in enumerate(kinds)
        ]
        # With several, EC2 assigns no public address, so machines are in the private subnet.
        if cards == 1 and not self.private and self.plane.stack.network().public:
            interfaces[0]["AssociatePublicIpAddress"] = True
        return interfaces


class NodeGroup(EksResource):
    """Equal machines in one zone, all requested ones or none: EKS manages their auto scaling group."""

    kind = "node group"
    create_seconds = 2400.0
    delete_seconds = 2400.0

    def __init__(
        self,
        plane: ControlPlane,
        stack: Stack,
        group: Group,
        needs: tuple[Resource, ...],
        template: LaunchTemplate | None = None,
    ) -> None:
        super().__init__(plane.cluster, plane.aws)
        self.plane = plane
        self.stack = stack
        self.group = group
        self.name = group.name
        self.template = template
        self.needs = (plane, *needs, *((template,) if template else ()))
        self.remove_command = (
            f"aws eks delete-nodegroup --region {self.aws.region} --cluster-name {plane.name} "
            f"--nodegroup-name {self.name}"
        )

    def find_raw(self) -> dict[str, Any] | None:
        """AWS' description of the node group; None if it does not exist."""
        return find_raw_group(self.aws, self.plane.name, self.name)

    def create(self) -> None:
        """Request the group with a fixed number of machines, labels, taints and tags in the call."""
        group = self.group
        self.aws.call(
            "eks",
            "create_nodegroup",
            clusterName=self.plane.name,
            nodegroupName=self.name,
            nodeRole=self.stack.network().machine_role,
            subnets=[self._subnet()],
            amiType=group.image,
            capacityType=self._capacity_type(),
            # No autoscaling: exactly the requested number.
            scalingConfig=scaling_config(group.count),
            labels=group.labels,
            taints=group.taints,
            tags=ownership_tags(self.cluster),
            clientRequestToken=self.token,
            **self._launch_settings(),
        )

    def poll(self) -> Readiness:
        """Ready when ACTIVE.

        Raises with AWS' issues if machines are unavailable, even while EKS is still retrying.
        """
        found = self.require_raw()
        state = found["status"]
        if state == "ACTIVE":
            return Readiness(True)
        if state in ("CREATE_FAILED", "DEGRADED") or (state == "CREATING" and _issue(found)):
            issue = error_from_issues(found, f"The node group {self.name} did not get its machines", self.aws.region)
            raise self._explain(issue, found)
        if state == "CREATING" and (error := self._launch_failure(found)):
            raise error
        return Readiness(False, f"{self.group.count} × {self.group.types[0]}: {state}")

    def remove(self) -> None:
        """Send the delete call. Raises NotFoundError if the group does not exist."""
        self.aws.call("eks", "delete_nodegroup", clusterName=self.plane.name, nodegroupName=self.name)

    def find_flaw(self, described: dict[str, Any]) -> str | None:
        """Why the group will never be ready.

        Includes groups that wait for machines in another zone than the one requested now.
        """
        if flaw := super().find_flaw(described):
            return flaw
        # If a zone had no machines, another one may be tried.
        elsewhere = described["status"] == "CREATING" and self._has_moved(described)
        return f"it is waiting for machines in a zone other than {self.group.zone}" if elsewhere else None

    def find_difference(self, described: dict[str, Any]) -> str | None:
        """The first of type, purchase, zone and number in which the group differs from the request."""
        group = self.group
        if described["status"] in ("DELETING", "DELETE_FAILED", "CREATE_FAILED"):
            return None
        if described.get("instanceTypes") and list(group.types[:1]) != described["instanceTypes"][:1]:
            return f"its machines are {described['instanceTypes'][0]}, not {group.types[0]}"
        if group.reservation is None and described.get("capacityType") not in (None, self._capacity_type()):
            return f"its machines are {described['capacityType']}"
        if described["status"] == "ACTIVE" and self._has_moved(described, group.zones):
            return f"its machines are not in the zone {group.zone}"
        count = described["scalingConfig"]["desiredSize"]
        if count != group.count:
            return f"it has {count} machines, not {group.count} (mlbench scale-cluster {self.cluster.name} N)"
        return None

    def _has_moved(self, described: dict[str, Any], others: Sequence[str] = ()) -> bool:
        """Whether the group is neither in the requested zone nor in `others`."""
        if self.group.zone is None:
            return False
        try:
            network = self.stack.network()
            subnets = network.private_subnets if self.group.private else network.subnets
            wanted = {subnets[zone] for zone in (self.group.zone, *others) if zone in subnets}
            return bool(wanted) and not wanted & set(described["subnets"])
        except NotFoundError:
            return False  # without its network it can only be deleted

    def _subnet(self) -> str:
        network = self.stack.network()
        subnets = network.private_subnets if self.group.private and network.private_subnets else network.subnets
        return subnets.get(self.group.zone or "") or next(iter(subnets.values()))

    def _capacity_type(self) -> str:
        """EKS' name of the purchase option."""
        if self.group.reservation and find_reservation(self.aws, self.group.reservation).is_block:
            return "CAPACITY_BLOCK"
        return "SPOT" if self.group.spot else "ON_DEMAND"

    def _launch_settings(self) -> dict[str, Any]:
        # With a reservation the template has the type: EKS rejects it in both places.
        types = {} if self.group.reservation else {"instanceTypes": list(self.group.types)}
        if self.template:
            return {"launchTemplate": {"name": self.template.name}, **types}
        return {"diskSize": self.group.disk, **types}

    def _launch_failure(self, found: dict[str, Any]) -> MlbenchError | None:
        """The failure reported by the auto scaling group, long before EKS reports it. Without permission to read it,
        None."""
        for name in _scaling_groups(found):
            try:
                answer = self.aws.call(
                    "autoscaling", "describe_scaling_activities", AutoScalingGroupName=name, MaxRecords=MAX_ACTIVITIES
                )
                running = self._count_machines(name)
            except (CredentialError, NotFoundError):
                return None
            if running >= self.group.count:
                return None  # it got them after all
            for activity in answer["Activities"]:
                said = activity.get("StatusMessage") or activity["StatusCode"]
                message = f'{self.name} has {running} of {self.group.count} machines and cannot get more: "{said}"'
                if activity["StatusCode"] != "Failed":
                    continue
                error = error_from_message("AsgInstanceLaunchFailures", message, said, self.aws.region)
                # Other errors may be transient, such as a new role that is not yet visible everywhere in IAM.
                if isinstance(error, CapacityError) or error_from_cause(message, said, self.aws.region):
                    return error
        return None

    def _explain(self, error: MlbenchError, found: dict[str, Any]) -> MlbenchError:
        """The error; for machines that did not join, with the console output of one of them, if permitted."""
        if not isinstance(error, NeverStartedError):
            return error
        try:
            names = [item["name"] for item in (found.get("resources") or {}).get("autoScalingGroups", [])]
            answer = self.aws.call("autoscaling", "describe_auto_scaling_groups", AutoScalingGroupNames=names[:1])
            machines = [item["InstanceId"] for group in answer["AutoScalingGroups"] for item in group["Instances"]]
            if not machines:
                return error
            printed = self.aws.call("ec2", "get_console_output", InstanceId=machines[0])
        except MlbenchError:
            return error
        lines = [line.strip() for line in str(printed.get("Output") or "").splitlines() if CONSOLE_TROUBLE.search(line)]
        last = "; ".join(lines[-3:])[:500] or "no reason given"
        command = f"aws ec2 get-console-output --region {self.aws.region} --instance-id {machines[0]}"
        return NeverStartedError(f'{error.message} {machines[0]} printed: "{last}"', hint=f"{command}\n{error.hint}")

    def _count_machines(self, name: str) -> int:
        """The number of running machines of an auto scaling group, which already cost money."""
        answer = self.aws.call("autoscaling", "describe_auto_scaling_groups", AutoScalingGroupNames=[name])
        return sum(len(group.get("Instances") or ()) for group in answer["AutoScalingGroups"])


class NodeGroupSize(Part):
    """The number of machines in a node group."""

    kind = "size of node group"
    create_seconds = 2400.0

    def __init__(self, group: NodeGroup, count: int) -> None:
        self.group = group
        self.count = count
        self.name = group.name
        self.goes_with = group
        self.token = uuid.uuid4().hex

    def find(self) -> ResourceStatus | None:
        """The group's status if it has this size, else None, so that the life-cycle sets the size."""
        described = self.group.find_raw()
        if described is None:
            raise NotFoundError(
                f"There is no node group {self.name}.",
                hint=f"mlbench delete-cluster eks {self.group.plane.name}, or repeat the create-cluster command",
            )
        if described["status"] != "UPDATING" and described["scalingConfig"]["desiredSize"] != self.count:
            return None
        return ResourceStatus(
            described["status"], ours=(described.get("tags") or {}).get(CLUSTER_TAG) == self.group.cluster.name
        )

    def create(self) -> None:
        """Request the new number of machines."""
        self.group.aws.call(
            "eks",
            "update_nodegroup_config",
            clusterName=self.group.plane.name,
            nodegroupName=self.name,
            scalingConfig=scaling_config(self.count),
            clientRequestToken=self.token,
        )

    def poll(self) -> Readiness:
        """Ready when the group is ACTIVE with that number. Raises with AWS' issues if it is DEGRADED."""
        described = self.group.require_raw()
        if described["status"] == "DEGRADED":
            raise error_from_issues(described, f"The node group {self.name} did not get its machines")
        reached = described["scalingConfig"]["desiredSize"] == self.count
        return Readiness(reached and described["status"] == "ACTIVE", f"it is {described['status']}")


def find_raw_group(aws: Aws, cluster: str, name: str) -> dict[str, Any] | None:
    """Describe a node group in AWS' own fields; None if it does not exist."""
    names = {"clusterName": cluster, "nodegroupName": name}
    group: dict[str, Any] | None = aws.find("eks", "describe_nodegroup", "nodegroup", **names)
    return group


def scaling_config(count: int) -> dict[str, int]:
    """EKS' scaling configuration for exactly `count` machines; the maximum size must not be 0."""
    return {"minSize": 0, "maxSize": max(1, count), "desiredSize": count}


def worker_group(cluster: Cluster) -> str:
    """The name of a cluster's worker group."""
    return f"{cluster.name}-workers"


def _scaling_groups(described: Mapping[str, Any]) -> list[str]:
    """The auto scaling groups of a node group; none until EKS shows them."""
    return [item["name"] for item in (described.get("resources") or {}).get("autoScalingGroups", [])]


def _issue(found: dict[str, Any]) -> bool:
    return bool((found.get("health") or {}).get("issues"))


# --- device plugins for GPUs and fast network cards, and waiting until all machines show their devices ----------------


@dataclass(frozen=True)
class Device:
    """A device by Kubernetes' name, with `each` per machine; `manifest` is its device plugin."""

    resource: str
    words: str
    each: int
    manifest: str | None  # None: the machines' image includes the plugin


def gpu_device(each: int, *, built_in: bool = False) -> Device:
    """NVIDIA GPUs, `each` per machine; `built_in` if the node image brings the device plugin."""
    return Device(GPU, "GPU", each, None if built_in else "kubernetes/nvidia-device-plugin.yaml")


def network_card_device(each: int) -> Device:
    """EFA network cards, `each` per machine."""
    return Device(EFA, "EFA", each, "kubernetes/efa-device-plugin.yaml")


class DevicePlugin(ClusterObjects):
    """A device plugin, applied unless the machines' image includes it; ready when all machines show their devices."""

    def __init__(
        self, plane: ControlPlane, workers: NodeGroup, count: int, device: Device, needs: tuple[Resource, ...] = ()
    ) -> None:
        self.manifest = device.manifest
        name = str(self.documents()[0]["metadata"]["name"]) if self.manifest else f"{plane.name}/{count}"
        super().__init__(plane.access, name, needs or (plane, workers), workers)
        self.plane = plane
        self.count = count
        self.device = device
        self.kind = f"{device.words} device{' plugin' if self.manifest else 's'}"

    def documents(self) -> Sequence[Document]:
        """The DaemonSet; empty if the image includes it."""
        image = require_pin("devices", Path(self.manifest).stem) if self.manifest else None
        return documents(self.manifest, {"image": image}) if self.manifest else []

    def find(self) -> ResourceStatus | None:
        """Find the DaemonSet; None if it is missing, included in the image, or the cluster is unreachable."""
        return super().find() if self.manifest else None

    def create(self) -> None:
        """Apply the DaemonSet (server-side apply). Raises TransientError while the cluster is unreachable."""
        try:
            super().create()
        except NotFoundError:
            raise TransientError(f"The EKS cluster {self.plane.name} cannot be reached yet.") from None

    def poll(self) -> Readiness:
        """Ready when `count` workers show all their devices."""
        try:
            nodes = list_workers(self.connect)
        except NotFoundError:
            return Readiness(False, "the cluster cannot be reached yet")
        device = self.device
        ready = sum(1 for node in nodes if count_allocatable(node, device.resource) >= device.each)
        return Readiness(
            ready >= self.count, f"{ready} of {self.count} machines show {device.each} × {device.resource}"
        )


# --- volumes --------------------------------------------------------------------------------------------------------

# A new cluster has neither a driver nor a default storage class, so claims would stay pending. The EBS driver is an
# EKS add-on. Its service account gets a role of the stack through EKS Pod Identity: pods cannot use the machines'
# role, because AL2023 machines limit metadata requests to one network hop. Sources: EKS' user guide (Pod Identity, EBS
# CSI driver), Kubernetes' storage classes.


AGENT, DRIVER = "eks-pod-identity-agent", "aws-ebs-csi-driver"
DRIVER_ACCOUNT = "ebs-csi-controller-sa"
CLASS = "mlbench-gp3"
MANIFEST = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {
        "name": CLASS,
        "labels": {"app.kubernetes.io/managed-by": "mlbench"},
        "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
    },
    "provisioner": "ebs.csi.aws.com",
    "parameters": {"type": "gp3"},
    # A disk is in the zone of its pod, so it is created once the pod is scheduled.
    "volumeBindingMode": "WaitForFirstConsumer",
    "allowVolumeExpansion": True,
    "reclaimPolicy": "Delete",
}


class StorageClass(ClusterObjects):
    """The default storage class."""

    kind = "storage class"

    def documents(self) -> Sequence[Document]:
        return [MANIFEST]


def volume_resources(plane: ControlPlane, machines: Resource) -> list[Resource]:
    """The resources for claims, in the order of creation; the driver's pods run on `machines`."""
    agent = AddOn(plane, AGENT)  # a DaemonSet, ACTIVE without machines, so it is created while they start
    driver = AddOn(plane, DRIVER, (plane, agent, machines), account=DRIVER_ACCOUNT)
    return [agent, driver, StorageClass(plane.access, f"{plane.name}/{CLASS}", (plane,), plane)]


# --- the end of a cluster ---------------------------------------------------------------------------------------------

# Scheduled actions of auto scaling groups remove all machines in time. They are set as soon as EKS shows the auto
# scaling group, before its machines are ready. An action is deleted with its group, which belongs to EKS. The control
# plane and a NAT gateway remain until `mlbench gc --expired` or `delete-cluster`. Sources: docs/development.

ACTION = "mlbench-end"


class EndTimer(Part):
    """The scheduled action that removes the machines of one node group."""

    kind = "scheduled end"
    create_seconds = 2400.0

    def __init__(self, group: NodeGroup, expires: float, needs: tuple[Resource, ...] | None = None) -> None:
        self.group = group
        self.aws = group.aws
        self.expires = int(expires)
        self.name = f"{group.name}/{ACTION}"
        self.needs = tuple(group.needs) if needs is None else needs
        self.goes_with = group

    def find(self) -> ResourceStatus | None:
        """None if a group has no such action, or one for another time, which `create` changes.

        Raises BusyError while EKS creates the group and does not show its auto scaling group.
        """
        group = self.group.find_raw() or {}
        names = _scaling_groups(group)
        if not names:
            if group.get("status") == "CREATING":
                raise BusyError(f"EKS does not show the auto scaling group of {self.group.name} yet.")
            return None
        found = [self._find_action(name) for name in names]
        times = [int(item["StartTime"].timestamp()) for item in found if item is not None]
        is_late = self.expires < self._earliest_start()
        as_asked = len(times) == len(names) and (is_late or set(times) == {self.expires})
        return ResourceStatus("scheduled") if as_asked else None

    def create(self) -> None:
        """Schedule the group's size 0 for the cluster's end, in UTC, for each of its auto scaling groups.

        Raises BusyError while EKS does not show the auto scaling group.
        """
        names = _scaling_groups(self.group.find_raw() or {})
        if not names:
            raise BusyError(f"EKS does not show the auto scaling group of {self.group.name} yet.")
        for name in names:
            self.aws.call(
                "autoscaling",
                "put_scheduled_update_group_action",
                AutoScalingGroupName=name,
                ScheduledActionName=ACTION,
                StartTime=datetime.fromtimestamp(max(self.expires, self._earliest_start()), UTC),
                MinSize=0,
                MaxSize=0,
                DesiredCapacity=0,
            )

    def poll(self) -> Readiness:
        """Ready with the group: one that is created again has another auto scaling group, without the action."""
        if self.find() is None:
            self.create()
        state = (self.group.find_raw() or {}).get("status")
        return Readiness(state in ("ACTIVE", "UPDATING", "DEGRADED"), f"its group is {state}")

    def _earliest_start(self) -> int:
        """The earliest valid start: AWS rejects past times, so a cluster that expires before it is ready ends at
        once."""
        return int(time.time()) + 60

    def _find_action(self, group: str) -> Mapping[str, Any] | None:
        answer = self.aws.call(
            "autoscaling", "describe_scheduled_actions", AutoScalingGroupName=group, ScheduledActionNames=[ACTION]
        )
        actions: list[Mapping[str, Any]] = answer["ScheduledUpdateGroupActions"]
        return actions[0] if actions else None


class EndTag(EndMark):
    """The tags of the control plane."""

    kind = "tag of the end"

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(plane.cluster, plane)
        self.plane = plane

    def read(self) -> Mapping[str, str]:
        return self._describe().get("tags") or {}

    def write(self, tags: Mapping[str, str]) -> None:
        self.plane.aws.call("eks", "tag_resource", resourceArn=self._describe()["arn"], tags=dict(tags))

    def _describe(self) -> dict[str, Any]:
        found = find_raw_cluster(self.plane.aws, self.plane.name)
        if found is None:
            raise UsageError(f"There is no EKS cluster {self.plane.name} in {self.plane.aws.region}.")
        return found


def timers(cluster_details: ClusterDetails, groups: list[NodeGroup]) -> list[EndTimer]:
    """A timer for each group, if the cluster has an end."""
    expires = cluster_details.expires
    return [] if expires is None else [EndTimer(group, expires) for group in groups]


# --- the image repository of --registry auto --------------------------------------------------------------------------

# A single repository, with tasks as tags: ECR requires repositories to exist before a push, and one is easier to delete
# and to find. Sources: ECR's API reference; eksctl's policies for the nodes' permission to pull.


class ImageRepository(Resource):
    """The image repository. It is deleted with its images before the stack, by which the cluster is found."""

    kind = "image repository"
    create_seconds = delete_seconds = 120.0

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.aws = stack.aws
        self.cluster = stack.cluster
        self.name = f"mlbench-{stack.cluster.name}"
        self.needs = (stack,)
        self.remove_command = (
            f"aws ecr delete-repository --region {self.aws.region} --repository-name {self.name} --force"
        )

    def find(self) -> ResourceStatus | None:
        found = self._describe()
        if found is None:
            return None
        tags = tags_of(self.aws.call("ecr", "list_tags_for_resource", resourceArn=found["repositoryArn"])["tags"])
        kept = reason_to_keep_images(self.cluster, self.remove_command)
        return ResourceStatus("there", ours=tags.get(CLUSTER_TAG) == self.cluster.name, kept=kept)

    def create(self) -> None:
        self.aws.call("ecr", "create_repository", repositoryName=self.name, tags=tag_list(ownership_tags(self.cluster)))

    def poll(self) -> Readiness:
        found = self._describe()
        # The ":" means that tags name tasks (mlbench_cli.tasks.images).
        return Readiness(
            found is not None, "AWS does not show it yet", {"registry": f"{found['repositoryUri']}:"} if found else {}
        )

    def delete(self) -> None:
        with suppress(NotFoundError):
            self.aws.call("ecr", "delete_repository", repositoryName=self.name, force=True)

    def _describe(self) -> dict[str, str] | None:
        found: list[dict[str, str]] | None = self.aws.find(
            "ecr", "describe_repositories", "repositories", repositoryNames=[self.name]
        )
        return found[0] if found else None


def fetch_login(aws: Aws) -> tuple[str, str]:
    """User and password of the account's registry, valid for twelve hours."""
    data = aws.call("ecr", "get_authorization_token")["authorizationData"]
    user, colon, password = base64.b64decode(data[0]["authorizationToken"]).decode().partition(":")
    if not colon:
        raise MlbenchError("ECR gave a login that is not of the form USER:PASSWORD.")
    return user, password
