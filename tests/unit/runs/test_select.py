"""Which runs a filter keeps: by state, outcome, task and age."""

from pathlib import Path

import pytest

from mlbench_cli.model.run import Outcome, Run, RunRow, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.select import Filter

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
        (Filter(("running",)), a_row(RunState.QUEUED), False),
        (Filter(("pending",)), a_row(RunState.QUEUED), True),
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
