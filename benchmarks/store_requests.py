"""What a rank asks of the rendezvous' store and sends in an update, and how that grows with the number of ranks.

    .venv/bin/python -m benchmarks.store_requests [--ranks 8 64 256]

Ranks are threads of this process, and the store counts: rank 0 has one store for all of them. Counted are the meeting
of the ranks, the wait for loading, and the addresses for the network's measurement, twice. Printed: the most of any
rank, and the mean. Then messages and bytes on the wire of an update of a model of 940 numbers, the most of any rank, by
some methods: an all-gather's bytes grow with the ranks, those of the others do not, or as their logarithm.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

# As a script the repository is not on the path; with -m it is.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

from task_images.comm.choose import make_strategy
from task_images.comm.presets import resolve
from tests.unit.task_images.comm.equality import Probe, draw_gradients
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks
from tests.unit.task_images.harness.store_requests import count

METHODS = ("bsp", "powersgd", "dpsgd", "gtopk", "localsgd", "eftopk")
UPDATES = 4  # one average of localsgd


def send(world: ThreadWorld, name: str) -> tuple[float, float]:
    """Messages and bytes on the wire that this rank sends in an update."""
    strategy = make_strategy(resolve(name))

    def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), 0.1)

    module = strategy.attach(world, Probe(), make_optimizer)
    for update in range(UPDATES):
        strategy.begin(1.0, float(world.size))
        with strategy.last_pass():
            module([torch.from_numpy(part) for part in draw_gradients(update, 1, False)[0]]).backward()
        strategy.step(0.1)
    world.barrier()
    figures = strategy.stats()
    strategy.close()
    return figures["messages"] / UPDATES, figures["wire_bytes"] / UPDATES


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 256])
    for size in parser.parse_args(arguments).ranks:
        found = count(size)
        most = Counter(requests for requests, _ in found)
        print(
            f"{size:5d} ranks: at most {max(most)} requests of a rank, {sum(n * k for n, k in most.items()) / size:.1f}"
            f" on average, {sum(sent for _, sent in found) / size / 1024:.1f} KiB each"
        )
        for name in METHODS:
            messages, sent = (max(column) for column in zip(*run_ranks(size, partial(send, name=name)), strict=True))
            print(f"      {name:<9} {messages:5.2f} messages and {sent:9,.0f} bytes of a rank in an update")


if __name__ == "__main__":
    main(sys.argv[1:])
