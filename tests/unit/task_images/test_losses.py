"""The training loss: exact means, few transfers, and an end for what is not finite."""

import math

import pytest
import torch

from task_images.contract import Contract
from task_images.errors import DivergedError
from task_images.loop import MAX_HELD, TrainingLoss, check_finite
from task_images.world import World


@pytest.fixture
def world() -> World:
    return World(Contract({}), torch.device("cpu"), 1, grouped=False)


def read(losses: list[torch.Tensor]) -> list[float]:
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_training(world: World, bad: float) -> None:
    loss = TrainingLoss(read)
    loss.add(torch.tensor(1.0), 4)
    assert loss.collect_recent(world, epoch=1, step=25) == 1.0
    loss.add(torch.tensor(bad), 4)
    loss.add(torch.tensor(1.0), 4)
    with pytest.raises(DivergedError, match=r"epoch 3, at step 50: the training has diverged"):
        loss.collect_recent(world, epoch=3, step=50)
    with pytest.raises(DivergedError, match=r"the validation loss is .* in epoch 2"):
        check_finite({"loss": bad}, 2)


def test_the_recent_mean_and_that_of_the_whole_epoch_are_taken_apart(world: World) -> None:
    loss = TrainingLoss(read)
    loss.add(torch.tensor(1.0), 30)
    assert loss.collect_recent(world, 1, 1) == 1.0
    loss.add(torch.tensor(5.0), 10)
    assert loss.collect_recent(world, 1, 2) == 5.0
    loss.add(torch.tensor(2.0), 40)
    assert loss.collect_whole(world) == (30 + 50 + 80) / 80
    assert loss.collect_recent(world, 1, 3) == 2.0
    assert math.isnan(loss.collect_whole(world))


def test_small_losses_are_not_lost_in_a_large_sum_and_few_transfers_read_them(world: World) -> None:
    transfers: list[int] = []

    def count(losses: list[torch.Tensor]) -> list[float]:
        transfers.append(len(losses))
        return read(losses)

    loss = TrainingLoss(count)
    loss.add(torch.tensor(1e8), 1)
    for _ in range(1000):
        loss.add(torch.tensor(1.0), 1)
    assert loss.collect_whole(world) == pytest.approx((1e8 + 1000) / 1001, rel=1e-12)
    assert transfers == [MAX_HELD] * (1001 // MAX_HELD) + [1001 % MAX_HELD]
