"""The options of `create-cluster aks`, and the details that only AKS clusters have."""

import re
from dataclasses import dataclass

from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from providers.base import CloudOptions, option
from providers.machines import GpuCatalog, check_count, load_shapes

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
    aad: str | None = option(
        None,
        "--aad",
        help="object ID of a Microsoft Entra group, one of yours, whose members administer the cluster; its local "
        "accounts are then disabled, as some policies demand",
    )
    identity: str | None = option(
        None,
        "--identity",
        help="resource ID of a user-assigned identity for the cluster, with its roles; default: a new one",
    )


class AksDetails(ClusterDetails, frozen=True):
    """A cluster on AKS is also identified by its subscription."""

    subscription: str | None = None


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


# --- VM sizes and their GPUs ----------------------------------------------------------------------------------------

# Sources of their rows in machines.csv: Microsoft's pages on VM sizes as of 2026-11; karpenter-provider-azure
# `supported-gpus.yaml` (sizes for which AKS installs a driver). Sizes with a fraction of a GPU, with AMD GPUs, and Arm
# machines have none, because task images do not run there.

CPU_DEFAULT = "Standard_D4s_v5"
GPU_DEFAULT = "t4"


@dataclass(frozen=True)
class Machine:
    """`gpu` as in `--gpu-type`, None for a machine without. `vcpus` is None if the table does not know it."""

    name: str
    gpu: str | None = None
    gpus: int = 0
    vcpus: int | None = None


@dataclass(frozen=True)
class Fabric:
    """The fast network of a VM size: name and bandwidth in Gbit/s."""

    name: str
    gbits: int


OTHER_NAMES = {"a100-80gb": "a100", "h100-80gb": "h100", "h100-94gb": "h100-nvl", "h200-141gb": "h200"}
MACHINES = {row.name: Machine(row.name, row.gpu, row.gpus, row.vcpus) for row in load_shapes("aks")}
GPU_MACHINES = {name: machine for name, machine in MACHINES.items() if machine.gpu}
# NVIDIA driver that AKS installs: GRID for sizes that are also sold for graphics, else CUDA's. Moves with node images.
# Source: karpenter-provider-azure `pkg/utils/gpu.go` (ConvergedGPUDriverSizes) as of 2026-08.
DRIVERS = {"a10": "570.211.01", "rtx-pro-6000": "595.58"}
OTHER_DRIVER = "580.159.04"
INFINIBAND = "InfiniBand"
FABRICS = {row.name: Fabric(INFINIBAND, row.gbits) for row in load_shapes("aks") if row.gbits}
# The last are GPUs that current torch wheels do not support, or that Azure has retired.
CATALOG = GpuCatalog("Azure", GPU_MACHINES, OTHER_NAMES, ("k80", "p40", "p100", "m60", "v100"))
TOO_OLD_SIZES = ("nc6", "nc12", "nc24", "nc6s_v3", "nc12s_v3", "nc24s_v3", "nc24rs_v3", "nd40rs_v2", "nd40s_v2")
NOT_NVIDIA = ("mi300x", "v710", "v620")


def choose_machine(machine_type: str | None, num_gpus: int | None, gpu_type: str | None) -> Machine:
    """The VM size selected by the options. Raises UsageError with valid alternatives for impossible combinations."""
    check_count(num_gpus)
    machine = find_machine(machine_type) if machine_type else None
    is_new = machine is not None and not machine.gpus and is_gpu_family(machine.name)
    gpu = (gpu_type if is_new else CATALOG.find_gpu(gpu_type)) if gpu_type else None
    if machine is None:
        return CATALOG.choose_smallest(gpu or GPU_DEFAULT, num_gpus) if gpu or num_gpus else MACHINES[CPU_DEFAULT]
    if machine.gpus:
        return CATALOG.require_gpus(machine, num_gpus, gpu)
    if is_gpu_family(machine.name):
        return Machine(machine.name, gpu or _gpu_of_name(machine.name))  # the number is looked up in Azure
    if gpu or num_gpus:
        raise UsageError(f"{machine.name} has no GPU.", hint=CATALOG.list_with(gpu or GPU_DEFAULT))
    return machine


def is_gpu_family(size: str) -> bool:
    """Whether a VM size belongs to a GPU family, whose names begin with N."""
    return size.lower().startswith("standard_n")


def _gpu_of_name(size: str) -> str:
    """The GPU in a size's name, e.g. "GB200" in Standard_ND128isr_NDR_GB200_v6; Azure does not list types."""
    words = [word for word in re.split(r"_", size) if re.search(r"[A-Z]+\d{2,}", word) and not word.startswith("N")]
    short = words[-1].lower() if words else "gpu"
    return "rtx-pro-6000" if short.startswith("rtxpro6000") else short


def find_machine(name: str) -> Machine:
    """The size with this name, in Azure's capitalization; unknown ones are looked up when the cluster is planned.

    Raises UsageError for invalid names, and for sizes whose GPUs cannot run the tasks.
    """
    full = name if name.lower().startswith("standard_") else f"Standard_{name}"
    known = {size.lower(): machine for size, machine in MACHINES.items()}
    if (machine := known.get(full.lower())) is not None:
        return machine
    size = full.lower().removeprefix("standard_")
    if size in TOO_OLD_SIZES or any(word in size for word in NOT_NVIDIA):
        raise UsageError(
            f"{full} has GPUs that current images do not support.", hint=f"--machine-type: {', '.join(GPU_MACHINES)}"
        )
    if not full.replace("_", "").replace("-", "").isalnum():
        raise UsageError(f'--machine-type "{name}" is not the name of a VM size.', hint=f"For example {CPU_DEFAULT}")
    return Machine(full)
