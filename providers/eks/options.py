"""The options of `create-cluster eks`, and the facts that only its clusters have."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.cluster_details import NVIDIA_GPU, ClusterDetails
from providers.base import ROLE_LABEL, WORKER, CloudOptions, RightsError, option
from providers.eks.api import Aws
from providers.machines import GpuCatalog, check_count, describe_gpus, load_shapes


class EksDetails(ClusterDetails, frozen=True):
    """What only clusters on EKS have."""

    machine: Mapping[str, Any] = {}  # fields of Machine


@dataclass(frozen=True)
class EksOptions(CloudOptions):
    """The options of `mlbench create-cluster eks`; fields are declared once, for flags, plans and the record."""

    gpu_type: str | None = option(None, "--gpu-type", help="T4, A10G, L4, A100, H100, …; selects the instance type")
    kubernetes_version: str | None = option(
        None, "--kubernetes-version", "-k", help="Kubernetes X.Y; default: EKS' own default version"
    )
    region: str | None = option(
        None, "--region", help="AWS region; default: the zone's, the environment's or the profile's"
    )
    zone: str | None = option(None, "--zone", "-z", help="zone of the workers; default: the first with such machines")
    spot_type: tuple[str, ...] = option(
        (),
        "--spot-type",
        help="with --spot: another acceptable instance type; repeatable; default: those with the same GPUs",
    )
    capacity_reservation: str | None = option(
        None, "--capacity-reservation", help="capacity reservation or Capacity Block (cr-…) for the workers"
    )
    placement_group: bool = option(False, "--placement-group", help="put the workers close together")
    subnets: str | None = option(
        None,
        "--subnets",
        help="subnet IDs of a network that others made, one for each of two zones or more; default: a network made "
        "with the cluster",
    )
    private_nodes: bool = option(
        False, "--private-nodes", help="machines without public addresses, behind a NAT gateway"
    )
    permissions_boundary: str | None = option(
        None, "--permissions-boundary", help="ARN of the IAM policy that limits the roles created for the cluster"
    )
    efa: bool = option(False, "--efa", help="EFA network cards, with a placement group; runs request them")
    node_image: str = option(
        "al2023",
        "--node-image",
        help="node image of the workers: al2023, or bottlerocket, which has a GPU device plugin",
    )
    admin: tuple[str, ...] = option(
        (), "--admin", help="ARN of another principal with administrator access; repeatable"
    )
    no_network_policies: bool = option(
        False, "--no-network-policies", help="omit the agent that enforces the network policies of runs"
    )
    no_volumes: bool = option(False, "--no-volumes", help="omit the EBS driver and the default storage class")
    system_machine_type: str = option(
        "t3.medium", "--system-machine-type", help="instance type of the two system nodes (DNS, Helm charts)"
    )


# --- types of machines and their GPUs -------------------------------------------------------------------------------

# Source of their rows in machines.csv: AWS' lists of accelerated instance types and of EFA (network cards), as of
# 2026-11. Types without a row are looked up in EC2 when the cluster is planned.


@dataclass(frozen=True)
class Machine:
    """`gpu` as NVIDIA calls it, None for a machine without; `efa` is the number of network cards with EFA."""

    name: str
    vcpus: int
    gpu: str | None = None
    gpus: int = 0
    efa: int = 0
    gbits: int | None = None  # from EC2; None: use the table
    plain_first: bool = False  # has an additional first network card without EFA

    @property
    def fabric_gbits(self) -> int | None:
        """Total bandwidth of its EFA cards in Gbit/s; None without EFA, or if unknown."""
        known = EFA_GBITS.get(self.name)
        return (known or self.gbits) if self.efa else None


# Of machines with one card of less than 100 Gbit/s (g4dn, g5, g6), the table does not have the rate.
EFA_GBITS = {row.name: row.gbits for row in load_shapes("eks") if row.gbits}
GPU_MACHINES = {
    row.name: Machine(row.name, row.vcpus or 0, row.gpu, row.gpus, row.cards) for row in load_shapes("eks") if row.gpu
}
# Available only as Capacity Blocks for ML or spot.
NOT_ON_DEMAND = ("p5e.", "p5en.")
MIN_FABRIC_GBITS = 100  # minimum EFA bandwidth for which a warning is worthwhile
# CUDA 13 of current torch wheels does not support them.
TOO_OLD = ("V100",)
_OLD_FAMILY = re.compile(r"(p2|g2|g3s?)\.")  # K80, K520, M60, of which the table has none
CATALOG = GpuCatalog("AWS", GPU_MACHINES, {"a100-40gb": "A100", "h100-80gb": "H100", "h200-141gb": "H200"})
CPU_DEFAULT = "m5.xlarge"
GPU_DEFAULT = "T4"
_CPUS = {"medium": 2, "large": 2, "xlarge": 4}  # vCPUs of burstable and general families; larger sizes: 4 for each "N"
_ARM = re.compile(r"[a-z]+\d+[a-z]*g[a-z]*|t4g|g5g|a1")
TYPE_NAME = re.compile(r"[a-z][a-z0-9-]*\.([a-z0-9-]+)")


def choose_machine(machine_type: str | None, num_gpus: int | None, gpu_type: str | None) -> Machine:
    """The machine selected by the options. Raises UsageError with valid alternatives for impossible combinations."""
    check_count(num_gpus)
    if machine_type is None:
        if not num_gpus and gpu_type is None:
            return find_machine(CPU_DEFAULT)
        return CATALOG.choose_smallest(CATALOG.find_gpu(gpu_type or GPU_DEFAULT), num_gpus)
    machine = find_machine(machine_type)
    if is_gpu_family(machine_type) and not machine.gpus:
        return replace(machine, gpu=gpu_type)  # looked up in EC2
    return CATALOG.require_gpus(machine, num_gpus, CATALOG.find_gpu(gpu_type) if gpu_type else None)


def find_machine(name: str) -> Machine:
    """The machine with this name; without GPUs if it is not in the table and its family has none."""
    if name in GPU_MACHINES:
        return GPU_MACHINES[name]
    match = TYPE_NAME.fullmatch(name)
    if not match:
        raise UsageError(f'"{name}" is not an instance type of EC2.', hint="For example: --machine-type g5.xlarge")
    family, size = name.split(".")
    if _ARM.fullmatch(family):
        raise _arm_error(name)
    if re.fullmatch(r"(inf|trn|dl)\d.*|g4ad|vt1", family):
        raise UsageError(
            f"{name} has no NVIDIA GPUs.", hint=f"Available GPUs: {', '.join(CATALOG.gpus)}; for example --gpu-type L4"
        )
    multiple = re.fullmatch(r"(\d+)xlarge", size)
    return Machine(name, 4 * int(multiple[1]) if multiple else _CPUS.get(size, 0))


def _arm_error(name: str) -> UsageError:
    return UsageError(
        f"{name} is an ARM machine; the images of mlbench's tasks are for x86-64.",
        hint=f"For example: --machine-type {CPU_DEFAULT}",
    )


def is_gpu_family(name: str) -> bool:
    """Whether machines of the type have GPUs: families G and P, such as g7e and p6-b300."""
    return re.match(r"(g|gr|p)\d", name) is not None


def require_supported(machine: Machine) -> None:
    """Reject machines whose GPUs current task images cannot use. Not for existing clusters, which must be deletable."""
    if machine.gpu in TOO_OLD or _OLD_FAMILY.match(machine.name):
        newer = [gpu for gpu in CATALOG.gpus if gpu not in TOO_OLD]
        raise UsageError(
            f"The GPUs of {machine.name} are too old for the CUDA version of current images.",
            hint=f"Choose another --gpu-type: {', '.join(newer)}",
        )


def equivalent_types(machine: Machine) -> list[str]:
    """Equivalent types for a spot request, with the same GPUs and number of them; the machine itself first."""
    if machine.gpu is None:
        return [machine.name]
    others = [
        item.name
        for item in GPU_MACHINES.values()
        if (item.gpu, item.gpus) == (machine.gpu, machine.gpus) and not item.name.endswith(".metal")
    ]
    return [machine.name, *(name for name in others if name != machine.name)]


def require_equivalent(machine: Machine, others: Sequence[str]) -> list[str]:
    """The names of the machine and its alternatives, each once: auto scaling groups reject a type that is named twice.

    Raises UsageError if one has other GPUs or another number of them.
    """
    for name in others:
        other = find_machine(name)
        if (other.gpu, other.gpus) != (machine.gpu, machine.gpus):
            raise UsageError(
                f"{name} ({describe_gpus(other)}) cannot replace {machine.name} ({describe_gpus(machine)}).",
                hint=f"Equivalent types: {', '.join(equivalent_types(machine))}",
            )
    return list(dict.fromkeys([machine.name, *others]))


def describe_machine(aws: Aws, machine: Machine) -> Machine | None:
    """The machine as described by EC2, with the table's name of its GPU; None without permission to ask.

    Raises UsageError for a type unknown to EC2, or whose GPUs are not NVIDIA's.
    """
    try:
        items = aws.call("ec2", "describe_instance_types", InstanceTypes=[machine.name])["InstanceTypes"]
    except RightsError:
        return None
    except UsageError as error:
        if not is_gpu_family(machine.name):
            return None  # the search for its zone reports the error
        near = did_you_mean(machine.name, list(GPU_MACHINES))
        raise UsageError(f"{error.message}{near}", hint="Choose another --machine-type.") from None
    if not items:
        return None
    item = items[0]
    gpus = item.get("GpuInfo", {}).get("Gpus", [])
    other = next((gpu for gpu in gpus if gpu.get("Manufacturer", "NVIDIA").upper() != "NVIDIA"), None)
    if other:
        raise UsageError(
            f"The GPUs of {machine.name} are {other['Manufacturer']}'s, not NVIDIA's.", hint="--gpu-type L4"
        )
    if "x86_64" not in item.get("ProcessorInfo", {}).get("SupportedArchitectures", ["x86_64"]):
        raise _arm_error(machine.name)
    network = item.get("NetworkInfo", {})
    speed = re.match(r"(\d+) Gigabit", network.get("NetworkPerformance", ""))
    efa = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 1) if network.get("EfaSupported") else 0
    return Machine(
        machine.name,
        int(item.get("VCpuInfo", {}).get("DefaultVCpus") or machine.vcpus),
        machine.gpu or (str(gpus[0]["Name"]) if gpus else None),
        sum(int(gpu.get("Count", 0)) for gpu in gpus),
        efa,
        int(speed[1]) if speed and int(speed[1]) >= MIN_FABRIC_GBITS else None,
        plain_first=0 < efa < int(network.get("MaximumNetworkCards") or 0),
    )


# --- the machines of a node group -------------------------------------------------------------------------------------

GPU_TAINT = {"Key": NVIDIA_GPU, "Value": "present", "Effect": "NO_SCHEDULE"}  # in CloudFormation's words
EFA = "vpc.amazonaws.com/efa"
HUGE_PAGES = "hugepages-2Mi"
AL2023, BOTTLEROCKET = "al2023", "bottlerocket"
# EKS' name of each image, without and with NVIDIA's driver.
IMAGES = {
    AL2023: ("AL2023_x86_64_STANDARD", "AL2023_x86_64_NVIDIA"),
    BOTTLEROCKET: ("BOTTLEROCKET_x86_64", "BOTTLEROCKET_x86_64_NVIDIA"),
}


@dataclass(frozen=True)
class Group:
    """The request for a node group. Several `types` are only for spot: any of them may be used."""

    name: str
    types: tuple[str, ...]
    count: int
    disk: int  # GB
    gpu: bool = False
    worker: bool = True
    spot: bool = False
    zone: str | None = None
    zones: tuple[str, ...] = ()  # all zones to try
    private: bool = False
    efa: bool = False
    reservation: str | None = None  # ID of a capacity reservation
    system: str = AL2023  # the operating system

    @property
    def image(self) -> str:
        """The AMI type of EKS for the group's role and GPU."""
        return IMAGES[self.system][self.gpu]

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the group's nodes: the role, and which devices are present."""
        labels = {ROLE_LABEL: WORKER if self.worker else "system"}
        present = ((NVIDIA_GPU, self.gpu), (EFA, self.efa))
        return {**labels, **{f"{device}.present": "true" for device, is_there in present if is_there}}

    @property
    def taints(self) -> list[dict[str, str]]:
        """The taint that keeps other pods off GPU machines; none for other machines."""
        # System machines have no taint, so that Helm charts can run there; runs select the workers' label.
        return [GPU_TAINT] if self.gpu else []


# --- existing subnets (`--subnets`) -----------------------------------------------------------------------------------

SUBNET = r"subnet-[0-9a-f]{8,17}"
LIST_SUBNETS = "aws ec2 describe-subnets --query 'Subnets[].[SubnetId,VpcId,AvailabilityZone,AvailableIpAddressCount]'"


def split_subnets(text: str | None) -> tuple[str, ...]:
    """The IDs of --subnets. Raises UsageError for invalid IDs, or fewer than two."""
    names = tuple(part.strip() for part in (text or "").split(",") if part.strip())
    wrong = [name for name in names if not re.fullmatch(SUBNET, name)]
    if wrong or len(set(names)) != len(names) or len(names) == 1:
        what = f'"{wrong[0]}" is not the ID of a subnet' if wrong else "EKS needs at least two subnets, in two zones"
        raise UsageError(
            f"--subnets: {what}.", hint=f"For example --subnets subnet-0a1b2c3d,subnet-4e5f6a7b\n{LIST_SUBNETS}"
        )
    return names
