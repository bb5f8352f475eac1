"""The task's own reduction: flat buffers that gradients are views of, probes of waiting, and averages of weights."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from task_images.comm import allreduce
from task_images.comm.allreduce import GradientAllReduce, WeightAllReduce
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks


class Two(nn.Module):
    """Two parameters whose gradients are given; None leaves one out."""

    def __init__(self, second: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2))
        self.second = nn.Parameter(torch.zeros(3, dtype=second))

    def forward(self, first: float | None, second: float | None) -> Tensor:
        total = torch.zeros(())
        if first is not None:
            total = total + first * self.first.sum()
        if second is not None:
            total = total + (second * self.second.sum()).float()
        return total


def update(strategy: Any, model: Two, first: float | None, second: float | None, weight: float = 1.0) -> list[float]:
    """One update at rate 1, weighted against a total of 2 per rank; returns the first number of each parameter."""
    strategy.begin(weight, float(strategy.world.size))
    model(first, second).backward()
    strategy.step(1.0)
    return [model.first[0].item(), model.second[0].item()]


def attach(world: ThreadWorld, strategy: Any, model: nn.Module) -> Any:
    strategy.attach(world, model, lambda net: torch.optim.SGD(net.parameters(), 1.0))
    return strategy


def test_gradients_are_summed_by_their_weights_and_missing_ones_are_zeros() -> None:
    def body(world: ThreadWorld) -> tuple[list[float], list[float]]:
        model = Two()
        strategy = attach(world, GradientAllReduce(), model)
        weight = 1.5 if world.rank else 0.5
        one = update(strategy, model, 4.0, 2.0 if world.rank else None, weight)
        return one, update(strategy, model, None, 8.0, weight)

    # Weights 0.5 and 1.5 of 2: 4 from both, 2 from rank 1 alone.
    assert run_ranks(2, body) == [([-4.0, -1.5], [-4.0, -9.5])] * 2


def test_a_message_has_all_gradients_of_a_type() -> None:
    for second, messages, size in ((torch.float32, 1, 20), (torch.float64, 2, 8 + 24)):

        def body(world: ThreadWorld, second: torch.dtype = second) -> dict[str, float]:
            model = Two(second)
            strategy = attach(world, GradientAllReduce(), model)
            for _ in range(3):
                update(strategy, model, 1.0, 1.0)
            figures: dict[str, float] = strategy.stats()
            return figures

        for figures in run_ranks(2, body):
            assert (figures["messages"], figures["bytes"], figures["updates"]) == (3 * messages, 3 * size, 3)
            assert figures["probes"] == 0


@pytest.mark.parametrize(
    ("wire", "size", "moved"), [(None, 20, 2049.0), (torch.float16, 10, 2048.0), (torch.bfloat16, 10, 2048.0)]
)
def test_messages_may_have_another_type(wire: torch.dtype | None, size: int, moved: float) -> None:
    """Half of 4098 is 2049, which has no number of 16 bits."""

    def body(world: ThreadWorld) -> tuple[float, float]:
        model = Two()
        strategy = attach(world, GradientAllReduce(wire), model)
        found = update(strategy, model, 0.0 if world.rank else 4098.0, 1.0)
        return -found[0], strategy.stats()["bytes"]

    assert run_ranks(2, body) == [(moved, size)] * 2


def test_gradients_stay_views_of_the_buffer_also_if_something_replaces_them() -> None:
    def body(world: ThreadWorld) -> list[bool]:
        model = Two()
        strategy = attach(world, GradientAllReduce(), model)
        seen = []
        for replaced in (False, True):
            strategy.begin(1.0, 2.0)
            model(1.0, 1.0).backward()
            if replaced:
                model.first.grad, model.second.grad = torch.full((2,), 3.0), None
            strategy._reduce()
            [flat] = strategy._buffers
            assert model.first.grad is not None
            assert model.second.grad is not None
            pointers = [model.first.grad.data_ptr(), model.second.grad.data_ptr()]
            seen.append(pointers == [flat.data_ptr(), flat.data_ptr() + 8])
            assert flat.tolist() == ([3.0, 3.0, 0.0, 0.0, 0.0] if replaced else [1.0] * 5)
            flat.zero_()
        return seen

    assert run_ranks(2, body) == [[True, True]] * 2


def test_the_memory_format_of_parameters_is_that_of_their_gradients() -> None:
    def body(world: ThreadWorld) -> bool:
        model = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last)
        attach(world, GradientAllReduce(), model)
        assert model.weight.grad is not None
        assert model.weight.grad.stride() == model.weight.stride()
        return bool(model.weight.grad.is_contiguous(memory_format=torch.channels_last))

    assert run_ranks(2, body) == [True, True]


def test_some_updates_tell_waiting_for_peers_from_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks of the ranks that are a second later whenever they are looked at."""
    clock = threading.local()

    def look() -> float:
        clock.now = getattr(clock, "now", 0.0) + 1
        return float(clock.now)

    monkeypatch.setattr(allreduce, "PROBE_EVERY", 3)
    monkeypatch.setattr(allreduce, "time", SimpleNamespace(perf_counter=look))

    def body(world: ThreadWorld) -> tuple[list[float], int, dict[str, float]]:
        model = Two()
        strategy = attach(world, GradientAllReduce(), model)
        meetings, barrier = [0], world.barrier

        def meet() -> None:
            meetings[0] += 1
            barrier()

        world.barrier = meet  # type: ignore[method-assign]
        counts = []
        for _ in range(7):
            update(strategy, model, 1.0, 1.0)
            counts.append(strategy.stats()["probes"])
        return counts, meetings[0], strategy.stats()

    for counts, meetings, figures in run_ranks(2, body):
        assert counts == [0, 0, 1, 1, 1, 2, 2]
        assert meetings == 2
        assert (figures["waiting_seconds"], figures["transfer_seconds"]) == (2.0, 2.0)


def test_one_rank_scales_its_gradients_and_sends_nothing() -> None:
    def body(world: ThreadWorld) -> tuple[list[float], Any, int]:
        model = Two()
        strategy = attach(world, GradientAllReduce(), model)
        found = update(strategy, model, 4.0, 2.0, 0.5)
        return found, strategy.stats()["messages"], len(strategy._buffers)

    assert run_ranks(1, body) == [([-2.0, -1.0], 0.0, 0)]


def test_weights_are_averaged_with_equal_weights_after_each_ranks_own_step() -> None:
    def body(world: ThreadWorld) -> tuple[list[float], float, float]:
        model = Two()
        strategy = attach(world, WeightAllReduce(), model)
        assert not strategy.traits.gradients_agree
        found = update(strategy, model, 2.0 + 4.0 * world.rank, 1.0)
        return found, strategy.stats()["messages"], strategy.stats()["bytes"]

    assert run_ranks(2, body) == [([-4.0, -1.0], 1.0, 20.0)] * 2

    def alone(world: ThreadWorld) -> tuple[list[float], float]:
        model = Two()
        strategy = attach(world, WeightAllReduce(), model)
        return update(strategy, model, 2.0, 1.0), strategy.stats()["messages"]

    assert run_ranks(1, alone) == [([-2.0, -1.0], 0.0)]
