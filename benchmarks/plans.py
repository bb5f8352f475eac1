"""Fusion plans under delays against the model that makes them: BSP, WFBP, fusion, MG-WFBP and the optimal plan.

    .venv/bin/python benchmarks/plans.py [--ranks 2] [--rounds 15] [--delay ALPHA,BETA ...]

Real ranks, real gloo, mlbench's own reducer with the transport that takes ALPHA seconds per message and BETA per byte
longer. Layers have the sizes of ResNet-20's tensors and wait for a fixed time instead of computing, so that what else
the machine does changes little. Methods take turns. Predicted: the step without communication (`noop`, in the same
round), and what the last message exposes after the backward pass: messages of the plan that the reducer has made, one
after the other, each as long as the line fitted through all-reduces of two sizes says, and once what a burst of
messages takes whatever its length, until the last rank is done; both measured in every round.
Wanted: each within 15 %, and the order that the model gives. Two delays by default: one in which the start of messages
is dear, and one in which their bytes are.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import _ranks
import torch
from methods import find_median_interval, interleave
from torch import Tensor, nn

from task_images.comm import plans
from task_images.comm.base import Strategy
from task_images.comm.choose import make_strategy
from task_images.comm.link import Link, measure_burst, open_link
from task_images.comm.plans import Cost
from task_images.comm.presets import resolve
from task_images.comm.reducer import Reducer
from task_images.contract import Contract
from task_images.harness.distributed import World, open_world
from task_images.harness.models.resnet import resnet

DELAYS = ("0.005,2e-9", "0.0003,6e-8")
PLANS = {"bsp": None, "wfbp": None, "fusion": "threshold:256KiB", "mgwfbp": None, "optfusion": None}
LAYER_SECONDS = 0.001
SIZES = [parameter.numel() for parameter in resnet(20).parameters()]
BACKWARD_SECONDS = LAYER_SECONDS * len(SIZES)
COST_SIZES = (1024, 262_144)  # numbers of 4 bytes
COUNTS = (2, 22)  # messages of a short and of a long burst
WARM_UP = 5  # the plans of mgwfbp and optfusion are made in the first updates
WANTED = 0.15
CLEAR = 0.1  # predictions that differ by more have an order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--delay", action="append", default=[])
    options = parser.parse_args()
    if not _ranks.is_rank():
        sys.exit(_ranks.start(__file__, options.ranks, arguments=sys.argv[1:]))
    world = open_world(Contract())
    for delay in options.delay or DELAYS:
        measure(world, options.rounds, delay)
    world.close()


class Wait(torch.autograd.Function):
    """A layer whose backward pass ends at a fixed time after that of the loss."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor, layers: "WaitingLayers", number: int) -> Tensor:
        context.layers, context.number, context.like = layers, number, weight
        return inputs.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        layers: WaitingLayers = context.layers
        left = layers.began + (len(SIZES) - context.number) * LAYER_SECONDS - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return gradients[0], torch.ones_like(context.like), None, None


class WaitingLayers(nn.Module):
    """Parameters of ResNet-20's sizes. `began`: when the backward pass did, set by whoever starts it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(size) for size in SIZES])
        self.began = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        for number, weight in enumerate(self.weights):
            inputs = Wait.apply(inputs, weight, self, number)
        return inputs


def measure(world: World, rounds: int, delay: str) -> None:
    reducers = {name: make_reducer(name, delay) for name in PLANS}
    strategies: dict[str, Strategy] = {"noop": make_strategy(resolve("noop")), **reducers}
    steps = {name: make_step(world, strategy) for name, strategy in strategies.items()}
    link = open_link(world, delay)
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    costs: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        costs.append(measure_line(link))
        for name, found in interleave(world, steps, 2).items():
            times[name].append(statistics.mean(found))
    alpha, beta, once = (statistics.median(values) for values in zip(*costs, strict=True))
    if world.is_first:
        print(
            f"{world.size} ranks, delay {delay} (a message takes {1e3 * alpha:.2f} ms + {1e9 * beta:.1f} ns/B, a burst"
            f" {1e3 * once:.2f} ms more), backward pass {1e3 * BACKWARD_SECONDS:.0f} ms, {rounds} rounds,"
            f" load {os.getloadavg()[0]:.0f}"
        )
        report(times, {name: predict_exposed(reducer, Cost(alpha, beta), once) for name, reducer in reducers.items()})
    for strategy in strategies.values():
        with strategy.consensus():
            pass
        strategy.close()


def measure_line(link: Link) -> tuple[float, float, float]:
    """Seconds of a message, seconds per byte of it, and seconds that a burst of messages takes once. Collective."""
    short, long = COUNTS
    bursts = [(size, measure_burst(link, size, short), measure_burst(link, size, long)) for size in COST_SIZES]
    cost = plans.fit([(4 * size, (late - early) / (long - short)) for size, early, late in bursts])
    once = [early - short * cost.time(4 * size) for size, early, _ in bursts]
    return cost.alpha, cost.beta, max(0.0, statistics.mean(once))


def report(times: Mapping[str, list[float]], exposed: Mapping[str, tuple[float, int]]) -> None:
    silent = statistics.median(times["noop"])
    predicted = {name: silent + seconds for name, (seconds, _) in exposed.items()}
    measured = {name: statistics.median(times[name]) for name in exposed}
    for name, (seconds, messages) in exposed.items():
        ratios = sorted(one / (other + seconds) for one, other in zip(times[name], times["noop"], strict=True))
        low, high = find_median_interval(ratios)
        middle = statistics.median(ratios)
        print(
            f"{name:<10} predicted {1e3 * predicted[name]:7.1f} ms   measured {1e3 * measured[name]:7.1f} ms"
            f"   ratio {middle:.3f} ({low:.3f} to {high:.3f}){'' if abs(middle - 1) <= WANTED else '  NOT within 15 %'}"
            f"   {messages} messages",
            flush=True,
        )
    wrong = [
        f"{one} before {other}"
        for one, other in itertools.permutations(predicted, 2)
        if predicted[one] * (1 + CLEAR) < predicted[other] and measured[one] >= measured[other]
    ]
    print(f"order of the model: {'kept' if not wrong else 'NOT kept: ' + ', '.join(wrong)}", flush=True)


def make_reducer(name: str, delay: str) -> Reducer:
    plan = PLANS[name]
    strategy = make_strategy(resolve(name, {"delay": delay, **({"plan": plan} if plan else {})}))
    assert isinstance(strategy, Reducer)
    return strategy


def predict_exposed(reducer: Reducer, cost: Cost, once: float) -> tuple[float, int]:
    """Seconds after the backward pass until the last message of the reducer's own plan is over, and their number."""
    order = {name: place for place, name in enumerate(reversed([f"weights.{number}" for number in range(len(SIZES))]))}
    end = 0.0
    for group in reducer._groups:
        ready = LAYER_SECONDS * (1 + max(order[slot.name] for slot in group.slots))
        if reducer.method.order == "deferred":
            ready = BACKWARD_SECONDS
        end = max(end, ready) + cost.time(group.flat.numel() * group.flat.element_size())
    return end + once - BACKWARD_SECONDS, len(reducer._groups)


def make_step(world: World, strategy: Strategy) -> Callable[[], None]:
    """One update with a strategy of its own layers."""
    layers = WaitingLayers()
    module = strategy.attach(world, layers, lambda net: torch.optim.SGD(net.parameters(), 0.1, fused=True))

    def step() -> None:
        strategy.begin(1.0, float(world.size))
        with strategy.last_pass():
            loss = module(torch.zeros(1, requires_grad=True)).sum()
            layers.began = time.perf_counter()
            loss.backward()
        strategy.step(0.1)

    return step


if __name__ == "__main__":
    main()
