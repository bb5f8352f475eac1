"""What a machine that was named has to have, for the numbers that were asked for beside its name."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

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
        raise UsageError(
            f"A {machine.name} has {machine.gpu}, not {gpu}.", hint="Leave out --gpu-type, or --machine-type."
        )
    if num_gpus is not None and num_gpus != machine.gpus:
        others = [name for name, other in known.items() if other.gpu == machine.gpu and other.gpus == num_gpus]
        raise UsageError(
            f"A {machine.name} has {machine.gpus} × {machine.gpu}, not {num_gpus}.",
            hint=f"--machine-type {others[0]}" if others else "Leave out --num-gpus.",
        )
    return machine


def require_vcpus(machine: M, num_cpus: int | None) -> M:
    """`machine`, if it has as many vCPUs, or its number is not known. Raises UsageError."""
    if num_cpus is not None and machine.vcpus and num_cpus > machine.vcpus:
        raise UsageError(
            f"{machine.name} has {machine.vcpus} vCPUs, not {num_cpus}.", hint="Choose a larger --machine-type."
        )
    return machine
