"""The end timer of an EKS cluster, in AWS: scheduled actions of auto scaling groups, and EventBridge Scheduler.

A scheduled action removes all machines of a group at the exact time; it is deleted with its group, which belongs to
EKS. Then Scheduler deletes node groups, control plane and NAT gateway with a role of the stack, every ten minutes until
each is gone. The stack itself, which is then free, and volumes of claims remain until `mlbench gc` or `delete-
cluster`. Sources: docs/clouds-assumptions.md.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from mlbench_cli.errors import CapacityError, CredentialError, NotFoundError, UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from providers.base import Part, Readiness, Resource, ResourceStatus, TransientError
from providers.cluster_end import EndMark
from providers.eks.control_plane import ControlPlane, find_raw_cluster
from providers.eks.network import Stack
from providers.eks.nodes import NodeGroup

ACTION = "mlbench-end"
EVERY = "rate(10 minutes)"  # a control plane can be deleted only after its node groups
SCHEDULE_SECONDS = 12 * 3600.0  # for which Scheduler retries; then the schedules delete themselves


class EndTimer(Part):
    """The scheduled action that removes the machines of one node group."""

    kind = "scheduled end"
    create_seconds = 300.0

    def __init__(self, group: NodeGroup, expires: float, needs: tuple[Resource, ...] | None = None) -> None:
        self.group = group
        self.aws = group.aws
        self.expires = int(expires)
        self.name = f"{group.name}/{ACTION}"
        self.needs = (group,) if needs is None else needs
        self.goes_with = group

    def find(self) -> ResourceStatus | None:
        """None if a group has no such action, or one for another time, which `create` changes."""
        names = self._scaling_groups()
        if not names:
            return None
        found = [self._find_action(name) for name in names]
        times = [int(item["StartTime"].timestamp()) for item in found if item is not None]
        is_late = self.expires < self._earliest_start()
        as_asked = len(times) == len(names) and (is_late or set(times) == {self.expires})
        return ResourceStatus("scheduled") if as_asked else None

    def create(self) -> None:
        """Schedule the group's size 0 for the cluster's end, in UTC, for each of its auto scaling groups.

        Raises TransientError while EKS does not show the auto scaling group.
        """
        names = self._scaling_groups()
        if not names:
            raise TransientError(f"EKS does not show the auto scaling group of {self.group.name} yet.")
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

    def _earliest_start(self) -> int:
        """The earliest valid start: AWS rejects past times, so a cluster that expires before it is ready ends at
        once."""
        return int(time.time()) + 60

    def _scaling_groups(self) -> list[str]:
        found = self.group.find_raw() or {}
        return [item["name"] for item in (found.get("resources") or {}).get("autoScalingGroups", [])]

    def _find_action(self, group: str) -> Mapping[str, Any] | None:
        answer = self.aws.call(
            "autoscaling", "describe_scheduled_actions", AutoScalingGroupName=group, ScheduledActionNames=[ACTION]
        )
        actions: list[Mapping[str, Any]] = answer["ScheduledUpdateGroupActions"]
        return actions[0] if actions else None


class PlaneEnd(Resource):
    """The schedules that delete node groups, control plane and NAT gateway; none without permission to create them."""

    kind = "scheduled deletion"
    create_seconds = delete_seconds = 300.0

    def __init__(self, stack: Stack, groups: Sequence[str], expires: float, needs: Sequence[Resource]) -> None:
        self.stack = stack
        self.aws = stack.aws
        self.name = f"{stack.name}-end"
        self.groups = groups
        self.expires = int(expires)
        self.needs = tuple(needs)
        self.refused: str | None = None  # why they could not be created
        self.remove_command = f"aws scheduler list-schedules --region {self.aws.region} --name-prefix {self.name}"

    def find(self) -> ResourceStatus | None:
        """Also None without permission to read them: schedules are free, and delete themselves."""
        if self.refused is not None:
            return ResourceStatus("not armed")
        try:
            return self._read()
        except CredentialError:
            return None

    def _read(self) -> ResourceStatus | None:
        found = [self._find_one(name) for name in self._names()]
        if not any(found):
            return None
        # The schedule of a NAT gateway exists only if the stack has one.
        lacking = [name for name, item in zip(self._names()[:-1], found[:-1], strict=True) if item is None]
        return ResourceStatus("scheduled", broken=f"{', '.join(lacking)} are missing" if lacking else None)

    def create(self) -> None:
        """Create or update the schedules. Raises TransientError while the new role is not visible everywhere in IAM."""
        network = self.stack.network()
        if not network.end_role:
            self.refused = "The stack is from an older version of mlbench and has no role for it."
            return
        try:
            for name, (call, given) in self._targets(network.nat).items():
                self._put(name, call, given, network.end_role)
        except (CapacityError, CredentialError) as error:
            self.refused = error.message

    def poll(self) -> Readiness:
        """Ready once AWS lists them, or has accepted them if the caller may not list them; the record says if they
        could not be created.
        """
        if self.refused is not None:
            return Readiness(True, facts={"end_problem": self.refused})
        try:
            is_shown = self._read() is not None
        except CredentialError:
            is_shown = True
        return Readiness(is_shown, "AWS does not show them yet", {"end_problem": None})

    def delete(self) -> None:
        """Delete the existing ones."""
        for name in self._names():
            try:
                self.aws.call("scheduler", "delete_schedule", Name=name)
            except NotFoundError:
                continue

    def _names(self) -> list[str]:
        return [f"{self.name}-{number}" for number in range(len(self.groups))] + [
            f"{self.name}-plane",
            f"{self.name}-nat",
        ]

    def _targets(self, nat: str) -> dict[str, tuple[str, dict[str, str]]]:
        """Calls and their parameters, with the capitalized names of the service's model."""
        cluster = self.stack.cluster.name
        calls = [("eks:deleteNodegroup", {"ClusterName": cluster, "NodegroupName": name}) for name in self.groups]
        calls.append(("eks:deleteCluster", {"Name": cluster}))
        if nat:
            calls.append(("ec2:deleteNatGateway", {"NatGatewayId": nat}))
        return dict(zip(self._names(), calls, strict=False))

    def _put(self, name: str, call: str, given: Mapping[str, str], role: str) -> None:
        start = datetime.fromtimestamp(max(self.expires, int(time.time()) + 60), UTC)
        schedule = {
            "Name": name,
            "Description": f"end of the mlbench cluster {self.stack.cluster.name}",
            "ScheduleExpression": EVERY,
            "StartDate": start,
            "EndDate": start + timedelta(seconds=SCHEDULE_SECONDS),
            "ActionAfterCompletion": "DELETE",
            "FlexibleTimeWindow": {"Mode": "OFF"},
            "Target": {"Arn": f"arn:aws:scheduler:::aws-sdk:{call}", "RoleArn": role, "Input": json.dumps(given)},
        }
        self.aws.call("scheduler", "update_schedule" if self._find_one(name) else "create_schedule", **schedule)

    def _find_one(self, name: str) -> Mapping[str, Any] | None:
        try:
            found: Mapping[str, Any] = self.aws.call("scheduler", "get_schedule", Name=name)
        except NotFoundError:
            return None
        return found


class PlaneEndMoved(PlaneEnd):
    """The same schedules with another time."""

    def find(self) -> ResourceStatus | None:
        """None, so that they are rewritten, which is harmless."""
        return None if self.refused is None else ResourceStatus("not armed")

    def poll(self) -> Readiness:
        """Ready at once: AWS has accepted the new time."""
        return Readiness(True, facts={"end_problem": self.refused})

    def delete(self) -> None:
        """Does nothing: the cluster's own resource deletes them."""


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
