"""Properties of Compute Engine's machine families: boot disks, CPU quotas, purchase options, networks.

Sources: dstack `gcp/resources.py` and SkyPilot `volume_utils.py` (disks), gpuhunt and Google's consumption table (ways
to buy), cluster-toolkit (networks of A3 and A4, since which GKE makes those of RDMA), as of 2026-11.
"""

from dataclasses import dataclass
from enum import StrEnum

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
