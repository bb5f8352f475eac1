"""Labels of axes."""

from hypothesis import given
from hypothesis import strategies as st

from mlbench_cli.results.figures.ticks import choose_ticks, format_tick, widen

NUMBERS = st.floats(1e-6, 1e12)


@given(NUMBERS, NUMBERS)
def test_an_axis_has_at_least_two_ticks_in_order_and_within(first: float, second: float) -> None:
    for logarithmic in (False, True):
        low, high = widen([first, second], logarithmic=logarithmic)
        ticks = choose_ticks(low, high, logarithmic=logarithmic)
        assert len(ticks) >= 2
        assert ticks == sorted(ticks)
        span = high - low
        assert low - 1e-9 * span <= ticks[0]
        assert ticks[-1] <= high + 1e-9 * span


def test_ticks_are_round() -> None:
    assert choose_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert choose_ticks(1, 1000, logarithmic=True) == [1, 10, 100, 1000]


def test_an_axis_without_values_has_ends() -> None:
    assert widen([]) == (0.0, 1.0)
    assert widen([0.0], logarithmic=True) == (1.0, 10.0)
    assert widen([float("nan"), 2.0], from_zero=True)[0] == 0.0


def test_numbers_are_short() -> None:
    assert [format_tick(value) for value in (0, 0.25, 1200, 25_000, 2.5e6, 1e-7, 3e9)] == [
        *("0", "0.25", "1,200", "25k", "2.5M", "0.0000001", "3G")
    ]
    units = ((4096, "B"), (2e9, "B/s"), (5e-5, "s"), (0.02, "s"))
    assert [format_tick(*each).replace("\u00a0", " ") for each in units] == ["4 KiB", "2 GB/s", "50 µs", "20 ms"]
