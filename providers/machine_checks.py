"""Chooses the machine that has the GPUs asked for, and checks a machine that was named for the numbers beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from mlbench_cli.errors import CapacityError, UsageError, did_you_mean
from mlbench_cli.util.text import counted


class Sized(Protocol):
    """A type of machine. `gpu` is None for one without; `vcpus` is None or 0 if they are not known."""

    @property
    def name(self) -> str: ...
    @property
    def gpu(self) -> str | None: ...
    @property
    def gpus(self) -> int: ...
    @property
    def vcpus(self) -> int | None: ...


M = TypeVar("M", bound=Sized)


@dataclass(frozen=True)
class GpuCatalog(Generic[M]):
    """The machines with GPUs of one cloud by name, the smallest of equals first.

    `names` are other names of the GPUs, in lower case; `too_old` are GPUs that current images do not support.
    """

    cloud: str
    machines: Mapping[str, M]
    names: Mapping[str, str] = field(default_factory=dict)
    too_old: Sequence[str] = ()

    @property
    def gpus(self) -> list[str]:
        """The table's names of all GPUs."""
        return list(dict.fromkeys(machine.gpu for machine in self.machines.values() if machine.gpu))

    def find_gpu(self, name: str) -> str:
        """The table's name of a GPU. Raises UsageError for one that is unknown or too old."""
        short = name.lower().removeprefix("nvidia-").removeprefix("tesla-")
        known = {**{gpu.lower(): gpu for gpu in self.gpus}, **self.names}
        hint = f"Available GPUs: {', '.join(self.gpus)}"
        if short in self.too_old:
            raise UsageError(
                f"{short} is too old for the CUDA version of current images, or no longer offered.", hint=hint
            )
        found = known.get(name.lower()) or known.get(short)
        if found is None:
            raise UsageError(f'{self.cloud} has no GPU "{name}".{did_you_mean(short, list(known))}', hint=hint)
        return found

    def choose_smallest(self, gpu: str, count: int | None) -> M:
        """The smallest machine with `count` of the GPUs; without a count, with as few as any machine has.

        Raises UsageError if there is none.
        """
        fitting = [machine for machine in self.machines.values() if machine.gpu == gpu]
        counts = sorted({machine.gpus for machine in fitting})
        wanted = count or counts[0]
        exact = [machine for machine in fitting if machine.gpus == wanted]
        if not exact:
            listed = ", ".join(map(str, counts[:-1])) + " or " if len(counts) > 1 else ""
            having = {machine.gpu: None for machine in self.machines.values() if machine.gpus == wanted}
            alike = [other for other in having if other and _model_of(other) == _model_of(gpu)]
            raise UsageError(
                f"No machine has {wanted} × {gpu}; there are some with {listed}{counts[-1]}.",
                hint=f"With {wanted}: --gpu-type {', '.join(alike)}" if alike else self.list_with(gpu),
            )
        return min(exact, key=lambda machine: machine.vcpus or 0)

    def list_with(self, gpu: str) -> str:
        """A hint with the machines that have a GPU."""
        fitting = [f"{machine.name} ({machine.gpus})" for machine in self.machines.values() if machine.gpu == gpu]
        return f"Machines with {gpu}: {', '.join(fitting)}"

    def require_gpus(self, machine: M, num_gpus: int | None, gpu: str | None) -> M:
        """`machine`, if it has what was asked for. Raises UsageError, with machines that have."""
        if gpu is not None and gpu != machine.gpu:
            raise UsageError(f"{machine.name} has {machine.gpu or 'no GPU'}, not {gpu}.", hint=self.list_with(gpu))
        if num_gpus is not None and num_gpus != machine.gpus:
            same = [item for item in self.machines.values() if item.gpu == machine.gpu and item.gpus == num_gpus]
            raise UsageError(
                f"{machine.name} has {describe_gpus(machine)}, not {num_gpus}; machines are sold whole.",
                hint=f"--machine-type {same[0].name}, or leave out --num-gpus." if same else "Leave out --num-gpus.",
            )
        return machine


def _model_of(gpu: str) -> str:
    """The name of a GPU without its maker and variant: "h100" of "nvidia-h100-80gb" and of "h100-nvl"."""
    return gpu.lower().removeprefix("nvidia-").removeprefix("tesla-").partition("-")[0]


def describe_gpus(machine: Sized) -> str:
    """Number and type of a machine's GPUs, for messages."""
    return f"{machine.gpus} × {machine.gpu}" if machine.gpu else "no GPU"


def check_count(num_gpus: int | None) -> None:
    """Raise UsageError for a --num-gpus below 0."""
    if num_gpus is not None and num_gpus < 0:
        raise UsageError(f"--num-gpus {num_gpus}: the minimum is 0.")


def settle_gpus(
    machine: Any, told: tuple[str | None, int] | None, *, forced: int | None, asked: int | None, is_gpu_family: bool
) -> Any:
    """`machine` (a dataclass) with `forced` GPUs, else those that the cloud has told: type and number.

    `told` is None if the cloud could not be asked: then the table counts. `asked` is --num-gpus. Raises UsageError for
    a machine of a family with GPUs for which none are known: its nodes would be paid for and used as CPU machines.
    """
    gpu, count = told if told is not None else (machine.gpu, machine.gpus)
    if forced is not None:
        count = forced
    if count and not (gpu or machine.gpu):
        raise UsageError(f"The GPU type of {machine.name} is unknown.", hint="Name it with --gpu-type, such as h100.")
    if is_gpu_family and not count:
        raise UsageError(
            f"{machine.name} belongs to a family with GPUs, but their number is unknown.",
            hint="Set it with --gpus-per-node N.",
        )
    if asked is not None and asked != count:
        raise UsageError(
            f"A {machine.name} has {counted(count, 'GPU')}, not {asked}.",
            hint="Remove --num-gpus, or choose another type.",
        )
    return replace(machine, gpu=(gpu or machine.gpu) if count else None, gpus=count)


def check_forced(gpus: int | None) -> None:
    """Raise UsageError for a --gpus-per-node that no machine has."""
    if gpus is not None and not 1 <= gpus <= 64:
        raise UsageError(f"--gpus-per-node {gpus}: from 1 to 64.")


def require_vcpus(machine: M, num_cpus: int | None) -> M:
    """`machine`, if it has as many vCPUs, or its number is not known. Raises UsageError."""
    if num_cpus is not None and machine.vcpus and num_cpus > machine.vcpus:
        raise UsageError(
            f"{machine.name} has {machine.vcpus} vCPUs, not {num_cpus}.", hint="Choose a larger --machine-type."
        )
    return machine


@dataclass(frozen=True)
class Shortage:
    """A quota with less remaining than needed."""

    quota: str
    left: float
    limit: float
    needed: int
    unit: str = ""  # behind a blank


def make_quota_error(place: str, lacking: Sequence[Shortage], hint: str) -> CapacityError:
    """The error that names every quota of `place` that is too small; its details are those of the first."""
    listed = "; ".join(
        f"{item.quota} has {item.left:g} of {item.limit:g}{item.unit} left, {item.needed} needed" for item in lacking
    )
    first = lacking[0]
    return CapacityError(
        f"The quota of {place} is too small: {listed}.",
        hint=hint,
        details={"reason": "quota", "quota": first.quota, "left": first.left, "needed": first.needed},
    )
