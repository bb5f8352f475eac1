import math

import pytest

from mlbench_cli.results.analysis.numbers import (
    describe_change,
    describe_ratio,
    format_estimate,
    format_share,
    format_value,
)
from mlbench_cli.results.analysis.stats import Ratio, estimate, ratio


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.00012, "s", "120 µs"),
        (0.2807, "s", "281 ms"),
        (6.174, "s", "6.17 s"),
        (121.2, "s", "121 s"),
        (299.4, "s", "299 s"),
        (372.0, "s", "6 min 12 s"),
        (7500.0, "s", "2 h 05 min"),
        (4.55e-13, "s", "below 0.01 µs"),
        (0.0, "s", "0 s"),
        (3614.0, "samples/s", "3.61k samples/s"),
        (204_800.0, "tokens/s", "205k tokens/s"),
        (1739.0, "samples/s", "1.74k samples/s"),
        (90.37, "%", "90.4 %"),
        (0.7667, "", "0.767"),
        (0.005, "", "0.005"),
        (3.2e-8, "", "3.2e-08"),
        (521.9, "", "522"),
        (3390.0, "", "3390"),
        (None, "s", "–"),
        (float("nan"), "", "nan"),
    ],
)
def test_a_value_has_three_digits_and_its_unit(value: float | None, unit: str, text: str) -> None:
    assert format_value(value, unit).replace("\u00a0", " ") == text


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def test_a_mean_has_its_interval_from_three_runs_on() -> None:
    assert plain(format_estimate(estimate([9.7]), "s")) == "9.70 s"
    assert plain(format_estimate(estimate([9.58, 9.81]), "s", counts=True)) == "9.69 s, n = 2"
    assert plain(format_estimate(estimate([6.0, 6.17, 6.34]), "s")) == "6.17 s (5.76 to 6.61)"
    assert plain(format_estimate(None, "s")) == "–"


def test_what_cannot_be_is_not_shown() -> None:
    assert plain(format_estimate(estimate([85.0, 99.0, 71.0]), "%")) == "84.2 % (55.7 to 100.0)"
    assert plain(format_estimate(estimate([5.0, 35.0, 20.0]), "s")) == "15.2 s (1.3 to 182.9)"  # never 0 or below
    wide = plain(format_estimate(estimate([3390.0, 8000.0, 900.0]), "samples/s"))
    assert "e+" not in wide
    assert "±" not in wide
    assert format_share(1.2) == "100\u00a0%"
    assert [plain(format_share(share)) for share in (0.7221, 0.0521, 0.0)] == ["72 %", "5.2 %", "0 %"]


SLOW, FAST = (10.0, 10.1, 9.9), (5.0, 5.05, 4.95)


def test_a_ratio_says_which_way_it_goes() -> None:
    assert str(describe_ratio(ratio(SLOW, FAST))) == "2.00× faster (1.96 to 2.05)"
    assert str(describe_ratio(ratio(FAST, SLOW))) == "2.00× slower (1.96 to 2.05)"
    assert str(describe_ratio(ratio(FAST, SLOW), True, is_time=False)) == "2.00× higher (1.96 to 2.05)"
    assert str(describe_ratio(ratio((10.05, 9.9, 10.2), SLOW))) == "no difference seen (0.965 to 1.03×)"


def test_a_difference_of_rounding_is_none() -> None:
    assert plain(str(describe_ratio(ratio([0.3] * 3, [0.1 + 0.2] * 3)))) == "no difference seen (1.00 to 1.00×)"


def test_percentages_differ_by_points() -> None:
    high, low, close = (70.0, 70.5, 71.0), (27.0, 27.2, 27.4), (70.2, 70.6, 71.1)

    def change(a: tuple[float, ...], b: tuple[float, ...], unit: str = "%") -> str:
        return str(describe_change(estimate(a), estimate(b), ratio(a, b), unit, True, is_time=unit == "s"))

    assert change(high, low) == "43.3 points lower"
    assert change(high, close) == "no difference seen"
    assert change(high, (72.0,)) == "1.50 points higher, too few runs"
    assert change(high, low, "s") == str(describe_ratio(ratio(high, low)))


def test_below_three_runs_on_a_side_there_is_no_verdict() -> None:
    assert str(describe_ratio(ratio(SLOW, (5.0, 5.0)))) == "2.00× faster, too few runs"
    assert str(describe_ratio(ratio((1.0,), (0.5,)))) == "2.00× faster, too few runs"
    assert str(describe_ratio(ratio((1.0,), (1.0,)))) == "equal, too few runs"
    assert str(describe_ratio(None)) == "–"


def test_a_ratio_of_two_sessions_is_no_finding() -> None:
    found = Ratio(0.5, 3, 0.01, 4.0, is_confounded=True)
    assert str(describe_ratio(found)) == "1.65× slower (1.60 to 1.70), other session"


def test_ratios_close_to_one_are_percentages() -> None:
    fast, slow = (10.0, 10.01, 9.99), (10.5, 10.51, 10.49)
    assert str(describe_ratio(ratio(fast, slow))) == "5.00\u00a0% slower (4.77 to 5.23\u00a0%)"
    assert str(describe_ratio(ratio(slow, fast))) == "5.00\u00a0% faster (4.77 to 5.23\u00a0%)"
    assert str(describe_ratio(ratio((1.0,), (1.02,)))) == "2.00\u00a0% slower, too few runs"


def test_a_ratio_and_its_ends_are_both_factors_or_both_percentages() -> None:
    rounded = math.nextafter(math.log(1.1), 0)  # its exponential is 1.1
    assert str(describe_ratio(Ratio(rounded, 3, 0.01, 4.0))) == "1.10× slower (1.07 to 1.13)"
    assert str(describe_ratio(Ratio(0.095, 3, 0.01, 4.0))) == "9.97\u00a0% slower (6.95 to 13.1\u00a0%)"


def test_huge_numbers_have_an_exponent() -> None:
    assert format_value(1e17) == "1e+17"
    assert len(format_value(1.234e300, "B")) < 20
    assert format_estimate(estimate((3.1e18, 3.2e18, 3.3e18))) == "3.2e+18 (2.96e+18 to 3.46e+18)"
    assert format_estimate(estimate((3.1e15, 3.2e15, 3.3e15)), "B") == "3.2e+15\u00a0B (2.96e+15 to 3.46e+15)"


def test_an_end_of_an_interval_that_is_not_one_does_not_look_like_it() -> None:
    """Else a reader cannot see that the interval includes 1."""
    loss = ((1.30, 1.31, 1.29), (1.28, 1.285, 1.29))
    assert str(describe_ratio(ratio(*loss))) == "no difference seen (0.9728 to 1.0044×)"


def test_small_percentages_keep_their_digits_and_large_rates_have_a_prefix() -> None:
    assert format_value(0.034, "%") == "0.0340\u00a0%"
    assert format_estimate(estimate((0.51, 0.52, 0.5)), "%") == "0.510\u00a0% (0.486 to 0.535)"
    assert format_value(3.12e14, "FLOP/s") == "312T\u00a0FLOP/s"
    assert format_value(-0.0) == "0"
