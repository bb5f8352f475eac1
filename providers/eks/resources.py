"""The resources of an EKS cluster: CloudFormation stacks of cluster and node groups, and what goes with them.

cluster.yaml has network, roles, control plane and add-ons; nodegroup.yaml has machines, of which the workers' stack can
be replaced by one in another zone. A stack's events are its progress and its errors.
"""

import base64
import json
import re
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

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
    OWNER_TAG,
    BusyError,
    Part,
    Readiness,
    Resource,
    ResourceStatus,
    RightsError,
    TransientError,
    ownership_tags,
)
from providers.cluster_end import EndMark
from providers.eks.api import (
    Aws,
    access_to,
    error_from_cause,
    error_from_issues,
    error_from_message,
    find_raw_cluster,
    is_caller,
    session,
    tag_list,
    tags_of,
)
from providers.eks.options import AL2023, BOTTLEROCKET, EksOptions, Group, Machine, split_subnets
from providers.eks.quota import find_reservation, find_subnets, version_for, zones_for, zones_with
from providers.kubernetes_calls import ClusterObjects, Document
from providers.pins import find_pin

# --- the stacks -------------------------------------------------------------------------------------------------------

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
# An issue of EKS in the event of a node group, with its code and its words.
ISSUE = re.compile(r"Code[=:] ?(\w+), ?Message[=:] ?(.*?), ?ResourceIds")
# After this time the stack's deletion is requested even if interfaces are still attached: its NAT gateway and address,
# which cost money, are deleted at once; subnets and network, which are free, once the interfaces are gone.
OCCUPIED_SECONDS = 600.0
BROKEN = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED")
# Includes stacks changed by users in CloudFormation.
WHOLE = ("CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE")


@dataclass(frozen=True)
class Network:
    """What node groups need of the cluster's stack: subnets by zone, and the roles' ARNs."""

    vpc: str
    subnets: dict[str, str]  # public subnets by zone; the first is for the machines
    private_subnets: dict[str, str]  # by zone; empty unless machines need them
    machine_role: str
    volume_role: str
    security_group: str  # of the control plane and of all machines
    public: frozenset[str]  # zones where machines get public addresses


class Stack(Resource):
    """A CloudFormation stack, by the rights of its caller. If a part fails, AWS itself removes what the stack has.

    What of it is in no stack was made by an earlier version of mlbench, or its stack was deleted by hand.
    """

    minutes: int  # CloudFormation's own timeout

    def __init__(self, cluster: Cluster, aws: Aws, name: str, stack: str) -> None:
        self.cluster = cluster
        self.aws = aws
        self.name = name
        self.stack = stack
        self.token = uuid.uuid4().hex
        self._requested = False  # whether this process has requested its deletion
        self.remove_command = f"aws cloudformation delete-stack --region {aws.region} --stack-name {stack}"

    @abstractmethod
    def template(self) -> dict[str, Any]:
        """The stack's template."""

    @abstractmethod
    def parameters(self) -> dict[str, str]:
        """The values of the template's parameters."""

    @abstractmethod
    def find_stray(self) -> ResourceStatus | None:
        """What there is without a stack; None if there is nothing."""

    def find_flaw(self, stack: Document) -> str | None:
        """Why a stack in creation will not become the requested one; None if it may."""
        return None

    def find_obstacle(self) -> str | None:
        """What its deletion has to wait for; None if it can be requested."""
        return None

    @abstractmethod
    def find_difference(self, stack: Document) -> str | None:
        """How a stack differs from the request; None if it does not."""

    def check_progress(self) -> None:
        """Raise what AWS says of a part that will fail, long before CloudFormation gives up."""

    def collect_facts(self) -> dict[str, object]:
        """Facts of a whole stack for the cluster's record."""
        return {}

    def describe(self) -> dict[str, Any] | None:
        """The stack in AWS' own fields; None if it does not exist."""
        stacks = self.aws.find("cloudformation", "describe_stacks", "Stacks", StackName=self.stack)
        present = [stack for stack in stacks or () if stack["StackStatus"] != "DELETE_COMPLETE"]
        return present[0] if present else None

    def find(self) -> ResourceStatus | None:
        """The status from the stack's state: rolled back is broken; stacks without mlbench's tag are not touched."""
        stack = self.describe()
        if stack is None:
            return self.find_stray()
        state = stack["StackStatus"]
        tags = tags_of(stack.get("Tags"))
        ours, owner = tags.get(CLUSTER_TAG) == self.cluster.name, tags.get(OWNER_TAG)
        # During a rollback it can neither be used nor deleted.
        if not ours or state in ("DELETE_IN_PROGRESS", "ROLLBACK_IN_PROGRESS"):
            return ResourceStatus(state, ours, deleting=True)
        if state in BROKEN:
            reason = stack.get("StackStatusReason") or state
            return ResourceStatus(state, broken=reason, busy=self.find_obstacle(), owner=owner)
        if state == "CREATE_IN_PROGRESS":
            return ResourceStatus(state, broken=self.find_flaw(stack), owner=owner)
        differs = self.find_difference(stack)
        return ResourceStatus(state, busy=self.find_obstacle(), differs=differs, owner=owner)

    def create(self) -> None:
        """Request the stack, with its tags in the call."""
        self.aws.call(
            "cloudformation",
            "create_stack",
            StackName=self.stack,
            TemplateBody=json.dumps(self.template()),
            Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in self.parameters().items()],
            Capabilities=["CAPABILITY_IAM"],
            TimeoutInMinutes=self.minutes,
            OnFailure="ROLLBACK",
            Tags=tag_list(ownership_tags(self.cluster)),
            ClientRequestToken=self.token,
        )

    def poll(self) -> Readiness:
        """Ready when the stack is complete. Raises with the first failed event, or what AWS says before it."""
        stack = self.describe()
        if stack is None:
            raise MlbenchError(f"The stack {self.stack} disappeared while it was being created.")
        if stack["StackStatus"] not in (*WHOLE, "CREATE_IN_PROGRESS"):
            raise self.explain(stack)
        self.check_progress()
        if stack["StackStatus"] in WHOLE:
            return Readiness(True, facts=self.collect_facts())
        newest: dict[str, str] = {}
        for event in self._list_events():
            newest.setdefault(event["LogicalResourceId"], event.get("ResourceStatus", ""))
        doing = [part for part, state in newest.items() if state == "CREATE_IN_PROGRESS" and part != self.stack]
        return Readiness(False, f"CloudFormation is creating {', '.join(sorted(doing)) or 'it'}")

    def delete(self) -> None:
        """Request the stack's deletion."""
        self.token = uuid.uuid4().hex
        self.aws.call("cloudformation", "delete_stack", StackName=self.stack)
        self._requested = True

    def explain(self, stack: Document) -> MlbenchError:
        """The error of the first event that failed, with CloudFormation's words."""
        causes = [
            f"{event['LogicalResourceId']} ({event['ResourceType']}): {event.get('ResourceStatusReason')}"
            for event in reversed(self._list_events())
            if event.get("ResourceStatus") == "CREATE_FAILED"
            and "cancelled" not in event.get("ResourceStatusReason", "")
        ]
        cause = causes[0] if causes else str(stack.get("StackStatusReason") or stack["StackStatus"])
        issue = ISSUE.search(cause)
        code, said = issue.groups() if issue else (stack["StackStatus"], cause)
        error = error_from_message(code, f'{self._not_created()}: "{said}"', said, self.aws.region)
        hint = next((hint for pattern, hint in FORBIDDEN if re.search(pattern, cause)), None)
        if hint and isinstance(error, CredentialError):
            return CredentialError(error.message, hint=hint)
        if type(error) is MlbenchError:
            error.hint = (
                f"aws cloudformation describe-stack-events --region {self.aws.region} --stack-name {self.stack}"
            )
        return error

    def _not_created(self) -> str:
        return f"The {self.kind} {self.name} was not created"

    def _list_events(self) -> list[dict[str, Any]]:
        """The stack's events, the newest first."""
        return self.aws.pages("cloudformation", "describe_stack_events", "StackEvents", StackName=self.stack)

    def _raise_if_forbidden(self, stack: Document | None) -> None:
        """Raise CredentialError if CloudFormation lacked a right, which is its caller's, when this process asked it to
        delete the stack."""
        reason = str(stack.get("StackStatusReason")) if stack and stack["StackStatus"] == "DELETE_FAILED" else ""
        if self._requested and "not authorized" in reason:
            raise CredentialError(
                f'CloudFormation could not delete the stack {self.stack}: "{reason}"',
                hint="mlbench doctor eks   names the permissions that you lack",
            )


class ClusterStack(Stack):
    """Network, roles and control plane with its add-ons. All else needs it; it is created first and deleted last."""

    kind = "EKS cluster"
    minutes = 40
    create_seconds = 3600.0
    # Interfaces of AWS services in the network take up to 22 minutes to detach.
    delete_seconds = 5400.0

    def __init__(self, cluster: Cluster, aws: Aws, options: EksOptions, workers: Group) -> None:
        super().__init__(cluster, aws, cluster.name, f"mlbench-{cluster.name}")
        self.options = options
        self.workers = workers
        self.subnets = split_subnets(options.subnets)
        self.addons: dict[str, str] = {}  # versions of the add-ons, also of those on the system's machines
        self._network: Network | None = None
        self._occupied_since: float | None = None

    # --- creation

    def template(self) -> dict[str, Any]:
        """The template, with an access entry for each administrator but the creator, who gets one from EKS: a second
        one for the same principal fails the stack (eks-distro 2805)."""
        template = load_template("cluster.yaml")
        policy = {"PolicyArn": admin_policy(self.aws.region), "AccessScope": {"Type": "cluster"}}
        caller = str(self.aws.call("sts", "get_caller_identity")["Arn"]) if self.options.admin else ""
        others = [principal for principal in dict.fromkeys(self.options.admin) if not is_caller(principal, caller)]
        for number, principal in enumerate(others, 1):
            entry = {"ClusterName": {"Ref": "Cluster"}, "PrincipalArn": principal, "AccessPolicies": [policy]}
            template["Resources"][f"Admin{number}"] = {"Type": "AWS::EKS::AccessEntry", "Properties": entry}
        return template

    def parameters(self) -> dict[str, str]:
        """The zones are the first two with the machine types, and those that the machines may move to."""
        options, workers = self.options, self.workers
        if self.subnets:
            subnets = self._order_subnets()
            zones = list(subnets)[:2]
        else:
            subnets = {}
            offered = zones_for(self.aws, list(workers.types), options.zone)
            zones = [*workers.zones, *(zone for zone in offered if zone not in workers.zones)]
            zones = zones[: max(2, len(workers.zones))]
        version = version_for(self.aws, options.kubernetes_version)
        return {
            **dict(zip(ZONE_PARAMETERS, zones, strict=False)),
            "Name": self.name,
            "Version": version or "",
            "AllowFrom": ",".join(options.allow_from) or "0.0.0.0/0",
            "Subnets": ",".join(subnets.values()),
            "ControlSubnets": ",".join(list(subnets.values())[:2]),
            "Boundary": options.permissions_boundary or "",
            "PrivateMachines": _yes(workers.private),
            "Moving": _yes(bool(workers.zones)),
            "NetworkPolicies": _yes(not options.no_network_policies),
            "Volumes": _yes(not options.no_volumes),
            "NetworkVersion": choose_addon_version(self.aws, "vpc-cni", version),
            "ProxyVersion": choose_addon_version(self.aws, "kube-proxy", version),
            "IdentityVersion": choose_addon_version(self.aws, "eks-pod-identity-agent", version),
        }

    def collect_facts(self) -> dict[str, object]:
        """The versions of the add-ons."""
        return self.collect_addons("vpc-cni", "kube-proxy", "eks-pod-identity-agent")

    def collect_addons(self, *names: str) -> dict[str, object]:
        """The versions of these add-ons, of those that there are, beside the versions collected before."""
        for name in names:
            if found := self.aws.find("eks", "describe_addon", "addon", clusterName=self.name, addonName=name):
                self.addons[name] = str(found.get("addonVersion") or "")
        return {"addons": dict(self.addons)}

    def find_difference(self, stack: Document) -> str | None:
        """Its network, zones, or version of Kubernetes, if they are not those requested."""
        given = {item["ParameterKey"]: item.get("ParameterValue") for item in stack.get("Parameters", [])}
        if "Name" not in given:
            return "it was made by an earlier version of mlbench"
        has = given.get("Subnets") or ""
        if set(self.subnets) != set(filter(None, has.split(","))):
            return f"it is in {has or 'its own network'}, not in {','.join(self.subnets) or 'its own'}"
        zones = [zone for key in ZONE_PARAMETERS if (zone := given.get(key))]
        lacking = [zone for zone in (self.options.zone, *self.workers.zones) if zone and zone not in zones]
        if lacking and not self.subnets:
            return f"it is in the zones {' and '.join(zones)}, not in {lacking[0]}"
        if self.workers.private and not self.subnets and given.get("PrivateMachines") != "yes":
            return "it has no private subnet, which machines with several network cards need"
        wanted = self.options.kubernetes_version
        plane = find_raw_cluster(self.aws, self.name) if wanted else None
        if plane is not None and plane.get("version") != wanted:
            return f"it has Kubernetes {plane.get('version')}, not {wanted}"
        return None

    def access(self) -> Access:
        """Connect to the cluster's API with a token of the caller's AWS identity."""
        return access_to(self.aws, self.name)

    def network(self) -> Network:
        """The stack's outputs, cached. Raises NotFoundError if it is incomplete."""
        if self._network is None:
            stack = self.describe() or {}
            made = {item["OutputKey"]: item["OutputValue"] for item in stack.get("Outputs", [])}
            if stack.get("StackStatus") not in WHOLE or "SecurityGroup" not in made:
                raise NotFoundError(f"The stack {self.stack} is not complete: {stack.get('StackStatus', 'absent')}.")
            own = _subnets_by_zone(made, ("FirstSubnet", "SecondSubnet", "ThirdSubnet", "FourthSubnet"))
            given = find_subnets(self.aws, made["Subnets"].split(",")) if made.get("Subnets") else None
            self._network = Network(
                given.vpc if given else made["Vpc"],
                given.by_zone if given else own,
                _subnets_by_zone(made, ("PrivateSubnet", "SecondPrivate", "ThirdPrivate", "FourthPrivate")),
                made["MachineRole"],
                made["VolumeRole"],
                made["SecurityGroup"],
                given.public if given else frozenset(own),
            )
        return self._network

    def _order_subnets(self) -> dict[str, str]:
        """The given subnets by zone, the machines' first, as `check_subnets` has told: in the wanted zone, or else the
        first in a zone with such machines."""
        by_zone = find_subnets(self.aws, self.subnets).by_zone
        offering = zones_with(self.aws, list(self.workers.types))
        return dict(sorted(by_zone.items(), key=lambda item: (item[0] != self.options.zone, item[0] not in offering)))

    # --- deletion

    def find_stray(self) -> ResourceStatus | None:
        """A control plane without a stack, or what one has left."""
        plane = find_raw_cluster(self.aws, self.name)
        if plane is None:
            left = find_leftover(self.aws, self.name)
            return ResourceStatus("left", broken=f"{left} is left") if left else None
        ours = (plane.get("tags") or {}).get(CLUSTER_TAG) == self.cluster.name
        state = plane["status"]
        return ResourceStatus(state, ours, deleting=state == "DELETING", broken="it is in no CloudFormation stack")

    def find_obstacle(self) -> str | None:
        """What is still attached to the network and will detach by itself, e.g. machines being terminated."""
        used = [item for item in list_interfaces(self.aws, self._vpcs()) if is_in_use(item)]
        if not used or find_raw_cluster(self.aws, self.name) is not None or self._is_late():
            return None
        first = used[0]
        what = first.get("Description") or first.get("InterfaceType") or "no description"
        return f"{len(used)} network interfaces are still in use, one is {first['NetworkInterfaceId']} ({what})"

    def delete(self) -> None:
        """Delete the control plane, then what it and others have left in the network, then the rest of the stack.

        Its interfaces and groups would block the network's deletion, or stay in a given network.
        """
        self._network = None
        stack = self.describe()
        self._raise_if_forbidden(stack)
        if stack is None or stack["StackStatus"] != "CREATE_IN_PROGRESS":
            self._delete_plane()
            delete_earlier_parts(self.aws, self.name)
            try:
                clear_network(self.aws, self._vpcs())
                clear_cluster(self.aws, self.name)
            except BusyError:
                if not self._is_late():
                    raise
        if stack is not None:
            super().delete()

    def _delete_plane(self) -> None:
        """Request the deletion of the control plane. Raises BusyError until it is gone."""
        plane = find_raw_cluster(self.aws, self.name)
        if plane is None:
            return
        if plane["status"] != "DELETING":
            with busy_if_in_use():
                self.aws.call("eks", "delete_cluster", name=self.name)
        raise BusyError("its control plane is being deleted")

    def _is_late(self) -> bool:
        """Whether interfaces have blocked the network for so long that its paid parts should be deleted first."""
        if self._occupied_since is None:
            self._occupied_since = time.monotonic()
        return time.monotonic() - self._occupied_since > OCCUPIED_SECONDS

    def _vpcs(self) -> list[str]:
        """The VPCs, found by tag, because a partly deleted stack has no outputs."""
        filters = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [self.cluster.name]}]
        return [item["VpcId"] for item in self.aws.pages("ec2", "describe_vpcs", "Vpcs", Filters=filters)]


def load_template(name: str) -> dict[str, Any]:
    """A template of this folder, with the short forms of CloudFormation's functions in their long form."""

    class Loader(yaml.SafeLoader):
        pass

    def expand(loader: yaml.SafeLoader, function: str, node: yaml.Node) -> dict[str, Any]:
        value: Any
        if isinstance(node, yaml.ScalarNode):
            value = loader.construct_scalar(node)
        else:
            assert isinstance(node, yaml.SequenceNode)
            value = loader.construct_sequence(node, deep=True)
        if function == "Ref":
            return {"Ref": value}
        return {f"Fn::{function}": value.split(".", 1) if function == "GetAtt" else value}

    yaml.add_multi_constructor("!", expand, Loader)
    template: dict[str, Any] = yaml.load(Path(__file__).with_name(name).read_text("utf-8"), Loader)
    return template


def choose_addon_version(aws: Aws, addon: str, kubernetes: str | None) -> str:
    """The pinned version of an add-on if EKS offers it, else EKS' default for that Kubernetes; empty: EKS chooses."""
    if kubernetes is None:
        return ""
    try:
        answer = aws.call("eks", "describe_addon_versions", addonName=addon, kubernetesVersion=kubernetes)
    except RightsError:  # earlier versions of mlbench did not need it
        return ""
    offered = {item["addonVersion"]: item for group in answer["addons"] for item in group["addonVersions"]}
    if (known := find_pin("eks", addon, kubernetes)) in offered:
        return str(known)
    defaults = (
        name for name, item in offered.items() if any(fit.get("defaultVersion") for fit in item["compatibilities"])
    )
    return next(defaults, "")


@contextmanager
def busy_if_in_use() -> Iterator[None]:
    """Turn EKS' refusal to delete what another operation uses into BusyError. What does not exist is deleted."""
    try:
        yield
    except NotFoundError:
        return
    except UsageError as error:
        if not str(error.details.get("aws", "")).startswith("ResourceInUse"):
            raise
        raise BusyError(error.message) from None


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _subnets_by_zone(made: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The subnets among the stack's outputs, by zone."""
    pairs = ((made.get(zone), made.get(name)) for zone, name in zip(ZONE_PARAMETERS, names, strict=True))
    return {zone: subnet for zone, subnet in pairs if zone and subnet}


ADMIN_POLICY = "arn:{}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"  # of the partition


def admin_policy(region: str) -> str:
    """The ARN of EKS' administrator policy in the region's partition: of AWS, China or GovCloud."""
    return ADMIN_POLICY.format(session().get_partition_for_region(region))


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
    for interface in aws.pages("ec2", "describe_network_interfaces", "NetworkInterfaces", Filters=_of_plugin(name)):
        if interface["Status"] != "available":
            raise BusyError(f"The network interface {interface['NetworkInterfaceId']} is {interface['Status']}.")
        _delete(aws, "delete_network_interface", NetworkInterfaceId=interface["NetworkInterfaceId"])
    _delete_groups(aws, _of_plane(name))


def find_leftover(aws: Aws, name: str) -> str | None:
    """Something that a cluster without stack and control plane has left: of EKS, its network plugin, or a version of
    mlbench that made launch template and placement group by themselves."""
    for interface in aws.pages("ec2", "describe_network_interfaces", "NetworkInterfaces", Filters=_of_plugin(name)):
        return f"the network interface {interface['NetworkInterfaceId']}"
    for group in aws.pages("ec2", "describe_security_groups", "SecurityGroups", Filters=_of_plane(name)):
        return f"the security group {group['GroupId']}"
    for template in aws.find("ec2", "describe_launch_templates", "LaunchTemplates", Filters=_ours(name)) or ():
        return f"the launch template {template['LaunchTemplateName']}"
    for placement in aws.find("ec2", "describe_placement_groups", "PlacementGroups", Filters=_ours(name)) or ():
        return f"the placement group {placement['GroupName']}"
    return None


def delete_earlier_parts(aws: Aws, name: str) -> None:
    """Delete the launch template and the placement group that earlier versions of mlbench made by themselves."""
    for template in aws.find("ec2", "describe_launch_templates", "LaunchTemplates", Filters=_ours(name)) or ():
        _delete(aws, "delete_launch_template", LaunchTemplateId=template["LaunchTemplateId"])
    for placement in aws.find("ec2", "describe_placement_groups", "PlacementGroups", Filters=_ours(name)) or ():
        if placement["State"] != "deleting":
            _delete(aws, "delete_placement_group", GroupName=placement["GroupName"])


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


def _of_plugin(name: str) -> list[Item]:
    return [{"Name": "tag:cluster.k8s.amazonaws.com/name", "Values": [name]}]


def _of_plane(name: str) -> list[Item]:
    return [{"Name": "tag:aws:eks:cluster-name", "Values": [name]}]


def _ours(name: str) -> list[Item]:
    return [{"Name": f"tag:{CLUSTER_TAG}", "Values": [name]}]


# --- machines: a stack for each node group ----------------------------------------------------------------------------

# The disk for images and logs. Bottlerocket's system has its own small disk before it.
DISKS = {AL2023: "/dev/xvda", BOTTLEROCKET: "/dev/xvdb"}
CONSOLE_TROUBLE = re.compile(r"error|fail|timed? ?out|denied|refused|unreachable", re.IGNORECASE)
# Newest activities of an auto scaling group to check for failures; each started machine is one.
MAX_ACTIVITIES = 50


class NodeStack(Stack):
    """Equal machines in one zone, all requested ones or none: EKS manages their auto scaling group."""

    kind = "node group"
    minutes = 40
    create_seconds = 2400.0
    delete_seconds = 2400.0

    def __init__(self, plane: ClusterStack, group: Group, machine: Machine | None = None) -> None:
        """`machine`: those with a fast network have an EFA interface per network card."""
        super().__init__(plane.cluster, plane.aws, group.name, f"mlbench-{group.name}")
        self.plane = plane
        self.group = group
        self.machine = machine
        self.needs = (plane,)

    def find_raw(self) -> dict[str, Any] | None:
        """AWS' description of the node group; None if it does not exist."""
        return find_raw_group(self.aws, self.plane.name, self.name)

    def require_raw(self) -> dict[str, Any]:
        """AWS' description of the node group. Raises TransientError if AWS does not show it (yet)."""
        found = self.find_raw()
        if found is None:
            raise TransientError(f'AWS does not show the {self.kind} "{self.name}" yet.')
        return found

    # --- creation

    def template(self) -> dict[str, Any]:
        """The template with the group's labels and taints, the machines' tags, network cards and reservation."""
        template = load_template("nodegroup.yaml")
        machines = template["Resources"]["Machines"]["Properties"]
        machines["Labels"] = self.group.labels
        if self.group.taints:
            machines["Taints"] = self.group.taints
        data = template["Resources"]["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
        tags = tag_list(ownership_tags(self.cluster))
        kinds = ("instance", "volume", "network-interface")
        data["TagSpecifications"] = [{"ResourceType": kind, "Tags": tags} for kind in kinds]
        if self.group.reservation:
            data |= find_reservation(self.aws, self.group.reservation).template
        if self.machine:
            data["NetworkInterfaces"] = self._interfaces(self.machine)
        return template

    def parameters(self) -> dict[str, str]:
        """The group's numbers and names, and the versions of the add-ons on the system's machines."""
        group, network, options = self.group, self.plane.network(), self.plane.options
        size = scaling_config(group.count)
        parameters = {
            "Cluster": self.plane.name,
            "Group": self.name,
            "MachineRole": network.machine_role,
            "Subnet": self._subnet(),
            "ImageType": group.image,
            "Types": ",".join(group.types),
            "CapacityType": self._capacity_type(),
            "Count": str(size["desiredSize"]),
            "MaxCount": str(size["maxSize"]),
            "Device": DISKS[group.system],
            "Disk": str(group.disk),
            # EC2 has no capacity of a reservation for another placement group than the reservation's own.
            "Together": _yes(group.worker and not group.reservation and (options.efa or options.placement_group)),
            "Reserved": _yes(bool(group.reservation)),
        }
        if group.worker:
            return parameters
        version = str((find_raw_cluster(self.aws, self.plane.name) or {}).get("version") or "") or None
        return {
            **parameters,
            "System": "yes",
            "VolumeRole": "" if options.no_volumes else network.volume_role,
            "DnsVersion": choose_addon_version(self.aws, "coredns", version),
            "DriverVersion": choose_addon_version(self.aws, "aws-ebs-csi-driver", version),
        }

    def check_progress(self) -> None:
        """Raise AWS' issues if machines are unavailable, even while EKS is still retrying."""
        found = self.find_raw()
        if found is None:
            return
        state = found["status"]
        if state in ("CREATE_FAILED", "DEGRADED") or (state == "CREATING" and has_issue(found)):
            issue = error_from_issues(found, f"The node group {self.name} did not get its machines", self.aws.region)
            raise self._add_console(issue)
        if state == "CREATING" and (error := self._launch_failure(found)):
            raise error

    def collect_facts(self) -> dict[str, object]:
        """The versions of the add-ons on the system's machines."""
        return {} if self.group.worker else self.plane.collect_addons("coredns", "aws-ebs-csi-driver")

    def explain(self, stack: Document) -> MlbenchError:
        """Like other stacks; for machines that did not join, with the console output of one of them, if permitted."""
        return self._add_console(super().explain(stack))

    def _not_created(self) -> str:
        return f"The node group {self.name} did not get its machines"

    def _interfaces(self, machine: Machine) -> list[dict[str, Any]]:
        """Network interfaces in the cluster's security group, which allows all traffic between members, as EFA
        requires.

        The first card has the machine's address, with EFA or without (P6-B300: aws-parallelcluster 7143). The others
        are for EFA only and take none, as EC2's guide on EFA has them since 2026 (terraform-aws-eks 3653).
        """
        network = self.plane.network()
        cards = machine.efa + machine.plain_first
        kinds = ["interface" if machine.plain_first else "efa", *["efa-only"] * (cards - 1)]
        interfaces: list[dict[str, Any]] = [
            {
                "NetworkCardIndex": card,
                "DeviceIndex": 0,
                "InterfaceType": kind,
                "Groups": [network.security_group],
                "DeleteOnTermination": True,
            }
            for card, kind in enumerate(kinds)
        ]
        # With several, EC2 assigns no public address, so machines are in the private subnet.
        if cards == 1 and not self.group.private and network.public:
            interfaces[0]["AssociatePublicIpAddress"] = True
        return interfaces

    def _subnet(self) -> str:
        network = self.plane.network()
        subnets = network.private_subnets if self.group.private and network.private_subnets else network.subnets
        return subnets.get(self.group.zone or "") or next(iter(subnets.values()))

    def _capacity_type(self) -> str:
        """EKS' name of the purchase option."""
        if self.group.reservation and find_reservation(self.aws, self.group.reservation).is_block:
            return "CAPACITY_BLOCK"
        return "SPOT" if self.group.spot else "ON_DEMAND"

    # --- what there is

    def find_stray(self) -> ResourceStatus | None:
        """A node group without a stack."""
        found = self.find_raw()
        if found is None:
            return None
        ours = (found.get("tags") or {}).get(CLUSTER_TAG) == self.cluster.name
        state = found["status"]
        return ResourceStatus(state, ours, deleting=state == "DELETING", broken="it is in no CloudFormation stack")

    def find_flaw(self, stack: Document) -> str | None:
        """If a zone had no machines, another one may be tried."""
        given = {item["ParameterKey"]: item.get("ParameterValue") for item in stack.get("Parameters", [])}
        is_elsewhere = self._has_moved([given.get("Subnet")])
        return f"it is waiting for machines in a zone other than {self.group.zone}" if is_elsewhere else None

    def find_difference(self, stack: Document) -> str | None:
        """The first of type, purchase, zone and number in which the group differs from the request."""
        group, described = self.group, self.find_raw()
        if described is None:
            return "its machines were deleted"
        if described.get("instanceTypes") and list(group.types[:1]) != described["instanceTypes"][:1]:
            return f"its machines are {described['instanceTypes'][0]}, not {group.types[0]}"
        if group.reservation is None and described.get("capacityType") not in (None, self._capacity_type()):
            return f"its machines are {described['capacityType']}"
        if self._has_moved(described["subnets"], group.zones):
            return f"its machines are not in the zone {group.zone}"
        count = described["scalingConfig"]["desiredSize"]
        if count != group.count:
            return f"it has {count} machines, not {group.count}"
        return None

    def delete(self) -> None:
        """Request the deletion of the stack, or of a node group without one."""
        stack = self.describe()
        self._raise_if_forbidden(stack)
        if stack is not None:
            super().delete()
            return
        with busy_if_in_use():
            self.aws.call("eks", "delete_nodegroup", clusterName=self.plane.name, nodegroupName=self.name)

    def _has_moved(self, subnets: Sequence[str | None], others: Sequence[str] = ()) -> bool:
        """Whether these subnets of the group are neither in the requested zone nor in `others`."""
        if self.group.zone is None:
            return False
        try:
            network = self.plane.network()
        except NotFoundError:
            return False  # without its network it can only be deleted
        known = network.private_subnets if self.group.private else network.subnets
        wanted = {known[zone] for zone in (self.group.zone, *others) if zone in known}
        return bool(wanted) and not wanted & set(subnets)

    # --- machines that do not come

    def _launch_failure(self, found: Document) -> MlbenchError | None:
        """The failure reported by the auto scaling group, long before EKS reports it. Without permission to read it,
        None."""
        for name in _scaling_groups(found):
            try:
                answer = self.aws.call(
                    "autoscaling", "describe_scaling_activities", AutoScalingGroupName=name, MaxRecords=MAX_ACTIVITIES
                )
                running = self._list_machines(name)
            except (RightsError, NotFoundError):
                return None
            if len(running) >= self.group.count:
                return None  # it got them after all
            for activity in answer["Activities"]:
                said = activity.get("StatusMessage") or activity["StatusCode"]
                message = f'{self.name} has {len(running)} of {self.group.count} machines and cannot get more: "{said}"'
                if activity["StatusCode"] != "Failed":
                    continue
                error = error_from_message("AsgInstanceLaunchFailures", message, said, self.aws.region)
                # Other errors may be transient, such as a new role that is not yet visible everywhere in IAM.
                if isinstance(error, CapacityError) or error_from_cause(message, said, self.aws.region):
                    return error
        return None

    def _add_console(self, error: MlbenchError) -> MlbenchError:
        """The error; for machines that did not join, with what one of them printed."""
        if not isinstance(error, NeverStartedError):
            return error
        try:
            names = _scaling_groups(self.find_raw() or {})
            machines = self._list_machines(names[0]) if names else []
            if not machines:
                return error
            printed = self.aws.call("ec2", "get_console_output", InstanceId=machines[0])
        except MlbenchError:
            return error
        lines = [line.strip() for line in str(printed.get("Output") or "").splitlines() if CONSOLE_TROUBLE.search(line)]
        last = "; ".join(lines[-3:])[:500] or "no reason given"
        command = f"aws ec2 get-console-output --region {self.aws.region} --instance-id {machines[0]}"
        return NeverStartedError(f'{error.message} {machines[0]} printed: "{last}"', hint=f"{command}\n{error.hint}")

    def _list_machines(self, name: str) -> list[str]:
        """The running machines of an auto scaling group, which already cost money."""
        answer = self.aws.call("autoscaling", "describe_auto_scaling_groups", AutoScalingGroupNames=[name])
        return [item["InstanceId"] for group in answer["AutoScalingGroups"] for item in group.get("Instances") or ()]


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


def has_issue(found: Mapping[str, Any]) -> bool:
    """Whether EKS reports an issue of it."""
    return bool((found.get("health") or {}).get("issues"))


# --- volumes --------------------------------------------------------------------------------------------------------

# A new cluster has neither a driver nor a default storage class, so claims would stay pending. The driver is an add-on
# of the system's stack. Sources: EKS' user guide (Pod Identity, EBS CSI driver), Kubernetes' storage classes.

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


# --- the end of a cluster ---------------------------------------------------------------------------------------------

# Scheduled actions of auto scaling groups remove all machines in time. They are set as soon as EKS shows the auto
# scaling group, before its machines are ready. An action is deleted with its group, which belongs to EKS. The control
# plane and a NAT gateway remain until `mlbench gc --expired` or `delete-cluster`. Sources: docs/development.

ACTION = "mlbench-end"


class EndTimer(Part):
    """The scheduled action that removes the machines of one node group."""

    kind = "expiry timer"
    create_seconds = 2400.0

    def __init__(self, group: NodeStack, expires: float, needs: tuple[Resource, ...] | None = None) -> None:
        self.group = group
        self.aws = group.aws
        self.expires = int(expires)
        self.name = group.name
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

    kind = "expiry tag"

    def __init__(self, plane: ClusterStack) -> None:
        super().__init__(plane.cluster, plane)
        self.plane = plane

    def read(self) -> Mapping[str, str]:
        return self._describe().get("tags") or {}

    def write(self, tags: Mapping[str, str]) -> None:
        self.plane.aws.call("eks", "tag_resource", resourceArn=self._describe()["arn"], tags=dict(tags))

    def _describe(self) -> dict[str, Any]:
        found = find_raw_cluster(self.plane.aws, self.plane.name)
        if found is None:
            raise NotFoundError(f"There is no EKS cluster {self.plane.name} in {self.plane.aws.region}.")
        return found


def timers(cluster_details: ClusterDetails, groups: list[NodeStack]) -> list[EndTimer]:
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
    holds_images = True

    def __init__(self, plane: ClusterStack) -> None:
        self.aws = plane.aws
        self.cluster = plane.cluster
        self.name = f"mlbench-{plane.cluster.name}"
        self.needs = (plane,)
        self.remove_command = (
            f"aws ecr delete-repository --region {self.aws.region} --repository-name {self.name} --force"
        )

    def find(self) -> ResourceStatus | None:
        found = self._describe()
        if found is None:
            return None
        tags = tags_of(self.aws.call("ecr", "list_tags_for_resource", resourceArn=found["repositoryArn"])["tags"])
        return ResourceStatus("there", ours=tags.get(CLUSTER_TAG) == self.cluster.name)

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
