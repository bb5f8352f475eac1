"""What measuring and reporting ask of the ranks of a run, whatever framework they train with."""

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from task_images.contract import Contract
from task_images.harness.cores import effective_cores
from task_images.harness.errors import DivergedError

RENDEZVOUS_SECONDS = 600.0
COLLECTIVE_SECONDS = 1800.0  # patience of parameter servers, whose trainers validate in between
GROUP_SECONDS = 600.0  # longest time of one collective of the process group
# Data may have to be unpacked or converted first, by one rank of each machine.
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
        """Every rank's `values` (equally many on each), by rank, on every rank. One collective, float64."""
        ...

    def framework_facts(self) -> dict[str, Any]:
        """For the environment event: framework, framework_version, device, device_name, and `libraries`: versions
        of what it communicates and computes with (cuda, cudnn, nccl, mpi), by name."""
        ...

    def backend_facts(self) -> dict[str, object]:
        """What a result should say of the backend; empty if there is nothing."""
        ...


def compare_checksums(world: Ranks, checksum: int) -> None:
    """Raise DivergedError, on every rank, naming the ranks whose model has another checksum than that of rank 0."""
    sums = [row[0] for row in world.gather([float(checksum)])]
    odd = [str(rank) for rank, value in enumerate(sums) if value != sums[0]]
    if odd:
        raise DivergedError(f"the model of rank {', '.join(odd)} differs from that of rank 0")


def cpu_threads(contract: Contract) -> int:
    """CPU threads of this rank: OMP_NUM_THREADS as the engine set it, else this rank's share of what it may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit():
        return max(1, int(given))
    return max(1, effective_cores() // contract.local_world_size)


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory for the next step, which needs as much again. By itself it gives it
    back, and the kernel clears every page again: 4 % of a step of the tiny decoder. Other C libraries do as they did.

    Source: mallopt(3), M_TRIM_THRESHOLD (-1), M_TOP_PAD (-2), M_MMAP_THRESHOLD (-3, 32 MiB at most).
    """
    with contextlib.suppress(AttributeError, OSError):
        choose = ctypes.CDLL(None).mallopt
        for option, size in ((-1, 1 << 30), (-2, 64 << 20), (-3, 32 << 20)):
            choose(option, size)


def resident_peak() -> int:
    """Most bytes of memory that this process ever had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
