"""All-reduce by the backend mpi against raw mpi4py and against gloo, in turn in the same two processes.

Columns, microseconds per all-reduce (float32, SUM, in place):

    raw       mpi4py on a numpy array
    least     the same, in a process group that does nothing but look at the two options that torch hands it
              (whether to wait, and which reduction): what no process group written in Python can do without
    backend   the same through the backend's own method
    torch     through torch.distributed.all_reduce, as tasks call it: torch's own Python comes on top, on every backend
    gloo      torch.distributed.all_reduce on gloo

The ways take turns, in rounds. Given is the quietest tenth of the rounds (first decile), since others on the machine
only add to it. Once through shared memory, once with MPICH told to use TCP (on the loopback interface), as between
machines. Wanted: backend / raw at most 1.2, and below gloo for small sizes.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import _ranks
import numpy as np
import torch
import torch.distributed as dist

from task_images.contract import Contract
from task_images.mpi import group as mpi
from task_images.world import open_world

SUM = dist.ReduceOp.SUM
RANKS = 2
ROUNDS = 100
SIZES = {1: 60, 100: 60, 10_000: 30, 1_000_000: 2}  # elements: all-reduces of a round
TCP = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}


def main() -> None:
    if _ranks.is_rank():
        compare()
        return
    code = 0
    for name, variables in (("shared memory", {}), ("TCP", TCP)):
        print(f"-- {name}", flush=True)
        code = max(code, _ranks.start(__file__, RANKS, {**variables, "MLBENCH_BACKEND": "mpi"}))
    sys.exit(code)


class Least(dist.ProcessGroup):
    """An all-reduce of one numpy array behind the interface of a process group."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(0, 1)
        self._call = call

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        if not opts.asyncOp and opts.reduceOp == SUM:
            self._call()


def compare() -> None:
    world = open_world(Contract())
    from mpi4py import MPI

    communicator = MPI.COMM_WORLD.Dup()
    group = dist.group.WORLD
    assert group is not None
    gloo = dist.new_group(backend="gloo")
    waited_for = dist.AllreduceOptions()
    waited_for.asyncOp = False
    for elements, repeats in SIZES.items():
        array, tensor = np.ones(elements, np.float32), torch.ones(elements)
        raw = partial(communicator.Allreduce, MPI.IN_PLACE, array)
        ways: dict[str, Callable[[], object]] = {
            "raw": raw,
            "least": partial(Least(raw).allreduce, [tensor], waited_for),
            "backend": partial(group.allreduce, [tensor], waited_for),
            "torch": partial(dist.all_reduce, tensor),
            "gloo": partial(dist.all_reduce, tensor, group=gloo),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(ROUNDS):
            names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            for name in names:
                # The sum doubles with every call; far from overflow it costs the same.
                array.fill(0)
                tensor.zero_()
                world.barrier()
                begin = time.perf_counter()
                for _ in range(repeats):
                    ways[name]()
                seconds[name].append((time.perf_counter() - begin) / repeats)
        if world.is_first:
            quiet = {name: 1e6 * sorted(values)[len(values) // 10] for name, values in seconds.items()}
            row = "  ".join(f"{name} {value:.1f}" for name, value in quiet.items())
            ratios = [quiet["least"] / quiet["raw"], quiet["backend"] / quiet["raw"], quiet["gloo"] / quiet["torch"]]
            words = "least/raw {:.2f}  backend/raw {:.2f}  gloo/torch {:.1f}".format(*ratios)
            print(f"{elements:>9} elements  {row}  {words}", flush=True)
    if world.is_first:
        print(mpi.facts()["library"], flush=True)
    dist.destroy_process_group(gloo)
    world.close()


if __name__ == "__main__":
    main()
