"""Expiry of the workers if the user may not let the cluster delete itself: a Job holds the machines until the deadline.

It needs no permission in the cloud's IAM or in Kubernetes' RBAC: one pod on each worker, which the autoscaler may not
evict, and a pool that the autoscaler may shrink to nothing. At the cluster's end the Job's deadline ends the pods, and
the autoscaler removes the machines once their runs have ended. Control plane and system machines stay. Sources:
docs/clouds-assumptions.md.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlbench_cli.errors import NotFoundError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.objects import condition, is_true
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.util.times import parse_timestamp
from providers.base import BusyError, Readiness, Resource, ResourceStatus
from providers.kubernetes_calls import apply_object, open_young_cluster
from templates import documents

NAME = "mlbench-hold"
EXPIRES = "mlbench/expires"
MIN_SECONDS = 60  # of a hold whose end has passed before it was made


class WorkerHold(Resource):
    """The Job, and the pool's permission to shrink. `is_needless` tells whether the cluster deletes itself anyway."""

    kind = "hold on the workers"
    create_seconds = 900.0

    def __init__(
        self,
        cluster: Cluster,
        connect: Callable[[], Access],
        namespace: str,
        count: int,
        needs: Sequence[Resource],
        goes_with: Resource,
        is_needless: Callable[[], bool],
    ) -> None:
        self.cluster = cluster
        self.name = f"{cluster.name}/{NAME}"
        self.needs = tuple(needs)
        self.goes_with = goes_with
        self._connect = connect
        self._namespace = namespace
        self._count = count
        self._is_needless = is_needless
        self._path = f"/apis/batch/v1/namespaces/{namespace}/jobs/{NAME}"
        self._expires = int(ClusterDetails.of(cluster).expires or 0)

    image: str  # of a program that waits for a signal
    node_selector: Mapping[str, str]  # of the workers

    @abstractmethod
    def let_shrink(self) -> None:
        """Request that the pool has between 0 and as many machines as now, as the autoscaler finds."""

    @abstractmethod
    def poll_shrinking(self) -> Readiness:
        """How far that request is."""

    def find(self) -> ResourceStatus | None:
        """None if it is needed: applying it again does no harm."""
        return ResourceStatus("not needed") if self._is_needless() else None

    def create(self) -> None:
        """Apply the Job, then let the pool shrink: pods that hold the machines come first."""
        with open_young_cluster(self._connect) as kubernetes:
            namespace: dict[str, object] = {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {
                    "name": self._namespace,
                    "labels": {
                        "app.kubernetes.io/managed-by": "mlbench",
                        "pod-security.kubernetes.io/enforce": "restricted",
                    },
                },
            }
            apply_object(kubernetes, f"/api/v1/namespaces/{self._namespace}", namespace)
            try:
                found = kubernetes.get(self._path)
            except NotFoundError:
                found = {}
            if any(is_true(condition(found, state)) for state in ("Failed", "Complete")):
                # Its deadline has passed, or it was for no workers: a Job that has ended never runs again.
                kubernetes.request("DELETE", self._path, params={"propagationPolicy": "Background"})
                raise BusyError("The Job that holds the workers had ended; creating it again.")
            apply_object(kubernetes, self._path, self._job(found.get("status") or {}))
        self.let_shrink()

    def poll(self) -> Readiness:
        """Ready when the pool may shrink."""
        return Readiness(True) if self._is_needless() else self.poll_shrinking()

    def delete(self) -> None:
        """Do nothing: it goes with the cluster."""
        return

    def _job(self, status: Mapping[str, Any]) -> dict[str, object]:

        began = _seconds_of(status.get("startTime"))
        values = {
            "name": NAME,
            "namespace": self._namespace,
            "expires": self._expires,
            "seconds": max(self._expires - int(began), int(time.time() - began) + MIN_SECONDS),
            "count": self._count,
            "image": self.image,
            "node_selector": dict(self.node_selector),
        }
        (job,) = documents("kubernetes/worker-hold.yaml.j2", values)
        return job


def describe_hold(cluster: Cluster, why: str) -> str:
    """What expires of a cluster whose workers are only held, and what continues to cost money."""
    return (
        f"{why} So only the workers end by themselves: the autoscaler takes them away when no run needs them any more. "
        f"Control plane and system machines stay{ClusterDetails.of(cluster).describe_rest()} until mlbench gc "
        "--expired or delete-cluster."
    )


def _seconds_of(started: str | None) -> float:
    """Seconds since 1970 that the deadline counts from: the Job's start, or now."""
    return parse_timestamp(started) if started else time.time()
