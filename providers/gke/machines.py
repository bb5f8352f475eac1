"""Which machine of Compute Engine has which GPUs: checked before any call, so that a wrong pair costs nothing.

Source: Google's list of GPU machine types, as of 2026-11. A type that is not in the table is asked of Compute Engine
when the cluster is planned.
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
    """`gpu` is an accelerator type of Compute Engine, None for a machine without."""

    name: str
    gpu: str | None = None
    gpus: int = 0

    @property
    def vcpus(self) -> int | None:
        """As its name tells; None if it tells something else."""
        size = re.fullmatch(r"[a-z0-9]+-(?:standard|highmem|highcpu|custom)-(\d+)(?:-.*)?", self.name)
        return int(size[1]) if size else None


def _shapes(family: str, gpu: str, sizes: Mapping[str, int]) -> dict[str, Machine]:
    return {f"{family}-{size}": Machine(f"{family}-{size}", gpu, count) for size, count in sizes.items()}


# Machines whose GPUs are part of their shape.
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
# GPUs that are attached to general machines of the N1 family, and how many of them may be.
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
    """Whether machines of the type have GPUs by their shape: families A and G, such as a4x and g4."""
    return re.match(r"[ag]\d+x?-", machine_type) is not None


def choose_machine(machine_type: str | None, num_gpus: int | None, gpu_type: str | None) -> Machine:
    """The machine that the options mean. Raises UsageError with what would fit for every pair that cannot be."""
    check_count(num_gpus)
    is_new = machine_type is not None and machine_type not in SHAPED and is_gpu_family(machine_type)
    gpu = (gpu_type if is_new else CATALOG.find_gpu(gpu_type)) if gpu_type else None
    if machine_type is None:
        if not gpu and not num_gpus:
            return Machine(CPU_DEFAULT)
        machine = CATALOG.choose_smallest(gpu or GPU_DEFAULT, num_gpus)
        # Of the smallest machines with one L4 the second is the first with enough memory for the tasks.
        return SHAPED["g2-standard-8"] if machine.name == "g2-standard-4" else machine
    if machine_type in SHAPED:
        return CATALOG.require_gpus(SHAPED[machine_type], num_gpus, gpu)
    if is_gpu_family(machine_type):
        return Machine(machine_type, gpu)  # how many GPUs it has is asked of Compute Engine
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
