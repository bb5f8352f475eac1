"""JAX collectives between the ranks of a run: one process and one CPU device per rank, connected by XLA's gloo.

Outside the timed part, ranks communicate over torch's gloo (rendezvous, barriers, bookkeeping), so figures differ only
by the collectives. JAX arrays are immutable: "in place" means that the input's memory is donated to the result.
"""

from __future__ import annotations

import os
import socket
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

    def __init__(self, world: Ranks) -> None:
        if world.contract.device != "cpu":
            raise EnvironmentUnfitError("the backend jax is for CPUs", "Leave out --gpu, or choose --backend nccl.")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hide informational messages
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

    def put(self, host: Tensor) -> Any:
        """A distributed array [ranks, elements] with `host` [elements] as this rank's row."""
        own = self.jax.device_put(_to_numpy(host).copy()[None], self.device)  # a copy, because JAX may keep its memory
        shape = (self.size, len(host))
        return self.jax.make_array_from_single_device_arrays(shape, self.sharding, [own])

    def get(self, array: Any) -> Tensor:
        """This rank's row of an array, [elements], on the host."""
        (shard,) = array.addressable_shards
        row = np.array(shard.data)[0]
        if row.dtype.name == "bfloat16":  # which torch cannot convert from numpy
            return torch.from_numpy(row.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(row)

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


def _to_numpy(host: Tensor) -> Any:
    if host.dtype is not torch.bfloat16:
        return host.numpy()
    return host.view(torch.int16).numpy().view(import_module("ml_dtypes").bfloat16)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
