"""What measuring the gradient noise scale costs a training.

    python benchmarks/noise_scale.py [--blocks N] [--updates N]

Two ranks train ResNet-20 on 64 random images each, as `mlbench run --calibrate` does: the noise scale chooses by itself
how seldom it takes norms. The CPU time of all its methods and hooks is compared with that of the process, which other
programs change less than times. Prints the median share over blocks of updates, and the largest. The exit code is 1 if
the median is above 1 %. About a minute on a quiet machine.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import _ranks
import torch

from task_images.comm.choose import make_strategy
from task_images.comm.presets import resolve
from task_images.contract import Contract
from task_images.harness.distributed import World, open_world
from task_images.harness.models.resnet import resnet
from task_images.harness.noise_scale import FIRST_LOOK, WARM_UP, NoiseScale
from task_images.harness.updates import Update

BATCH = 64
MAX_SHARE = 0.01
TIMED = ("begin", "begin_pass", "end_pass", "end", "collect", "_on_gradient", "_on_mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--updates", type=int, default=10, help="of each block")
    options = parser.parse_args()
    if not _ranks.is_rank():
        sys.exit(_ranks.start(__file__, 2, arguments=sys.argv[1:]))
    world = open_world(Contract())
    shares = measure(world, options.blocks, options.updates)
    world.close()
    middle = statistics.median(shares)
    if world.is_first:
        print(f"the noise scale takes {middle:.2%} of the CPU time, at most {max(shares):.2%} of {len(shares)} blocks")
    sys.exit(int(middle > MAX_SHARE))


def measure(world: World, blocks: int, updates: int) -> list[float]:
    """The share of each block on this rank."""
    spent = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any) -> Any:
            nonlocal spent
            begun = time.thread_time()
            try:
                return method(*arguments)
            finally:
                spent += time.thread_time() - begun

        return call

    torch.manual_seed(1)
    kind = type("Timed", (NoiseScale,), {name: timed(getattr(NoiseScale, name)) for name in TIMED})
    model, strategy = resnet(20), make_strategy(resolve("bsp"))
    noise = kind(world, model, strategy)
    strategy.attach(world, model, lambda module: torch.optim.SGD(module.parameters(), lr=0.01))
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    update: Update[None] = Update([], 1, BATCH, BATCH * world.size, BATCH * world.size)

    def train(count: int) -> float:
        nonlocal spent
        spent, begun = 0.0, time.process_time()
        for _ in range(count):
            noise.begin(update, 1.0)
            strategy.begin(update.weight, update.total)
            noise.begin_pass()
            with strategy.last_pass():
                torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            noise.end_pass()
            strategy.step(0.01)
            noise.end()
        noise.collect()  # as before a validation
        return spent / (time.process_time() - begun)

    train(WARM_UP + FIRST_LOOK + 2)  # chooses how seldom norms are taken
    shares = [train(updates) for _ in range(blocks)]
    strategy.close()
    return shares


if __name__ == "__main__":
    main()
