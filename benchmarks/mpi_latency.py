"""All-reduce by the backend mpi against raw mpi4py and against gloo, in turn in the same two processes.

Columns, medians of rounds in microseconds per all-reduce (float32, SUM, in place):

    raw       mpi4py on a numpy array
    backend   the same through the process group's own method
    torch     through torch.distributed.all_reduce, as tasks call it: torch's own Python comes on top, on every backend
    gloo      torch.distributed.all_reduce on gloo

Once through shared memory, once with MPICH told to use TCP (on the loopback interface), as between machines.
Budget: backend / raw at most 1.2, and below gloo for small sizes.
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from task_images.comm import mpi
from task_images.contract import Contract
from task_images.harness.distributed import open_world

RANKS = 2
ROUNDS = 60
SIZES = {1: 60, 100: 60, 10_000: 30, 1_000_000: 2}  # elements: all-reduces of a round

# Over libfabric a rank sends the tail of a collective only inside its next MPI call, and the loops here wait on gloo.
TCP = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp,self"}


def main() -> None:
    if "RANK" in os.environ:
        compare()
        return
    code = 0
    for name, variables in (("shared memory", {}), ("TCP", TCP)):
        print(f"-- {name}", flush=True)
        code = max(code, start(variables))
    sys.exit(code)


def start(variables: dict[str, str]) -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **shared, **variables, "MLBENCH_BACKEND": "mpi"}
    ranks = [
        subprocess.Popen([sys.executable, __file__], env={**environment, "RANK": str(rank)}) for rank in range(RANKS)
    ]
    return max(abs(rank.wait()) for rank in ranks)


def compare() -> None:
    world = open_world(Contract())
    from mpi4py import MPI

    communicator = MPI.COMM_WORLD.Dup()
    group = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    waited_for = dist.AllreduceOptions()
    waited_for.asyncOp = False
    for elements, repeats in SIZES.items():
        array, tensor = np.ones(elements, np.float32), torch.ones(elements)
        ways: dict[str, Callable[[], object]] = {
            "raw": lambda array=array: communicator.Allreduce(MPI.IN_PLACE, array),
            "backend": lambda tensor=tensor: group.allreduce([tensor], waited_for),
            "torch": lambda tensor=tensor: dist.all_reduce(tensor),
            "gloo": lambda tensor=tensor: dist.all_reduce(tensor, group=gloo),
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
            median = {name: 1e6 * statistics.median(values) for name, values in seconds.items()}
            row = "  ".join(f"{name} {value:8.1f}" for name, value in median.items())
            ratio = median["backend"] / median["raw"]
            faster = median["gloo"] / median["torch"]
            print(f"{elements:>9} elements  {row}  backend/raw {ratio:.2f}  gloo/torch {faster:.1f}", flush=True)
    if world.is_first:
        print(mpi.facts()["library"], flush=True)
    dist.destroy_process_group(gloo)
    world.close()


if __name__ == "__main__":
    main()
