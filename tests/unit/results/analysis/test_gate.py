"""The gate of `mlbench compare --fail-above`: the interval decides, in the direction of the figure."""

from pathlib import Path

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.compare import THROUGHPUT, Comparison, ComparisonRow, Obstacle, compare
from mlbench_cli.results.analysis.gate import Direction, check_gate, describe_limit, find_metric, parse_limit
from mlbench_cli.results.analysis.statistics import Estimate
from mlbench_cli.results.analysis.verdict import Verdict
from mlbench_cli.results.archive.reader import Archive
from tests.unit.results.runs import sealed_run

SOME = Estimate(3, 1.0, 0.9, 1.1)


def comparison(ratio: Estimate | None, higher_is_better: bool | None = False, **changes: object) -> Comparison:
    row = ComparisonRow(SOME, SOME, ratio, higher_is_better)
    fields: dict[str, object] = {"obstacles": (), "seconds": {"task": row}, "others": {"figure": row}}
    return Comparison("a", "b", {}, **{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Estimate(3, 1.2, 1.11, 1.3), Verdict.FAILED),
        (Estimate(3, 1.2, 1.1, 1.3), Verdict.CANNOT_TELL),  # the lower end is at the limit, not above it
        (Estimate(3, 1.2, 1.0, 1.4), Verdict.CANNOT_TELL),
        (Estimate(3, 1.0, 0.8, 1.2), Verdict.CANNOT_TELL),
        (Estimate(3, 1.05, 1.0, 1.1), Verdict.PASSED),
        (Estimate(3, 0.5, 0.4, 0.6), Verdict.PASSED),
        (Estimate(1, 0.5), Verdict.CANNOT_TELL),
        (Estimate(1, 5.0), Verdict.CANNOT_TELL),
        (None, Verdict.CANNOT_TELL),
    ],
)
def test_the_interval_decides(ratio: Estimate | None, verdict: Verdict) -> None:
    assert check_gate(comparison(ratio), 1.1).verdict is verdict


def test_exit_codes() -> None:
    assert [verdict.exit_code for verdict in (Verdict.PASSED, Verdict.FAILED, Verdict.CANNOT_TELL)] == [0, 7, 9]


def test_of_a_figure_that_should_be_high_the_inverse_counts() -> None:
    fell = comparison(Estimate(3, 0.5, 0.45, 0.55), higher_is_better=True)
    found = check_gate(fell, 1.1, "figure")
    assert (found.verdict, found.direction) == (Verdict.FAILED, Direction.HIGHER)
    assert found.worse is not None
    assert found.worse.low == pytest.approx(1 / 0.55)
    assert found.worse.mean == 2.0
    assert check_gate(fell, 1.1, "figure", Direction.LOWER).verdict is Verdict.PASSED


def test_a_figure_of_unknown_direction_must_say_it() -> None:
    unknown = comparison(Estimate(3, 1.0, 0.9, 1.1), higher_is_better=None)
    with pytest.raises(UsageError, match="It is unknown whether lower or higher is better"):
        check_gate(unknown, 1.1, "figure")
    assert check_gate(unknown, 1.2, "figure", Direction.LOWER).verdict is Verdict.PASSED


def test_obstacles_leave_nothing_to_tell_and_failed_runs_fail() -> None:
    fast = Estimate(3, 0.5, 0.4, 0.6)
    obstacle = Obstacle("machine", "The machines differ: x and y.")
    found = check_gate(comparison(fast, obstacles=(obstacle,)), 1.1)
    assert found.verdict is Verdict.CANNOT_TELL
    assert "The machines differ: x and y." in found.reason
    assert check_gate(comparison(fast, failed=("b-1",)), 1.1).verdict is Verdict.FAILED


def test_metrics_are_found_by_name_by_word_and_by_part() -> None:
    row = ComparisonRow(SOME, SOME, SOME)
    rows = dict.fromkeys(("run", "task", "Prec@1", THROUGHPUT, "all_reduce fp32, alpha us"), row)
    rows |= dict.fromkeys(("all_reduce fp32, best busbw GB/s", "broadcast fp32, best busbw GB/s"), row)
    assert find_metric(rows, None) == find_metric(rows, "seconds") == "task"
    assert find_metric({**rows, "task": ComparisonRow(None, None, None)}, None) == "run"
    assert find_metric(rows, "throughput") == THROUGHPUT
    assert find_metric(rows, "prec@1") == "Prec@1"
    assert find_metric(rows, "alpha") == "all_reduce fp32, alpha us"
    assert find_metric(rows, "broadcast") == "broadcast fp32, best busbw GB/s"
    with pytest.raises(UsageError, match="names 2 figures") as caught:
        find_metric(rows, "bandwidth")
    assert "broadcast fp32, best busbw GB/s" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="is not a figure"):
        find_metric(rows, "speed")


def archives(folder: Path, seconds: tuple[float, ...]) -> list[Archive]:
    return [
        Archive.open(sealed_run(folder / str(number), name=f"x-2-r{number}", seconds=each, seed=number))
        for number, each in enumerate(seconds)
    ]


def test_archives_of_repeats_from_end_to_end(tmp_path: Path) -> None:
    base = archives(tmp_path / "base", (100.0, 101.0, 99.0, 100.5))
    slow = archives(tmp_path / "slow", (119.0, 120.0, 121.0, 120.5))
    noisy = archives(tmp_path / "noisy", (90.0, 140.0, 100.0, 120.0))
    assert check_gate(compare(base, slow), 1.1).verdict is Verdict.FAILED
    assert check_gate(compare(base, slow), 1.3).verdict is Verdict.PASSED
    assert check_gate(compare(base, noisy), 1.1).verdict is Verdict.CANNOT_TELL
    throughput = check_gate(compare(base, slow), 1.1, "throughput")
    assert (throughput.verdict, throughput.direction) == (Verdict.FAILED, Direction.HIGHER)
    accuracy = check_gate(compare(base, slow), 1.01, "Prec@1")
    assert (accuracy.verdict, accuracy.direction) == (Verdict.PASSED, Direction.HIGHER)
    assert accuracy.to_dict()["worse"] == {"count": 4, "mean": 1.0, "low": 1.0, "high": 1.0, "confidence": 0.95}


@pytest.mark.parametrize(
    ("text", "factor"),
    [("1.2", 1.2), ("+20%", 1.2), ("-5%", 0.95), ("+0%", 1.0), ("1", 1.0), ("999999", 999999.0)],
)
def test_a_limit_is_a_factor_or_a_percentage(text: str, factor: float) -> None:
    assert parse_limit(text, "--max") == pytest.approx(factor)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (1.2, "limit 1.2× (+20 %)"),
        (1.0, "limit 1× (+0 %)"),
        (0.95, "limit 0.95× (-5 %)"),
        (10.0, "limit 10× (+900 %)"),
        (1.025, "limit 1.02× (+2.5 %)"),
    ],
)
def test_a_limit_in_words(limit: float, text: str) -> None:
    assert describe_limit(limit) == text
