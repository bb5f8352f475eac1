"""The gradient noise scale against numpy: norms from gradients of single samples, and a known population."""

import math
import time
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from task_images.comm.base import Strategy
from task_images.comm.choose import make_strategy
from task_images.comm.presets import PRESETS, resolve
from task_images.harness import noise_scale
from task_images.harness.noise_scale import (
    FIRST_LOOK,
    MAX_EVERY,
    NoiseScale,
    NoiseScaleDocument,
    Norms,
    averages_exactly,
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


def test_the_estimate_is_the_papers_formula() -> None:
    """|G|^2 = 2 and tr(S) = 48: expected squared norms are 2 + 48/8 and 2 + 48/16 (McCandlish et al., appendix A.1)."""
    assert estimate([Norms(1, 8.0, 5.0)], 8, 16) == pytest.approx((2.0, 48.0, 24.0))
    assert estimate([Norms(1, 6.0, 4.0), Norms(2, 10.0, 6.0)], 8, 16) == pytest.approx((2.0, 48.0, 24.0))


@pytest.mark.parametrize(
    ("small", "big", "ratio"),
    [(5.0, 5.0, 0.0), (5.0, 5.1, None), (6.0, 3.0, None), (6.0, 3.1, 46.4 / 0.2)],
    ids=["no noise", "negative noise", "no gradient", "little gradient"],
)
def test_a_ratio_needs_a_gradient_and_noise_that_is_not_negative(small: float, big: float, ratio: float | None) -> None:
    found = estimate([Norms(1, small, big)], 8, 16)[2]
    assert found == (None if ratio is None else pytest.approx(ratio))


def test_percentiles_come_from_12_blocks_or_more() -> None:
    same = [Norms(number, 8.0, 5.0) for number in range(12)]
    assert bootstrap(same[:-1], 8, 16) is None
    assert bootstrap(same, 8, 16) == pytest.approx((24.0, 24.0))


def test_percentiles_are_those_of_resampled_blocks_in_numpy() -> None:
    source = numpy.random.default_rng(3)
    norms = [Norms(number, *pair) for number, pair in enumerate(source.uniform((7.5, 4.8), (8.5, 5.2), (50, 2)))]
    blocks = numpy.array([(norm.small, norm.big) for norm in norms[:48]]).reshape(12, 4, 2).mean(1)  # 2 are left over
    small, big = blocks[source.integers(0, 12, (20_000, 12))].mean(1).T
    ratios = (small - big) / (1 / 8 - 1 / 16) / ((16 * big - 8 * small) / 8)
    assert bootstrap(norms, 8, 16) == pytest.approx(numpy.quantile(ratios, [0.1, 0.9]), rel=0.03)


def test_only_methods_with_the_plain_mean_compare_ranks() -> None:
    """Others compress, exchange weights, or change weights before all gradients have arrived."""
    found = {name for name in PRESETS if averages_exactly(make_strategy(resolve(name), 0))}
    servers = {"bsp-ps", "wfbp-ps"}
    assert found - servers == {
        *("single", "bsp", "wfbp", "fusion", "mgwfbp", "optfusion", "ddp", "ddp-static", "fp16", "bf16")
    }
    assert servers < found


# --- the cost, by a clock that only the test moves ------------------------------------------------------------------


class Clock:
    """Seconds of the wall and of the CPUs."""

    wall = cpu = 100.0

    def perf_counter(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.cpu

    thread_time = process_time


class Costly:
    """One rank whose updates have two passes of a second each; norms take `cost` seconds of the wall and `own` of the
    CPUs per update."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, cost: float = 0.0, own: float = 0.0, dtype: Any = torch.float64
    ):
        self.clock, self.cost, self.own = Clock(), cost, own
        monkeypatch.setattr(noise_scale, "time", self.clock)
        self.model = nn.Linear(WIDTH, 1, bias=False, dtype=dtype)
        nn.init.zeros_(self.model.weight)
        world: Any = SimpleNamespace(size=1, rank=0)
        self.noise = NoiseScale(world, self.model, make_strategy(resolve("bsp"), 0))
        charge = self.noise._charge

        def pay(begun: tuple[float, float]) -> None:
            self.clock.wall, self.clock.cpu = begun[0] + self.cost / 4, begun[1] + self.own / 4  # 2 passes, 2 sections
            charge(begun)

        self.noise._charge = pay  # type: ignore[method-assign]

    def update(self, batch: int = BATCH, passes: int = 2, scale: float = 1.0, factor: float = 1.0) -> None:
        self.noise.begin(Update([], passes, 2.0 * batch, 2.0 * batch, batch * passes), scale)
        self.model.weight.grad = None
        for index in range(passes):
            self.clock.wall, self.clock.cpu = self.clock.wall + 1.0, self.clock.cpu + 1.0
            self.noise.begin_pass()
            rows = torch.from_numpy(INPUTS[index * BATCH : (index + 1) * BATCH]).to(self.model.weight.dtype)
            (factor * scale * self.model(rows)).mean().div(passes).backward()
            self.noise.end_pass()
        self.noise.end()


def test_nothing_is_charged_before_the_first_norm_and_all_norms_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.04 s per measured update and 2 s for others, since the second update: norms take 0.16 of 12.16 s."""
    trained = Costly(monkeypatch, cost=0.04, own=0.04)
    for _ in range(2 + 4):
        trained.update()
    found = trained.noise.to_dict()
    assert found is not None
    assert found["share_of_time"] == pytest.approx(4 * 0.04 / (2.0 + 4 * 2.04))


@pytest.mark.parametrize(
    ("cost", "own", "every"),
    [(0.0, 0.0, 1), (0.01, 0.01, 1), (0.1, 0.0, 5), (0.0, 0.1, 5), (0.1, 0.3, 14)],
    ids=["nothing", "less than the share", "the wall", "the CPUs", "the larger of both"],
)
def test_norms_are_computed_so_rarely_that_they_take_their_share(
    monkeypatch: pytest.MonkeyPatch, cost: float, own: float, every: int
) -> None:
    """0.8 % of the time: e.g. every 5th update if norms take 0.4 of 10.4 s, after four of four updates."""
    trained = Costly(monkeypatch, cost, own)
    for _ in range(2 + FIRST_LOOK):
        trained.update()
    longest = max(cost / (2 + 4 * (2 + cost)), own / (2 + 4 * (2 + own))) * 4
    assert trained.noise._every == every == max(1, math.ceil(longest / 0.008))


def test_norms_never_become_more_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Costly(monkeypatch, cost=0.1)
    for _ in range(2 + FIRST_LOOK):
        trained.update()
    trained.cost = 0.0
    for _ in range(100):
        trained.update()
    trained.noise.collect()
    assert trained.noise._every == 5
    assert len(trained.noise._norms) == FIRST_LOOK + 20  # every fifth


def test_the_first_two_updates_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Costly(monkeypatch)
    for _ in range(4):
        trained.update()
    trained.noise.collect()
    assert [norm.update for norm in trained.noise._norms] == [3, 4]


def test_updates_of_another_size_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of an epoch, for example: its norms belong to other batch sizes."""
    trained = Costly(monkeypatch)
    for batch in (BATCH, BATCH, BATCH, BATCH - 1, BATCH):
        trained.update(batch)
    point = trained.noise.collect()
    assert [norm.update for norm in trained.noise._norms] == [3, 5]
    assert point is not None
    assert (point["update"], point["norms"]) == (5, 2)
    found = trained.noise.to_dict()
    assert found is not None
    assert (found["small_batch"], found["big_batch"], found["between"]) == (BATCH, 2 * BATCH, "passes")
    assert (found["low"], found["high"]) == (None, None)  # too few updates


def test_the_loss_scale_is_divided_out_and_an_overflow_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Costly(monkeypatch)
    for scale, factor in ((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1024.0, 1.0), (1.0, math.inf)):
        trained.update(scale=scale, factor=factor)
    point = trained.noise.collect()
    plain, scaled = trained.noise._norms
    assert (scaled.small, scaled.big) == pytest.approx((plain.small, plain.big))
    assert point is not None
    assert (point["norms"], point["update"]) == (2, 4)
    trained.update(factor=math.nan)
    assert trained.noise.collect() is None
    assert trained.noise.collect() is None


def test_norms_of_half_precision_gradients_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six gradients of 60,000, of which each fits fp16, up to 65,504, and their norm does not."""
    trained = Costly(monkeypatch, dtype=torch.float16)
    for _ in range(3):
        trained.noise.begin(Update([], 2, 16.0, 16.0, 16), 1.0)
        trained.model.weight.grad = None
        for _ in range(2):
            trained.clock.wall, trained.clock.cpu = trained.clock.wall + 1.0, trained.clock.cpu + 1.0
            trained.noise.begin_pass()
            (30_000 * trained.model.weight).sum().backward()  # type: ignore[no-untyped-call]
            trained.noise.end_pass()
    trained.noise.collect()
    [norm] = trained.noise._norms
    assert norm.small == norm.big == pytest.approx(6 * 60_000.0**2, rel=1e-3)


def test_sharded_and_frozen_parameters_have_no_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard's norm is a part of the gradient's."""
    world: Any = SimpleNamespace(size=1, rank=0)
    model = nn.Linear(WIDTH, 1)
    model.bias.requires_grad = False
    monkeypatch.setattr(nn.Parameter, "placements", (), raising=False)
    noise = NoiseScale(world, model, make_strategy(resolve("bsp"), 0))
    for _ in range(4):
        noise.begin(Update([], 2, 8.0, 8.0, 16), 1.0)
        assert not noise._is_measured
    assert (noise.collect(), noise.smoothed, noise.to_dict()) == (None, None, None)


def test_the_live_figure_is_that_of_the_last_100_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Costly(monkeypatch).noise
    noise._batches = (8.0, 16.0)
    assert noise.smoothed is None
    noise._norms = [Norms(number, 9.0, 5.0) for number in range(50)] + [Norms(50 + n, 8.0, 5.0) for n in range(100)]
    assert noise.smoothed == pytest.approx(24.0)
