"""Ways of doing the same step of ResNet-20 against the ordinary one, in turn in the same two processes:

    pinned         ranks bound to CPUs of their own (what `mlbench run --pin` does), free for all other ways
    2, 4 buckets   gradients in 2 or 4 messages that a communication thread sends during the backward pass, instead of
                   one message after it, as the task's own reduction has it

    python benchmarks/ways.py [--rounds 100]

Every round does one step each way, in random order, after all ranks have met. A ratio is the ordinary step's seconds
over the way's of the same round: above 1 the way is faster. The interval is Student's 95 % interval of the mean of the
ratios' logarithms. The load is that of the machine at the begin and the end.
"""

import argparse
import contextlib
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import _ranks
import torch
from torch.nn.functional import cross_entropy

from mlbench_cli.results.analysis.statistics import estimate
from task_images.comm.allreduce import GradientAllReduce
from task_images.comm.base import Strategy
from task_images.comm.methods import Method
from task_images.comm.reducer import Reducer
from task_images.contract import Contract
from task_images.harness.cores import share_cpus
from task_images.harness.distributed import World, open_world
from task_images.harness.models.resnet import resnet

RANKS, WARMUP = 2, 3
# Images of a rank and step: those of digits_resnet and of cifar10_resnet20. The gradients are 1.1 MB.
SHAPES = {"32 images of 8x8": (32, 3, 8, 8), "64 images of 32x32": (64, 3, 32, 32)}
ORDINARY, PINNED = "ordinary", "pinned"
WAYS: Mapping[str, Callable[[], Strategy]] = {
    ORDINARY: GradientAllReduce,
    PINNED: GradientAllReduce,
    "2 buckets": lambda: Reducer(Method(plan="threshold:600KiB")),
    "4 buckets": lambda: Reducer(Method(plan="threshold:300KiB")),
}
Step = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    if not _ranks.is_rank():
        sys.exit(_ranks.start(__file__, RANKS, arguments=sys.argv[1:]))
    world = open_world(Contract())
    usable = sorted(os.sched_getaffinity(0))
    own = share_cpus(usable, RANKS)[world.rank]
    for name, shape in SHAPES.items():
        begin = os.getloadavg()[0]
        seconds = measure(world, shape, rounds, {PINNED: own}, usable)
        if world.is_first:
            show(name, seconds, f"load {begin:.1f} to {os.getloadavg()[0]:.1f}")
    world.close()


def measure(
    world: World, shape: tuple[int, ...], rounds: int, bound: Mapping[str, list[int]], usable: list[int]
) -> dict[str, list[float]]:
    """The longest seconds of any rank in each round, by way."""
    steps = {way: make_step(world, make(), shape) for way, make in WAYS.items()}
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    names = list(steps)
    for number in range(-WARMUP, rounds):
        for way in random.Random(number).sample(names, len(names)):  # the same order on all ranks
            bind(bound.get(way, usable))
            world.barrier()
            begin = time.perf_counter()
            steps[way]()
            taken = world.max([time.perf_counter() - begin])[0]
            if number >= 0:
                seconds[way].append(taken)
    return seconds


def make_step(world: World, strategy: Strategy, shape: tuple[int, ...]) -> Step:
    """One update on images that stay the same."""
    torch.manual_seed(0)
    model = resnet(20).to(memory_format=torch.channels_last)
    strategy.attach(
        world,
        model,
        lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True, fused=True),
    )
    images = torch.randn(shape).to(memory_format=torch.channels_last)
    labels = torch.randint(10, shape[:1])

    def step() -> None:
        strategy.begin(1, world.size)
        with strategy.last_pass():
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        strategy.step(0.01)

    return step


def bind(cpus: list[int]) -> None:
    """Let all threads of this process run on these CPUs."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cpus)


def show(name: str, seconds: Mapping[str, list[float]], load: str) -> None:
    """Print the ratio of each way to the ordinary one."""
    print(f"{name}: {1e3 * statistics.median(seconds[ORDINARY]):.1f} ms a step, {load}")
    for way, values in seconds.items():
        if way == ORDINARY:
            continue
        ratios = [math.log(usual / own) for usual, own in zip(seconds[ORDINARY], values, strict=True)]
        mean = estimate(ratios)
        low, high = (math.exp(end if end is not None else mean.mean) for end in (mean.low, mean.high))
        print(
            f"    {way:<12} {math.exp(mean.mean):.3f} times as fast ({low:.3f} to {high:.3f}),"
            f" median {math.exp(statistics.median(ratios)):.3f}, {len(values)} rounds",
            flush=True,
        )


if __name__ == "__main__":
    main()
