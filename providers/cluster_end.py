"""The end of a cluster that the cluster itself keeps (GKE, AKS), and the tags by which every machine knows it.

A CronJob on the system's machines deletes the cluster, by an identity that has the right to. Who may not give an
identity that right gets a Job instead that holds the workers until the end. It needs no permission in the cloud's IAM
or in Kubernetes' RBAC: one pod on each worker, which the autoscaler may not evict, and a pool that the autoscaler may
shrink to nothing. At the cluster's end the Job's deadline ends the pods, and the autoscaler removes the machines once
their runs have ended. Control plane and system machines stay. Sources: docs/clouds-assumptions.md.
"""

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.errors import CredentialError
from mlbench_cli.kube.objects import condition, is_true
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.util.times import parse_timestamp
from providers.base import (
    ROLE_LABEL,
    SYSTEM,
    WORKER,
    BusyError,
    Part,
    Readiness,
    Resource,
    ResourceStatus,
    ownership_tags,
)
from providers.kubernetes_calls import ClusterObjects, Connect, Document, open_young_cluster, path_of
from templates import FOLDER, documents

NAME = "mlbench-end"  # of the identity, of the CronJob and of its account
HOLD = "mlbench-hold"
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


class EndIdentity(Part):
    """What the CronJob acts as, with its right to delete the cluster."""

    kind = "identity of the end"
    create_seconds = delete_seconds = 600.0
    refused: str | None = None  # why it may not get the right
    has_right = False

    @abstractmethod
    def grant(self) -> None:
        """Make the identity and give it its right. Raises CredentialError if the caller may not."""

    def create(self) -> None:
        """Request it; a refusal leaves the cluster without a timer."""
        try:
            self.grant()
        except CredentialError as error:
            self.refused = error.message

    def poll(self) -> Readiness:
        """Ready when the cloud shows the right, or has refused it, which the record says."""
        if self.refused is not None:
            return Readiness(True, facts={"end_problem": self.refused})
        self.has_right = self.find() is not None
        return Readiness(self.has_right, "the cloud does not show its right yet", {"end_problem": None})


class EndTimer(ClusterObjects):
    """Namespace, account and CronJob. Applied again with another time when the end moves."""

    kind = "scheduled end"
    create_seconds = 600.0
    image: str  # with Python, from a registry that every node reaches
    script: str  # a file of the templates' folder

    def __init__(
        self,
        cluster: Cluster,
        connect: Connect,
        namespace: str,
        identity: EndIdentity | None,
        needs: Sequence[Resource],
        goes_with: Resource,
    ) -> None:
        """`identity`: None if it has its right since the cluster's creation."""
        super().__init__(connect, f"{cluster.name}/{NAME}", (*needs, *((identity,) if identity else ())), goes_with)
        self.identity = identity
        self.namespace = namespace
        self.expires = int(ClusterDetails.of(cluster).expires or 0)

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """What the script has to know of the cluster and of its identity."""

    def documents(self) -> Sequence[Document]:
        """Namespace, account and CronJob."""
        environment = {"MLBENCH_EXPIRES": str(self.expires), **self.environment()}
        values = {
            "name": NAME,
            "namespace": self.namespace,
            "expires": self.expires,
            "environment": [{"name": key, "value": value} for key, value in environment.items()],
            "image": self.image,
            "node_selector": {ROLE_LABEL: SYSTEM},
            "script": (FOLDER / "kubernetes" / self.script).read_text("utf-8"),
            "audience": getattr(self, "audience", None),
        }
        return documents("kubernetes/cluster-end.yaml.j2", values)

    def find(self) -> ResourceStatus | None:
        """Look for the CronJob with the right time."""
        if self.identity is not None and self.identity.refused is not None:
            return ResourceStatus("not armed")
        metadata = {"name": NAME, "namespace": self.namespace}
        found = self.read({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": metadata})
        if found is None:
            return None
        expires = (found["metadata"].get("annotations") or {}).get("mlbench/expires")
        return ResourceStatus("armed") if expires == str(self.expires) else None


class WorkerHold(ClusterObjects):
    """The Job that holds the workers, and the pool's permission to shrink, if the cluster does not delete itself."""

    kind = "hold on the workers"
    image: str  # of a program that waits for a signal

    def __init__(
        self,
        cluster: Cluster,
        connect: Connect,
        namespace: str,
        count: int,
        identity: EndIdentity | None,
        needs: Sequence[Resource],
        goes_with: Resource,
    ) -> None:
        super().__init__(connect, f"{cluster.name}/{HOLD}", needs, goes_with)
        self._identity = identity
        self._namespace = namespace
        self._count = count
        self._expires = int(ClusterDetails.of(cluster).expires or 0)
        self._started: str | None = None  # when the Job began

    @abstractmethod
    def let_shrink(self) -> None:
        """Request that the pool has between 0 and as many machines as now, as the autoscaler finds."""

    @abstractmethod
    def poll_shrinking(self) -> Readiness:
        """How far that request is."""

    def documents(self) -> Sequence[Document]:
        """Namespace and Job; the Job's deadline counts from its start."""
        began = parse_timestamp(self._started) if self._started else time.time()
        values = {
            "name": HOLD,
            "namespace": self._namespace,
            "expires": self._expires,
            "seconds": max(self._expires - int(began), int(time.time() - began) + MIN_SECONDS),
            "count": self._count,
            "image": self.image,
            "node_selector": {ROLE_LABEL: WORKER},
        }
        return documents("kubernetes/worker-hold.yaml.j2", values)

    def find(self) -> ResourceStatus | None:
        """None if it is needed: applying it again does no harm."""
        return ResourceStatus("not needed") if self._identity and self._identity.has_right else None

    def create(self) -> None:
        """Apply the Job, then let the pool shrink: pods that hold the machines come first."""
        job = self.documents()[-1]
        found: Mapping[str, Any] = self.read(job) or {}
        if any(is_true(condition(found, state)) for state in ("Failed", "Complete")):
            # Its deadline has passed, or it was for no workers: a Job that has ended never runs again.
            with open_young_cluster(self.connect) as api:
                api.request("DELETE", path_of(job), params={"propagationPolicy": "Background"})
            raise BusyError("The Job that holds the workers had ended; creating it again.")
        self._started = (found.get("status") or {}).get("startTime")
        super().create()
        self.let_shrink()

    def poll(self) -> Readiness:
        """Ready when the pool may shrink."""
        return Readiness(True) if self.find() else self.poll_shrinking()


def describe_hold(cluster: Cluster, why: str) -> str:
    """What expires of a cluster whose workers are only held, and what continues to cost money."""
    return (
        f"{why} So only the workers expire: the autoscaler removes them when no run needs them. Control plane and "
        f"system machines remain{ClusterDetails.of(cluster).describe_rest()} until mlbench gc "
        "--expired or delete-cluster."
    )
