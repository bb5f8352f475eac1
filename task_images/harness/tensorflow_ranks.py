"""Collectives of TensorFlow between the ranks of a run: a worker each of a MultiWorkerMirroredStrategy, on CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from task_images.harness.errors import EnvironmentUnfitError, install_hint
from task_images.harness.jax_ranks import find_addresses, from_numpy, to_numpy
from task_images.harness.ranks import Ranks
from task_images.harness.tensorflow_strategy import make_strategy

NAME = "grpc"
TRANSPORT = "ring over gRPC"


def find() -> str:
    """The backend of torch that keeps the ranks together. Raises EnvironmentUnfitError without TensorFlow."""
    if find_spec("tensorflow") is None:
        raise EnvironmentUnfitError("the backend grpc needs TensorFlow, which is missing", install_hint("tensorflow"))
    return "gloo"


def facts() -> dict[str, str]:
    """The framework and its version."""
    names = {one.metadata["Name"]: one.version for one in distributions()}
    version = next((names[name] for name in ("tensorflow", "tensorflow-cpu", "tensorflow_cpu") if name in names), "?")
    return {"tensorflow": version}


class TensorFlowRanks:
    """This process among the workers of TensorFlow."""

    title = "TensorFlow"
    collectives = ("all_reduce", "all_gather")
    in_place = ()  # tensors cannot be changed

    def __init__(self, world: Ranks) -> None:
        if world.contract.device != "cpu":
            raise EnvironmentUnfitError("the backend grpc is for CPUs here", "Leave out --gpu, or --backend nccl.")
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

    def close(self) -> None:
        """Its servers end with the process."""


connect = TensorFlowRanks
