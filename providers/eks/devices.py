"""Makes GPUs and fast network cards known to Kubernetes: device plugins, and the wait until all machines show them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbench_cli.errors import NotFoundError
from providers.base import Readiness, Resource, ResourceStatus, TransientError
from providers.eks.control_plane import ControlPlane
from providers.eks.nodes import EFA, GPU, ROLE_LABEL, WORKER, NodeGroup
from providers.gpu_probe import GpuProbe
from providers.kubernetes_calls import apply_object, open_young_cluster
from providers.pins import require_pin
from providers.ready_machines import count_allocatable
from templates import documents

PATH = "/apis/apps/v1/namespaces/kube-system/daemonsets"


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


class DevicePlugin(Resource):
    """Applied by us, unless the machines' image has it; ready when all machines show their devices."""

    create_seconds = 900.0

    def __init__(
        self, plane: ControlPlane, workers: NodeGroup, count: int, device: Device, needs: tuple[Resource, ...] = ()
    ) -> None:

        image = require_pin("devices", Path(device.manifest).stem) if device.manifest else None
        self.manifest = documents(device.manifest, {"image": image})[0] if device.manifest else None
        self.plane = plane
        self.count = count
        self.device = device
        self.kind = f"{device.words} device plugin" if self.manifest else f"{device.words} devices"
        self.name = str(self.manifest["metadata"]["name"]) if self.manifest else f"{plane.name}/{count}"
        self.needs = needs or (plane, workers)
        self.goes_with = workers

    def find(self) -> ResourceStatus | None:
        """Look for the DaemonSet on the cluster; None if it is missing, built into the image, or out of reach."""
        if self.manifest is None:
            return None  # it is nothing but a wait
        with self._api() as api:
            if api is None:
                return None
            try:
                api.get(f"{PATH}/{self.name}")
            except NotFoundError:
                return None
        return ResourceStatus("there")

    def create(self) -> None:
        """Apply the DaemonSet on the server's side. Raises TransientError while the cluster cannot be reached."""
        if self.manifest is None:
            return
        with self._api() as api:
            if api is None:
                raise TransientError(f"The EKS cluster {self.plane.name} cannot be reached yet.")
            apply_object(api, f"{PATH}/{self.name}", self.manifest)

    def poll(self) -> Readiness:
        """Count the workers that show all their devices; ready when `count` do."""
        with self._api() as api:
            if api is None:
                return Readiness(False, "the cluster cannot be reached yet")
            nodes = api.get("/api/v1/nodes", labelSelector=f"{ROLE_LABEL}={WORKER}")["items"]
        device = self.device
        ready = sum(1 for node in nodes if count_allocatable(node, device.resource) >= device.each)
        return Readiness(
            ready >= self.count, f"{ready} of {self.count} machines show {device.each} × {device.resource}"
        )

    def delete(self) -> None:
        """Do nothing: the DaemonSet goes with the control plane."""
        return

    @contextmanager
    def _api(self) -> Iterator[Any]:
        """A client, or None if there is no cluster to talk to. Refusals soon after the start pass by themselves."""
        try:
            access = self.plane.access()
        except NotFoundError:
            yield None
            return
        with open_young_cluster(lambda: access) as api:
            yield api


def gpu_probe(plane: ControlPlane, workers: NodeGroup, gpus: int, image: str, needs: tuple[Resource, ...]) -> GpuProbe:
    """The proof that containers on the workers can use their GPUs."""
    return GpuProbe(plane.access, image, gpus, {ROLE_LABEL: WORKER}, needs, workers)
