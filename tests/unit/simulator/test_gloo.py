"""gloo's ring as events: small cases by hand, measured cells, and any number of ranks."""

import pytest

from mlbench_cli.simulator.gloo import (
    LAUNCH_SECONDS,
    Link,
    Message,
    gather_seconds,
    ring_seconds,
    simulate,
    split,
)

# All-reduces over shaped links of this project's machine, ms, median: ranks, bit/s, one-way delay, bytes.
MEASURED = {
    (2, 1e9, 1e-3): {65_536: 5.52, 1 << 20: 13.5, 4 << 20: 39.5, 16 << 20: 161.0},
    (2, 1e9, 5e-3): {65_536: 22.0, 1 << 20: 30.7, 4 << 20: 57.3, 16 << 20: 224.6},
    (4, 1e9, 1e-3): {65_536: 16.0, 1 << 20: 24.9, 4 << 20: 58.5, 16 << 20: 211.0},
    (4, 1e8, 5e-3): {4096: 64.1, 65_536: 68.3, 262_144: 85.5, 1 << 20: 159.7, 2 << 20: 273.9},
    (2, 1e8, 5e-3): {262_144: 43.5, 2 << 20: 192.5},
}
# The same of all-gathers (bytes in all) on 200 Mbit/s with 20 ms, as probed: bit/s and one-way seconds.
GATHERED = {
    2: {160_000: 43.7, 640_000: 53.5, 4_160_000: 125.7},
    4: {160_000: 128.1, 640_000: 138.9, 4_160_000: 205.3},
}
GATHERED_OVER = Link(0.02045, 8 / 199.4e6)
OWN_SECONDS, GOODPUT = 1.5e-4, 0.975  # what the machine adds to the delay, and keeps of the rate, as probed


def test_one_rank_sends_nothing() -> None:
    assert simulate([Message(3.0, 1e6)], 1, Link(1.0, 1.0)) == [3.0]
    assert ring_seconds(1, 1e6, Link(1.0, 1.0)) == 0.0


def test_a_buffer_is_cut_into_two_segments_a_rank_of_at_most_a_mebibyte() -> None:
    assert split(2, 400) == (2, 100)
    assert split(4, 4096) == (6, 512)
    assert split(2, 16 << 20) == (8, 1 << 20)
    assert split(3, 10 << 20) == (8, (10 << 20) / 12)


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_gathers_take_what_was_measured(ranks: int) -> None:
    for size, milliseconds in GATHERED[ranks].items():
        assert 1e3 * gather_seconds(ranks, size, GATHERED_OVER) == pytest.approx(milliseconds, rel=0.05)


def test_an_all_gather_is_half_of_an_all_reduce_of_small_segments() -> None:
    link = Link(1.0, 0.0, overhead=0.0)
    assert [gather_seconds(ranks, 1024, link) for ranks in (1, 2, 8)] == pytest.approx([0.0, 2.0, 14.0])
    assert gather_seconds(10_000, 1e9, Link(1e-6, 1e-10)) > 9999 * 2e-6


@pytest.mark.parametrize(("ranks", "seconds"), [(2, 4.0), (4, 12.0), (8, 28.0)])
def test_a_hop_costs_two_latencies(ranks: int, seconds: float) -> None:
    """Every send waits for the receiver's "ready": 4 (n-1) alpha, not the textbook's 2 (n-1) alpha."""
    assert ring_seconds(ranks, 1024, Link(1.0, 0.0, overhead=0.0)) == pytest.approx(seconds)


def test_two_ranks_by_hand() -> None:
    """400 bytes, 1 s per byte, no latency: four segments of 100 bytes with a head of 56, two a phase.

    A phase: "ready" takes 56, each segment 156. Two ranks share one connection, so it is 56 + 2 x 156, twice.
    """
    (end,) = simulate([Message(0.0, 400)], 2, Link(0.0, 1.0, overhead=0.0))
    assert end == pytest.approx(LAUNCH_SECONDS + 736)


def test_two_messages_share_the_link_and_a_third_waits_for_a_thread() -> None:
    link = Link(0.0, 1.0, overhead=0.0)
    alone = ring_seconds(2, 400, link)
    first, second, third = simulate([Message(0.0, 400)] * 3, 2, link)
    assert alone < first < second < third
    assert third >= 3 * 4 * 156  # the bytes of all three pass one link
    assert simulate([Message(0.0, 400)] * 2, 2, link, threads=1)[1] > 2 * alone


@pytest.mark.parametrize("case", MEASURED)
def test_the_model_is_near_measured_all_reduces(case: tuple[int, float, float]) -> None:
    """Mean error 3 % over all cells, worst 15 % (16 MiB at 5 ms); nothing is fitted."""
    ranks, rate, delay = case
    link = Link(delay + OWN_SECONDS, 8 / (GOODPUT * rate))
    for size, milliseconds in MEASURED[case].items():
        assert 1000 * ring_seconds(ranks, size, link) == pytest.approx(milliseconds, rel=0.16)


def test_ten_thousand_ranks_are_extrapolated_from_few_segments() -> None:
    link = Link(1e-5, 8e-11)
    assert ring_seconds(90, 1e8, link) == pytest.approx(4 * 89 * 6e-5 + 2 * 89 / 90 * 8e-3, rel=0.6)
    times = [ring_seconds(ranks, 1e8, link) for ranks in (64, 128, 1024, 10_000)]
    assert times == sorted(times)
