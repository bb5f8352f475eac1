"""Waits until the machines of a new pool have joined the cluster and report their GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from providers.base import Readiness, Resource, ResourceStatus

GPU = "nvidia.com/gpu"


class HasWorkers(Protocol):
    """A control plane that can be asked for its workers."""

    name: str

    def list_ready_workers(self) -> Sequence[Mapping[str, Any]]:
        """The nodes of workers that are Ready. Raises NotFoundError if the cluster does not exist."""
        ...


class ReadyMachines(Resource):
    """Waits until every worker has joined and reports its GPUs."""

    kind = "workers"
    create_seconds = 1200.0

    def __init__(
        self, plane: HasWorkers, count: int, gpus: int, needs: Sequence[Resource], goes_with: Resource
    ) -> None:
        self.plane = plane
        self.count = count
        self.gpus = gpus
        self.name = f"{plane.name}/{count}"
        self.needs = tuple(needs)
        self.goes_with = goes_with

    def find(self) -> ResourceStatus | None:
        """Always None: it is only a wait."""
        return None

    def create(self) -> None:
        """Do nothing: the pool brings the machines."""
        return

    def poll(self) -> Readiness:
        """Count the workers that are Ready and show their GPUs; ready when `count` do.

        Raises NotFoundError if the cluster does not exist.
        """
        ready = self.plane.list_ready_workers()
        if len(ready) < self.count:
            return Readiness(False, f"{len(ready)} of {self.count} machines have joined (scale-cluster sets how many)")
        shown = sum(1 for node in ready if count_allocatable(node, GPU) >= self.gpus)
        return Readiness(shown >= self.count, f"{shown} of {self.count} machines show their GPUs; drivers install")

    def delete(self) -> None:
        """Do nothing: the machines go with their pool."""
        return


def count_allocatable(node: Mapping[str, Any], resource: str) -> int:
    """How many of a device a node offers to pods; 0 until its plugin has shown them."""
    return int(((node.get("status") or {}).get("allocatable") or {}).get(resource, 0))
