"""The ranks of a run as TensorFlow connects them: one worker each of a MultiWorkerMirroredStrategy.

The strategy is used for what it does best, collectives over gRPC or NCCL; model and loop are written out, so that the
tracker sees forward, backward, communication and update apart.
"""

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

# Before TensorFlow is loaded: its own notices are no errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

try:
    import tensorflow as tf
except ImportError:  # said by require_tensorflow
    tf = None

from task_images.cifar10_resnet20_tensorflow.rendezvous import rendezvous
from task_images.contract import Contract
from task_images.errors import EnvironmentUnfitError, PeerLostError, install_hint
from task_images.ranks import RENDEZVOUS_SECONDS, cpu_threads, free_port, make_strategy, resident_peak


class World:
    """This rank among all ranks; see ranks.Ranks. With one rank every collective is a no-op."""

    def __init__(self, contract: Contract, device: str, threads: int, strategy: Any) -> None:
        self.contract = contract
        self.rank = contract.rank
        self.size = contract.world_size
        self.backend = contract.backend
        self.threads = threads
        self.device = device  # as TensorFlow names it: CPU:0 or GPU:0
        self._strategy = strategy
        self._reduce = tf.function(self._reduce_tensor, reduce_retracing=True) if strategy else None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports."""
        return self.rank == 0

    def synchronize(self) -> None:
        """Wait until the device has done what it was given. Nothing to do on a CPU."""
        if self.device.startswith("GPU"):
            tf.test.experimental.sync_devices()

    def await_loading(self) -> None:
        """TensorFlow has no other way to wait than a collective."""
        self.barrier()

    def barrier(self) -> None:
        self.sum([0.0])

    def peak_memory(self) -> int:
        """Highest number of bytes over ranks: allocated on the GPU, else resident in the process. One collective."""
        if self.device.startswith("GPU"):
            own = float(tf.config.experimental.get_memory_info(self.device)["peak"])
        else:
            own = float(resident_peak())
        return int(max(row[0] for row in self.gather([own])))

    def all_reduce(self, tensor: Any) -> Any:
        """The sum of all ranks' tensors, the same bits on every rank."""
        if self._reduce is None:
            return tensor
        with lost_ranks():
            return self._reduce(tensor)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element by element, the sum over ranks, in float64. One collective."""
        return [float(value) for value in self.all_reduce(tf.constant(list(values), tf.float64)).numpy()]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's `values`, by rank, on every rank."""
        rows = np.zeros((self.size, len(values)))
        rows[self.rank] = values
        flat = self.sum(rows.reshape(-1).tolist())
        return np.reshape(flat, rows.shape).tolist()

    def agree(self, value: float) -> float:
        """Rank 0's `value`."""
        return self.gather([value])[0][0]

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Give every rank rank 0's values: a sum in which all other ranks add 0."""
        self._replace(variables, 1.0 if self.is_first else 0.0)

    def average(self, variables: Sequence[Any]) -> None:
        """Replace every variable by its mean over ranks."""
        self._replace(variables, 1 / self.size)

    def framework_facts(self) -> dict[str, Any]:
        """TensorFlow's version, libraries and device, for the environment event."""
        return {
            "framework": "tensorflow",
            "framework_version": tf.__version__,
            "device": self.device.lower(),
            "device_name": _device_name() if self.device.startswith("GPU") else platform.machine(),
            "libraries": _libraries(),
        }

    def backend_facts(self) -> dict[str, object]:
        """How collectives are done, for the environment event."""
        return {"collectives": "NCCL" if self.backend == "nccl" else "ring over gRPC"} if self._strategy else {}

    def close(self) -> None:
        """Leave together, only after success."""
        self.sum([0.0])

    def _replace(self, variables: Sequence[Any], factor: float) -> None:
        if self.size == 1:
            return
        flat = self.all_reduce(pack(variables) * factor)
        for variable, part in zip(variables, unpack(flat, variables), strict=True):
            variable.assign(part)

    def _reduce_tensor(self, tensor: Any) -> Any:
        def add(own: Any) -> Any:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(own))

        return self._strategy.run(add, args=(tensor,))


def require_tensorflow() -> None:
    """Raises EnvironmentUnfitError without TensorFlow."""
    if tf is None:
        raise EnvironmentUnfitError("TensorFlow is not installed here", f"Install it: {install_hint('tensorflow')}")


def open_world(contract: Contract, seconds: float = RENDEZVOUS_SECONDS, *, tf32: bool = False) -> World:
    """Meet the other ranks and set up device and threads.

    Raises EnvironmentUnfitError if backend or device are missing, PeerLostError naming the ranks that did
    not connect within `seconds`.
    """
    device, threads = configure(contract, tf32=tf32)
    return World(contract, device, threads, _strategy(contract, seconds) if contract.world_size > 1 else None)


def configure(contract: Contract, *, tf32: bool = False, inter_op: int = 2) -> tuple[str, int]:
    """Set up device and threads of this process, `inter_op` of them for operations that run side by side.

    Returns the device and the number of threads of an operation. Raises EnvironmentUnfitError.
    """
    threads = cpu_threads(contract)
    tf.config.experimental.enable_tensor_float_32_execution(tf32)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(inter_op)
    return _device(contract), threads


@contextmanager
def lost_ranks() -> Iterator[None]:
    """What TensorFlow raises when another rank is gone, as a PeerLostError."""
    try:
        yield
    except (
        tf.errors.UnavailableError,
        tf.errors.DeadlineExceededError,
        tf.errors.CancelledError,
        tf.errors.AbortedError,
        tf.errors.InternalError,
    ) as error:
        raise PeerLostError(
            f"lost another rank: {' '.join(str(error).split())[:300]}",
            "See the log of the rank that failed first for the cause.",
        ) from None


def pack(tensors: Sequence[Any]) -> Any:
    """One flat tensor of all."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def unpack(flat: Any, like: Sequence[Any]) -> list[Any]:
    """The reverse of `pack`."""
    sizes = [int(np.prod(tensor.shape)) for tensor in like]
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(tf.split(flat, sizes), like, strict=True)]


def _device(contract: Contract) -> str:
    devices = tf.config.list_physical_devices("GPU")
    if contract.device == "cpu":
        if contract.backend == "nccl":
            raise EnvironmentUnfitError(
                "the backend nccl needs a GPU and the run's device is cpu", "Choose --backend grpc, or --gpu."
            )
        tf.config.set_visible_devices([], "GPU")
        return "CPU:0"
    if not devices:
        raise EnvironmentUnfitError(
            "the run needs a GPU, but TensorFlow finds none here",
            "Run without --gpu, or install TensorFlow with its CUDA libraries: pip install 'tensorflow[and-cuda]'.",
        )
    own = devices[contract.local_rank % len(devices)]
    tf.config.set_visible_devices([own], "GPU")
    tf.config.experimental.set_memory_growth(own, True)
    return "GPU:0"


def _libraries() -> dict[str, str]:
    """Versions of what this build of TensorFlow uses on GPUs; empty if it is for CPUs only."""
    build = tf.sysconfig.get_build_info()
    return {name: str(build[f"{name}_version"]) for name in ("cuda", "cudnn") if build.get(f"{name}_version")}


def _device_name() -> str:
    (device,) = tf.config.get_visible_devices("GPU")
    return str(tf.config.experimental.get_device_details(device).get("device_name", device.name))


def _strategy(contract: Contract, seconds: float) -> Any:
    if contract.backend not in ("grpc", "nccl"):
        raise EnvironmentUnfitError(
            f'TensorFlow has no communication backend "{contract.backend}"', "Choose --backend grpc."
        )
    addresses = rendezvous(contract, free_port(), seconds)
    with lost_ranks():
        return make_strategy(tf, addresses, contract.rank, is_nccl=contract.backend == "nccl")
