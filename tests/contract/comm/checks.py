"""A program for test_methods.py: every preset on the ranks of one start, each printing OK when its checks hold."""

import sys
import traceback
from collections.abc import Callable

import torch
from torch import nn

from task_images.comm.base import Placement, Strategy
from task_images.comm.choose import make_strategy
from task_images.comm.methods import Method, MethodError, check, payload_bytes
from task_images.comm.presets import PRESETS, resolve
from task_images.comm.selfcheck import MethodWrongError, check_method
from task_images.contract import Contract
from task_images.harness.distributed import World, open_world
from task_images.harness.entry import run
from task_images.harness.replicas import check_identical

DENSE = (
    "single",
    "bsp",
    "wfbp",
    "fusion",
    "mgwfbp",
    "optfusion",
    "bytescheduler",
    "dear",
    "ddp",
    "ddp-static",
    "zero1",
)


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


def train(world: World, strategy: Strategy, updates: int = 7, passes: int = 1) -> tuple[Net, Strategy]:
    torch.manual_seed(3)
    model = Net()
    module = strategy.attach(
        Placement(world), model, lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)
    )
    for update in range(updates):
        strategy.begin(1.0, float(world.size * passes), passes)
        for number in range(passes):
            torch.manual_seed(1000 * update + 10 * number + world.rank)
            inputs = torch.randn(4, 12)
            if number < passes - 1:
                module(inputs).backward()
                continue
            with strategy.last_pass():
                module(inputs).backward()
        strategy.step(0.01)
    with strategy.consensus():
        pass
    return model, strategy


def every_preset_passes_the_self_check(world: World) -> None:
    for name in PRESETS:
        method = resolve(name)
        try:
            check(method, world.size)
        except MethodError:
            continue
        if not method.server_count:
            check_method(Placement(world), method)


def a_falsified_number_is_found(world: World) -> None:
    for name in ("fusion", "eftopk"):
        try:
            check_method(Placement(world), resolve(name), fault=True)
        except MethodWrongError:
            pass
        else:
            raise AssertionError(name)


def dense_methods_train_as_ddp(world: World) -> None:
    for passes in (1, 2):
        expected, _ = train(world, DdpAllReduceUnused(), passes=passes)
        for name in DENSE:
            if name.startswith("ddp") or name == "zero1":
                continue  # torch's own refuse parameters without gradients, or are the same thing
            model, strategy = train(world, make_strategy(resolve(name)), passes=passes)
            check_identical(world, model)
            compare(world, model, expected, name)
            strategy.close()


def compare(world: World, model: nn.Module, expected: nn.Module, name: str) -> None:
    for (key, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        if world.size == 2:  # two terms have one sum
            assert torch.equal(one, other), (name, key, float((one - other).detach().abs().max()))
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=f"{name} {key}")


class DdpAllReduceUnused(Strategy):
    """The plain mean by hand: what every dense method must equal."""

    def _reduce(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.mul_(self._weight / self._total)
            self.place.world.all_reduce(parameter.grad)


def full_density_and_full_rank_are_exact(world: World) -> None:
    expected, _ = train(world, DdpAllReduceUnused(), 4)
    for name, changes in (
        ("eftopk", {"codec": "topk:1"}),
        ("topk", {"codec": "topk:1"}),
        ("gtopk", {"codec": "topk:1"}),
        ("randomk", {"codec": "randomk:1"}),
        ("powersgd", {"codec": "powersgd:64"}),
    ):
        model, strategy = train(world, make_strategy(resolve(name, changes)), 4)
        for (key, one), other in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            torch.testing.assert_close(one, other[1], rtol=1e-3, atol=2e-5, msg=f"{name} {key}")
        strategy.close()


def bytes_are_those_of_the_formula(world: World) -> None:
    size = sum(parameter.numel() for parameter in Net().parameters())
    for name in ("bsp", "fp16", "bf16", "signsgd-mv", "ef-signsgd", "topk", "eftopk", "randomk", "qsgd"):
        method = resolve(name, {"plan": "all"})
        _, strategy = train(world, make_strategy(method), 3)
        assert strategy.stats()["bytes"] == 3 * payload_bytes(method, size), (name, strategy.stats())
        strategy.close()


def a_resumed_training_goes_on_as_if_it_had_not_stopped(world: World) -> None:
    for name in ("eftopk", "dgc", "powersgd", "qsgd", "bytescheduler", "localsgd", "dpsgd", "choco"):
        if name not in PRESETS:
            continue
        method = resolve(name)
        _, first = train_from(world, method, None, 4)
        state = first.state_dict()
        rest, strategy = train_from(world, method, state, 3, start=4)
        again, other = train_from(world, method, None, 7)
        with other.consensus(), strategy.consensus():
            for one, two in zip(rest.parameters(), again.parameters(), strict=True):
                assert torch.equal(one, two), (name, float((one - two).abs().max()))
        for each in (first, strategy, other):
            each.close()


def train_from(world: World, method: Method, state: object, updates: int, start: int = 0) -> tuple[Net, Strategy]:
    torch.manual_seed(3)
    model, strategy = Net(), make_strategy(method, seed=5)
    module = strategy.attach(Placement(world), model, lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    if state is not None:
        strategy.load_state_dict(state)  # type: ignore[arg-type]
    for update in range(start, start + updates):
        strategy.begin(1.0, float(world.size))
        torch.manual_seed(1000 * update + world.rank)
        with strategy.last_pass():
            module(torch.randn(4, 12)).backward()
        strategy.step(0.01)
        if update == 3:
            with strategy.consensus():
                pass
    with strategy.consensus():
        pass
    return model, strategy


CHECKS: list[Callable[[World], None]] = [
    every_preset_passes_the_self_check,
    a_falsified_number_is_found,
    dense_methods_train_as_ddp,
    full_density_and_full_rank_are_exact,
    bytes_are_those_of_the_formula,
    a_resumed_training_goes_on_as_if_it_had_not_stopped,
]


def main(contract: Contract) -> None:
    world = open_world(contract, rendezvous_seconds=60)
    for each in CHECKS:
        try:
            each(world)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        print("OK", each.__name__, flush=True)
    world.close()


if __name__ == "__main__":
    run(main)
