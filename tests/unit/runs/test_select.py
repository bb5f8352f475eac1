"""Which runs a filter keeps: by state, outcome, task and age."""

from pathlib import Path

import pytest

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import Outcome, Run, RunRow, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.select import Filter, find, one_run, select
from mlbench_cli.storage.store import Store

MOMENT = 1_800_000_000.0
CREATED = "2027-01-15T07:58:20.000Z"  # 100 seconds before


def a_spec(name: str = "x-1", task: str = "mnist", seed: int = 42) -> RunSpec:
    return RunSpec(name, "local", "local", task, "tiny", ("true",), "gloo", 1, seed=seed)


def a_row(state: RunState, outcome: Outcome | None = None) -> RunRow:
    return RunRow(Run("abc", a_spec(), Path("/nowhere"), CREATED), state, outcome)


@pytest.mark.parametrize(
    ("chosen", "row", "is_kept"),
    [
        (Filter(), a_row(RunState.RUNNING), True),
        (Filter(("running",)), a_row(RunState.RUNNING), True),
        (Filter(("running",)), a_row(RunState.CREATED), False),
        (Filter(("pending",)), a_row(RunState.CREATED), True),
        (Filter(("failed", "lost")), a_row(RunState.FINISHED, Outcome.LOST), True),
        (Filter(("failed",)), a_row(RunState.FINISHED, Outcome.LOST), False),
        (Filter(("finished",)), a_row(RunState.FINISHED, Outcome.LOST), True),
        (Filter(tasks=("mnist", "other")), a_row(RunState.RUNNING), True),
        (Filter(tasks=("other",)), a_row(RunState.RUNNING), False),
        (Filter(("running",), ("other",)), a_row(RunState.RUNNING), False),
        (Filter(older_than=100.0), a_row(RunState.RUNNING), True),
        (Filter(older_than=100.1), a_row(RunState.RUNNING), False),
        (Filter(newer_than=100.0), a_row(RunState.RUNNING), True),
        (Filter(newer_than=99.9), a_row(RunState.RUNNING), False),
        (Filter(older_than=50.0, newer_than=150.0), a_row(RunState.RUNNING), True),
        (Filter(older_than=150.0, newer_than=200.0), a_row(RunState.RUNNING), False),
        (Filter(older_than=0.0), a_row(RunState.RUNNING), True),
    ],
)
def test_what_a_filter_keeps(chosen: Filter, row: RunRow, is_kept: bool) -> None:
    assert chosen.keeps(row, MOMENT) is is_kept


def test_only_a_filter_that_says_something_is_one() -> None:
    assert not Filter()
    for chosen in (Filter(("running",)), Filter(tasks=("x",)), Filter(older_than=0.0), Filter(newer_than=0.0)):
        assert chosen


def test_an_unknown_state_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=r'--state "runing": no such state or outcome\. Did you mean "running"'
    ) as caught:
        Filter(("runing",))
    assert str(caught.value.hint).startswith("pending, created, running, finished, goal_reached")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    for name, seed in (("x-1", 1), ("y-2-r1", 1), ("y-2-r2", 2)):
        store.record_run(a_spec(name, seed=seed))
    return store


def test_names_are_those_of_runs_or_of_repeats(store: Store) -> None:
    assert select(store, ["y-2-r2", "x-1", "y-2-r2"]).names == ["y-2-r2", "x-1"]
    assert sorted(select(store, ["y-2"]).names) == ["y-2-r1", "y-2-r2"]
    assert sorted(select(store, all_runs=True).names) == ["x-1", "y-2-r1", "y-2-r2"]
    assert sorted(select(store, filter=Filter(("pending",))).names) == ["x-1", "y-2-r1", "y-2-r2"]
    assert select(store, ["x-1"], filter=Filter(("running",))).names == []
    assert one_run(store, "x-1").run.name == "x-1"


def test_a_command_says_which_runs_it_is_about(store: Store) -> None:
    with pytest.raises(UsageError, match="No run given"):
        select(store)
    with pytest.raises(UsageError, match="--all selects every run"):
        select(store, ["x-1"], all_runs=True)
    with pytest.raises(UsageError, match='The name "y-2" stands for 2 runs') as caught:
        one_run(store, "y-2")
    assert caught.value.hint in ("Name one of them: y-2-r1", "Name one of them: y-2-r2")
    with pytest.raises(NotFoundError, match=r'no run or experiment "y-3"\. Did you mean "y-2"'):
        find(store, "y-3")
