"""The update that all strategies share, with one rank."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from task_images.comm.allreduce import GradientAllReduce
from task_images.contract import Contract
from task_images.harness.distributed import open_world


def attach(**changes: bool) -> tuple[GradientAllReduce, nn.Linear]:
    strategy, model = GradientAllReduce(), nn.Linear(3, 2)
    strategy.attach(open_world(Contract({})), model, lambda it: torch.optim.SGD(it.parameters(), 0.1))
    for name, value in changes.items():
        setattr(strategy, name, value)
    return strategy, model


def update(strategy: GradientAllReduce, model: nn.Linear, clip: float | None) -> None:
    strategy.begin(1.0, 1.0)
    with strategy.last_pass():
        model(torch.ones(4, 3)).square().sum().backward()
    strategy.step(0.1, clip)


def test_a_single_rank_drops_its_gradients() -> None:
    strategy, model = attach()
    update(strategy, model, None)
    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_gradients_that_cuda_graphs_write_to_stay_where_they_are() -> None:
    strategy, model = attach(keeps_gradients=True)
    update(strategy, model, None)
    first = model.weight.grad
    assert first is not None
    assert not first.any()
    update(strategy, model, None)
    assert model.weight.grad is first


def test_an_infinite_limit_measures_the_norm_and_scales_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    real = nn.utils.clip_grads_with_norm_

    def count(parameters: Any, limit: float, norm: torch.Tensor) -> None:
        calls.append(limit)
        real(parameters, limit, norm)

    monkeypatch.setattr(nn.utils, "clip_grads_with_norm_", count)
    strategy, model = attach()
    update(strategy, model, math.inf)
    assert calls == []
    update(strategy, model, 1.0)
    assert calls == [1.0]
