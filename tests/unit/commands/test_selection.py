"""Commands on several runs: what is shown of their errors, and which exit code they end with."""

from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.commands._dashboard import _exit_code
from mlbench_cli.commands._selection import act_on_each, make_filter
from mlbench_cli.errors import MlbenchError, NotFoundError, TaskFailedError, UnreachableError, UsageError
from mlbench_cli.runs.select import Filter

RUNS: list[Any] = [SimpleNamespace(name=name) for name in ("a-1", "b-1", "c-1")]


def act(errors: dict[str, MlbenchError]) -> Any:
    def run(handle: Any) -> str:
        if handle.name in errors:
            raise errors[handle.name]
        return str(handle.name)

    return run


def test_one_run_that_fails_leaves_the_others_alone(capsys: pytest.CaptureFixture[str]) -> None:
    done, worst = act_on_each(RUNS, act({"b-1": NotFoundError("It is gone.")}), is_only=False)
    assert done == ["a-1", "c-1"]
    assert isinstance(worst, NotFoundError)
    assert capsys.readouterr().err == "Warning: b-1: It is gone.\n"


def test_of_several_errors_the_one_with_the_highest_exit_code_counts() -> None:
    errors = {"a-1": UsageError("x"), "b-1": UnreachableError("y"), "c-1": TaskFailedError("z")}
    done, worst = act_on_each(RUNS, act(errors), is_only=False)
    assert (done, worst) == ([], errors["b-1"])
    assert act_on_each(RUNS, act({}), is_only=False) == (["a-1", "b-1", "c-1"], None)


def test_the_error_of_the_only_run_is_the_error_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotFoundError, match="gone"):
        act_on_each(RUNS[:1], act({"a-1": NotFoundError("It is gone.")}), is_only=True)
    assert capsys.readouterr().err == ""


def test_options_that_are_not_given_filter_nothing() -> None:
    assert make_filter(None, None, None) == make_filter([], [], None, None) == Filter()
    assert make_filter(["failed"], ["mnist"], "7d") == Filter(("failed",), ("mnist",), 7 * 86400.0)
    with pytest.raises(UsageError, match="--older-than"):
        make_filter(None, None, "long")
    with pytest.raises(UsageError, match='Did you mean "failed"'):
        make_filter(["faild"], None, None)


def test_ages_of_new_runs_are_counted_from_now() -> None:
    assert make_filter(None, None, None, "2d").newer_than == pytest.approx(2 * 86400.0, abs=60)
    assert make_filter(None, None, None, "2999-01-01T00:00:00Z").newer_than == 0.0


@pytest.mark.parametrize(
    ("state", "outcome", "require_goal", "code"),
    [
        ("finished", "goal_reached", True, 0),
        ("finished", "completed", False, 0),
        ("finished", "goal_missed", False, 0),
        ("finished", "goal_missed", True, 7),
        ("finished", "failed", False, 7),
        ("finished", "cancelled", False, 7),  # stopped by somebody else
        ("finished", "deadline", False, 124),
        ("damaged", "goal_reached", False, 8),
        ("finished", None, False, 8),
    ],
)
def test_waiting_for_a_run_of_a_dashboard_ends_with_its_exit_code(
    state: str, outcome: str | None, require_goal: bool, code: int
) -> None:
    assert _exit_code({"state": state, "outcome": outcome}, require_goal) == code
