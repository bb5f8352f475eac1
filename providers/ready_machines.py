"""Waits until the machines of a new pool have joined the cluster and report their GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.kube.objects import condition, is_true
from providers.base import Part, Readiness, Resource, ResourceStatus
from providers.kubernetes_calls import Connect, list_workers

GPU = "nvidia.com/gpu"


class ReadyMachines(Part):
    """Waits until every worker has joined and reports its GPUs."""

    kind = "workers"
    create_seconds = 1200.0

    def __init__(
        self, connect: Connect, cluster: str, count: int, gpus: int, needs: Sequence[Resource], goes_with: Resource
    ) -> None:
        self.connect = connect
        self.count = count
        self.gpus = gpus
        self.name = f"{cluster}/{count}"
        self.needs = tuple(needs)
        self.goes_with = goes_with

    def find(self) -> ResourceStatus | None:
        """Always None: it is only a wait."""
        return None

    def create(self) -> None:
        """Do nothing: the pool brings the machines."""

    def poll(self) -> Readiness:
        """Count the workers that are Ready and show their GPUs; ready when `count` do.

        Raises NotFoundError if the cluster does not exist.
        """
        ready = list_ready_workers(self.connect)
        if len(ready) < self.count:
            return Readiness(False, f"{len(ready)} of {self.count} machines have joined (scale-cluster sets how many)")
        shown = sum(1 for node in ready if count_allocatable(node, GPU) >= self.gpus)
        return Readiness(shown >= self.count, f"{shown} of {self.count} machines show their GPUs; drivers install")


def list_ready_workers(connect: Connect) -> list[dict[str, Any]]:
    """The nodes of the workers that are Ready. Raises NotFoundError if the cluster does not exist."""
    return [node for node in list_workers(connect) if is_true(condition(node, "Ready"))]


def count_allocatable(node: Mapping[str, Any], resource: str) -> int:
    """How many of a device a node offers to pods; 0 until its plugin has shown them."""
    return int(((node.get("status") or {}).get("allocatable") or {}).get(resource, 0))
