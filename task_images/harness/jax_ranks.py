"""JAX collectives between the ranks of a run: one process and one CPU device per rank, connected by XLA's gloo.

JAX arrays are immutable: "in place" means that the input's memory is donated to the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from torch import Tensor

from task_images.harness.framework_ranks import FrameworkRanks, from_numpy, to_numpy
from task_images.harness.ranks import Ranks, free_port

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
