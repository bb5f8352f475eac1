"""When a cluster on GKE is of use: its workers have joined, a container has used their GPUs, its end is labelled."""

from providers.base import Readiness, Resource, ResourceStatus, ownership_tags
from providers.gke.api import Message
from providers.gke.resources import GPU, ROLE_LABEL, WORKER, ControlPlane
from providers.gpu_probe import GpuProbe


class EndLabel(Resource):
    """The label that tells `mlbench gc` of every machine when the cluster ends."""

    kind = "label of the end"
    create_seconds = 600.0

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.name = f"{plane.name}/expires"
        self.goes_with = plane

    def find(self) -> ResourceStatus | None:
        """Compare the labels of the cluster with those wanted. Raises if the cluster does not exist."""
        found = self.plane.require_raw()
        wanted = ownership_tags(self.plane.cluster)
        return ResourceStatus("set") if wanted.items() <= dict(found.resource_labels).items() else None

    def create(self) -> None:
        """Add the ownership labels, with the new end, to those that the cluster has."""
        found = self.plane.require_raw()
        labels = {**dict(found.resource_labels), **ownership_tags(self.plane.cluster)}
        fingerprint = found.label_fingerprint
        self.plane.gke.call("set_labels", name=self.plane.path, resource_labels=labels, label_fingerprint=fingerprint)

    def poll(self) -> Readiness:
        """Ready when Google shows the new labels."""
        return Readiness(self.find() is not None, "Google does not show it yet")

    def delete(self) -> None:
        """Do nothing: the label goes with the cluster."""
        return


class ReadyMachines(Resource):
    """The wait until every worker has joined and, with the driver installed, shows its GPUs."""

    kind = "workers"
    create_seconds = 1200.0

    def __init__(self, plane: ControlPlane, count: int, gpus: int, needs: tuple[Resource, ...]) -> None:
        self.plane = plane
        self.count = count
        self.gpus = gpus
        self.name = f"{plane.name}/{count}"
        self.needs = needs
        self.goes_with = plane

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
        shown = sum(1 for node in ready if _gpus(node) >= self.gpus)
        return Readiness(shown >= self.count, f"{shown} of {self.count} machines show their GPUs; drivers install")

    def delete(self) -> None:
        """Do nothing: the machines go with their pool."""
        return


def gpu_probe(plane: ControlPlane, gpus: int, image: str, needs: tuple[Resource, ...]) -> GpuProbe:
    """The proof that containers on the workers can use their GPUs."""
    return GpuProbe(plane.access, image, gpus, {ROLE_LABEL: WORKER}, needs, plane)


def _gpus(node: Message) -> int:
    return int(((node.get("status") or {}).get("allocatable") or {}).get(GPU, 0))
