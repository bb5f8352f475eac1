"""`mlbench gate`: the interval decides, in the direction of the figure."""

import math

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.compare import Comparison, Obstacle, Row
from mlbench_cli.results.analysis.gate import Direction, decide, parse_limit
from mlbench_cli.results.analysis.sessions import Sessions
from mlbench_cli.results.analysis.stats import Ratio, Verdict

MANY = 1e9  # degrees of freedom: 1.96 standard errors on either side


def between(low: float, high: float) -> Ratio:
    """A ratio with that interval."""
    middle = (math.log(low) + math.log(high)) / 2
    return Ratio(middle, 3, (math.log(high) - middle) / 1.959964, MANY)


def comparison(found: Ratio | None, higher_is_better: bool | None = False, **changes: object) -> Comparison:
    row = Row("seconds", "s", higher_is_better, True, False, (1.0,) * 3, (1.0,) * 3, found)
    fields: dict[str, object] = {"obstacles": (), "rows": {"seconds": row}, "excluded": {}}
    sessions = Sessions((1, 1, 1), (1, 1, 1))
    return Comparison("a", "b", {}, sessions=sessions, **{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (between(1.11, 1.3), Verdict.FAILED),
        (between(1.0999, 1.3), Verdict.CANNOT_TELL),
        (between(0.8, 1.2), Verdict.CANNOT_TELL),
        (between(1.0, 1.0999), Verdict.PASSED),
        (between(0.4, 0.6), Verdict.PASSED),
        (Ratio(math.log(0.5), 1), Verdict.CANNOT_TELL),
        (Ratio(math.log(5.0), 1), Verdict.CANNOT_TELL),
        (Ratio(math.log(5.0), 3, 0.01, MANY, is_confounded=True), Verdict.CANNOT_TELL),
        (None, Verdict.CANNOT_TELL),
    ],
)
def test_the_interval_decides(found: Ratio | None, verdict: Verdict) -> None:
    assert decide(comparison(found), 1.1).verdict is verdict


def test_a_figure_of_unknown_direction_must_say_it() -> None:
    unknown = comparison(between(0.9, 1.1), higher_is_better=None)
    with pytest.raises(UsageError, match="It is unknown whether lower or higher is better"):
        decide(unknown, 1.1)
    assert decide(unknown, 1.2, None, Direction.LOWER).verdict is Verdict.PASSED


def test_obstacles_leave_nothing_to_tell_and_failed_runs_fail() -> None:
    obstacle = Obstacle("machine", "The machines differ: x and y.")
    found = decide(comparison(between(0.4, 0.6), obstacles=(obstacle,)), 1.1)
    assert found.verdict is Verdict.CANNOT_TELL
    assert "The machines differ: x and y. Accept it with --across machine." in found.reason
    failed = comparison(between(0.4, 0.6), failed=("b-1",), excluded={"b-1": "goal missed"})
    assert decide(failed, 1.1).reason == "b-1 ended as goal missed."


@pytest.mark.parametrize(
    ("text", "factor"),
    [("1.2", 1.2), ("+20%", 1.2), ("-5%", 0.95), ("+0%", 1.0), ("+5 %", 1.05), ("1", 1.0), ("+999900%", 10000.0)],
)
def test_a_limit_is_a_factor_or_a_percentage(text: str, factor: float) -> None:
    assert parse_limit(text, "--max") == pytest.approx(factor)
