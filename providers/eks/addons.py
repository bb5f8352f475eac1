"""Device plugins for GPUs and fast network cards, and waiting until all machines show their devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbench_cli.errors import NotFoundError
from providers.base import Readiness, Resource, ResourceStatus, TransientError
from providers.eks.nodes import EFA, GPU, NodeGroup
from providers.eks.resources import AddOn, ControlPlane
from providers.kubernetes_calls import ClusterObjects, Document, list_workers
from providers.pins import require_pin
from providers.ready_machines import count_allocatable
from templates import documents


@dataclass(frozen=True)
class Device:
    """A device by Kubernetes' name, with `each` per machine; `manifest` is its device plugin."""

    resource: str
    words: str
    each: int
    manifest: str | None  # None: the machines' image includes the plugin


def gpu_device(each: int, *, built_in: bool = False) -> Device:
    """NVIDIA GPUs, `each` per machine; `built_in` if the node image brings the device plugin."""
    return Device(GPU, "GPU", each, None if built_in else "kubernetes/nvidia-device-plugin.yaml")


def network_card_device(each: int) -> Device:
    """EFA network cards, `each` per machine."""
    return Device(EFA, "EFA", each, "kubernetes/efa-device-plugin.yaml")


class DevicePlugin(ClusterObjects):
    """A device plugin, applied unless the machines' image includes it; ready when all machines show their devices."""

    def __init__(
        self, plane: ControlPlane, workers: NodeGroup, count: int, device: Device, needs: tuple[Resource, ...] = ()
    ) -> None:
        self.manifest = device.manifest
        name = str(self.documents()[0]["metadata"]["name"]) if self.manifest else f"{plane.name}/{count}"
        super().__init__(plane.access, name, needs or (plane, workers), workers)
        self.plane = plane
        self.count = count
        self.device = device
        self.kind = f"{device.words} device{' plugin' if self.manifest else 's'}"

    def documents(self) -> Sequence[Document]:
        """The DaemonSet; empty if the image includes it."""
        image = require_pin("devices", Path(self.manifest).stem) if self.manifest else None
        return documents(self.manifest, {"image": image}) if self.manifest else []

    def find(self) -> ResourceStatus | None:
        """Find the DaemonSet; None if it is missing, included in the image, or the cluster is unreachable."""
        return super().find() if self.manifest else None

    def create(self) -> None:
        """Apply the DaemonSet (server-side apply). Raises TransientError while the cluster is unreachable."""
        try:
            super().create()
        except NotFoundError:
            raise TransientError(f"The EKS cluster {self.plane.name} cannot be reached yet.") from None

    def poll(self) -> Readiness:
        """Ready when `count` workers show all their devices."""
        try:
            nodes = list_workers(self.connect)
        except NotFoundError:
            return Readiness(False, "the cluster cannot be reached yet")
        device = self.device
        ready = sum(1 for node in nodes if count_allocatable(node, device.resource) >= device.each)
        return Readiness(
            ready >= self.count, f"{ready} of {self.count} machines show {device.each} × {device.resource}"
        )


# --- volumes --------------------------------------------------------------------------------------------------------

# A new cluster has neither a driver nor a default storage class, so claims would stay pending. The EBS driver is an
# EKS add-on. Its service account gets a role of the stack through EKS Pod Identity: pods cannot use the machines'
# role, because AL2023 machines limit metadata requests to one network hop. Sources: EKS' user guide (Pod Identity, EBS
# CSI driver), Kubernetes' storage classes.


AGENT, DRIVER = "eks-pod-identity-agent", "aws-ebs-csi-driver"
DRIVER_ACCOUNT = "ebs-csi-controller-sa"
CLASS = "mlbench-gp3"
MANIFEST = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {
        "name": CLASS,
        "labels": {"app.kubernetes.io/managed-by": "mlbench"},
        "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
    },
    "provisioner": "ebs.csi.aws.com",
    "parameters": {"type": "gp3"},
    # A disk is in the zone of its pod, so it is created once the pod is scheduled.
    "volumeBindingMode": "WaitForFirstConsumer",
    "allowVolumeExpansion": True,
    "reclaimPolicy": "Delete",
}


class StorageClass(ClusterObjects):
    """The default storage class."""

    kind = "storage class"

    def documents(self) -> Sequence[Document]:
        return [MANIFEST]


def volume_resources(plane: ControlPlane, machines: Resource) -> list[Resource]:
    """The resources for claims, in the order of creation; the driver's pods run on `machines`."""
    agent = AddOn(plane, AGENT)  # a DaemonSet, ACTIVE without machines, so it is created while they start
    driver = AddOn(plane, DRIVER, (plane, agent, machines), account=DRIVER_ACCOUNT)
    return [agent, driver, StorageClass(plane.access, f"{plane.name}/{CLASS}", (plane,), plane)]
