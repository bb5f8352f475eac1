"""The end of a cluster that the cluster itself keeps (GKE, AKS), and the tags by which every machine knows it.

The pool of the workers is created so that the autoscaler may shrink it to nothing, and a Job that is there before the
pool holds them until the end: one pod on each worker, which the autoscaler may not evict. So no worker ever runs that
would not end by itself, whatever happens to this process, and it needs no permission in the cloud's IAM or in
Kubernetes' RBAC. At the cluster's end the Job's deadline ends the pods, and the autoscaler removes the machines once
their runs have ended. Control plane and system machines stay until `mlbench gc --expired`, which knows the end by their
tags. Sources: docs/development/clouds-assumptions.md.
"""

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.kube.objects import condition, is_true
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.util.times import parse_timestamp
from providers.base import (
    ROLE_LABEL,
    WORKER,
    BusyError,
    Part,
    Readiness,
    Resource,
    ResourceStatus,
    ownership_tags,
)
from providers.kubernetes_calls import ClusterObjects, Connect, Document, open_young_cluster, path_of
from templates import documents

NAMESPACE, HOLD = "mlbench-end", "mlbench-hold"
MIN_SECONDS = 60  # of a hold whose end has passed before it was made


class EndMark(Part):
    """The tags or labels that tell `mlbench gc` of every machine when the cluster ends."""

    create_seconds = 600.0

    def __init__(self, cluster: Cluster, marked: Resource) -> None:
        self.cluster = cluster
        self.name = f"{marked.name}/expires"
        self.goes_with = marked

    @abstractmethod
    def read(self) -> Mapping[str, str]:
        """The tags that the cloud shows. Raises MlbenchError if there is no such cluster."""

    @abstractmethod
    def write(self, tags: Mapping[str, str]) -> None:
        """Add the tags to those that the cluster has."""

    def find(self) -> ResourceStatus | None:
        """Compare the cloud's tags with those wanted."""
        return ResourceStatus("set") if ownership_tags(self.cluster).items() <= self.read().items() else None

    def create(self) -> None:
        """Set the ownership tags, with the new end."""
        self.write(ownership_tags(self.cluster))


class WorkerHold(ClusterObjects):
    """The Job that holds the workers, and the permission to shrink of a pool that exists already."""

    kind = "expiry timer"
    image: str  # of a program that waits for a signal

    def __init__(
        self,
        cluster: Cluster,
        connect: Connect,
        count: int,
        needs: Sequence[Resource],
        goes_with: Resource,
    ) -> None:
        super().__init__(connect, cluster.name, needs, goes_with)
        self._count = count
        self._expires = int(ClusterDetails.of(cluster).expires or 0)
        self._started: str | None = None  # when the Job began

    @abstractmethod
    def let_shrink(self) -> None:
        """Request that a pool that exists has between 0 and as many machines as now, as the autoscaler finds."""

    @abstractmethod
    def may_shrink(self) -> bool:
        """Whether the pool may shrink, or is yet to be created so."""

    @abstractmethod
    def poll_shrinking(self) -> Readiness:
        """How far that request is."""

    def documents(self) -> Sequence[Document]:
        """Namespace and Job; the Job's deadline counts from its start."""
        began = parse_timestamp(self._started) if self._started else time.time()
        values = {
            "name": HOLD,
            "namespace": NAMESPACE,
            "expires": self._expires,
            "seconds": max(self._expires - int(began), int(time.time() - began) + MIN_SECONDS),
            "count": self._count,
            "image": self.image,
            "node_selector": {ROLE_LABEL: WORKER},
        }
        return documents("kubernetes/worker-hold.yaml.j2", values)

    def find(self) -> ResourceStatus | None:
        """Compare the Job with the end; None if it or the pool has to change."""
        wanted = self.documents()[-1]
        found = self.read(wanted)
        if found is None or any(is_true(condition(found, state)) for state in ("Failed", "Complete")):
            return None
        same = (found["metadata"].get("annotations") or {}).get("mlbench/expires") == str(self._expires)
        return ResourceStatus("holding") if same and self.may_shrink() else None

    def create(self) -> None:
        """Apply the Job, then let the pool shrink: pods that hold the machines come first."""
        job = self.documents()[-1]
        found: Mapping[str, Any] = self.read(job) or {}
        if any(is_true(condition(found, state)) for state in ("Failed", "Complete")):
            # Its deadline has passed: a Job that has ended never runs again.
            with open_young_cluster(self.connect) as api:
                api.request("DELETE", path_of(job), params={"propagationPolicy": "Background"})
            raise BusyError("The Job that holds the workers had ended; creating it again.")
        self._started = (found.get("status") or {}).get("startTime")
        super().create()
        self.let_shrink()

    def poll(self) -> Readiness:
        """Ready when a pool that was there may shrink."""
        return self.poll_shrinking()


def describe_hold(cluster: Cluster) -> str:
    """What expires of a cluster, and what continues to cost money."""
    return (
        f"Then the autoscaler removes workers that no run uses. Control plane and system machines remain"
        f"{ClusterDetails.of(cluster).describe_rest()} until mlbench gc --expired or mlbench delete-cluster."
    )
