"""The additional VPC networks for machines with GPUDirect-TCPX or TCPXO, one per card.

Each has a subnetwork and a firewall rule for the machines. They are free, but limited per project (quota NETWORKS), and
GKE does not delete them with a cluster. Compute Engine does not support labels for them, so mlbench's tags are in their
descriptions, by which they are found even without a cluster. Sources: Google's page on GPUDirect-TCPX and TCPXO,
cluster-toolkit (MTU, one network per card), Compute Engine's REST reference.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote

from mlbench_cli.errors import CredentialError, NotFoundError
from mlbench_cli.kube.gpudirect import Release, choose_release
from mlbench_cli.kube.objects import condition, is_true
from mlbench_cli.model.cluster_details import ClusterDetails
from providers.base import (
    CLUSTER_TAG,
    ROLE_LABEL,
    WORKER,
    BusyError,
    Readiness,
    Resource,
    ResourceStatus,
    ownership_tags,
)
from providers.gke.api import Message, region_of
from providers.gke.options import FabricKind, name_networks
from providers.gke.quota import Compute
from providers.gke.resources import ControlPlane
from providers.gpu_probe import GpuProbe, find_driver_branch
from providers.kubernetes_calls import ClusterObjects, Document
from providers.pins import require_pin
from templates import documents

MTU = 8244  # the largest MTU with header-data split on the cards
# Divided among at most 8 networks: a machine's cards must not have overlapping ranges.
RANGE, SUBNET_BITS = "192.168.0.0/16", 19
LOCATION_TAG = "mlbench-location"
PREFIX = "mlbench-"


class ComputeResource(Resource):
    """A part of a network, read and changed by Compute Engine's REST API (changes are operations)."""

    create_seconds = delete_seconds = 900.0
    collection: str  # API path below the project

    def __init__(self, plane: ControlPlane, name: str, open_compute: Callable[[], Compute]) -> None:
        self.plane = plane
        self.name = name
        self.open_compute = open_compute
        self._creation: str | None = None
        self._removal: str | None = None

    @property
    def compute(self) -> Compute:
        """The Compute Engine client, created on first use, because plans need no credentials."""
        return self.open_compute()

    @property
    def path(self) -> str:
        """Its API path below the project."""
        return f"{self.collection}/{self.name}"

    def body(self) -> Message:
        """The request body, without name and description."""
        raise NotImplementedError

    def find(self) -> ResourceStatus | None:
        """Read its status; deleting while this process's delete operation runs."""
        if self._removal is not None:
            operation, self._removal = self._removal, None
            if not self.compute.is_done(operation):
                self._removal = operation
                return ResourceStatus("being deleted", deleting=True)
        try:
            found = self.compute.get(self.path)
        except NotFoundError:
            return None
        return ResourceStatus("there", ours=read_marks(found).get(CLUSTER_TAG) == self.plane.name)

    def create(self) -> None:
        """Request it with mlbench's tags in its description, and store the operation to poll."""
        request = {"name": self.name, "description": describe_owner(self.plane), **self.body()}
        self._creation = self.compute.change("POST", self.collection, request)

    def poll(self) -> Readiness:
        """Ready when the create operation is done. Raises with Compute Engine's message if it failed."""
        if self._creation is not None and not self.compute.is_done(self._creation):
            return Readiness(False, "Compute Engine is creating it")
        self._creation = None
        self.compute.get(self.path)
        return Readiness(True)

    def delete(self) -> None:
        """Request the deletion. Absent is success. Raises BusyError while something else uses it."""
        with suppress(NotFoundError):
            self._removal = self.compute.change("DELETE", self.path)


class FastNetwork(ComputeResource):
    """A network without automatic subnetworks, for one card of each machine."""

    kind = "fast network"
    collection = "/global/networks"

    def __init__(self, plane: ControlPlane, name: str, open_compute: Callable[[], Compute]) -> None:
        super().__init__(plane, name, open_compute)
        self.remove_command = f"gcloud compute networks delete {self.name} --project {plane.gke.project}"

    def body(self) -> Message:
        """A custom-mode network, with only mlbench's subnetwork."""
        return {"autoCreateSubnetworks": False, "mtu": MTU, "routingConfig": {"routingMode": "REGIONAL"}}

    def delete(self) -> None:
        """Like other resources, after deleting firewall rules that others, such as GKE, created in this network.

        Other users of the network, such as a load balancer's endpoint group, are not deleted: mlbench waits for them,
        and reports Google's message if they remain.
        """
        wanted = quote(f'network eq ".*/networks/{self.name}"')
        rules = self.compute.get("/global/firewalls?filter=" + wanted).get("items") or []
        for rule in rules:
            with suppress(NotFoundError):
                self.compute.change("DELETE", f"/global/firewalls/{rule['name']}")
        if rules:
            raise BusyError(f"waiting for its firewall rules: {', '.join(str(rule['name']) for rule in rules)}")
        super().delete()

    @property
    def url(self) -> str:
        """The URL by which other resources refer to it."""
        return f"https://www.googleapis.com/compute/v1/projects/{self.plane.gke.project}{self.path}"


class FastSubnetwork(ComputeResource):
    """The subnetwork of one card of each machine; `card` counts from 0."""

    kind = "fast subnetwork"

    def __init__(self, network: FastNetwork, card: int) -> None:
        super().__init__(network.plane, network.name, network.open_compute)
        self.needs = (network,)
        self.network = network
        self.range = f"192.168.{card << (24 - SUBNET_BITS)}.0/{SUBNET_BITS}"
        region, project = region_of(network.plane.gke.location), network.plane.gke.project
        self.collection = f"/regions/{region}/subnetworks"
        self.remove_command = (
            f"gcloud compute networks subnets delete {self.name} --region {region} --project {project}"
        )

    def body(self) -> Message:
        """The address range in the network."""
        return {"network": self.network.url, "ipCidrRange": self.range}


class FastFirewallRule(ComputeResource):
    """The rule that allows traffic between the machines' cards."""

    kind = "fast network's firewall rule"
    collection = "/global/firewalls"

    def __init__(self, network: FastNetwork) -> None:
        super().__init__(network.plane, network.name, network.open_compute)
        self.needs = (network,)
        self.network = network
        self.remove_command = f"gcloud compute firewall-rules delete {self.name} --project {network.plane.gke.project}"

    def body(self) -> Message:
        """All protocols, only from the machines' addresses."""
        allowed = [{"IPProtocol": protocol} for protocol in ("tcp", "udp", "icmp")]
        return {"network": self.network.url, "sourceRanges": [RANGE], "allowed": allowed, "direction": "INGRESS"}


def list_networks(plane: ControlPlane, kind: str | None) -> list[ComputeResource]:
    """The networks of a cluster with this fast network, each followed by its subnetwork and firewall rule."""
    open_compute = cache(lambda: Compute(plane.gke.project))
    parts: list[ComputeResource] = []
    for card, name in enumerate(name_networks(plane.name, kind)):
        network = FastNetwork(plane, name, open_compute)
        parts += [network, FastSubnetwork(network, card), FastFirewallRule(network)]
    return parts


def describe_owner(plane: ControlPlane) -> str:
    """mlbench's tags as a description."""
    tags = {**ownership_tags(plane.cluster), LOCATION_TAG: plane.gke.location}
    return " ".join(f"{key}={value}" for key, value in tags.items())


def read_marks(found: Mapping[str, object]) -> dict[str, str]:
    """The tags in the description of a part of a network; empty if it is not mlbench's."""
    words = (word.partition("=") for word in str(found.get("description") or "").split())
    return {key: value for key, equals, value in words if equals and key.startswith(PREFIX)}


@dataclass(frozen=True)
class NetworkMark:
    """The marks of one of mlbench's networks: its tags, and when it was created (RFC 3339)."""

    tags: Mapping[str, str]
    created: str


def find_marks(project: str) -> list[NetworkMark]:
    """The marks of all of mlbench's networks in the project.

    Empty for users who may not list networks, because they cannot have created any.
    """
    try:
        listed = Compute(project).get("/global/networks?filter=" + quote(f'name eq "{PREFIX}.*"'))
    except CredentialError:
        return []
    marks = (NetworkMark(read_marks(item), str(item.get("creationTimestamp"))) for item in listed.get("items") or ())
    return [mark for mark in marks if CLUSTER_TAG in mark.tags]


# --- what lets pods use the networks: Kubernetes objects and NCCL's plugin ------------------------------------------

# GPUDirect-TCPX and TCPXO need one network per card (above), a pair of Kubernetes objects for each, and a program that
# gives pods access to the cards' devices. For RDMA, GKE creates the networks (`accelerator_network_profile`), and pods
# claim cards. In all cases a DaemonSet installs NCCL's plugin in a folder of the machine. Sources:
# GoogleCloudPlatform/container-engine-accelerators, GoogleCloudPlatform/cluster-toolkit, Google's pages on GPUDirect
# and on managed DRANET, as of 2026-11; assumptions: docs/clouds-assumptions.md.


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
