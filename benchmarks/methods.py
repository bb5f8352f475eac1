"""mlbench's own reducer against torch's DistributedDataParallel, and every method's step, side by side.

    .venv/bin/python -m benchmarks.methods [--ranks 2] [--rounds 12] [--all]

All ranks are processes of this machine (gloo, one thread each). The methods take turns, a block of steps each, on their
own copies of ResNet-20 for CIFAR-10 and the same batches, so that what else the machine does meets them alike.
Printed: the median of a round's ratio of step times to DDP's, with the quartiles; below 1 is faster than DDP.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

from task_images.comm.base import Placement, Strategy
from task_images.comm.choose import make_strategy
from task_images.comm.methods import MethodError, check
from task_images.comm.presets import PRESETS, resolve
from task_images.contract import Contract
from task_images.harness.distributed import World, open_world
from task_images.harness.models.resnet import resnet

BATCH = 16
STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--all", action="store_true", help="every method without servers, not only fusion")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options.rounds, options.all)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.methods", *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}) for rank in range(options.ranks)
    ]
    sys.exit(max(process.wait() for process in ranks))


def measure(rounds: int, everything: bool) -> None:
    world = open_world(Contract())
    names = ["ddp", "fusion", "noop"] if not everything else list_measurable(world.size)
    steps = {name: make_step(world, make_strategy(resolve(name))) for name in names}
    for step in steps.values():  # plans, buckets and buffers are made in the first updates
        for _ in range(5):
            step()
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            world.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                steps[name]()
            times[name].append(world.max([time.perf_counter() - begin])[0] / STEPS)
    if world.is_first:
        print(f"{world.size} ranks, ResNet-20, batch {BATCH} each, {rounds} rounds of {STEPS} steps")
        for name in names:
            ratios = [one / other for one, other in zip(times[name], times["ddp"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{name:<14} {1e3 * statistics.median(times[name]):8.1f} ms a step"
                f"   {middle:.3f} of ddp's ({low:.3f} to {high:.3f})"
            )
    world.close()


def list_measurable(size: int) -> list[str]:
    """Methods that need no servers and are possible on `size` ranks."""
    found = []
    for name in PRESETS:
        method = resolve(name)
        try:
            check(method, size)
        except MethodError:
            continue
        if not method.server_count:
            found.append(name)
    return found


def make_step(world: World, strategy: Strategy) -> Callable[[], None]:
    """One update with a strategy of its own model."""
    torch.manual_seed(1)
    model = resnet(20)
    module = strategy.attach(
        Placement(world), model, lambda net: torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, fused=True)
    )
    images, targets = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))

    def step() -> None:
        strategy.begin(BATCH, BATCH * world.size)
        with strategy.last_pass():
            cross_entropy(module(images), targets).backward()  # type: ignore[no-untyped-call]
        strategy.step(0.01)

    return step


if __name__ == "__main__":
    main()
