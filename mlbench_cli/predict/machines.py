"""Machine types: their hardware, and how fast a rank computes on one relative to the machine of a run.

The tables list common types. Cores, memory and network rates are from the clouds' documentation of 2026; "up to" rates
count in full. GPU rates are from NVIDIA's datasheets, without sparsity.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.predict.model import Elsewhere, Link, Measured

NETWORK_SHARE = 0.8  # share of the documented rate that a stream of messages reaches
NETWORK_ROUND_TRIP = 1e-4  # seconds, in one zone


@dataclass(frozen=True)
class Gpu:
    """A type of GPU. `names` are substrings of CUDA's device name; rates are per second."""

    key: str
    names: tuple[str, ...]
    tensor_tflops: float
    gbytes: float

    @property
    def rate(self) -> float:
        """A figure in proportion to its speed in trainings, which are partly bound by arithmetic, partly by memory."""
        return math.sqrt(self.tensor_tflops * self.gbytes)


@dataclass(frozen=True)
class MachineType:
    """A machine type of a cloud. `priced_as`: items of the price table, joined by "+"."""

    provider: str
    name: str
    gpu: str
    gpus: int
    vcpus: int
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
    def cores(self) -> int:
        """Physical cores: clouds count two threads of a core as two vCPUs."""
        return max(1, self.vcpus // 2)

    @property
    def link(self) -> Link:
        """The network between two such machines in one zone."""
        return Link(1e9 * NETWORK_SHARE * self.gbits, NETWORK_ROUND_TRIP)

    def __str__(self) -> str:
        return f"{self.kind}+{self.gpu}" if self.priced_as else self.kind


@cache
def load_gpus() -> Mapping[str, Gpu]:
    """The table of GPUs by key."""
    return {
        row["gpu"]: Gpu(
            row["gpu"],
            tuple(row["names"].split("|")),
            float(row["tensor_tflops"]),
            float(row["gbytes_per_second"]),
        )
        for row in _rows("gpus.csv")
    }


@cache
def load_machines() -> tuple[MachineType, ...]:
    """All machine types of the table."""
    return tuple(
        MachineType(
            *(row["provider"], row["machine"], row["gpu"], int(row["gpus"]), int(row["vcpus"])),
            *(float(row["gbits"]), row["priced_as"]),
        )
        for row in _rows("machines.csv")
    )


def find_gpu(name: str) -> Gpu | None:
    """The GPU for CUDA's device name `name`; the longest match counts."""
    fitting = [(len(word), gpu) for gpu in load_gpus().values() for word in gpu.names if word in name]
    return max(fitting, key=lambda item: item[0])[1] if fitting else None


def find_machine(text: str) -> MachineType:
    """The machine type named `text`, with or without its provider. Raises UsageError that suggests a near name."""
    fitting = [machine for machine in load_machines() if text in (str(machine), machine.kind, machine.name)]
    # A machine that is also sold with a GPU attached has the plain name to itself.
    found = [machine for machine in fitting if text == str(machine) or not machine.priced_as] or fitting
    if not found:
        near = did_you_mean(text, [each for machine in load_machines() for each in (str(machine), machine.name)])
        raise UsageError(
            f'mlbench does not know the machine type "{text[:60]}".{near}',
            hint="Without --on, predictions are for the machine of the run.",
        )
    if len({str(machine) for machine in found}) > 1:
        raise UsageError(f"{text} is {' or '.join(str(machine) for machine in found)}.", hint=f"--on {found[0]}")
    return found[0]


def compare(machine: MachineType, runs: Sequence[Measured], per_hour: float | None) -> Elsewhere:
    """What differs on `machine` from `runs`: measured if one of them ran there, else guessed from cores, or from the
    GPUs' peak and memory rates. Raises UsageError between a CPU and a GPU, whose speeds no table compares."""
    if any(one.machine == machine.kind for one in runs):
        return Elsewhere(machine.link, per_hour)
    base = runs[0]
    own, other = find_gpu(base.device), load_gpus().get(machine.gpu)
    if own is not None and other is not None:
        return Elsewhere(machine.link, per_hour, own.rate / other.rate, is_guessed=True)
    if not base.device and other is None:
        return Elsewhere(machine.link, per_hour, base.cores / machine.cores, is_guessed=True)
    raise UsageError(
        f"{base.name} computed on {base.device or 'CPUs'}, which says nothing about {machine}.",
        hint="Run the task for a minute on one such machine, and predict from that run.",
    )


def _rows(name: str) -> list[dict[str, str]]:
    with resources.files(__package__).joinpath(name).open("r", encoding="utf-8") as file:
        return list(csv.DictReader(file))
