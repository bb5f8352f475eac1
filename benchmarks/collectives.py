"""The task `allreduce` against bare loops of the same protocol, in turn in the same two processes: within 3 %.

Both refill their buffers, meet at a barrier, and time one collective of gloo; a sample is the maximum over ranks. Short
rounds of the two alternate with a second bare loop, since a shared machine drifts more than the difference sought: how
far the two bare loops differ is how far the ratio can be trusted. Figures are lower quartiles over all samples, which
other programs on the machine disturb less than medians; the ratios of the medians are in brackets.
"""

import statistics
import sys
import time
from collections.abc import Callable

import _ranks
import torch
import torch.distributed as dist

from task_images.allreduce.operations import COLLECTIVES, Buffers, make_call
from task_images.allreduce.task import time_samples
from task_images.clock import Tracker
from task_images.contract import Contract
from task_images.world import World, open_world

RANKS = 2
ROUNDS = 60
SIZES = {2: 10, 1000: 10, 100_000: 8, 1_000_000: 3}  # elements: samples of a round


def main() -> None:
    if not _ranks.is_rank():
        sys.exit(_ranks.start(__file__, RANKS))
    world = open_world(Contract())
    ratios = {name: [compare(world, name, *size) for size in SIZES.items()] for name in COLLECTIVES}
    if world.is_first:
        for name, found in ratios.items():
            print(f"{name:<15} mean task/bare of the sizes {statistics.fmean(found):.3f}")
        mean = statistics.fmean(one for found in ratios.values() for one in found)
        print(f"mean of all collectives {mean:.3f} (budget 1.03)")
    world.close()


def compare(world: World, collective: str, elements: int, samples: int) -> float:
    """The task's time over that of both bare loops, lower quartiles."""
    tracker = Tracker()
    buffers = Buffers.of(world, "fp32")
    call = make_call(collective, buffers, elements, COLLECTIVES[collective].places[0])
    # Each with buffers of its own, which are as cold as the others' when its turn comes.
    bare = {name: bare_call(buffers, collective, elements) for name in ("bare", "again")}
    times: dict[str, list[float]] = {"task": [], "bare": [], "again": []}
    for number in range(ROUNDS):
        for turn in range(number, number + len(times)):
            name = list(times)[turn % len(times)]
            if name == "task":
                own = time_samples(world, tracker, call, samples)
            else:
                own = [one / call.trips if call.counts else 0.0 for one in bare_loop(*bare[name], samples)]
            times[name] += world.max(own)
    pooled = {**times, "both": times["bare"] + times["again"]}
    quartiles = {name: [1e6 * one for one in statistics.quantiles(found, n=4)] for name, found in pooled.items()}
    low, median = ({name: found[place] for name, found in quartiles.items()} for place in (0, 1))
    if world.is_first:
        print(
            f"{collective:<15} {elements:>8} elements  task {low['task']:9.1f} us  bare {low['both']:9.1f} us"
            f"  task/bare {low['task'] / low['both']:.3f} ({median['task'] / median['both']:.3f})"
            f"  bare/bare {low['again'] / low['bare']:.3f} ({median['again'] / median['bare']:.3f})",
            flush=True,
        )
    return low["task"] / low["both"]


def bare_call(buffers: Buffers, collective: str, elements: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """What refills, which is the task's, and the call as one would write it without the task; of two ranks."""
    rank, partner, part = buffers.world.rank, 1 - buffers.world.rank, elements // RANKS
    send, result, pattern = torch.ones(elements), torch.ones(elements), buffers.pattern.moved
    slot, own = (buffer[rank * part : (rank + 1) * part] for buffer in (result, send))

    def ping_pong() -> None:
        if rank == 0:
            dist.send(send, partner)
            dist.recv(result, partner)
        else:
            dist.recv(result, partner)
            dist.send(send, partner)

    def bidirectional() -> None:
        both = [dist.P2POp(dist.isend, send, partner), dist.P2POp(dist.irecv, result, partner)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def fill_one() -> None:
        pattern.fill(send)

    def fill_both() -> None:
        pattern.fill(send)
        result.fill_(-1)

    def fill_slot() -> None:
        result.fill_(-1)
        pattern.fill(slot)

    def fill_own() -> None:
        own.fill_(-1)
        pattern.fill(send)

    return {
        "all_reduce": (fill_one, lambda: dist.all_reduce(send)),
        "broadcast": (fill_one, lambda: dist.broadcast(send, 0)),
        "reduce": (fill_one, lambda: dist.reduce(send, 0)),
        "all_gather": (fill_slot, lambda: dist.all_gather_into_tensor(result, slot)),
        "reduce_scatter": (fill_own, lambda: dist.reduce_scatter_tensor(own, send)),
        "all_to_all": (fill_both, lambda: dist.all_to_all_single(result, send)),
        "ping_pong": (fill_both, ping_pong),
        "bidirectional": (fill_both, bidirectional),
    }[collective]


def bare_loop(fill: Callable[[], object], call: Callable[[], object], samples: int) -> list[float]:
    times = []
    for _ in range(samples):
        fill()
        dist.barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()
