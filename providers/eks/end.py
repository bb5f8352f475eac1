"""The end of an EKS cluster: its tag, and scheduled actions of auto scaling groups, which remove all machines in time.

An action is deleted with its group, which belongs to EKS. The control plane and a NAT gateway remain until `mlbench gc
--expired` or `delete-cluster`. Sources: docs/clouds-assumptions.md.
"""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from providers.base import Part, Resource, ResourceStatus, TransientError
from providers.cluster_end import EndMark
from providers.eks.nodes import NodeGroup
from providers.eks.resources import ControlPlane, find_raw_cluster

ACTION = "mlbench-end"


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
