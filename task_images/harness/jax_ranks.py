"""JAX collectives between the ranks of a run: one process and one CPU device per rank, connected by XLA's gloo.

JAX arrays are immutable: "in place" means that the input's memory is donated to the result.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from task_images.harness.errors import EnvironmentUnfitError, install_hint
from task_images.harness.ranks import Ranks

NAME = "jax"
TRANSPORT = "gloo of XLA"
AXIS = "ranks"


def find() -> str:
    """The torch backend for bookkeeping. Raises EnvironmentUnfitError without JAX."""
    if find_spec("jax") is None:
        raise EnvironmentUnfitError("the backend jax needs the package jax, which is missing", install_hint("jax"))
    return "gloo"


def facts() -> dict[str, str]:
    """Versions of the libraries used for computing and communicating."""
    return {name: version(name) for name in ("jax", "jaxlib")}


class JaxRanks:
    """This process as a member of JAX's distributed runtime."""

    title = "JAX"
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    in_place = ("all_reduce",)

    def __init__(self, world: Ranks) -> None:
        if world.contract.device != "cpu":
            raise EnvironmentUnfitError("the backend jax is for CPUs", "Leave out --gpu, or choose --backend nccl.")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hide informational messages
        os.environ.setdefault("PJRT_NPROC", str(world.threads))  # else each rank takes all cores
        self.jax: Any = import_module("jax")
        self.rank, self.size = world.rank, world.size
        self.jax.config.update("jax_platforms", "cpu")
        self._is_distributed = world.size > 1
        if self._is_distributed:
            self.jax.config.update("jax_cpu_collectives_implementation", "gloo")
            place = f"{world.contract.master_addr}:{int(world.gather([_free_port()])[0][0])}"
            self.jax.distributed.initialize(place, world.size, world.rank, local_device_ids=[0])
        sharding = self.jax.sharding
        self.device = self.jax.local_devices()[0]
        self.mesh = sharding.Mesh(np.array(self.jax.devices()), (AXIS,))
        self.sharding = sharding.NamedSharding(self.mesh, sharding.PartitionSpec(AXIS))
        self._sum: Any = None

    def put(self, host: Tensor) -> Any:
        """A distributed array [ranks, elements] with `host` [elements] as this rank's row."""
        shape = (self.size, len(host))
        return self.jax.make_array_from_single_device_arrays(shape, self.sharding, [self.take(host[None])])

    def take(self, host: Tensor) -> Any:
        """A copy of `host` as an array of this rank's device. JAX may keep its memory."""
        return self.jax.device_put(to_numpy(host.detach()).copy(), self.device)

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
        compiled = self.compile(functions[name], donate=donate)
        return lambda array: compiled(array).block_until_ready()

    def all_reduce(self, row: Any) -> Any:
        """The sum of all ranks' rows, the same bits on each. `row` is an array of this rank's device (1-D)."""
        if self._sum is None:
            self._sum = self.collective("all_reduce", donate=True)
        shape = (self.size, *row.shape)
        rows = self.jax.make_array_from_single_device_arrays(shape, self.sharding, [row[None]])
        (shard,) = self._sum(rows).addressable_shards
        return shard.data[0]

    def compile(self, function: Any, *, donate: bool) -> Any:
        """Compile `function`, which maps this rank's row and may use collectives along AXIS, for distributed arrays."""
        spec = self.jax.sharding.PartitionSpec(AXIS)
        mapped = self.jax.shard_map(
            lambda block: function(block[0])[None], mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return self.jax.jit(mapped, donate_argnums=(0,) if donate else ())

    def close(self) -> None:
        """Leave together with the others."""
        if self._is_distributed:
            self.jax.distributed.shutdown()


def find_addresses(world: Ranks) -> list[str]:
    """ "host:port" of every rank, each with a port that is free on its machine now. Collective."""
    hosts, addresses = world.contract.hosts, []
    for port, node in world.gather([_free_port(), world.contract.node_rank]):
        host = hosts[int(node)] if node < len(hosts) else world.contract.master_addr
        addresses.append(f"{'127.0.0.1' if host == 'localhost' else host}:{int(port)}")
    return addresses


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


connect = JaxRanks
