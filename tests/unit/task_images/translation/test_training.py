"""Translation with a model whose scores are given: updates, losses, shares of ranks, and where data come from."""

import numpy as np
import pytest

from task_images.loop import Passes
from task_images.translation.batches import SentenceBatches, fill_batches
from task_images.translation.pairs import Pairs, Side

PADDING, END, WORDS = 1, 2, 12


def make_side(*sentences: list[int]) -> Side:
    lengths = np.array([len(one) for one in sentences])
    return Side(np.concatenate(sentences), np.cumsum(lengths) - lengths, lengths)


SOURCES = [[5, 6, END], [7, END], [8, 9, 10, END], [4, END], [6, 5, 4, 3, END]]
PAIRS = Pairs(make_side(*SOURCES), make_side(*([number + 1 for number in one[:-1]] + [END] for one in SOURCES)))


# --- updates and losses ---------------------------------------------------------------------------------------------


# --- validation -----------------------------------------------------------------------------------------------------


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "budget", "sizes"),
    [
        ([1, 1, 1, 1], 32, [4]),  # up to four sentences count eight positions each
        ([1, 1, 1, 1], 31, [3, 1]),
        ([1] * 5, 10, [1] * 5),
        ([3] * 16, 64, [16]),  # 16 x 4
        ([3] * 16, 63, [12, 4]),
        ([8] * 8, 64, [8]),
        ([9] * 8, 64, [4, 4]),
        ([40, 2, 2], 32, [1, 2]),
        ([], 32, []),
    ],
)
def test_runs_have_as_many_sentences_as_fit(lengths: list[int], budget: int, sizes: list[int]) -> None:
    runs = fill_batches(np.arange(len(lengths)), np.array(lengths, np.int64), budget)
    assert [len(run) for run in runs] == sizes
    assert [int(number) for run in runs for number in run] == list(range(len(lengths)))


def test_padding_is_the_share_of_positions_without_a_word() -> None:
    batches = SentenceBatches(PAIRS, Passes(1, 5), 1, 0, seed=1)
    # All five together: 16 words of 25 positions on each side.
    assert batches.padding(1) == pytest.approx(1 - 16 / 25)
    assert SentenceBatches(PAIRS, Passes(1, 1), 1, 0, seed=1).padding(1) == 0.0


# --- where data come from -------------------------------------------------------------------------------------------
