"""The end of an AKS cluster: its group's tag, and the Job that holds the workers until then."""

from collections.abc import Mapping, Sequence

from mlbench_cli.errors import NotFoundError
from providers.aks.resources import ResourceGroup, WorkerPool
from providers.base import Readiness, Resource
from providers.cluster_end import EndMark, WorkerHold

NAMESPACE = "mlbench-end"
# Waits for a signal. AKS' machines already have it for their own pods.
PAUSE = "mcr.microsoft.com/oss/kubernetes/pause:3.6"


class AksHold(WorkerHold):
    """The hold on the workers of a node pool."""

    image = PAUSE

    def __init__(self, pool: WorkerPool, needs: Sequence[Resource] = ()) -> None:
        plane = pool.plane
        super().__init__(plane.cluster, plane.access, NAMESPACE, pool.count, needs, plane.group)
        self.pool = pool

    def let_shrink(self) -> None:
        """Enable autoscaling of the pool. A PUT resets omitted properties to their defaults."""
        what = f"let the {self.pool.kind} {self.pool.name} shrink"
        found = self.pool.azure.get(self.pool.path, what)["properties"]
        limits = {"enableAutoScaling": True, "minCount": 0, "maxCount": max(1, self.pool.count, int(found["count"]))}
        self.pool.operation = self.pool.azure.change("PUT", self.pool.path, what, {"properties": {**found, **limits}})

    def may_shrink(self) -> bool:
        what = f"show the {self.pool.kind} {self.pool.name}"
        found = self.pool.azure.get(self.pool.path, what)["properties"]
        return bool(found.get("enableAutoScaling")) and int(found.get("maxCount") or 0) >= self.pool.count

    def poll_shrinking(self) -> Readiness:
        return self.pool.poll_operation("scaled down automatically")


class EndTags(EndMark):
    """The expiry in the tags of the cluster's group."""

    kind = "tag of the end"

    def __init__(self, group: ResourceGroup) -> None:
        super().__init__(group.cluster, group)
        self.group = group

    def read(self) -> Mapping[str, str]:
        found = self.group.find_raw()
        if found is None:
            raise NotFoundError(f'There is no resource group "{self.group.name}".')
        return dict(found.get("tags") or {})

    def write(self, tags: Mapping[str, str]) -> None:
        body = {"tags": {**self.read(), **tags}}
        self.group.azure.change("PATCH", self.group.path, f"tag the group {self.group.name}", body)
