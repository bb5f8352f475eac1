"""The gradient noise scale against numpy: norms from gradients of single samples, and a known population."""

import time
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from task_images.comm.base import Strategy
from task_images.comm.choose import make_strategy
from task_images.comm.presets import resolve
from task_images.harness.noise_scale import (
    FIRST_LOOK,
    MAX_EVERY,
    NoiseScale,
    NoiseScaleDocument,
    Norms,
    bootstrap,
    estimate,
)
from task_images.harness.updates import Update
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks

UPDATES, BATCH, WIDTH = 150, 8, 6
SOURCE = numpy.random.default_rng(7)
INPUTS = SOURCE.normal(size=(64, WIDTH))
TARGETS = INPUTS @ SOURCE.normal(size=WIDTH) + 0.5 * SOURCE.normal(size=64)
# Gradients of 0.5 (w x - y)^2 for each sample at w = 0, which the model keeps: its learning rate is 0.
GRADIENTS = -TARGETS[:, None] * INPUTS
TRACE = float(((GRADIENTS - GRADIENTS.mean(0)) ** 2).sum(1).mean())
SQUARED = float((GRADIENTS.mean(0) ** 2).sum())


def draw(update: int, ranks: int, passes: int) -> numpy.ndarray:
    """Numbers of the samples by rank and pass, drawn with replacement."""
    return numpy.random.default_rng(update).integers(0, 64, size=(ranks, passes, BATCH))


def train(world: Any, name: str, passes: int, scale: float = 1.0, updates: int = UPDATES) -> NoiseScaleDocument | None:
    """Take the norms of a linear model on batches of the population."""
    model = nn.Linear(WIDTH, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    strategy: Strategy = make_strategy(resolve(name), 0)
    noise = NoiseScale(world, model, strategy)
    noise._every = 1
    noise.collect = lambda: None  # type: ignore[method-assign]  # so that every update counts
    strategy.attach(world, model, lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
    for number in range(updates):
        samples = draw(number, world.size, passes)
        update: Update[Any] = Update([], passes, BATCH, BATCH * world.size * passes, BATCH * world.size * passes)
        noise.begin(update, scale)
        strategy.begin(update.weight, update.total, passes)
        strategy._divisor = scale
        for index in range(passes):
            chosen = samples[world.rank, index]
            noise.begin_pass()
            is_last = index == passes - 1
            with strategy.last_pass() if is_last else torch.enable_grad():
                outputs = model(torch.from_numpy(INPUTS[chosen])).squeeze(1)
                loss = 0.5 * ((outputs - torch.from_numpy(TARGETS[chosen])) ** 2).mean()
                (scale * loss).backward()
            noise.end_pass()
        strategy.step(0.0)
        noise.end()
    del noise.collect
    noise.collect()
    strategy.close()
    return noise.to_dict()


def norms_of(ranks: int, passes: int) -> tuple[list[Norms], float, float]:
    """The same norms in numpy, from the gradients of single samples."""
    found = []
    for number in range(2, UPDATES):
        means = GRADIENTS[draw(number, ranks, passes)].mean(2)  # rank, pass, weight
        if ranks > 1:
            small = (means.mean(1) ** 2).sum(1).mean()
            big = (means.mean((0, 1)) ** 2).sum()
        else:
            small, big = (means[0, 0] ** 2).sum(), (means[0].mean(0) ** 2).sum()
        found.append(Norms(number + 1, float(small), float(big)))
    return found, float(BATCH * (passes if ranks > 1 else 1)), float(BATCH * ranks * passes)


@pytest.mark.parametrize(
    ("name", "ranks", "passes", "scale"),
    [("bsp", 2, 1, 1.0), ("wfbp", 3, 1, 1.0), ("wfbp", 2, 2, 1.0), ("bsp", 1, 4, 1.0), ("bsp", 2, 1, 1024.0)],
)
def test_norms_and_scale_are_those_of_numpy(name: str, ranks: int, passes: int, scale: float) -> None:
    measured = run_ranks(ranks, lambda world: train(world, name, passes, scale))
    norms, small, big = norms_of(ranks, passes)
    at_small, at_big = numpy.mean([row.small for row in norms]), numpy.mean([row.big for row in norms])
    squared = (big * at_big - small * at_small) / (big - small)
    trace = (at_small - at_big) / (1 / small - 1 / big)
    for found in measured:
        assert found is not None
        assert (found["small_batch"], found["big_batch"], found["updates"]) == (small, big, UPDATES - 2)
        assert found["samples"] == pytest.approx(trace / squared, rel=1e-4)
        assert found["points"][0]["trace"] == pytest.approx(trace, rel=1e-4)
        # And both are the population's, within what some hundred draws tell.
        assert found["samples"] == pytest.approx(TRACE / SQUARED, rel=0.4)
        assert (found["low"] or 0.0) < (found["samples"] or 0.0) < (found["high"] or 0.0)


@pytest.mark.parametrize("name", ["eftopk", "localsgd", "dpsgd", "signsgd-mv"])
def test_gradients_that_are_no_mean_tell_nothing_across_ranks(name: str) -> None:
    assert run_ranks(2, lambda world: train(world, name, 1, updates=6)) == [None, None]


def test_one_rank_with_one_pass_tells_nothing() -> None:
    assert run_ranks(1, lambda world: train(world, "bsp", 1, updates=6)) == [None]


def test_a_gradient_lost_in_noise_has_no_scale() -> None:
    norms = [Norms(number, 1.0, 0.4 + 0.1 * (number % 2)) for number in range(24)]  # trace 2 x batch, |G|^2 below 0
    squared, trace, ratio = estimate(norms, 8, 16)
    assert (squared < 0, trace > 0, ratio) == (True, True, None)
    assert bootstrap(norms, 8, 16) is None


def test_ranks_agree_on_taking_norms_rarely_where_one_of_them_pays_much_for_them() -> None:
    def measure(world: ThreadWorld) -> tuple[int, int]:
        model = nn.Linear(WIDTH, 1, bias=False).double()
        strategy = make_strategy(resolve("bsp"), 0)
        noise = NoiseScale(world, model, strategy)
        strategy.attach(world, model, lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
        for number in range(60):
            chosen = draw(number, world.size, 1)[world.rank, 0]
            noise.begin(Update([], 1, BATCH, 2 * BATCH, 2 * BATCH), 1.0)
            strategy.begin(BATCH, 2 * BATCH)
            noise.begin_pass()
            noise._spent += 10.0 * (world.rank == 0)  # seconds
            model(torch.from_numpy(INPUTS[chosen])).sum().backward()
            noise.end_pass()
            strategy.step(0.0)
            noise.end()
        noise.collect()
        found = noise.to_dict()
        assert found is not None
        return found["updates"], noise._every

    taken = run_ranks(2, measure)
    assert taken[0] == taken[1]
    assert taken[0][0] == FIRST_LOOK
    assert taken[0][1] == MAX_EVERY


def test_updates_that_wait_for_other_programs_make_norms_no_cheaper() -> None:
    def measure(world: ThreadWorld) -> int:
        model = nn.Linear(WIDTH, 1, bias=False).double()
        strategy = make_strategy(resolve("bsp"), 0)
        noise = NoiseScale(world, model, strategy)
        strategy.attach(world, model, lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
        for _ in range(FIRST_LOOK + 4):
            time.sleep(0.1)
            noise.begin(Update([], 1, BATCH, 2 * BATCH, 2 * BATCH), 1.0)
            strategy.begin(BATCH, 2 * BATCH)
            noise.begin_pass()
            model(torch.from_numpy(INPUTS[:BATCH])).sum().backward()
            noise.end_pass()
            strategy.step(0.0)
            noise.end()
        return noise._every

    assert min(run_ranks(2, measure)) > 1


# --- the estimate ---------------------------------------------------------------------------------------------------


# --- the cost, by a clock that only the test moves ------------------------------------------------------------------
