"""Corpus-level metrics against a brute-force count, and independent of how the data are cut."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from task_images.contract import Contract
from task_images.metrics import F1, Dice, Mean, Metric, Perplexity, TopK, TrainingLoss, collect
from task_images.world import World


@pytest.fixture
def world() -> World:
    return World(Contract({}), torch.device("cpu"), 1, grouped=False)


def compute(metric: Metric, outputs: torch.Tensor, targets: torch.Tensor, cuts: list[int]) -> float:
    for start, stop in zip([0, *cuts], [*cuts, len(targets)], strict=True):
        if stop > start:
            metric.update(outputs[start:stop], targets[start:stop])
    return metric.value(metric.take())


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 60), k=st.integers(1, 5), cut=st.integers(0, 60))
def test_prec_at_k(seed: int, count: int, k: int, cut: int) -> None:
    generator = np.random.default_rng(seed)
    outputs, targets = generator.normal(size=(count, 5)), generator.integers(0, 5, count)
    hits = sum(target in np.argsort(-row)[:k] for row, target in zip(outputs, targets, strict=True))

    value = compute(TopK(k), torch.tensor(outputs), torch.tensor(targets), [min(cut, count)])

    assert value == pytest.approx(100 * hits / count)


def test_one_column_is_the_probability_of_class_one() -> None:
    outputs, targets = torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert compute(TopK(1), outputs, targets, []) == 50.0
    assert compute(TopK(2), outputs[:, None], targets, []) == 100.0
    with pytest.raises(ValueError, match="Prec@3"):
        TopK(3).update(outputs, targets)


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 80), cut=st.integers(0, 80))
def test_f1_and_dice(seed: int, count: int, cut: int) -> None:
    generator = np.random.default_rng(seed)
    p, y = generator.random(count), generator.integers(0, 2, count)
    hits = sum(1 for a, b in zip(p, y, strict=True) if a >= 0.5 and b)
    wrong = sum(1 for a, b in zip(p, y, strict=True) if (a >= 0.5) != b)
    outputs, targets, cuts = torch.tensor(p), torch.tensor(y), [min(cut, count)]

    expected = 2 * hits / (2 * hits + wrong) if hits + wrong else 0.0
    assert compute(F1(), outputs, targets, cuts) == pytest.approx(expected, abs=1e-6)
    assert compute(Dice(), outputs, targets, cuts) == pytest.approx((2 * p @ y + 1e-4) / (p.sum() + y.sum() + 1e-4))


def test_perplexity_is_of_the_global_mean_and_not_a_mean_of_perplexities() -> None:
    perplexity = Perplexity()
    perplexity.add_mean(torch.tensor(2.0), 30)
    perplexity.add_mean(6.0, 10)
    assert perplexity.value(perplexity.take()) == pytest.approx(math.exp(3.0))
    assert perplexity.value([1e6, 1.0]) == math.inf
    assert math.isnan(perplexity.value([math.nan, 1.0]))


def test_collect_takes_all_sums_in_one_go_and_begins_anew(world: World) -> None:
    loss, top = Mean("loss"), TopK(1)
    loss.add_mean(2.0, 3)
    top.update(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    assert collect(world, [loss, top]) == {"loss": 2.0, "Prec@1": 100.0}
    assert math.isnan(collect(world, [loss])["loss"])


def test_losses_before_a_checkpoint_count_in_both_means_after_it(world: World) -> None:
    before, after = TrainingLoss(), TrainingLoss()
    before.add(4.0, 10, 1)
    assert before.collect_recent(world, 1) == 4.0  # reported already, but part of the whole epoch
    before.add(2.0, 10, 2)
    after.load_state_dict(before.state_dict())
    after.add(6.0, 20, 3)
    assert after.collect_recent(world, 1) == pytest.approx((2.0 * 10 + 6.0 * 20) / 30)
    assert after.collect_whole(world) == pytest.approx((4.0 * 10 + 2.0 * 10 + 6.0 * 20) / 40)


def test_small_losses_are_not_lost_in_a_large_sum(world: World) -> None:
    mean = Mean("loss")
    mean.add_mean(torch.tensor(1e8, dtype=torch.float32), 1)
    for _ in range(1000):
        mean.add_mean(torch.tensor(1.0, dtype=torch.float32), 1)
    assert collect(world, [mean])["loss"] == pytest.approx((1e8 + 1000) / 1001, rel=1e-12)
