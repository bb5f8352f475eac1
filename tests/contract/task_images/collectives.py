"""A program for test_collectives.py: checks on three ranks, each printing OK when it holds."""

import math

import pytest
import torch
from torch import nn

from task_images.clock import Snapshot, gather_timings
from task_images.contract import CATEGORIES, Contract, DivergedError
from task_images.epsilon_logistic_regression.task import MeanOfWeights
from task_images.methods.base import Bsp, LossScale
from task_images.methods.half import Fp16
from task_images.metrics import TrainingLoss
from task_images.run import run
from task_images.world import World, average_buffers, broadcast_state, check_identical, open_world

UPDATES = 4


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


def set_gradients(model: nn.Module, value: float) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, value + number)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1.0)


def clear(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def gradients_become_the_weighted_mean(world: World) -> None:
    # Ranks hold 1, 2 and 5 samples with gradients 10, 20, 30: mean (10 + 40 + 150) / 8 = 25, exactly.
    weight = [1, 2, 5][world.rank]
    for wire in (None, torch.float16):  # all of these numbers are also fp16
        method, model = Bsp(wire), make_model()
        method.attach(world, model, make_optimizer)
        for _ in range(UPDATES):  # all but the first time in the buffers of the first
            clear(model)
            method.begin(weight, 8)
            set_gradients(model, 10.0 * (world.rank + 1))
            method.step(1.0)
            for number, parameter in enumerate(model.parameters()):
                assert torch.equal(parameter, torch.full_like(parameter, -25.0 - number)), parameter
        stats = method.stats()
        assert stats["messages"] == UPDATES, stats
        width = 4 if wire is None else 2
        numbers = sum(parameter.numel() for parameter in model.parameters())
        assert stats["bytes"] == UPDATES * width * numbers, stats


def gradients_in_fp16_travel_as_by_the_method_fp16(world: World) -> None:
    found = []
    for method in (Bsp(wire=torch.float16), Fp16(), Bsp()):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))
        method.attach(world, model, make_optimizer)
        for number in range(4):
            torch.manual_seed(100 * number + world.rank)
            method.begin(5, 15)
            model(torch.randn(5, 3)).square().mean().backward()
            method.step(0.1)
        check_identical(world, model)
        found.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
        method.close()
    wired, by_method, plain = found
    torch.testing.assert_close(wired, by_method, rtol=1e-3, atol=1e-4)
    assert not torch.equal(wired, plain)


def gradients_accumulate_in_the_buffer_without_copies(world: World) -> None:
    method, model = Bsp(), make_model()
    method.attach(world, model, make_optimizer)
    places = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
    assert len(places) == 5
    for _ in range(3):
        method.begin(5, 15)
        model(torch.randn(5, 3)).sum().backward()
        method.step(0.1)
    assert places == [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
    check_identical(world, model)


def a_missing_gradient_counts_as_zeros(world: World) -> None:
    method, model = Bsp(), nn.Linear(2, 1, bias=False)
    method.attach(world, model, make_optimizer)
    for _ in range(2):  # the second time the buffers are no longer zero
        clear(model)
        method.begin(1, 3)
        model.weight.grad = torch.full((1, 2), 6.0) if world.rank == 1 else None
        method.step(1.0)
        assert model.weight.tolist() == [[-2.0, -2.0]]


def an_overflow_on_one_rank_leaves_all_models_alone(world: World) -> None:
    too_large = ((Bsp(), math.inf), (Bsp(wire=torch.float16), 1e6), (MeanOfWeights(), math.inf))
    for method, gradient in too_large:
        model, scale = make_model(), LossScale(8.0)
        method.attach(world, model, make_optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        method.begin(1, 3, scale=scale)
        set_gradients(model, gradient if world.rank == 2 else 1.0)
        assert not method.step(1.0)
        assert scale.value == 4.0
        for parameter, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.detach(), old)


def weights_become_their_mean(world: World) -> None:
    method, model = MeanOfWeights(), make_model()
    method.attach(world, model, make_optimizer)
    clear(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0 * world.rank)
    method.begin(1, 3)
    method.step(1.0)
    assert all(bool((parameter == -3.0).all()) for parameter in model.parameters())


def models_start_equal_and_differences_are_found(world: World) -> None:
    torch.manual_seed(world.rank)
    model = make_model()
    with pytest.raises(DivergedError, match="rank 1, 2 differs"):
        check_identical(world, model)
    broadcast_state(world, model)
    check_identical(world, model)
    norm, last = model[1], model[2]
    assert isinstance(norm, nn.BatchNorm1d)
    assert isinstance(last, nn.Linear)
    assert norm.num_batches_tracked is not None
    assert int(norm.num_batches_tracked) == 0
    with torch.no_grad():
        last.weight[0, 0] += 1e-6 if world.rank == 2 else 0
    with pytest.raises(DivergedError, match="rank 2 differs"):
        check_identical(world, model)


def running_statistics_become_their_mean(world: World) -> None:
    model = make_model()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    norm.running_mean.fill_(float(world.rank))
    norm.num_batches_tracked.fill_(7)
    average_buffers(world, model)
    assert torch.allclose(norm.running_mean, torch.ones(4))
    assert int(norm.num_batches_tracked) == 7


def numbers_are_summed_gathered_and_agreed_on(world: World) -> None:
    assert world.sum([1.0, 2.0**40 + world.rank]) == [3.0, 3 * 2.0**40 + 3]
    assert world.max([-float(world.rank)]) == [0.0]
    assert world.gather([world.rank, 5]) == [[0, 5], [1, 5], [2, 5]]
    assert world.agree(100.0 + world.rank) == 100.0


def timings_are_spread_over_ranks(world: World) -> None:
    timings = gather_timings(
        world, Snapshot(dict.fromkeys(CATEGORIES, 0.0) | {"loss": world.rank + 1.0}, 0, 0, 0, 0, 0)
    )
    assert timings["loss"] == {"min": 1.0, "mean": 2.0, "max": 3.0, "rank0": 1.0}


def one_bad_loss_stops_every_rank(world: World) -> None:
    loss = TrainingLoss()
    for step in (6, 7, 8):
        loss.add(torch.tensor(float("nan") if world.rank == 2 and step > 6 else 1.0), 4, step)
    with pytest.raises(DivergedError, match="epoch 1, at step 7"):
        loss.collect_recent(world, 1)


CHECKS = [
    gradients_become_the_weighted_mean,
    gradients_accumulate_in_the_buffer_without_copies,
    a_missing_gradient_counts_as_zeros,
    gradients_in_fp16_travel_as_by_the_method_fp16,
    an_overflow_on_one_rank_leaves_all_models_alone,
    weights_become_their_mean,
    models_start_equal_and_differences_are_found,
    running_statistics_become_their_mean,
    numbers_are_summed_gathered_and_agreed_on,
    timings_are_spread_over_ranks,
    one_bad_loss_stops_every_rank,
]


def main(contract: Contract) -> None:
    world = open_world(contract, rendezvous_seconds=60)
    for check in CHECKS:
        check(world)
        print("OK", check.__name__, flush=True)
    world.close()


if __name__ == "__main__":
    run(main)
