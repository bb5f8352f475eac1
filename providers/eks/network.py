"""A cluster's network and roles, in one CloudFormation stack, and its placement group."""

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from providers.base import CLUSTER_TAG, BusyError, Readiness, Resource, ResourceStatus, ownership_tags
from providers.eks.api import ELSEWHERE, Aws, error_from_code, tag_list, tags_of
from providers.eks.given_subnets import find_subnets
from providers.eks.leftovers import clear_cluster, clear_network, is_in_use, list_interfaces
from templates import render

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


def zones_for(aws: Aws, machine_types: list[str], zone: str | None) -> list[str]:
    """At least two zones of the region; first `zone`, or else one with these machine types.

    Raises UsageError if `zone` does not have them, CapacityError if no zone of the region does.
    """
    filters = [{"Name": "zone-type", "Values": ["availability-zone"]}, {"Name": "state", "Values": ["available"]}]
    zones = sorted(
        item["ZoneName"]
        for item in aws.call("ec2", "describe_availability_zones", Filters=filters)["AvailabilityZones"]
        # us-east-1e and others: EKS has no control planes there.
        if item.get("ZoneId") not in ("use1-az3", "usw1-az2", "cac1-az3")
    )
    offering = zones_with(aws, machine_types)
    if zone and zone not in offering:
        raise UsageError(
            f"The zone {zone} does not have {machine_types[0]}.", hint=f"These have it: {', '.join(sorted(offering))}"
        )
    ordered = sorted(zones, key=lambda name: (name != zone, name not in offering, name))
    if len(ordered) < 2:
        raise UsageError(f"EKS needs two zones, but only {len(ordered)} are available in {aws.region}.")
    return ordered


def zones_with(aws: Aws, machine_types: list[str]) -> set[str]:
    """The zones of the region with the first of these types. Raises CapacityError if there are none."""
    offers = aws.pages(
        "ec2",
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": machine_types}],
    )
    offering = {offer["Location"] for offer in offers if offer["InstanceType"] == machine_types[0]}
    if not offering:
        raise CapacityError(
            f"{machine_types[0]} is offered in no zone of {aws.region}.", hint=f"Choose another --region. {ELSEWHERE}"
        )
    return offering
