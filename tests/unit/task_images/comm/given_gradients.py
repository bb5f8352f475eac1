"""A model whose gradients a test gives, and its updates."""

from typing import Any

import torch
from torch import Tensor, nn


class Numbers(nn.Module):
    """So many numbers, ones at first, with the gradient that `forward` is given."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count))

    def forward(self, gradient: float) -> Tensor:
        return gradient * self.weight.sum()


def update(strategy: Any, model: Numbers, gradient: float, rate: float = 1.0) -> float:
    """One update; returns the first number after it."""
    strategy.begin(1.0, float(strategy.world.size))
    with strategy.last_pass():
        model(gradient).backward()
    strategy.step(rate)
    return model.weight[0].item()
