"""Every method's step against torch's DistributedDataParallel, side by side.

    .venv/bin/python benchmarks/methods.py [--ranks 2] [--rounds 12] [--model resnet20] [--all] [--delay ALPHA,BETA ...]

All ranks are processes of this machine (gloo, one thread each). The methods take turns, a block of steps each, on their
own copies of the model and the same batches, so that what else the machine does meets them alike.
Printed: the median of a round's ratio of step times to DDP's, with the quartiles, and a 95 % interval of the median (by
order statistics); below 1 is faster than DDP. With --delay (seconds per message and per byte that every message takes
longer) there is no DDP, which knows no delay: ratios are then to bsp. `--model mlp25m` has 25 million parameters.
Also printed: the seconds of each method's self-check.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import _ranks
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from task_images.contract import Contract
from task_images.methods import FILES
from task_images.methods.base import Method, MethodError
from task_images.methods.catalog import find_class
from task_images.methods.check import check_method
from task_images.resnet import resnet
from task_images.world import World, open_world

BATCH = 16
STEPS = 3
WARM_UP = 5  # plans, buckets and buffers are made in the first updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--model", choices=MODELS, default="resnet20")
    parser.add_argument("--all", action="store_true", help="every method without servers, not only fusion")
    parser.add_argument("--method", action="append", default=[], help="only these, besides what ratios are to")
    parser.add_argument("--delay", action="append", default=[], help="ALPHA,BETA; several are measured in turn")
    options = parser.parse_args()
    if _ranks.is_rank():
        world = open_world(Contract())
        for delay in options.delay or ["none"]:
            measure(world, options.rounds, options.model, choose(world.size, options, delay), delay)
        world.close()
        return
    sys.exit(_ranks.start(__file__, options.ranks, arguments=sys.argv[1:]))


def choose(size: int, options: argparse.Namespace, delay: str) -> list[Method]:
    """What is measured, the method that ratios are to first."""
    first = "ddp" if delay == "none" else "bsp"
    names = options.method or (list(FILES) if options.all else ["fusion", "wfbp", "bsp", "noop"])
    found = []
    for name in dict.fromkeys([first, *names]):
        if delay != "none" and find_class(name).wraps:
            continue
        method = find_class(name)(**({} if delay == "none" else {"delay": delay}))
        try:
            method.check(size)
        except MethodError:
            continue
        if "servers" not in method.values:
            found.append(method)
    return found


def measure(world: World, rounds: int, model: str, methods: Sequence[Method], delay: str) -> None:
    checks, steps = {}, {}
    for method in methods:
        world.barrier()
        begin = time.perf_counter()
        check_method(world, method)
        checks[method.name] = world.max([time.perf_counter() - begin])[0]
        steps[method.name] = make_step(world, method, model)
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times = interleave(world, steps, rounds)
    if not world.is_first:
        return
    print(f"{world.size} ranks, {model}, batch {BATCH} each, {rounds} rounds of {STEPS} steps, delay {delay}")
    first = methods[0].name
    for name in steps:
        ratios = sorted(one / other for one, other in zip(times[name], times[first], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        least, most = find_median_interval(ratios)
        print(
            f"{name:<14} {1e3 * statistics.median(times[name]):8.1f} ms a step   {middle:.3f} of {first}'s"
            f" (quartiles {low:.3f} to {high:.3f}, median within {least:.3f} to {most:.3f})"
            f"   self-check {checks[name]:.2f} s",
            flush=True,
        )


def interleave(world: World, steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step by method and round, of the slowest rank: blocks of STEPS in turns, every other round back."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in steps if number % 2 else reversed(steps):
            world.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                steps[name]()
            times[name].append(world.max([time.perf_counter() - begin])[0] / STEPS)
    return times


def find_median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median of ascending values, by their order (binomial): it assumes no distribution."""
    count = len(values)
    total, below = 0.0, 0
    while below < count // 2 and total + math.comb(count, below) / 2**count <= 0.025:
        total += math.comb(count, below) / 2**count
        below += 1
    first = max(0, below - 1)
    return values[first], values[count - 1 - first]


class DeepNet(nn.Module):
    """Six layers of 2048 x 2048, 25 178 112 parameters: little to compute, much to send."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs)
        return found


def make_resnet() -> tuple[nn.Module, Tensor]:
    return resnet(20), torch.randn(BATCH, 3, 32, 32)


def make_mlp() -> tuple[nn.Module, Tensor]:
    return DeepNet(), torch.randn(BATCH, 2048)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"resnet20": make_resnet, "mlp25m": make_mlp}


def make_step(world: World, method: Method, model_name: str = "resnet20") -> Callable[[], None]:
    """One update with a method and its own model."""
    torch.manual_seed(1)
    model, inputs = MODELS[model_name]()
    module = method.attach(world, model, lambda net: torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, fused=True))
    targets = torch.randint(10, (BATCH,))

    def step() -> None:
        method.begin(BATCH, BATCH * world.size)
        cross_entropy(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
        method.step(0.01)

    return step


if __name__ == "__main__":
    main()
