"""The ranks of a run as members of a framework other than torch: what JAX's and TensorFlow's have in common.

torch's gloo keeps the ranks together outside the clock (rendezvous, barriers, what ranks tell each other), so figures
differ by what the framework does alone.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from task_images.harness.errors import EnvironmentUnfitError, install_hint
from task_images.harness.ranks import Ranks


class FrameworkRanks:
    """This process among those of a framework, one CPU each. Subclasses have `put` and `get`, which copy this rank's
    data (1-D) to the framework's array and back, and `collective(name, donate)`, from array to array, which returns
    when it is done and may overwrite a donated input.

    backend      name of the backend; package: of the framework, also the extra of mlbench that installs it
    libraries    whose versions are recorded; transport: what carries messages
    collectives  what it has, by the names of the task allreduce; in_place: of these, what can change its input
    """

    backend: ClassVar[str]
    package: ClassVar[str]
    title: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]]
    transport: ClassVar[str]
    collectives: ClassVar[tuple[str, ...]]
    in_place: ClassVar[tuple[str, ...]] = ()

    def __init__(self, world: Ranks) -> None:
        if world.contract.device != "cpu":
            raise EnvironmentUnfitError(
                f"the backend {self.backend} is for CPUs here", "Leave out --gpu, or choose --backend nccl."
            )
        self.rank, self.size = world.rank, world.size

    @classmethod
    def find(cls) -> str:
        """The torch backend for bookkeeping. Raises EnvironmentUnfitError without the framework."""
        if find_spec(cls.package) is None:
            raise EnvironmentUnfitError(
                f"the backend {cls.backend} needs the package {cls.package}, which is missing",
                install_hint(cls.package),
            )
        return "gloo"

    @classmethod
    def facts(cls) -> dict[str, str]:
        """Versions of its libraries, the framework's first. Builds for CPUs are packages of another name."""
        found = dict.fromkeys(cls.libraries, "?")
        for library in cls.libraries:
            for name in (f"{library}-cpu", library):
                with suppress(PackageNotFoundError):
                    found[library] = version(name)
        return found

    def close(self) -> None:
        """Leave together with the others."""


def to_numpy(host: Tensor) -> Any:
    """The memory of a tensor of the CPU as an array; numpy knows bfloat16 by the package ml_dtypes."""
    if host.dtype is not torch.bfloat16:
        return host.numpy()
    return host.view(torch.int16).numpy().view(import_module("ml_dtypes").bfloat16)


def from_numpy(array: Any) -> Tensor:
    """The same memory as a tensor, which takes no bfloat16 from numpy."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
