"""The interface of a run's ranks for training, measuring and reporting, independent of the framework. No torch, which
images of TensorFlow do not have.
"""

import contextlib
import ctypes
import json
import os
import resource
import socket
import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from task_images.contract import Contract, DivergedError
from task_images.cores import effective_cores

RENDEZVOUS_SECONDS = 600.0
COLLECTIVE_SECONDS = 1800.0  # timeout of parameter servers; long, because trainers validate in between
TENSORFLOW = "grpc"  # the backend of TensorFlow's collectives
GROUP_SECONDS = 600.0  # timeout of a collective of the process group
# Includes unpacking and converting data, by one rank per machine.
LOADING_SECONDS = 12 * 3600.0


class Ranks(Protocol):
    """This rank among all ranks. `distributed.World` is torch's."""

    contract: Contract
    rank: int
    size: int
    backend: str
    threads: int

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Each rank's `values` (the same number on all), by rank, on every rank. One collective, in float64."""
        ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """The element-wise sum over ranks, in float64. One collective."""
        ...

    def agree(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""

    def await_loading(self) -> None:
        """Wait until all ranks have loaded their data."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def peak_memory(self) -> int:
        """Maximum over ranks of peak bytes, on the GPU or else of the process. One collective."""
        ...

    def framework_facts(self) -> dict[str, Any]:
        """For the environment event: framework, framework_version, device, device_name, and `libraries`: versions of
        libraries for computing and communicating (cuda, cudnn, nccl, mpi), by name."""
        ...

    def backend_facts(self) -> dict[str, object]:
        """Facts about the backend for the result; may be empty."""
        ...


def compare_checksums(world: Ranks, parameters: Iterable[bytes | memoryview]) -> None:
    """Raises DivergedError, on every rank, naming the ranks whose parameters have another checksum than rank 0's."""
    checksum = 0
    for parameter in parameters:
        checksum = zlib.crc32(parameter, checksum)
    sums = [row[0] for row in world.gather([float(checksum)])]
    odd = [str(rank) for rank, value in enumerate(sums) if value != sums[0]]
    if odd:
        raise DivergedError(f"the model of rank {', '.join(odd)} differs from that of rank 0")


def free_port() -> int:
    """A port that is free now; nobody reserves it."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def name_place(contract: Contract, node: int, seen: str, port: int) -> str:
    """ "host:port" by which other ranks find a rank of worker `node`: the worker's name, else the address `seen`."""
    host = contract.hosts[node] if node < len(contract.hosts) else seen
    return f"{'127.0.0.1' if host == 'localhost' else host}:{port}"


def find_addresses(world: Ranks) -> list[str]:
    """ "host:port" of every rank, each with a port that is free on its machine now. Collective."""
    contract = world.contract
    rows = world.gather([free_port(), contract.node_rank])
    return [name_place(contract, int(node), contract.master_addr, int(port)) for port, node in rows]


def cpu_threads(contract: Contract) -> int:
    """CPU threads of this rank: OMP_NUM_THREADS if the engine set it, else this rank's share of the usable CPUs."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit():
        return max(1, int(given))
    return max(1, effective_cores() // contract.local_world_size)


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory for the next step. By default it returns the memory to the kernel,
    which must zero every page again: 4 % of a step of the tiny decoder. No effect with other C libraries.

    Source: mallopt(3), M_TRIM_THRESHOLD (-1), M_TOP_PAD (-2), M_MMAP_THRESHOLD (-3, 32 MiB at most).
    """
    with contextlib.suppress(AttributeError, OSError):
        choose = ctypes.CDLL(None).mallopt
        for option, size in ((-1, 1 << 30), (-2, 64 << 20), (-3, 32 << 20)):
            choose(option, size)


def resident_peak() -> int:
    """Peak resident memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def make_strategy(tensorflow: Any, addresses: Sequence[str], rank: int, *, is_nccl: bool = False) -> Any:
    """The strategy of workers at `addresses`, of which this one is number `rank`: a ring over gRPC, or NCCL."""
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(addresses)}, "task": task})
    experimental = tensorflow.distribute.experimental
    kinds = experimental.CommunicationImplementation
    options = experimental.CommunicationOptions(
        implementation=kinds.NCCL if is_nccl else kinds.RING, timeout_seconds=GROUP_SECONDS
    )
    return tensorflow.distribute.MultiWorkerMirroredStrategy(communication_options=options)
