"""The options of GKE clusters, and the additional details in their records."""

import re
from dataclasses import dataclass
from enum import StrEnum

from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from providers.base import CloudOptions, option
from providers.machines import GpuCatalog, check_count, load_shapes

DEFAULT_ZONE = "europe-west1-b"


@dataclass(frozen=True)
class GkeOptions(CloudOptions):
    """The options of `mlbench create-cluster gke`; fields are declared once, for flags, plans and the record."""

    machine_type: str | None = option(
        None,
        "--machine-type",
        "-t",
        help="machine type of each worker; default: n1-standard-4, or one with the requested GPUs",
    )
    gpu_type: str | None = option(None, "--gpu-type", help="t4, l4, a100, a100-80gb, h100, …; selects the machine type")
    disk_size: int = option(100, "--disk-size", "-d", help="boot disk size per worker in GB")
    disk_type: str | None = option(
        None, "--disk-type", help="boot disk type of the workers; default: the machine type's"
    )
    kubernetes_version: str | None = option(
        None, "--kubernetes-version", "-k", help="X.Y or X.Y.Z-gke.N; default: the release channel's version"
    )
    zone: str | None = option(None, "--zone", "-z", help=f"zone of the cluster; default: {DEFAULT_ZONE}")
    region: str | None = option(
        None, "--region", help="region of a regional cluster, with a control plane in all of its zones"
    )
    worker_zone: tuple[str, ...] = option(
        (),
        "--worker-zone",
        help="zone of the workers; repeatable; default: the cluster's, or the first with such machines",
    )
    project: str | None = option(None, "--project", "-p", help="Google project; default: the credentials' own")
    flex_start: bool = option(False, "--flex-start", help="queue for machines (DWS flex-start); runs wait for them")
    reservation: str | None = option(
        None,
        "--reservation",
        help="Compute Engine reservation for the workers; for one of its blocks: NAME/reservationBlocks/BLOCK",
    )
    compact_placement: bool = option(False, "--compact-placement", help="put the workers close together")
    fast_network: bool = option(
        False,
        "--fast-network",
        help="GPUDirect-TCPX, TCPXO or RDMA between the workers (A3 with 8 GPUs, A4); runs use it",
    )
    gpu_driver: str = option("latest", "--gpu-driver", help="GPU driver version: latest or default, as GKE calls them")
    release_channel: str = option(
        "regular", "--release-channel", help="release channel: rapid, regular, stable or extended"
    )
    system_machine_type: str = option(
        "e2-standard-2", "--system-machine-type", help="machine type of the two system nodes (DNS, Helm charts)"
    )
    service_account: str | None = option(
        None, "--service-account", help="service account of the machines; default: the project's"
    )
    private_nodes: bool = option(False, "--private-nodes", help="machines without public addresses")
    allow_from: tuple[str, ...] = option(
        (),
        "--allow-from",
        help="CIDR with access to the Kubernetes API; repeatable; default: all, by DNS name",
    )
    network: str | None = option(
        None,
        "--network",
        help="VPC network; default: the project's default; a shared one: projects/HOST/global/networks/NAME",
    )
    subnetwork: str | None = option(
        None,
        "--subnetwork",
        help="subnetwork of that network; a shared one: projects/HOST/regions/REGION/subnetworks/NAME",
    )
    pods_range: str | None = option(
        None, "--pods-range", help="secondary range of the subnetwork for pods; default: GKE adds one"
    )
    services_range: str | None = option(
        None, "--services-range", help="secondary range of the subnetwork for Services; default: GKE adds one"
    )
    secure_boot: bool = option(
        False, "--secure-boot", help="machines that start only signed code, for organizations that require it"
    )


class GkeDetails(ClusterDetails, frozen=True):
    """A cluster on GKE is also identified by its Google project."""

    project: str | None = None


# --- families of machines: boot disks, CPU quotas, purchase options, networks ---------------------------------------

# Sources: dstack `gcp/resources.py` and SkyPilot `volume_utils.py` (disks), gpuhunt and Google's consumption table
# (ways to buy), cluster-toolkit (networks of A3 and A4, since which GKE makes those of RDMA), as of 2026-11.


PD, HYPERDISK = "pd-balanced", "hyperdisk-balanced"
# Families with persistent or Hyperdisk boot disks. For families in neither list, GKE chooses.
PD_FAMILIES = ("e2", "n1", "n2", "n2d", "c2", "c2d", "c3", "t2d", "a2", "g2", "a3-highgpu", "a3-megagpu")
HYPERDISK_FAMILIES = ("n4", "c4", "c4a", "c4d", "g4", "a3-ultragpu", "a4", "a4x", "x4", "m4", "h3")
# Names of regional disk quotas.
DISK_QUOTAS = {PD: "SSD_TOTAL_GB", HYPERDISK: "HDB_TOTAL_GB"}
# Not available on demand: only as spot, flex-start or from a reservation.
NOT_ON_DEMAND = (
    *("a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g", "a3-ultragpu-8g"),
    *("a4-highgpu-8g", "a4x-highgpu-4g", "a4x-maxgpu-4g-metal"),
)
# Families with compact placement for flex-start, but not with queued provisioning. Source: cluster-toolkit.
FLEX_START_COMPACT = ("a3-ultragpu", "a4-", "h4d-")


class FabricKind(StrEnum):
    """How NCCL uses a family's network cards. Values are those of the label `mlbench-fabric`."""

    TCPX = "tcpx"
    TCPXO = "tcpxo"
    GIB = "gib"


@dataclass(frozen=True)
class Fabric:
    """A machine's fast network: name, bandwidth in Gbit/s, and what a cluster needs for it.

    `networks` is the number of additional VPC networks, one per card; if 0, GKE creates them itself since version
    `since` (`accelerator_network_profile`).
    """

    name: str
    gbits: int
    kind: FabricKind
    networks: int = 0
    since: tuple[int, ...] = ()


RDMA = Fabric("RDMA (gIB)", 3200, FabricKind.GIB, since=(1, 34, 1, 1829001))
FABRICS = {
    "a3-highgpu-8g": Fabric("GPUDirect-TCPX", 800, FabricKind.TCPX, 4),
    "a3-megagpu-8g": Fabric("GPUDirect-TCPXO", 1600, FabricKind.TCPXO, 8),
    "a3-ultragpu-8g": RDMA,
    "a4-highgpu-8g": RDMA,
}


def fabric_facts(machine_type: str | None, kind: str | None) -> dict[str, object]:
    """The record's entries about the machines' fast network, with `kind` if it is set up; empty without one."""
    fabric = FABRICS.get(machine_type or "")
    facts: dict[str, object] = {"name": fabric.name, "gbits": fabric.gbits} if fabric else {}
    return {**facts, "setup": kind} if kind else facts


def count_networks(kind: str | None) -> int:
    """The number of additional VPC networks of a cluster with this fast network."""
    return max((fabric.networks for fabric in FABRICS.values() if fabric.kind == kind), default=0)


def name_networks(cluster: str, kind: str | None) -> list[str]:
    """The names of the additional VPC networks of a cluster with this fast network."""
    return [f"mlbench-{cluster}-net{number + 1}" for number in range(count_networks(kind))]


def configure_pool(cluster: str, kind: str) -> tuple[dict[str, object], dict[str, str]]:
    """The network settings of a node pool with a fast network, and the labels of its nodes.

    A network and its subnetwork have the same name.
    """
    if names := name_networks(cluster, kind):
        return {"additional_node_network_configs": [{"network": name, "subnetwork": name} for name in names]}, {}
    return {"accelerator_network_profile": "auto"}, {"cloud.google.com/gke-networking-dra-driver": "true"}


def default_disk_type(machine_type: str) -> str | None:
    """The boot disk type for the machine type; None: GKE's choice."""
    if _is_of(machine_type, HYPERDISK_FAMILIES):
        return HYPERDISK
    return PD if _is_of(machine_type, PD_FAMILIES) else None


def cpu_quota_names(machine_type: str) -> tuple[str, str]:
    """The CPU quota of a family, and the common one of all families without their own."""
    return f"{machine_type.partition('-')[0].upper()}_CPUS", "CPUS"


def _is_of(machine_type: str, families: tuple[str, ...]) -> bool:
    return any(machine_type.startswith(f"{family}-") for family in families)


# --- types of machines and their GPUs -------------------------------------------------------------------------------

# Source of their rows in machines.csv: Google's list of GPU machine types, as of 2026-11. Types without a row are
# looked up in Compute Engine when the cluster is planned.


CPU_DEFAULT = "n1-standard-4"
GPU_DEFAULT = "nvidia-tesla-t4"


@dataclass(frozen=True)
class Machine:
    """A machine type. `gpu` is a Compute Engine accelerator type, None without GPUs."""

    name: str
    gpu: str | None = None
    gpus: int = 0

    @property
    def vcpus(self) -> int | None:
        """The number of vCPUs in its name; None if the name has none."""
        size = re.fullmatch(r"[a-z0-9]+-(?:standard|highmem|highcpu|custom)-(\d+)(?:-.*)?", self.name)
        return int(size[1]) if size else None


# Machine types with built-in GPUs.
SHAPED = {row.name: Machine(row.name, row.gpu, row.gpus) for row in load_shapes("gke") if row.gpu}
# GPUs that can be attached to N1 machines, and the possible numbers.
ATTACHED = {"nvidia-tesla-t4": (1, 2, 4)}
ATTACHED_TO = {1: "n1-standard-8", 2: "n1-standard-16", 4: "n1-standard-32"}
OTHER_NAMES = {
    "rtx6000": "nvidia-rtx-pro-6000",
    "a100-40gb": "nvidia-tesla-a100",
    "h100": "nvidia-h100-80gb",
    "h100-mega": "nvidia-h100-mega-80gb",
    "h200": "nvidia-h200-141gb",
}
CATALOG = GpuCatalog(
    "Google Cloud",
    {**SHAPED, **{name: Machine(name, GPU_DEFAULT, count) for count, name in ATTACHED_TO.items()}},
    OTHER_NAMES,
    ("k80", "p100", "p4", "v100"),
)


def is_gpu_family(machine_type: str) -> bool:
    """Whether the machine type has built-in GPUs: families A and G, such as a4x and g4."""
    return re.match(r"[ag]\d+x?-", machine_type) is not None


def choose_machine(machine_type: str | None, num_gpus: int | None, gpu_type: str | None) -> Machine:
    """The machine selected by the options. Raises UsageError with valid alternatives for impossible combinations."""
    check_count(num_gpus)
    is_new = machine_type is not None and machine_type not in SHAPED and is_gpu_family(machine_type)
    gpu = (gpu_type if is_new else CATALOG.find_gpu(gpu_type)) if gpu_type else None
    if machine_type is None:
        if not gpu and not num_gpus:
            return Machine(CPU_DEFAULT)
        machine = CATALOG.choose_smallest(gpu or GPU_DEFAULT, num_gpus)
        # The smallest machine with one L4 has too little memory for the tasks, so take the second smallest.
        return SHAPED["g2-standard-8"] if machine.name == "g2-standard-4" else machine
    if machine_type in SHAPED:
        return CATALOG.require_gpus(SHAPED[machine_type], num_gpus, gpu)
    if is_gpu_family(machine_type):
        return Machine(machine_type, gpu)  # Compute Engine reports the number of GPUs
    if not gpu and not num_gpus:
        return Machine(machine_type)
    return _attach(machine_type, num_gpus or 1, gpu or GPU_DEFAULT)


def _attach(machine_type: str, count: int, gpu: str) -> Machine:
    if gpu not in ATTACHED:
        raise UsageError(
            f"{gpu} cannot be attached to {machine_type}; it comes with its own machine types.",
            hint=CATALOG.list_with(gpu),
        )
    if not machine_type.startswith("n1-"):
        raise UsageError(
            f"{gpu} can be attached only to n1 machines, not to {machine_type}.",
            hint=f"--machine-type {ATTACHED_TO.get(count, ATTACHED_TO[1])}",
        )
    if count not in ATTACHED[gpu]:
        raise UsageError(f"A machine may have {', '.join(map(str, ATTACHED[gpu]))} × {gpu}, not {count}.")
    return Machine(machine_type, gpu, count)
