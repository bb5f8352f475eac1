"""A cluster's machines: managed node groups, and the launch template for those with fast networks."""

import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NeverStartedError, NotFoundError
from mlbench_cli.model.run import Cluster
from providers.base import (
    CLUSTER_TAG,
    ROLE_LABEL,
    WORKER,
    Part,
    Readiness,
    Resource,
    ResourceStatus,
    TransientError,
    ownership_tags,
)
from providers.eks.api import Aws, tag_list, tags_of
from providers.eks.network import PlacementGroup, Stack
from providers.eks.options import Machine
from providers.eks.quota import find_reservation
from providers.eks.resources import (
    ControlPlane,
    EksResource,
    error_from_cause,
    error_from_issues,
    error_from_message,
    find_raw_cluster,
)

GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NO_SCHEDULE"}
GPU, EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"
HUGE_PAGES = "hugepages-2Mi"
AL2023, BOTTLEROCKET = "al2023", "bottlerocket"
# EKS' name of each image, without and with NVIDIA's driver.
IMAGES = {
    AL2023: ("AL2023_x86_64_STANDARD", "AL2023_x86_64_NVIDIA"),
    BOTTLEROCKET: ("BOTTLEROCKET_x86_64", "BOTTLEROCKET_x86_64_NVIDIA"),
}
# The disk for images and logs. Bottlerocket's system has its own small disk before it.
DISKS = {AL2023: "/dev/xvda", BOTTLEROCKET: "/dev/xvdb"}


@dataclass(frozen=True)
class Group:
    """The request for a node group. Several `types` are only for spot: any of them may be used."""

    name: str
    types: tuple[str, ...]
    count: int
    disk: int  # GB
    gpu: bool = False
    worker: bool = True
    spot: bool = False
    zone: str | None = None
    zones: tuple[str, ...] = ()  # all zones to try
    private: bool = False
    efa: bool = False
    reservation: str | None = None  # ID of a capacity reservation
    system: str = AL2023  # the operating system

    @property
    def image(self) -> str:
        """The AMI type of EKS for the group's role and GPU."""
        return IMAGES[self.system][self.gpu]

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the group's nodes: the role, and which devices are present."""
        labels = {ROLE_LABEL: WORKER if self.worker else "system"}
        present = ((GPU, self.gpu), (EFA, self.efa))
        return {**labels, **{f"{device}.present": "true" for device, is_there in present if is_there}}

    @property
    def taints(self) -> list[dict[str, str]]:
        """The taint that keeps other pods off GPU machines; none for other machines."""
        # System machines have no taint, so that Helm charts can run there; runs select the workers' label.
        return [GPU_TAINT] if self.gpu else []


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
        names = [item["name"] for item in (found.get("resources") or {}).get("autoScalingGroups", [])]
        for name in names:
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


def _issue(found: dict[str, Any]) -> bool:
    return bool((found.get("health") or {}).get("issues"))
