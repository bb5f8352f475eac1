"""Plans are made from warm backward passes: slow first ones, which compile and choose kernels, change nothing."""

from functools import partial

import pytest
import torch
from torch import nn

from task_images.comm.plans import Cost
from task_images.comm.presets import resolve
from task_images.comm.reducer import Reducer
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks

LAYERS, EACH, ALPHA = 12, 0.002, 0.010  # seconds between gradients, and of a message


class Timed(Reducer):
    """A reducer whose gradients take EACH, and `slower` more in the first passes."""

    cold, slower, _clock = 0, 0.0, 0.0

    def _now(self) -> float:
        self._clock += EACH + (self.slower if self._update < self.cold else 0.0)
        return self._clock

    def _measure_cost(self) -> Cost:
        return Cost(ALPHA, 0.0)


def count_messages(world: ThreadWorld, name: str, cold: int, slower: float) -> int:
    strategy = Timed(resolve(name), 0)
    strategy.cold, strategy.slower = cold, slower
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(LAYERS)))
    module = strategy.attach(world, layers, lambda net: torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(9):
        strategy.begin(1.0, float(world.size))
        with strategy.last_pass():
            module(torch.ones(1, 4)).sum().backward()
        strategy.step(0.0)
    strategy.close()
    return len(strategy.bucket_bytes())


@pytest.mark.parametrize("name", ["mgwfbp", "optfusion"])
def test_slow_first_passes_change_nothing(name: str) -> None:
    counts = [
        run_ranks(2, partial(count_messages, name=name, cold=cold, slower=0.05))[0] for cold in (0, 1, 3, 2 * LAYERS)
    ]
    assert counts[0] == counts[1] == counts[2] <= 3
    assert counts[3] == LAYERS  # all passes being slow, each layer gets a message
