"""What a machine that was named has to have, for the numbers that were asked for beside its name."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from mlbench_cli.errors import UsageError


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


def require_gpus(machine: M, num_gpus: int | None, gpu: str | None, known: Mapping[str, M]) -> M:
    """`machine`, if it has what was asked for. Raises UsageError, with one of `known` that has the number."""
    if gpu is not None and gpu != machine.gpu:
        raise UsageError(f"A {machine.name} has {machine.gpu}, not {gpu}.", hint="Remove --gpu-type or --machine-type.")
    if num_gpus is not None and num_gpus != machine.gpus:
        others = [name for name, other in known.items() if other.gpu == machine.gpu and other.gpus == num_gpus]
        raise UsageError(
            f"A {machine.name} has {machine.gpus} × {machine.gpu}, not {num_gpus}.",
            hint=f"--machine-type {others[0]}" if others else "Leave out --num-gpus.",
        )
    return machine


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
            f"A {machine.name} has {count} GPUs, not {asked}.", hint="Remove --num-gpus, or choose another type."
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
