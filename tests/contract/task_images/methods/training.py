"""What the checks of methods train: small networks with what is hard for a reducer, and the mean by hand."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from task_images.checkpoint import load_model
from task_images.methods.base import Method
from task_images.world import World

MakeNet = Callable[[], nn.Module]


class Net(nn.Module):
    """A tied parameter, one that is never used, one that is used outside its module, and several data flows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 16)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(16, 12)
        self.head.weight = nn.Parameter(torch.randn(12, 16))
        self.table = nn.Embedding(5, 16)
        self.tied = nn.Linear(16, 5, bias=False)
        self.tied.weight = self.table.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.relu(self.norm(self.first(inputs))))
        out: torch.Tensor = self.head(hidden).tanh().mean() + self.tied(hidden + self.table.weight[1]).square().mean()
        return out


class PlainNet(nn.Module):
    """Every parameter is used once: what torch's own engines take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 17), nn.ReLU(), nn.Linear(17, 9), nn.LayerNorm(9), nn.Linear(9, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(inputs).square().mean()
        return out


class DictNet(PlainNet):
    """The same, with its output in a dictionary, as the models of transformers have it."""

    def forward(self, inputs: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
        return {"loss": super().forward(inputs), "cache": None}


class MixedNet(nn.Module):
    """Parameters of three types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.second = nn.Linear(24, 20).to(torch.bfloat16)
        self.third = nn.Linear(20, 16).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs)).to(torch.bfloat16)
        out: torch.Tensor = self.third(self.second(hidden).double()).square().mean()
        return out


def train(
    world: World,
    method: Method,
    updates: int = 7,
    passes: int = 1,
    *,
    make_net: MakeNet = Net,
    uneven: bool = False,
    clip: float | None = None,
    start: int = 0,
    state: Path | None = None,
    own: Mapping[str, Any] | None = None,
    consensus_after: int | None = None,
) -> tuple[nn.Module, Method]:
    """Updates of a network on batches that differ by update, pass and rank. `uneven`: so do the ranks' weights.

    start, state       go on after so many updates from the checkpoint `state`, and from what `own_state` gave
    consensus_after    also reach consensus after this update, as a validation would
    """
    torch.manual_seed(3)
    model = make_net()
    module = method.attach(
        world, model, lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)
    )
    if state is not None:
        load_model(state, method)
        method.update = start
        if own is not None:
            method.load_own_state(own)
    weight, total = (world.rank + 1.0, sum(range(1, world.size + 1))) if uneven else (1.0, float(world.size))
    for update in range(start, start + updates):
        method.begin(weight, total * passes, passes)
        for number in range(passes):
            torch.manual_seed(1000 * update + 10 * number + world.rank)
            inputs = torch.randn(4, 12)
            if number and number == passes - 1:
                method.begin_last_pass()
            outputs = module(inputs)
            (outputs["loss"] if isinstance(outputs, dict) else outputs).backward()
        method.step(0.01, clip)
        if update == consensus_after:
            with method.consensus():
                pass
    with method.consensus():
        pass
    return model, method


class MeanByHand(Method):
    """The plain weighted mean, one collective per tensor: what every dense method must equal."""

    name = "mean-by-hand"

    def reduce(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.mul_(self.share)
            self.world.all_reduce(parameter.grad)


def compare(world: World, model: nn.Module, expected: nn.Module, name: str) -> None:
    """Raises AssertionError unless the parameters are equal: bit by bit on two ranks, whose sums have one order."""
    for (key, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        if world.size == 2:
            assert torch.equal(one, other), (name, key, float((one - other).detach().abs().max()))
        else:
            loose = one.dtype == torch.bfloat16
            torch.testing.assert_close(
                one, other, rtol=0.02 if loose else 1e-4, atol=0.01 if loose else 1e-5, msg=f"{name} {key}"
            )
