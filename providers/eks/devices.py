"""Makes GPUs and fast network cards known to Kubernetes: device plugins, and the wait until all machines show them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbench_cli.errors import NotFoundError
from providers.base import Readiness, Resource, ResourceStatus, TransientError
from providers.eks.control_plane import ControlPlane
from providers.eks.nodes import EFA, GPU, NodeGroup
from providers.kubernetes_calls import ClusterObjects, Document, list_workers
from providers.pins import require_pin
from providers.ready_machines import count_allocatable
from templates import documents


@dataclass(frozen=True)
class Device:
    """What a machine has `each` of, by Kubernetes' name for it; `manifest` is the plugin that shows it."""

    resource: str
    words: str
    each: int
    manifest: str | None  # None: the machines' image brings the plugin along


def gpu_device(each: int, *, built_in: bool = False) -> Device:
    """NVIDIA GPUs, `each` per machine; `built_in` if the node image brings the device plugin."""
    return Device(GPU, "GPU", each, None if built_in else "kubernetes/nvidia-device-plugin.yaml")


def network_card_device(each: int) -> Device:
    """EFA network cards, `each` per machine."""
    return Device(EFA, "EFA", each, "kubernetes/efa-device-plugin.yaml")


class DevicePlugin(ClusterObjects):
    """Applied by us, unless the machines' image has it; ready when all machines show their devices."""

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
        """The DaemonSet; nothing if the image has it."""
        image = require_pin("devices", Path(self.manifest).stem) if self.manifest else None
        return documents(self.manifest, {"image": image}) if self.manifest else []

    def find(self) -> ResourceStatus | None:
        """Look for the DaemonSet on the cluster; None if it is missing, built into the image, or out of reach."""
        return super().find() if self.manifest else None

    def create(self) -> None:
        """Apply the DaemonSet on the server's side. Raises TransientError while the cluster cannot be reached."""
        try:
            super().create()
        except NotFoundError:
            raise TransientError(f"The EKS cluster {self.plane.name} cannot be reached yet.") from None

    def poll(self) -> Readiness:
        """Count the workers that show all their devices; ready when `count` do."""
        try:
            nodes = list_workers(self.connect)
        except NotFoundError:
            return Readiness(False, "the cluster cannot be reached yet")
        device = self.device
        ready = sum(1 for node in nodes if count_allocatable(node, device.resource) >= device.each)
        return Readiness(
            ready >= self.count, f"{ready} of {self.count} machines show {device.each} × {device.resource}"
        )
