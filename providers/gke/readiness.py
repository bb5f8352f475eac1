"""When a cluster on GKE is of use: its workers have joined, a container has used their GPUs, its end is labelled."""

from providers.base import Readiness, Resource, ResourceStatus, ownership_tags
from providers.gke.resources import ROLE_LABEL, WORKER, ControlPlane
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


def gpu_probe(plane: ControlPlane, gpus: int, image: str, needs: tuple[Resource, ...]) -> GpuProbe:
    """The proof that containers on the workers can use their GPUs."""
    return GpuProbe(plane.access, image, gpus, {ROLE_LABEL: WORKER}, needs, plane)
