"""Machine types of plans: hardware, compute speed for a task, and sources.

The tables list common types. Cores, memory and network rates are from the clouds' documentation of 2026; "up to" rates
count in full. GPU rates are from NVIDIA's datasheets, without sparsity.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from mlbench_cli.predict.samples import Basis
from mlbench_cli.simulator.gloo import Link

HERE = "here"
CPU_TFLOPS_PER_CORE = 0.08  # fp32: 32 operations per cycle at 2.5 GHz
CPU_GBYTES_PER_CORE = 5.0  # per second of a server's memory
NETWORK_SHARE = 0.8  # share of the documented rate that a stream of messages reaches
NETWORK_DELAY = 5e-5  # seconds one way, in one zone
# Standard deviations of logarithms; the 10th and 90th percentiles are 1.28 of them away.
MEASURED_SPREAD = 0.05
PUBLISHED_SPREAD = 0.16  # sources differ by 20 % for the same GPU and model
GUESSED_CPU_SPREAD = 0.32  # a factor of 1.5
GUESSED_GPU_SPREAD = 0.86  # a factor of 3 between devices of different kinds
GUESSED_RATIO_SPREAD = 0.32  # between two GPUs


@dataclass(frozen=True)
class Gpu:
    """A type of GPU. `names` are substrings of CUDA's device name; rates are per second."""

    key: str
    names: tuple[str, ...]
    fp32_tflops: float
    gbytes: float
    memory_gib: float
    inside: str


@dataclass(frozen=True)
class MachineType:
    """A machine type of a cloud, or this machine. `priced_as`: items of the price table, joined by "+"."""

    provider: str
    name: str
    gpu: str
    gpus: int
    vcpus: int
    memory_gib: float
    gbits: float
    priced_as: str = ""

    @property
    def items(self) -> list[str]:
        """The items of the price table that make up its price."""
        return (self.priced_as or self.name).split("+")

    @property
    def kind(self) -> str:
        """Provider and machine type, as runs on such machines record them."""
        return f"{self.provider}/{self.name}"

    @property
    def ranks(self) -> int:
        """Ranks of a worker: one for each GPU."""
        return self.gpus or 1

    @property
    def cores(self) -> int:
        """Physical cores: clouds count two threads of a core as two vCPUs."""
        return max(1, self.vcpus // 2)

    def __str__(self) -> str:
        return f"{self.name}+{self.gpu}" if self.priced_as else self.name


@dataclass(frozen=True)
class Speed:
    """Compute time relative to the calibrated machine (`factor`), and the basis of the figure."""

    factor: float
    spread: float  # standard deviation of its logarithm
    basis: Basis
    note: str


@dataclass(frozen=True)
class Calibrated:
    """The hardware of a calibration: cores per rank, CUDA's name of the GPU ("" for none), samples per second of a
    rank without communication, the number format, the cloud's machine type such as gke/n1-standard-4 ("" if unknown),
    and its network as measured."""

    cores: float
    gpu_name: str
    rate: float
    precision: str
    machine: str = ""
    link: Link | None = None


@cache
def load_gpus() -> Mapping[str, Gpu]:
    """The table of GPUs by key."""
    return {
        row["gpu"]: Gpu(
            row["gpu"],
            tuple(row["names"].split("|")),
            float(row["fp32_tflops"]),
            float(row["gbytes_per_second"]),
            float(row["memory_gib"]),
            row["inside"],
        )
        for row in _rows("gpus.csv")
    }


@cache
def load_machines() -> tuple[MachineType, ...]:
    """All machine types of the table."""
    return tuple(
        MachineType(
            *(row["provider"], row["machine"], row["gpu"], int(row["gpus"]), int(row["vcpus"])),
            *(float(row["memory_gib"]), float(row["gbits"]), row["priced_as"]),
        )
        for row in _rows("machines.csv")
    )


def find_gpu(name: str) -> Gpu | None:
    """The GPU for CUDA's device name `name`; the longest match counts."""
    fitting = [(len(word), gpu) for gpu in load_gpus().values() for word in gpu.names if word in name]
    return max(fitting, key=lambda item: item[0])[1] if fitting else None


def find_rate(task: str, gpu: str, precision: str) -> tuple[float, str] | None:
    """The published rate of one GPU for a task in samples per second, and its source; None if unknown."""
    kind = "fp32" if precision == "fp32" else "amp"
    for row in _rows("published_rates.csv"):
        if (row["task"], row["gpu"], row["precision"]) == (task, gpu, kind):
            return float(row["rate"]), f"{row['model']}, {row['source']}"
    return None


def compare_speed(task: str, machine: MachineType, own: Calibrated, others: Sequence[Calibrated] = ()) -> Speed:
    """The compute time of a rank on `machine` relative to the calibrated one.

    From a calibration on the same type of machine or GPU, else from published rates, else from arithmetic and memory
    rates.
    """
    if machine.provider == HERE:
        return Speed(1.0, MEASURED_SPREAD, Basis.MEASURED, "measured here")
    if not machine.gpus:
        same = next((one for one in (own, *others) if one.machine == machine.kind and not one.gpu_name), None)
        if same is not None:
            return Speed(own.rate / same.rate, MEASURED_SPREAD, Basis.MEASURED, f"measured on {machine.kind}")
        return _compare_cores(machine, own)
    for measured in (own, *others):
        known = find_gpu(measured.gpu_name)
        if known is not None and known.key == machine.gpu:
            return Speed(own.rate / measured.rate, MEASURED_SPREAD, Basis.MEASURED, f"measured on {measured.gpu_name}")
    rate = find_rate(task, machine.gpu, own.precision)
    own_gpu = find_gpu(own.gpu_name)
    own_rate = None if own_gpu is None else find_rate(task, own_gpu.key, own.precision)
    if rate is not None:
        base = own.rate if own_rate is None else own_rate[0]
        return Speed(base / rate[0], PUBLISHED_SPREAD, Basis.PUBLISHED, f"published rate of {machine.gpu}: {rate[1]}")
    gpu = load_gpus()[machine.gpu]
    flops, gbytes = gpu.fp32_tflops, gpu.gbytes
    if own_gpu is not None:
        ratio, spread = math.sqrt(own_gpu.fp32_tflops / flops * own_gpu.gbytes / gbytes), GUESSED_RATIO_SPREAD
        return Speed(ratio, spread, Basis.GUESSED, f"guessed from peak and memory rates of {own_gpu.key} and {gpu.key}")
    cpu = own.cores * CPU_TFLOPS_PER_CORE, own.cores * CPU_GBYTES_PER_CORE
    ratio = math.sqrt(cpu[0] / flops * cpu[1] / gbytes)
    note = f"guessed from peak and memory rates of {own.cores:g} CPU cores and {gpu.key}, within a factor of 3"
    return Speed(ratio, GUESSED_GPU_SPREAD, Basis.GUESSED, note)


def _compare_cores(machine: MachineType, own: Calibrated) -> Speed:
    note = f"guessed from {machine.cores} physical cores against {own.cores:g}, within a factor of 1.5"
    if own.gpu_name:
        gpu = find_gpu(own.gpu_name)
        flops, gbytes = (gpu.fp32_tflops, gpu.gbytes) if gpu else (20.0, 1000.0)
        ratio = math.sqrt(
            flops / (machine.cores * CPU_TFLOPS_PER_CORE) * gbytes / (machine.cores * CPU_GBYTES_PER_CORE)
        )
        return Speed(ratio, GUESSED_GPU_SPREAD, Basis.GUESSED, f"guessed from peak and memory rates of {own.gpu_name}")
    return Speed(own.cores / machine.cores, GUESSED_CPU_SPREAD, Basis.GUESSED, note)


def _rows(name: str) -> list[dict[str, str]]:
    with resources.files(__package__).joinpath(name).open("r", encoding="utf-8") as file:
        return list(csv.DictReader(file))
