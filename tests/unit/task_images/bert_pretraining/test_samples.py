"""BERT's samples against a generator in plain Python, at their bounds, and texts out of the published archives."""

from typing import Any

import numpy as np
import pytest

from task_images.bert_pretraining.data import (
    Samples,
    Specials,
    validation_batches,
)
from task_images.language.tokens import Corpus, Part

SPECIALS = Specials(padding=0, begin=1, end=2, mask=3, low=10, high=1000)
ROW = np.arange(10, 1000, dtype=np.uint32)
CORPUS = Corpus(ROW, ROW[:200], 1000, "numbers")


def make_samples(length: int = 43, seed: int = 1, split: str = "train") -> Samples:
    return Samples(CORPUS, split, length, SPECIALS, seed)


@pytest.mark.parametrize(("length", "count", "asked"), [(43, 24, 6), (498, 2, 75), (13, 99, 2), (10, 141, 2)])
def test_a_text_has_as_many_samples_as_fit_and_15_percent_are_asked_for(length: int, count: int, asked: int) -> None:
    samples = make_samples(length)
    assert (samples.count, samples.asked, samples.length) == (count, asked, length)


def test_a_tenth_of_the_samples_is_shorter_but_never_too_short() -> None:
    samples = make_samples()
    epochs, numbers = (grid.ravel() for grid in np.meshgrid(np.arange(400), np.arange(24)))
    sizes = samples.sizes(epochs, numbers)
    assert set(sizes.tolist()) <= set(range(20, 41))  # half of 40 tokens of text at least
    assert (sizes < 40).mean() == pytest.approx(0.1 * 20 / 21, abs=0.01)
    assert sizes.min() == 20
    assert np.bincount(sizes)[20:40].min() > 25  # all lengths are about equally likely: 46 of each
    short = make_samples(13)  # two positions are asked for, so four tokens of text would do; half of ten are more
    assert short.sizes(epochs, numbers % short.count).min() == 5


def test_shown_tokens_are_masks_random_ones_or_the_same_and_specials_are_never_asked_for() -> None:
    samples = make_samples()
    epochs, numbers = (grid.ravel() for grid in np.meshgrid(np.arange(100), np.arange(24)))
    found = samples.make(epochs, numbers)
    shown = np.take_along_axis(found["tokens"], found["positions"], axis=1)
    labels = found["labels"]
    assert labels.min() >= 10
    kinds = (shown == SPECIALS.mask).mean(), (shown == labels).mean()
    assert kinds == pytest.approx((0.8, 0.1), abs=0.01)
    others = shown[(shown != SPECIALS.mask) & (shown != labels)]
    assert others.min() >= 10
    assert others.max() < 1000
    assert others.max() - others.min() > 970
    assert (np.diff(found["positions"], axis=1) > 0).all()


@pytest.mark.parametrize(("most", "micro", "ranks"), [(10, 3, 2), (24, 8, 3), (100, 5, 1), (1, 4, 2)])
def test_validation_has_the_first_samples_of_epoch_0_once(most: int, micro: int, ranks: int) -> None:
    samples = make_samples()
    count = min(most, 24)
    wanted = samples.make(np.zeros(count, np.int64), np.arange(count))["tokens"]
    rows: dict[int, Any] = {}
    passes = set()
    for rank in range(ranks):
        batches = list(validation_batches(samples, most, Part(micro, rank, ranks)))
        passes.add(len(batches))
        for number, batch in enumerate(batches):
            assert batch.terms == float(batch.weights.sum())
            for place, (row, weight) in enumerate(zip(batch.tokens, batch.weights, strict=True)):
                at = (number * ranks + rank) * micro + place
                assert bool(weight) is (at < count)
                rows[at] = row.tolist()
    assert passes == {-(-count // (micro * ranks))}
    assert [rows[at] for at in range(count)] == wanted.tolist()
