"""Accumulation tables, loss scale, which sentences go into which pass."""

import numpy as np
import pytest

from task_images.contract import DivergedError, TaskUsageError
from task_images.methods.base import LossScale
from task_images.translation.batches import Passes, SentenceBatches, TokenBatches, Update, fill_batches, plan_passes
from task_images.translation.corpora import Pairs, Side
from task_images.translation.training import collate


@pytest.mark.parametrize(
    ("ranks", "gnmt", "transformer"),
    [
        (1, (16, 128), (16, 8192)),
        (2, (8, 128), (8, 8192)),
        (4, (4, 128), (4, 8192)),
        (8, (2, 128), (2, 8192)),
        (16, (1, 128), (1, 8192)),
        (32, (1, 64), (1, 4096)),
    ],
)
def test_the_published_accumulation_tables(ranks: int, gnmt: tuple[int, int], transformer: tuple[int, int]) -> None:
    assert plan_passes(2048, 128, ranks) == gnmt
    assert plan_passes(2**17, 2**13, ranks) == transformer


def test_what_does_not_divide_is_refused_with_a_batch_that_does() -> None:
    with pytest.raises(TaskUsageError, match="2048 cannot be shared evenly by 3 ranks with 6 passes") as caught:
        plan_passes(2048, 128, 3)
    assert caught.value.hint is not None
    even = int(caught.value.hint.rstrip(".").rsplit("=", 1)[1])
    number, size = plan_passes(even, 128, 3)
    assert number * size * 3 == even
    with pytest.raises(TaskUsageError):
        plan_passes(4, 128, 8)


def test_a_loss_scale_has_a_floor() -> None:
    scale = LossScale(1.5e-4)
    with pytest.raises(DivergedError, match="overflow even at a loss scale"):
        scale.observe(False)


def make_pairs(count: int, seed: int = 0) -> Pairs:
    random = np.random.default_rng(seed)

    def side() -> Side:
        lengths = random.integers(1, 40, count)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        return Side(random.integers(4, 90, lengths.sum()), starts, lengths)

    return Pairs(side(), side())


PAIRS = make_pairs(997)


def passes_of(update: Update) -> list[list[int]]:
    return [indices.tolist() for indices in update.passes]


@pytest.mark.parametrize("kind", [SentenceBatches, TokenBatches])
def test_an_update_has_the_same_passes_for_any_number_of_ranks(
    kind: type[SentenceBatches] | type[TokenBatches],
) -> None:
    alone = list(kind(PAIRS, Passes(8, 30 if kind is SentenceBatches else 300), 1, 0, seed=5).updates(2))
    for ranks in (2, 4, 8):
        passes = Passes(8 // ranks, 30 if kind is SentenceBatches else 300)
        shares = [list(kind(PAIRS, passes, ranks, rank, seed=5).updates(2)) for rank in range(ranks)]
        for step, update in enumerate(alone):
            together = [batch for share in shares for batch in passes_of(share[step])]
            assert together == passes_of(update)
            firsts = [share[step].first for share in shares]
            assert firsts == list(np.cumsum([0, *(len(share[step].passes) for share in shares)])[:-1])
            assert {(share[step].sentences, share[step].tokens) for share in shares} == {update[2:4]}
            assert sum(share[step].own for share in shares) == update.sentences


@pytest.mark.parametrize(
    ("kind", "size", "reshuffle"),
    [(SentenceBatches, 30, True), (SentenceBatches, 30, False), (TokenBatches, 300, True)],
)
def test_every_pair_is_in_an_epoch_once_and_nothing_is_thrown_away(
    kind: type[SentenceBatches] | type[TokenBatches], size: int, reshuffle: bool
) -> None:
    of_ranks = [kind(PAIRS, Passes(2, size), 2, rank, seed=1, reshuffle=reshuffle) for rank in range(2)]
    updates = [list(batches.updates(3)) for batches in of_ranks]
    assert len(updates[0]) == len(updates[1]) == of_ranks[0].steps
    seen = np.concatenate([indices for share in updates for update in share for indices in update.passes])
    assert sorted(seen.tolist()) == list(range(len(PAIRS)))
    assert sum(update.tokens for update in updates[0]) == PAIRS.target.lengths.sum()


def test_epochs_are_shuffled_anew_unless_told_otherwise() -> None:
    def order(batches: SentenceBatches | TokenBatches, epoch: int) -> list[list[list[int]]]:
        return [passes_of(update) for update in batches.updates(epoch)]

    for kind, size in ((SentenceBatches, 30), (TokenBatches, 300)):
        batches = kind(PAIRS, Passes(1, size), 1, 0, seed=1)
        assert order(batches, 1) != order(batches, 2)
        assert order(batches, 1) == order(kind(PAIRS, Passes(1, size), 1, 0, seed=1), 1)
        assert order(batches, 1)[5:] == [passes_of(update) for update in batches.updates(1, begin=5)]
    fixed = TokenBatches(PAIRS, Passes(1, 300), 1, 0, seed=1, reshuffle=False)
    assert order(fixed, 1) == order(fixed, 2)


def test_without_reshuffling_a_rank_keeps_its_part() -> None:
    def members(epoch: int, rank: int) -> set[int]:
        batches = SentenceBatches(PAIRS, Passes(1, 10), 2, rank, seed=1, reshuffle=False)
        complete = list(batches.updates(epoch))[:-1]
        return {int(index) for update in complete for indices in update.passes for index in indices}

    parts = members(1, 0) | members(2, 0), members(1, 1) | members(2, 1)
    assert not parts[0] & parts[1]
    assert members(1, 0) != members(2, 0) or len(members(1, 0)) >= 490


def test_token_batches_keep_to_their_budget_and_waste_little() -> None:
    batches = TokenBatches(PAIRS, Passes(1, 512), 1, 0, seed=1)
    for update in batches.updates(1):
        for indices in update.passes:
            longest = np.maximum(PAIRS.source.lengths, PAIRS.target.lengths)[indices].max()
            assert len(indices) * longest <= 512
            assert len(indices) < 4 or len(indices) % 4 == 0
    unsorted = SentenceBatches(PAIRS, Passes(1, 16), 1, 0, seed=1)
    # These made-up lengths of the two sides have nothing to do with each other, which is the worst case.
    assert batches.padding(1) < 0.75 * unsorted.padding(1)


def test_filling_rounds_lengths_up_and_lets_a_long_sentence_stand_alone() -> None:
    def sizes(lengths: list[int], budget: int) -> list[int]:
        return [len(run) for run in fill_batches(np.arange(len(lengths)), np.array(lengths), budget)]

    assert sizes([9] * 12, 40) == [2] * 6  # the third of up to four counts as 16
    assert sizes([9] * 12, 64) == [4, 4, 4]  # six of 10 would fit; cut to a multiple of four
    assert sizes([100, 3, 3, 3, 3], 40) == [1, 4]
    assert sum(sizes(list(range(1, 60)), 64)) == 59


def test_a_batch_is_shifted_and_padded() -> None:
    side = Side(np.array([5, 6, 2, 7, 2]), np.array([0, 3]), np.array([3, 2]))
    batch = collate(Pairs(side, side), np.array([1, 0]), padding=1, start=9)
    assert batch.source.tolist() == [[7, 2, 1], [5, 6, 2]]
    assert batch.target.tolist() == [[9, 7, 1], [9, 5, 6]]
    assert (batch.expected.tolist(), batch.places.tolist(), batch.words) == ([7, 2, 5, 6, 2], [0, 1, 3, 4, 5], 5)
    assert batch.lengths.tolist() == [2, 3]
