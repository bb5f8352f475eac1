"""The end of a GKE cluster: its label, and the Job that holds the workers until then.

GKE has no timer: machines that exceed their maximum run time (`max_run_duration`) are recreated, and changing it
recreates every machine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from providers.base import Readiness, Resource
from providers.cluster_end import EndMark, WorkerHold
from providers.gke.resources import ControlPlane, WorkerPool

NAMESPACE = "mlbench-end"
# Waits for a signal. GKE's machines already have it for their own pods.
PAUSE = "gke.gcr.io/pause:3.8@sha256:880e63f94b145e46f1b1082bb71b85e21f16b99b180b9996407d61240ceb9830"


class GkeHold(WorkerHold):
    """The hold on the workers of a node pool."""

    image = PAUSE

    def __init__(self, pool: WorkerPool, needs: Sequence[Resource] = ()) -> None:
        plane = pool.plane
        super().__init__(plane.cluster, plane.access, NAMESPACE, pool.count, needs, plane)
        self.pool = pool
        self.operation: str | None = None

    def let_shrink(self) -> None:
        """Enable autoscaling of the pool; its limits are per zone."""
        limits = {"enabled": True, "min_node_count": 0, "max_node_count": self._most(self.pool.find_raw())}
        gke = self.pool.plane.gke
        self.operation = gke.call("set_node_pool_autoscaling", name=self.pool.path, autoscaling=limits).name

    def may_shrink(self) -> bool:
        found = self.pool.find_raw()
        if found is None or not found.autoscaling.enabled:
            return False
        return bool(found.autoscaling.max_node_count >= self._most(found))

    def _most(self, found: Any) -> int:
        """The largest number of machines per zone that the pool needs."""
        zones = len(found.locations) if found is not None else 1
        return max(1, -(-self.pool.count // max(zones, 1)))

    def poll_shrinking(self) -> Readiness:
        return self.pool.poll_operation(self.operation, "scaled down automatically")


class EndLabel(EndMark):
    """The cluster's labels."""

    kind = "label of the end"

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(plane.cluster, plane)
        self.plane = plane

    def read(self) -> Mapping[str, str]:
        return dict(self.plane.require_raw().resource_labels)

    def write(self, tags: Mapping[str, str]) -> None:
        found = self.plane.require_raw()
        labels = {**dict(found.resource_labels), **tags}
        fingerprint = found.label_fingerprint
        self.plane.gke.call("set_labels", name=self.plane.path, resource_labels=labels, label_fingerprint=fingerprint)
