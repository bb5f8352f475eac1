"""What makes the fast network of A3 and A4 usable by pods: Kubernetes' names of the networks, and NCCL's plugin.

GPUDirect-TCPX and TCPXO take a network for each card (`networks.py`), which Kubernetes knows by a pair of objects, and
a program that lets pods reach the cards' devices. RDMA's networks are made by GKE (`accelerator_network_profile`), and
pods claim its cards. On all of them a DaemonSet puts NCCL's plugin into a folder of the machine.
Sources: GoogleCloudPlatform/container-engine-accelerators, GoogleCloudPlatform/cluster-toolkit, Google's pages on
GPUDirect and on managed DRANET, as of 2026-11; assumptions: docs/clouds-assumptions.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.errors import NotFoundError
from mlbench_cli.kube.gpudirect import Release, choose_release
from mlbench_cli.kube.objects import condition, is_true
from mlbench_cli.model.cluster_details import ClusterDetails
from providers.base import Readiness, Resource, ResourceStatus
from providers.gke.api import Message
from providers.gke.families import FabricKind, name_networks
from providers.gke.resources import ROLE_LABEL, WORKER, ControlPlane
from providers.gpu_probe import GpuProbe, find_driver_branch
from providers.kubernetes_calls import apply_object, open_young_cluster
from providers.pins import require_pin
from templates import documents

INSTALLER = "mlbench-nccl-installer"
DAEMON_SETS = "/apis/apps/v1/namespaces/kube-system/daemonsets"
NETWORKING = "/apis/networking.gke.io/v1"


class FabricObject(Resource):
    """Objects of Kubernetes that go with the cluster."""

    create_seconds = 900.0

    def __init__(self, plane: ControlPlane, kind: FabricKind, needs: Sequence[Resource]) -> None:
        self.plane = plane
        self.fabric = kind
        self.needs = tuple(needs)
        self.goes_with = plane

    def documents(self) -> list[tuple[str, Message]]:
        """Each object with its path."""
        raise NotImplementedError

    def find(self) -> ResourceStatus | None:
        """Look for the last of the objects; None if it is missing, or with it the cluster."""
        path, _ = self.documents()[-1]
        return ResourceStatus("there") if self.read(path) is not None else None

    def create(self) -> None:
        """Apply the objects on the server's side."""
        with open_young_cluster(self.plane.access) as kubernetes:
            for path, document in self.documents():
                apply_object(kubernetes, path, document)

    def delete(self) -> None:
        """Do nothing: the objects go with the cluster."""
        return

    def read(self, path: str) -> Mapping[str, Any] | None:
        """An object of the cluster; None if it is missing, or with it the cluster."""
        try:
            with open_young_cluster(self.plane.access) as kubernetes:
                found: Mapping[str, Any] = kubernetes.get(path)
                return found
        except NotFoundError:
            return None


class NetworkObjects(FabricObject):
    """A `Network` with its `GKENetworkParamSet` for each additional network: pods name their interfaces by them."""

    kind = "Kubernetes' networks"

    def __init__(self, plane: ControlPlane, kind: FabricKind, needs: Sequence[Resource]) -> None:
        super().__init__(plane, kind, needs)
        self.networks = {f"vpc{number}": name for number, name in enumerate(name_networks(plane.name, kind), 1)}
        self.name = f"{plane.name}/vpc1…vpc{len(self.networks)}"

    def documents(self) -> list[tuple[str, Message]]:
        """First the parameters of a network, then the network that refers to them."""

        plurals = {"GKENetworkParamSet": "gkenetworkparamsets", "Network": "networks"}
        networks = [{"name": name, "network": network} for name, network in self.networks.items()]
        found = documents("kubernetes/gke-networks.yaml.j2", {"networks": networks})
        return [(f"{NETWORKING}/{plurals[item['kind']]}/{item['metadata']['name']}", item) for item in found]

    def poll(self) -> Readiness:
        """Ready when GKE has accepted the parameters of every network."""
        for name in self.networks:
            found: Mapping[str, Any] = self.read(f"{NETWORKING}/gkenetworkparamsets/{name}") or {}
            ready = condition(found, "Ready")
            if not is_true(ready):
                said = ready.get("message") or "GKE has not processed it yet"
                return Readiness(False, f"{name} is not ready: {said}")
        return Readiness(True)


class NcclInstaller(FabricObject):
    """DaemonSets that bring NCCL's plugin to every worker; ready when it is on all of them."""

    kind = "NCCL plugin"
    name = INSTALLER

    def __init__(
        self, plane: ControlPlane, kind: FabricKind, count: int, pool: Resource, probe: GpuProbe | None = None
    ) -> None:
        """`probe` tells the branch of the driver; without one the oldest release that is known is installed."""
        super().__init__(plane, kind, (pool, *((probe,) if probe else ())))
        self.count = count
        self.probe = probe

    @property
    def branch(self) -> int | None:
        """The branch of the workers' driver, as far as it is known by now."""
        details = ClusterDetails.of(self.plane.cluster)
        return find_driver_branch(self.probe.report if self.probe and self.probe.report else details.gpu_probe)

    @property
    def release(self) -> Release:
        """The plugin that is installed."""
        return choose_release(self.fabric, self.branch)

    def find(self) -> ResourceStatus | None:
        """Look for the installer; None if it is missing, or installs a plugin for another driver."""
        path, document = self.documents()[-1]
        found = self.read(path)
        return ResourceStatus("there") if found and _images(found) == _images(document) else None

    def documents(self) -> list[tuple[str, Message]]:
        """The installer, after the device injector if pods reach the cards' devices through it."""

        values = {
            "kind": self.fabric.value,
            "name": INSTALLER,
            "node_selector": {ROLE_LABEL: WORKER},
            "plugin": self.release.plugin,
            "injector": None if self.fabric is FabricKind.GIB else require_pin("gke", "nri-device-injector"),
            "pause": require_pin("gke", "pause"),
        }
        found = documents("kubernetes/gke-nccl-installer.yaml.j2", values)
        return [(f"{DAEMON_SETS}/{item['metadata']['name']}", item) for item in found]

    def poll(self) -> Readiness:
        """Count the workers on which each DaemonSet is ready. A wrong label would let it want no machine at all."""
        for path, _ in self.documents():
            status = (self.read(path) or {}).get("status") or {}
            ready = int(status.get("numberReady") or 0)
            if ready < self.count:
                name = path.rpartition("/")[2]
                return Readiness(False, f"{name} is ready on {ready} of {self.count} machines")
        fabric = {**ClusterDetails.of(self.plane.cluster).fabric, "driver_branch": self.branch}
        is_first = self.release == choose_release(self.fabric, None)  # which runs take by default
        return Readiness(True, facts={} if is_first else {"fabric": fabric})


def _images(daemon_set: Mapping[str, Any]) -> list[str]:
    """The images of what it runs before its containers start."""
    return [str(item["image"]) for item in daemon_set["spec"]["template"]["spec"].get("initContainers") or ()]
