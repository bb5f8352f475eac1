"""Compute Engine's machine types and their GPUs, to check combinations before any call.

Source: Google's list of GPU machine types, as of 2026-11. Types missing here are looked up in Compute Engine when the
cluster is planned.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mlbench_cli.errors import UsageError
from providers.machine_checks import GpuCatalog, check_count

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


def _shapes(family: str, gpu: str, sizes: Mapping[str, int]) -> dict[str, Machine]:
    return {f"{family}-{size}": Machine(f"{family}-{size}", gpu, count) for size, count in sizes.items()}


# Machine types with built-in GPUs.
SHAPED: dict[str, Machine] = {
    **_shapes("g2-standard", "nvidia-l4", {"4": 1, "8": 1, "12": 1, "16": 1, "32": 1, "24": 2, "48": 4, "96": 8}),
    **_shapes("g4-standard", "nvidia-rtx-pro-6000", {"48": 1, "96": 2, "192": 4, "384": 8}),
    **_shapes("a2-highgpu", "nvidia-tesla-a100", {"1g": 1, "2g": 2, "4g": 4, "8g": 8}),
    **_shapes("a2-megagpu", "nvidia-tesla-a100", {"16g": 16}),
    **_shapes("a2-ultragpu", "nvidia-a100-80gb", {"1g": 1, "2g": 2, "4g": 4, "8g": 8}),
    **_shapes("a3-highgpu", "nvidia-h100-80gb", {"1g": 1, "2g": 2, "4g": 4, "8g": 8}),
    **_shapes("a3-megagpu", "nvidia-h100-mega-80gb", {"8g": 8}),
    **_shapes("a3-ultragpu", "nvidia-h200-141gb", {"8g": 8}),
    **_shapes("a4-highgpu", "nvidia-b200", {"8g": 8}),
}
# GPUs that can be attached to N1 machines, and the possible numbers.
ATTACHED = {"nvidia-tesla-t4": (1, 2, 4)}
ATTACHED_TO = {1: "n1-standard-8", 2: "n1-standard-16", 4: "n1-standard-32"}
SHORT = {
    "t4": "nvidia-tesla-t4",
    "l4": "nvidia-l4",
    "rtx6000": "nvidia-rtx-pro-6000",
    "a100": "nvidia-tesla-a100",
    "a100-80gb": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
    "h100-mega": "nvidia-h100-mega-80gb",
    "h200": "nvidia-h200-141gb",
    "b200": "nvidia-b200",
}
CATALOG = GpuCatalog(
    "Google Cloud",
    {**SHAPED, **{name: Machine(name, GPU_DEFAULT, count) for count, name in ATTACHED_TO.items()}},
    SHORT,
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
