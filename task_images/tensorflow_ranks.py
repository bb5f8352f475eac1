"""Collectives of TensorFlow between the ranks of a run: a worker each of a MultiWorkerMirroredStrategy, on CPUs.

torch's gloo keeps the ranks together outside the clock (rendezvous, barriers, what ranks tell each other), so figures
differ by what TensorFlow does alone.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from task_images.contract import EnvironmentUnfitError
from task_images.world import GROUP_SECONDS, World

COLLECTIVES = ("all_reduce", "all_gather")  # none in place: tensors cannot be changed


def find_addresses(world: World) -> list[str]:
    """ "host:port" by which other ranks find each rank: its worker's name, else the address of rank 0; a port that is
    free now. Collective."""
    contract = world.contract
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    places = []
    for number, node in world.gather([port, contract.node_rank]):
        host = contract.hosts[int(node)] if node < len(contract.hosts) else contract.master_addr
        places.append(f"{'127.0.0.1' if host == 'localhost' else host}:{int(number)}")
    return places


def make_strategy(tensorflow: Any, addresses: Sequence[str], rank: int) -> Any:
    """The strategy of workers at `addresses`, of which this one is number `rank`, with rings over gRPC."""
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(addresses)}, "task": task})
    experimental = tensorflow.distribute.experimental
    ring = experimental.CommunicationImplementation.RING
    options = experimental.CommunicationOptions(implementation=ring, timeout_seconds=GROUP_SECONDS)
    return tensorflow.distribute.MultiWorkerMirroredStrategy(communication_options=options)


class TensorFlowRanks:
    """This process among the workers of TensorFlow, whose servers end with the process."""

    def __init__(self, world: World) -> None:
        if world.contract.device != "cpu":
            raise EnvironmentUnfitError(
                "the backend grpc is for CPUs here", "Leave out --gpu, or choose --backend nccl."
            )
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
        """A copy of this rank's data (1-D). numpy knows bfloat16 by the package ml_dtypes."""
        if host.dtype is not torch.bfloat16:
            return self._tf.constant(host.numpy())
        return self._tf.constant(host.view(torch.int16).numpy().view(import_module("ml_dtypes").bfloat16))

    def get(self, array: Any) -> Tensor:
        """The data as torch has them, which takes no bfloat16 from numpy."""
        found = array.numpy()
        if found.dtype.name == "bfloat16":
            return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(found)

    def collective(self, name: str) -> Callable[[Any], Any]:
        """The collective from tensor to tensor, which returns when it is done."""
        distribute = self._tf.distribute

        def communicate(own: Any) -> Any:
            context = distribute.get_replica_context()
            if name == "all_gather":
                return context.all_gather(own, axis=0)
            return context.all_reduce(distribute.ReduceOp.SUM, self._tf.identity(own))

        compiled: Callable[[Any], Any] = self._tf.function(lambda own: self._strategy.run(communicate, args=(own,)))
        return compiled

    def close(self) -> None:
        """Nothing: its servers end with the process."""


def open_tensorflow(world: World) -> TensorFlowRanks:
    """TensorFlow's ranks for those of `world` (world.World), once per world. Collective."""
    for companion in world.companions:
        if isinstance(companion, TensorFlowRanks):
            return companion
    ranks = TensorFlowRanks(world)
    world.companions.append(ranks)
    return ranks
