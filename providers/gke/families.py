"""What the families of Compute Engine's machines want: boot disks, quotas of CPUs, ways to buy, networks.

Sources: dstack `gcp/resources.py` and SkyPilot `volume_utils.py` (disks), gpuhunt and Google's consumption table (ways
to buy), cluster-toolkit (networks of A3 and A4), as of 2026-11.
"""

from dataclasses import dataclass

PD, HYPERDISK = "pd-balanced", "hyperdisk-balanced"
# Families whose boot disk is a persistent disk, or a Hyperdisk. A family in neither gets what GKE chooses.
PD_FAMILIES = ("e2", "n1", "n2", "n2d", "c2", "c2d", "c3", "t2d", "a2", "g2", "a3-highgpu", "a3-megagpu")
HYPERDISK_FAMILIES = ("n4", "c4", "c4a", "c4d", "g4", "a3-ultragpu", "a4", "a4x", "x4", "m4", "h3")
# What a quota of disks is called in a region.
DISK_QUOTAS = {PD: "SSD_TOTAL_GB", HYPERDISK: "HDB_TOTAL_GB"}
# Not sold on demand: only as spot, flex-start or from a reservation.
NOT_ON_DEMAND = ("a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g", "a3-ultragpu-8g", "a4-highgpu-8g")
# Whose machines flex-start can put close together; not with queued provisioning. Source: cluster-toolkit.
FLEX_START_COMPACT = ("a3-ultragpu", "a4-", "h4d-")


@dataclass(frozen=True)
class Fabric:
    """The fast network of a machine: what NCCL calls it if it is used, and its bandwidth in Gbit/s."""

    name: str
    gbits: int


FABRICS = {
    "a3-highgpu-8g": Fabric("GPUDirect-TCPX", 800),
    "a3-megagpu-8g": Fabric("GPUDirect-TCPXO", 1600),
    "a3-ultragpu-8g": Fabric("RDMA (gIB)", 3200),
    "a4-highgpu-8g": Fabric("RDMA (gIB)", 3200),
}


def default_disk_type(machine_type: str) -> str | None:
    """The boot disk that machines of the type can have; None leaves it to GKE."""
    if _is_of(machine_type, HYPERDISK_FAMILIES):
        return HYPERDISK
    return PD if _is_of(machine_type, PD_FAMILIES) else None


def cpu_quota_names(machine_type: str) -> tuple[str, str]:
    """The quota of a family's CPUs, and the common one of all families that have none of their own."""
    return f"{machine_type.partition('-')[0].upper()}_CPUS", "CPUS"


def _is_of(machine_type: str, families: tuple[str, ...]) -> bool:
    return any(machine_type.startswith(f"{family}-") for family in families)
