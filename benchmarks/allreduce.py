"""The task `allreduce` against a bare loop of the same protocol, in turn in the same two processes: within 3 %.

Both refill a buffer, meet at a barrier, and time one all-reduce; a sample is the maximum over ranks. Short rounds of
the two alternate with a second bare loop, since a shared machine drifts more than the difference sought; how far the
two bare loops differ is how far the ratio can be trusted. Medians are over all samples.
"""

import os
import socket
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from task_images.allreduce.measure import time_samples
from task_images.allreduce.pattern import Pattern
from task_images.contract import Contract
from task_images.harness.distributed import World, open_world
from task_images.harness.tracker import Tracker

RANKS = 2
ROUNDS = 120
SIZES = {1: 10, 1000: 10, 100_000: 8, 1_000_000: 3}  # elements: samples of a round


def main() -> None:
    if "RANK" in os.environ:
        compare(open_world(Contract()))
        return
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, __file__], env={**os.environ, **shared, "RANK": str(rank)})
        for rank in range(RANKS)
    ]
    sys.exit(max(abs(rank.wait()) for rank in ranks))


def compare(world: World) -> None:
    tracker, ratios = Tracker(), []
    pattern = Pattern(world.rank, world.size, torch.float32, world.device)
    for elements, samples in SIZES.items():
        buffer = torch.empty(elements)
        times: dict[str, list[float]] = {"task": [], "bare": [], "again": []}
        for number in range(ROUNDS):
            for turn in range(number, number + len(times)):
                name = list(times)[turn % len(times)]
                if name == "task":
                    own = time_samples(world, tracker, pattern, buffer, samples)
                else:
                    own = bare_loop(pattern, buffer, samples)
                times[name] += world.max(own)
        task, bare, again = (1e6 * statistics.median(samples) for samples in times.values())
        ratios.append(task / bare)
        if world.is_first:
            print(
                f"{elements:>9} elements  task {task:9.1f} us  bare {bare:9.1f} us  task/bare {task / bare:.3f}"
                f"  bare/bare {again / bare:.3f}",
                flush=True,
            )
    if world.is_first:
        print(f"mean task/bare of the sizes: {statistics.fmean(ratios):.3f} (budget 1.03)")
    world.close()


def bare_loop(pattern: Pattern, buffer: torch.Tensor, samples: int) -> list[float]:
    times = []
    for _ in range(samples):
        pattern.fill(buffer)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(buffer)
        times.append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()
