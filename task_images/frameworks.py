"""Frameworks other than torch whose collectives, or trainings, run between the ranks of a run.

The ranks of a run as members of a framework other than torch: what JAX's and TensorFlow's have in common.

torch's gloo keeps the ranks together outside the clock (rendezvous, barriers, what ranks tell each other), so figures
differ by what the framework does alone.

JAX collectives between the ranks of a run: one process and one CPU device per rank, connected by XLA's gloo.

JAX arrays are immutable: "in place" means that the input's memory is donated to the result.

Collectives of TensorFlow between the ranks of a run: a worker each of a MultiWorkerMirroredStrategy, on CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from task_images.errors import EnvironmentUnfitError, install_hint
from task_images.ranks import Ranks, find_addresses, free_port, make_strategy


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


AXIS = "ranks"


class JaxRanks(FrameworkRanks):
    """This process as a member of JAX's distributed runtime."""

    backend, package, title, transport = "jax", "jax", "JAX", "gloo of XLA"
    libraries = ("jax", "jaxlib")
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    in_place = ("all_reduce",)

    def __init__(self, world: Ranks) -> None:
        super().__init__(world)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hide informational messages
        os.environ.setdefault("PJRT_NPROC", str(world.threads))  # else each rank takes all cores
        self.jax: Any = import_module("jax")
        self.jax.config.update("jax_platforms", "cpu")
        self._is_distributed = world.size > 1
        if self._is_distributed:
            self.jax.config.update("jax_cpu_collectives_implementation", "gloo")
            place = f"{world.contract.master_addr}:{int(world.agree(free_port()))}"
            self.jax.distributed.initialize(place, world.size, world.rank, local_device_ids=[0])
        sharding = self.jax.sharding
        self.device = self.jax.local_devices()[0]
        self.mesh = sharding.Mesh(np.array(self.jax.devices()), (AXIS,))
        self.sharding = sharding.NamedSharding(self.mesh, sharding.PartitionSpec(AXIS))

    def put(self, host: Tensor) -> Any:
        """A distributed array [ranks, elements] with `host` [elements] as this rank's row."""
        shape = (self.size, len(host))
        # A copy, because JAX may keep the memory.
        own = self.jax.device_put(to_numpy(host.detach()[None]).copy(), self.device)
        return self.jax.make_array_from_single_device_arrays(shape, self.sharding, [own])

    def get(self, array: Any) -> Tensor:
        """This rank's row of an array, [elements], on the host."""
        (shard,) = array.addressable_shards
        return from_numpy(np.array(shard.data)[0])

    def collective(self, name: str, *, donate: bool) -> Callable[[Any], Any]:
        """The collective from array to array, as `put` makes them, which returns when it is done."""
        lax = self.jax.lax
        functions = {
            "all_reduce": lambda row: lax.psum(row, AXIS),
            "all_gather": lambda row: lax.all_gather(row, AXIS, tiled=True),
            "reduce_scatter": lambda row: lax.psum_scatter(row, AXIS, tiled=True),
            "all_to_all": lambda row: lax.all_to_all(row, AXIS, 0, 0, tiled=True),
        }
        spec = self.jax.sharding.PartitionSpec(AXIS)
        mapped = self.jax.shard_map(
            lambda block: functions[name](block[0])[None],
            mesh=self.mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        compiled = self.jax.jit(mapped, donate_argnums=(0,) if donate else ())
        return lambda array: compiled(array).block_until_ready()

    def close(self) -> None:
        """Leave together with the others."""
        if self._is_distributed:
            self.jax.distributed.shutdown()


class TensorFlowRanks(FrameworkRanks):
    """This process among the workers of TensorFlow, whose servers end with the process."""

    backend, package, title, transport = "grpc", "tensorflow", "TensorFlow", "ring over gRPC"
    libraries = ("tensorflow",)
    collectives = ("all_reduce", "all_gather")  # none in place: tensors cannot be changed

    def __init__(self, world: Ranks) -> None:
        super().__init__(world)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its own notices are no errors
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        self._tf: Any = import_module("tensorflow")
        self._tf.config.threading.set_intra_op_parallelism_threads(world.threads)
        self._tf.config.threading.set_inter_op_parallelism_threads(2)
        addresses = find_addresses(world)
        is_alone = world.size == 1
        self._strategy = (
            self._tf.distribute.get_strategy() if is_alone else make_strategy(self._tf, addresses, world.rank)
        )

    def put(self, host: Tensor) -> Any:
        """A copy of this rank's data (1-D)."""
        return self._tf.constant(to_numpy(host))

    def get(self, array: Any) -> Tensor:
        """The data as torch has them."""
        return from_numpy(array.numpy())

    def collective(self, name: str, *, donate: bool) -> Callable[[Any], Any]:
        """The collective from tensor to tensor, which returns when it is done."""
        distribute = self._tf.distribute

        def communicate(own: Any) -> Any:
            context = distribute.get_replica_context()
            if name == "all_gather":
                return context.all_gather(own, axis=0)
            return context.all_reduce(distribute.ReduceOp.SUM, self._tf.identity(own))

        compiled: Callable[[Any], Any] = self._tf.function(lambda own: self._strategy.run(communicate, args=(own,)))
        return compiled


FRAMEWORKS: dict[str, type[FrameworkRanks]] = {one.backend: one for one in (JaxRanks, TensorFlowRanks)}


def open_framework(world: Any) -> Any:
    """The ranks of the framework that the backend of `world` (distributed.World) names, once per world; they leave with
    it. Collective."""
    for companion in world.companions:
        if isinstance(companion, FrameworkRanks):
            return companion
    ranks = FRAMEWORKS[world.backend](world)
    world.companions.append(ranks)
    return ranks
