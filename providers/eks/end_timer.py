"""The end of a cluster's machines, kept by AWS itself: a scheduled action of each auto scaling group.

It acts although no machine of ours runs, and takes all machines of the group away. The control plane, a NAT gateway
and the volumes of claims stay until `mlbench gc --expired` or `delete-cluster`. EKS makes the auto scaling groups; they
take their scheduled actions with them.
"""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from providers.base import Readiness, Resource, ResourceStatus, TransientError, ownership_tags
from providers.eks.control_plane import ControlPlane, find_raw_cluster
from providers.eks.nodes import NodeGroup

ACTION = "mlbench-end"


class EndTimer(Resource):
    """The scheduled action that takes away the machines of one node group."""

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
        """None if a group has no such action, or one for another time: creating it sets the time."""
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

    def poll(self) -> Readiness:
        """Ready when AWS lists the scheduled action with the right time."""
        return Readiness(self.find() is not None, "AWS does not show it yet")

    def delete(self) -> None:
        """Do nothing: the action goes with the auto scaling group."""
        return

    def _earliest_start(self) -> int:
        """AWS refuses a time that has passed: a cluster whose end came before it was ready ends at once."""
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


class EndTag(Resource):
    """The tag that tells `mlbench gc` of every machine when the cluster ends."""

    kind = "tag of the end"
    create_seconds = 120.0

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.name = f"{plane.name}/expires"
        self.goes_with = plane

    def find(self) -> ResourceStatus | None:
        """Compare the tags of the control plane with those wanted. Raises UsageError if the cluster does not exist."""
        found = find_raw_cluster(self.plane.aws, self.plane.name)
        if found is None:
            raise UsageError(f"There is no EKS cluster {self.plane.name} in {self.plane.aws.region}.")
        wanted = ownership_tags(self.plane.cluster)
        return ResourceStatus("set") if wanted.items() <= (found.get("tags") or {}).items() else None

    def create(self) -> None:
        """Write the ownership tags, with the new end, onto the control plane."""
        found = find_raw_cluster(self.plane.aws, self.plane.name)
        if found is None:
            raise TransientError(f"AWS does not show the EKS cluster {self.plane.name}.")
        self.plane.aws.call("eks", "tag_resource", resourceArn=found["arn"], tags=ownership_tags(self.plane.cluster))

    def poll(self) -> Readiness:
        """Ready when AWS shows the new tags."""
        return Readiness(self.find() is not None, "AWS does not show it yet")

    def delete(self) -> None:
        """Do nothing: the tag goes with the control plane."""
        return


def timers(cluster_details: ClusterDetails, groups: list[NodeGroup]) -> list[EndTimer]:
    """A timer for each group, if the cluster has an end."""
    expires = cluster_details.expires
    return [] if expires is None else [EndTimer(group, expires) for group in groups]
