"""Sizes of the all-reduce benchmark, and the pattern that betrays a wrong sum."""

import numpy as np
import pytest
import torch

from task_images.allreduce.measure import DTYPES, sizes
from task_images.allreduce.pattern import Pattern

CPU = torch.device("cpu")


def test_the_sizes_are_the_specified_ones_without_duplicates() -> None:
    everything = sizes(0, 8, 80, duplicates=True)
    assert everything == [int(value) for value in np.logspace(0, 8, num=80)]
    assert (len(everything), sum(everything)) == (80, 480_807_107)
    assert sizes(0, 8, 80) == sorted(set(everything))
    assert len(sizes(0, 8, 80)) == 77


def test_the_ends_are_what_was_asked_for() -> None:
    assert sizes(3, 5, 1) == [1000]
    # Computed in floating point the last one is 9999.999999999989.
    assert sizes(0, 4, 50)[-1] == 10000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 33, 43, 300])
@pytest.mark.parametrize("elements", [1, 5, 57344, 57345, 120001])
def test_the_sum_is_exact_in_every_type(dtype: str, ranks: int, elements: int) -> None:
    some = range(ranks) if elements < 100 else range(min(ranks, 4))
    patterns = [Pattern(rank, ranks, DTYPES[dtype], CPU) for rank in some]
    buffer, total = torch.empty(elements, dtype=DTYPES[dtype]), torch.zeros(elements, dtype=DTYPES[dtype])
    for pattern in patterns:
        pattern.fill(buffer)
        total += buffer
    if len(some) == ranks:
        assert patterns[0].wrong(total) == 0
    total[-1] += 1
    assert patterns[0].wrong(total) >= 1


def test_a_missing_or_doubled_rank_shows() -> None:
    patterns = [Pattern(rank, 3, torch.float32, CPU) for rank in range(3)]
    parts = []
    for pattern in patterns:
        buffer = torch.empty(1000)
        pattern.fill(buffer)
        parts.append(buffer)
    assert patterns[0].wrong(parts[0] + parts[1]) > 0
    assert patterns[0].wrong(parts[0] + parts[1] + parts[1]) > 0
    assert patterns[0].wrong(parts[0] + parts[1] + parts[2]) == 0
