"""Sizes of the collectives benchmark, the pattern that betrays a wrong result, and the fit."""

import random
import time

import numpy as np
import pytest
import torch

from task_images.allreduce.operations import COLLECTIVES, DTYPES, Call, Pattern, summands
from task_images.allreduce.task import Measured, Row, Series, fit, format_size, from_bytes, grid, in_parts, time_samples
from task_images.clock import Tracker
from task_images.contract import Contract
from task_images.world import World
from tests import NIGHTLY

CPU = torch.device("cpu")


def test_the_sizes_are_the_specified_ones_without_duplicates() -> None:
    everything = grid(0, 8, 80, duplicates=True)
    assert everything == [int(value) for value in np.logspace(0, 8, num=80)]
    assert (len(everything), sum(everything)) == (80, 480_807_107)
    assert grid(0, 8, 80) == sorted(set(everything))
    assert len(grid(0, 8, 80)) == 77


def test_the_ends_are_what_was_asked_for() -> None:
    assert grid(3, 5, 1) == [1000]
    # Computed in floating point the last one is 9999.999999999989.
    assert grid(0, 4, 50)[-1] == 10000


def test_bytes_become_elements_and_parts_are_equal() -> None:
    assert from_bytes([1, 2, 4, 8, 9, 4096], 4) == [1, 2, 1024]
    assert in_parts([1, 2, 3, 7, 9], 3) == [3, 6, 9]


def test_a_size_that_is_larger_takes_longer_than_the_one_before() -> None:
    """Before each size the budget asks for at least two calls, of as much longer as there is more."""
    series = Measured(Series("all_reduce", "fp32", "in_place"), [100, 1000], 4)
    assert series.next_seconds == 0
    series.rows.append(Row("all_reduce", "fp32", "in_place", 400, 100, 5, 400.0, 500.0, p50_us=500.0))
    assert series.next_seconds >= 2 * 10 * 500e-6


def test_a_buffer_that_travels_twice_takes_half_the_time_for_each_way() -> None:
    call = Call(fill=lambda: None, call=lambda: time.sleep(0.3), wrong=lambda: 0, trips=2)
    world = World(Contract({}), torch.device("cpu"), 1, grouped=False)
    [found] = time_samples(world, Tracker(), call, 1)
    assert 0.15 <= found < 0.3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 33, 64, 65, 300] if NIGHTLY else [1, 2, 65, 300])
@pytest.mark.parametrize("elements", [1, 5, 57331, 57332, 120001] if NIGHTLY else [5, 57332])
def test_the_sum_is_exact_in_every_type(dtype: str, ranks: int, elements: int) -> None:
    pattern = Pattern(0, ranks, DTYPES[dtype], CPU)
    total = torch.zeros(elements, dtype=DTYPES[dtype])
    for rank in range(ranks):
        own = torch.from_numpy(summands(rank, ranks)).to(DTYPES[dtype])
        total += own.repeat(-(-elements // len(own)))[:elements]
    assert pattern.total.wrong(total) == 0
    buffer = torch.empty(elements, dtype=DTYPES[dtype])
    pattern.own.fill(buffer)
    assert torch.equal(buffer[:57331].long(), torch.from_numpy(summands(0, ranks))[:elements])
    total[-1] += 1
    assert pattern.total.wrong(total) >= 1


@pytest.mark.parametrize("ranks", [65, 256, 1000, 4096] if NIGHTLY else [65, 256, 1000])
def test_sums_of_many_ranks_stay_exact(ranks: int) -> None:
    total = sum(summands(rank, ranks) for rank in range(ranks))
    assert 0 < np.max(total) <= 256


@pytest.mark.parametrize("elements", [64, 1000])
@pytest.mark.parametrize("ranks", range(2, 17))
def test_every_wrong_source_and_every_wrong_place_shows(ranks: int, elements: int) -> None:
    """A rank counted twice in place of another one, at any distance; a result reversed, or rotated by any amount."""
    shares = [torch.from_numpy(summands(rank, ranks))[:elements].float() for rank in range(ranks)]
    right = torch.stack(shares).sum(0)
    pattern = Pattern(0, ranks, torch.float32, CPU)
    assert pattern.total.wrong(right) == 0
    for lost in range(ranks):
        assert pattern.total.wrong(right - shares[lost]) > elements / 2
        for twice in {*range(ranks)} - {lost}:
            assert pattern.total.wrong(right - shares[lost] + shares[twice]) > elements / 2, (lost, twice)
    assert pattern.total.wrong(right.flip(0)) > elements / 2
    for shift in range(1, min(elements, 100)):
        assert pattern.total.wrong(right.roll(shift)) > elements / 4, shift


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_moved_tells_its_rank_and_its_place(dtype: str) -> None:
    pattern, whole = Pattern(0, 8, DTYPES[dtype], CPU), torch.empty(130_000, dtype=DTYPES[dtype])
    pattern.moved.fill(whole, pattern.place(5))
    assert pattern.moved.wrong(whole, pattern.place(5)) == 0
    for begin in (1, 250, 251, 60_001):
        assert pattern.moved.wrong(whole[begin:], pattern.place(5, begin)) == 0
    for shift in (pattern.place(4), pattern.place(5, 1), pattern.place(5, 57_344), pattern.place(256)):
        assert pattern.moved.wrong(whole, shift) > 125_000
    assert int(whole.min()) >= 0
    assert int(whole.max()) <= 250


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_formulas_say_what_is_computed(ranks: int) -> None:
    for kind in COLLECTIVES.values():
        words = kind.formula.replace("algbw", "1.0").replace("2 (", "2 * (")
        assert eval(words, {"k": ranks}) == pytest.approx(kind.factor(ranks))


BYTES = [8 * 2**power for power in range(24)]


def test_the_fit_finds_latency_and_bandwidth_through_noise() -> None:
    noise = random.Random(1)
    times = [(85 + number / 1200) * noise.uniform(0.9, 1.1) for number in BYTES]
    found = fit(BYTES, times)
    assert found is not None
    assert found.alpha_us == pytest.approx(85, rel=0.1)
    assert found.algbw is not None
    assert found.algbw == pytest.approx(1.2, rel=0.1)


def test_what_the_sizes_cannot_tell_is_not_told() -> None:
    assert fit([8, 8, 16], [1.0, 1.0, 1.0]) is None
    assert fit([], []) is None
    noise = random.Random(1)
    flat = fit([8, 16, 32, 64], [50 * noise.uniform(0.95, 1.05) for _ in range(4)])
    assert flat is not None
    assert flat.algbw is None
    steep = fit(BYTES, [number / 1000 for number in BYTES])
    assert steep is not None
    assert (steep.alpha_us, steep.algbw) == pytest.approx((0, 1))


def test_sizes_are_written_in_binary_units() -> None:
    assert [format_size(count) for count in (1, 1023, 1024, 1536, 2**26, 10**9)] == [
        *("1 B", "1023 B", "1 KiB", "1.5 KiB", "64 MiB", "953.7 MiB"),
    ]
