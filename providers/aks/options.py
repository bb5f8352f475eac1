"""The options of `create-cluster aks`, and the details that only AKS clusters have."""

from dataclasses import dataclass

from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails, fact
from providers.base import CloudOptions, option

DEFAULT_REGION = "eastus"
DEFAULT_SYSTEM = "Standard_D2s_v5"


@dataclass(frozen=True)
class AksOptions(CloudOptions):
    """The options of `mlbench create-cluster aks`; fields are declared once, for flags, plans and the record."""

    machine_type: str | None = option(
        None,
        "--machine-type",
        "-t",
        help="VM size of each worker; default: Standard_D4s_v5, or one with the requested GPUs",
    )
    gpu_type: str | None = option(
        None, "--gpu-type", help="t4, a10, a100, a100-40gb, h100, h100-nvl, h200; selects the VM size"
    )
    disk_size: int = option(128, "--disk-size", "-d", help="OS disk size per worker in GB (a managed premium disk)")
    kubernetes_version: str | None = option(
        None, "--kubernetes-version", "-k", help="X.Y or X.Y.Z; default: the region's default version"
    )
    region: str | None = option(None, "--region", help=f"region of the cluster; default: {DEFAULT_REGION}")
    zones: str | None = option(
        None,
        "--zones",
        help="availability zones to try for the workers, one after the other until one has them: 1,2,3",
    )
    subscription: str | None = option(
        None, "--subscription", "-p", help="Azure subscription (its ID); default: that of az account set"
    )
    compact_placement: bool = option(
        False, "--compact-placement", help="put the workers close together (a proximity placement group)"
    )
    slow_network_ok: bool = option(
        False,
        "--slow-network-ok",
        help="allow several machines of a size with InfiniBand, although NCCL will use TCP",
    )
    tier: str = option("free", "--tier", help="tier of the control plane: free, or standard (with an SLA)")
    system_machine_type: str = option(
        DEFAULT_SYSTEM, "--system-machine-type", help="VM size of the two system nodes (DNS, Helm charts)"
    )
    subnet: str | None = option(None, "--subnet", help="resource ID of a subnet for the nodes; default: a new network")
    identity: str | None = option(
        None,
        "--identity",
        help="resource ID of a user-assigned identity for the cluster, with its roles; default: a new one",
    )


@dataclass(frozen=True)
class AksDetails(ClusterDetails):
    """A cluster on AKS is also identified by its subscription."""

    subscription: str | None = fact(str)


def split_zones(text: str | None, region: str) -> tuple[str, ...]:
    """The zones of --zones in Kubernetes' form, e.g. "eastus-1".

    Raises UsageError unless they are distinct and among 1, 2 and 3.
    """
    if text is None:
        return ()
    numbers = [part.strip().removeprefix(f"{region}-") for part in text.split(",")]
    if any(number not in ("1", "2", "3") for number in numbers) or len(set(numbers)) < len(numbers):
        raise UsageError(f'--zones "{text}" is not a list of different zones.', hint="For example: --zones 1,2,3")
    return tuple(f"{region}-{number}" for number in numbers)
