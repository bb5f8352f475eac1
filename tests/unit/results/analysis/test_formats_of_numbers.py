"""Where the form of a number changes: its unit, its digits, and the words beside it."""

import math
from typing import Any

import pytest

from mlbench_cli.results.analysis.notebook import display_table
from mlbench_cli.results.analysis.numbers import (
    format_change,
    format_estimate,
    format_factor,
    format_money,
    format_ratio,
    format_share,
    format_value,
    unit_of,
    value_range,
)
from mlbench_cli.results.analysis.statistics import Estimate


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9.9e-9, "below 0.01 µs"),
        (1e-8, "0.0100 µs"),
        (9.994e-4, "999 µs"),
        (9.996e-4, "1.00 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (-2.5, "-2.50 s"),
        (299.49, "299 s"),
        (299.5, "5 min 00 s"),
        (359.4, "5 min 59 s"),
        (359.6, "6 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (3660.0, "1 h 01 min"),
        (86399.0, "24 h 00 min"),
        (86399.6, "1 d 00 h"),
        (90000.0, "1 d 01 h"),
        (math.inf, "inf"),
    ],
)
def test_seconds_are_in_the_unit_that_people_say(value: float, text: str) -> None:
    assert plain(format_value(value, "s")) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (9999.4, "", "9999"),
        (9999.6, "", "10.0k"),
        (-12345.0, "", "-12.3k"),
        (999.4, "samples/s", "999 samples/s"),
        (999.6, "samples/s", "1.00k samples/s"),
        (999_600.0, "samples/s", "1.00M samples/s"),
        (999.6e6, "samples/s", "1.00G samples/s"),
        (2.5e12, "samples/s", "2500G samples/s"),
        (512.0, "B", "512 B"),
        (2048.0, "B/s", "2.05 kB/s"),
        (3.2e9, "bit/s", "3.20 Gbit/s"),
        (4.5e6, "J", "4.50 MJ"),
        (0.05, "%", "0.1 %"),
        (2500.0, "GB/s", "2.50k GB/s"),
    ],
)
def test_large_numbers_have_a_prefix(value: float, unit: str, text: str) -> None:
    assert plain(format_value(value, unit)) == text


@pytest.mark.parametrize(
    ("mean", "half", "unit", "text"),
    [
        (0.281, 0.012, "s", "281 ms (269 to 293)"),
        (400.0, 60.0, "s", "6 min 40 s (5 min 40 s to 7 min 40 s)"),
        (1500.0, 600.0, "samples/s", "1.50k samples/s (0.90k to 2.10k)"),
        (10.0, 30.0, "samples/s", "10.0 samples/s (0.0 to 40.0)"),
        (5000.0, 100.0, "", "5000 (4900 to 5100)"),
        (20000.0, 1000.0, "", "20.0k (19.0k to 21.0k)"),
        (0.5, 1.0, "", "0.500 (-0.500 to 1.500)"),
        (98.0, 3.0, "%", "98.0 % (95.0 to 100.0)"),
        (1.0, 3.0, "%", "1.0 % (0.0 to 4.0)"),
        (110.0, 3.0, "%", "110.0 % (107.0 to 113.0)"),
        (-1.0, 3.0, "s", "-1.00 s (-4.00 to 2.00)"),
    ],
)
def test_an_interval_has_the_scale_of_its_mean_and_only_values_that_can_be(
    mean: float, half: float, unit: str, text: str
) -> None:
    assert plain(format_estimate(Estimate(3, mean, mean - half, mean + half), unit)) == text


def test_two_values_are_shown_as_their_range() -> None:
    """t(0.975, 1) = 12.7062 is the tangent of 0.475 pi."""
    half = math.tan(0.475 * math.pi) * 0.5
    found = value_range(Estimate(2, 10.0, 10.0 - half, 10.0 + half))
    assert found is not None
    assert list(found) == pytest.approx([9.5, 10.5])
    assert value_range(Estimate(3, 10.0, 9.0, 11.0)) == (9.0, 11.0)
    assert value_range(Estimate(1, 10.0)) is None
    assert value_range(Estimate(3, 10.0, None, 11.0)) is None
    assert plain(format_estimate(Estimate(1, 10.0), "s", counts=True)) == "10.0 s, n = 1"


RISE, FALL = Estimate(3, 2.0, 1.6, 2.5), Estimate(3, 0.5, 0.4, 0.625)


@pytest.mark.parametrize(
    ("found", "options", "text"),
    [
        (RISE, {}, "2.00× slower (1.60 to 2.50)"),
        (FALL, {}, "2.00× faster (1.60 to 2.50)"),
        (RISE, {"is_time": False, "higher_is_better": False}, "2.00× higher (1.60 to 2.50)"),
        (FALL, {"is_time": False, "higher_is_better": True}, "2.00× lower (1.60 to 2.50)"),
        (RISE, {"is_time": False, "higher_is_better": None}, "2.00× more (1.60 to 2.50)"),
        (FALL, {"is_time": False, "higher_is_better": None}, "2.00× less (1.60 to 2.50)"),
        (Estimate(3, 1.1, 1.0, 1.2), {}, "no difference seen (1.00 to 1.20×)"),
        (Estimate(3, 0.9, 0.8, 1.0), {}, "no difference seen (0.800 to 1.00×)"),
        (Estimate(3, 1.1, 1.01, 1.2), {}, "1.10× slower (1.01 to 1.20)"),
        (Estimate(3, 1.0), {}, "equal, too few runs"),
        (Estimate(2, 1.5, 1.4, 1.6), {}, "1.50× slower, too few runs"),
    ],
)
def test_a_ratio_names_the_direction_unless_its_interval_holds_1(
    found: Estimate, options: dict[str, Any], text: str
) -> None:
    assert format_ratio(found, **options) == text


@pytest.mark.parametrize(
    ("a", "b", "found", "text"),
    [
        (70.0, 72.5, Estimate(3, 1.036, 1.02, 1.05), "2.50 points higher"),
        (72.5, 70.0, Estimate(3, 0.966, 0.95, 0.98), "2.50 points lower"),
        (70.0, 70.0, Estimate(1, 1.0), "equal, too few runs"),
        (70.0, 70.5, Estimate(3, 1.007, 0.99, 1.02), "no difference seen"),
        (70.0, 72.0, None, "2.00 points higher, too few runs"),
    ],
)
def test_percentages_are_compared_by_points(a: float, b: float, found: Estimate | None, text: str) -> None:
    assert format_change(Estimate(3, a), Estimate(3, b), found, "%", True, is_time=False) == text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "–"),
        (Estimate(3, 1.83, 1.75, 1.92), "1.83× (1.75 to 1.92)"),
        (Estimate(2, 1.83, 1.75, 1.92), "1.83×"),
        (Estimate(3, 1.83, 1.83, 1.83), "1.83×"),
        (Estimate(1, 0.5), "0.500×"),
    ],
)
def test_a_speed_up_has_its_interval_from_three_runs_on(found: Estimate | None, text: str) -> None:
    assert format_factor(found) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (0.0004, "0.0 %"),
        (0.0521, "5.2 %"),
        (0.0994, "9.9 %"),
        (0.0996, "10 %"),
        (0.555, "56 %"),
        (1.0, "100 %"),
        (-0.1, "0 %"),
        (7.0, "100 %"),
    ],
)
def test_a_share_is_whole_from_ten_percent_on_and_between_0_and_100(share: float, text: str) -> None:
    assert plain(format_share(share)) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0.0, "0.00"),
        (0.0012345, "0.00123"),
        (0.01, "0.01"),
        (0.494, "0.49"),
        (99.994, "99.99"),
        (100.4, "100"),
        (1240.2, "1,240"),
        (-1240.2, "-1,240"),
        (-0.0012345, "-0.00123"),
    ],
)
def test_money_has_cents_below_a_hundred_and_separators_above(amount: float, text: str) -> None:
    assert format_money(amount) == text


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("Prec@1", "%"),
        ("val_Prec@5", "%"),
        ("accuracy", "%"),
        ("accuracy_loss", ""),
        ("samples_per_second", "samples/s"),
        ("train_throughput", "samples/s"),
        ("samples per second", "samples/s"),
        ("energy", "J"),
        ("energy per sample", "J"),
        ("energy per token", "J"),
        ("all_reduce busbw GB/s", "GB/s"),
        ("all_reduce alpha us", "µs"),
        ("compile_seconds", "s"),
        ("val_loss", ""),
    ],
)
def test_the_unit_of_a_metric_follows_from_its_name(metric: str, unit: str) -> None:
    assert unit_of(metric) == unit


@pytest.mark.parametrize(
    ("given", "total", "shown", "note"),
    [
        (20, None, 20, ""),
        (21, None, 20, "<p>1 more rows</p>"),
        (20, 25, 20, "<p>5 more rows</p>"),
        (3, 3, 3, ""),
        (0, 0, 0, ""),
    ],
)
def test_a_table_of_a_notebook_says_how_many_rows_it_does_not_show(
    given: int, total: int | None, shown: int, note: str
) -> None:
    found = display_table(["a"], ([number] for number in range(given)), total)
    assert found.count("<td>") == shown
    assert found.endswith(f"</table>{note}")
