"""What methods keep is written by each rank for itself: no rank gets more with more ranks."""

import io
from functools import partial

import pytest
import torch
from torch import nn

from task_images.comm.base import Placement, keep_own
from task_images.comm.choose import make_strategy
from task_images.comm.presets import resolve
from tests.unit.task_images.comm.equality import Probe, draw_gradients
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks


def keep(world: ThreadWorld, name: str) -> tuple[int, int]:
    """Collectives of the training threads for a state, and the bytes of its file, on rank 0."""
    method = resolve(name, {"sync": "postlocal:1,2"} if name == "postlocalsgd" else None)
    strategy = make_strategy(method)

    def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), 0.1, 0.9)

    module = strategy.attach(Placement(world), Probe(), make_optimizer)
    for update in (1, 2):
        strategy.begin(1.0, float(world.size))
        with strategy.last_pass():
            module(
                [torch.from_numpy(part) for part in draw_gradients(update, world.size, False)[world.rank]]
            ).backward()
        strategy.step(0.1)
    world.barrier()
    before = world.shared.collectives if world.is_first else 0
    state = strategy.method_state(keep_own)
    made = world.shared.collectives - before if world.is_first else 0
    file = io.BytesIO()
    torch.save({**state}, file)
    world.barrier()
    strategy.close()
    return made, len(file.getvalue())


@pytest.mark.parametrize("name", ["eftopk", "powersgd", "dgc", "localsgd", "postlocalsgd", "dpsgd", "choco", "slowmo"])
def test_a_rank_keeps_its_own_state_whatever_the_number_of_ranks(name: str) -> None:
    two, eight = (run_ranks(size, partial(keep, name=name))[0] for size in (2, 8))
    assert two[0] == eight[0] == 0
    assert eight[1] == pytest.approx(two[1], rel=0.02)
