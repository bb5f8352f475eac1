"""Collectives of TensorFlow between the ranks of a run: a worker each of a MultiWorkerMirroredStrategy, on CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from task_images.harness.framework_ranks import FrameworkRanks, from_numpy, to_numpy
from task_images.harness.ranks import Ranks, find_addresses
from task_images.harness.tensorflow_strategy import make_strategy


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
