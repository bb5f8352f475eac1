"""Makes the fast network of A3 and A4 usable by pods: Kubernetes network objects and NCCL's plugin.

GPUDirect-TCPX and TCPXO need one network per card (`networks.py`), a pair of Kubernetes objects for each, and a program
that gives pods access to the cards' devices. For RDMA, GKE creates the networks (`accelerator_network_profile`), and
pods claim cards. In all cases a DaemonSet installs NCCL's plugin in a folder of the machine. Sources:
GoogleCloudPlatform/container-engine-accelerators, GoogleCloudPlatform/cluster-toolkit, Google's pages on GPUDirect and
on managed DRANET, as of 2026-11; assumptions: docs/clouds-assumptions.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.kube.gpudirect import Release, choose_release
from mlbench_cli.kube.objects import condition, is_true
from mlbench_cli.model.cluster_details import ClusterDetails
from providers.base import ROLE_LABEL, WORKER, Readiness, Resource, ResourceStatus
from providers.gke.families import FabricKind, name_networks
from providers.gke.resources import ControlPlane
from providers.gpu_probe import GpuProbe, find_driver_branch
from providers.kubernetes_calls import ClusterObjects, Document
from providers.pins import require_pin
from templates import documents

INSTALLER = "mlbench-nccl-installer"


class NetworkObjects(ClusterObjects):
    """A `Network` and its `GKENetworkParamSet` for each additional network, to which pods' interfaces refer."""

    kind = "Kubernetes' networks"

    def __init__(self, plane: ControlPlane, kind: FabricKind, needs: Sequence[Resource]) -> None:
        self.networks = {f"vpc{number}": name for number, name in enumerate(name_networks(plane.name, kind), 1)}
        super().__init__(plane.access, f"{plane.name}/vpc1…vpc{len(self.networks)}", needs, plane)

    def documents(self) -> Sequence[Document]:
        """For each network, its parameters and the network that refers to them."""
        networks = [{"name": name, "network": network} for name, network in self.networks.items()]
        return documents("kubernetes/gke-networks.yaml.j2", {"networks": networks})

    def poll(self) -> Readiness:
        """Ready when GKE has accepted the parameters of every network."""
        for document in self.documents():
            ready = condition(self.read(document) or {}, "Ready")
            if document["kind"] == "GKENetworkParamSet" and not is_true(ready):
                said = ready.get("message") or "GKE has not processed it yet"
                return Readiness(False, f"{document['metadata']['name']} is not ready: {said}")
        return Readiness(True)


class NcclInstaller(ClusterObjects):
    """DaemonSets that install NCCL's plugin on every worker; ready when it is on all of them."""

    kind = "NCCL plugin"

    def __init__(
        self, plane: ControlPlane, kind: FabricKind, count: int, pool: Resource, probe: GpuProbe | None = None
    ) -> None:
        """`probe` reports the driver branch; without it, the oldest known release is installed."""
        super().__init__(plane.access, INSTALLER, (pool, *((probe,) if probe else ())), plane)
        self.plane = plane
        self.fabric = kind
        self.count = count
        self.probe = probe

    @property
    def branch(self) -> int | None:
        """The workers' driver branch, if already known."""
        details = ClusterDetails.of(self.plane.cluster)
        return find_driver_branch(self.probe.report if self.probe and self.probe.report else details.gpu_probe)

    @property
    def release(self) -> Release:
        """The plugin release to install."""
        return choose_release(self.fabric, self.branch)

    def find(self) -> ResourceStatus | None:
        """Look for the installer; None if it is missing, or installs a plugin for another driver branch."""
        document = self.documents()[-1]
        found = self.read(document)
        return ResourceStatus("there") if found and _images(found) == _images(document) else None

    def documents(self) -> Sequence[Document]:
        """The installer, after the device injector if pods reach the cards' devices through it."""
        values = {
            "kind": self.fabric.value,
            "name": INSTALLER,
            "node_selector": {ROLE_LABEL: WORKER},
            "plugin": self.release.plugin,
            "injector": None if self.fabric is FabricKind.GIB else require_pin("gke", "nri-device-injector"),
            "pause": require_pin("gke", "pause"),
        }
        return documents("kubernetes/gke-nccl-installer.yaml.j2", values)

    def poll(self) -> Readiness:
        """Count the workers on which each DaemonSet is ready. Uses the expected number, because with a wrong label a
        DaemonSet would want no machine."""
        for document in self.documents():
            status = (self.read(document) or {}).get("status") or {}
            ready = int(status.get("numberReady") or 0)
            if ready < self.count:
                name = document["metadata"]["name"]
                return Readiness(False, f"{name} is ready on {ready} of {self.count} machines")
        fabric = {**ClusterDetails.of(self.plane.cluster).fabric, "driver_branch": self.branch}
        is_first = self.release == choose_release(self.fabric, None)  # the default of runs
        return Readiness(True, facts={} if is_first else {"fabric": fabric})


def _images(daemon_set: Mapping[str, Any]) -> list[str]:
    """The images of its init containers."""
    return [str(item["image"]) for item in daemon_set["spec"]["template"]["spec"].get("initContainers") or ()]
