"""The evidence of a run: when it began and ended, what its folder and its archive hold, and its samples."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import Observation, WorkerState
from mlbench_cli.results.archive.evidence import Evidence, read_samples
from mlbench_cli.tasks.catalog import TaskRules
from mlbench_cli.util.times import MAX_SECONDS, timestamp
from tests.unit.results.runs import START, spec


def evidence(
    times: Iterable[tuple[float | None, float | None]] = (),
    nodes: Iterable[str | None] = (),
    at: float = 50.0,
    created: float = 0.0,
    rules: TaskRules | None = None,
    **changes: Any,
) -> Evidence:
    """Evidence whose workers ran at `times` (start and end), or on `nodes`; seconds after START."""
    workers = [
        WorkerState(
            rank, started=None if begin is None else START + begin, finished=None if end is None else START + end
        )
        for rank, (begin, end) in enumerate(times)
    ] + [WorkerState(rank, node=node) for rank, node in enumerate(nodes)]
    seen = Observation(START + at, tuple(workers))
    return Evidence("id", "demo-2", timestamp(START + created), spec(**changes), rules, seen, {}, lambda: (), {})


@pytest.mark.parametrize(
    ("times", "span"),
    [
        ([(2.0, 9.0), (1.0, 8.0)], (1.0, 9.0)),
        ([(2.0, None), (1.0, 8.0)], (1.0, 8.0)),  # the last one that is known to have ended
        ([(2.0, None), (None, None)], (2.0, 50.0)),  # none has: until it was last observed
        ([(None, None)], (None, 50.0)),
        ([], (None, 50.0)),
        ([(9.0, 2.0)], (9.0, 9.0)),  # the clock was set back
    ],
)
def test_a_run_lasts_from_its_first_start_to_its_last_end(
    times: list[tuple[float | None, float | None]], span: tuple[float | None, float]
) -> None:
    started, finished = evidence(times).span
    assert (None if started is None else started - START, finished - START) == span


@pytest.mark.parametrize(
    ("nodes", "functional", "is_alone"),
    [
        (["a", "b"], None, True),
        (["a", "a"], None, False),
        (["a", "b", "a"], None, False),
        ([None], None, True),
        ([None, None], None, False),
        (["a", "b"], "all nodes are one machine", False),
    ],
)
def test_workers_are_alone_on_their_nodes_if_no_two_share_one(
    nodes: list[str | None], functional: str | None, is_alone: bool
) -> None:
    assert evidence(nodes=nodes, functional_only=functional).is_alone is is_alone


# --- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "written"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (START + 0.5, "2025-10-09T08:53:20.500Z"),
        (MAX_SECONDS, "9999-12-31T23:59:59.000Z"),
        (MAX_SECONDS + 1, MAX_SECONDS + 1),  # no date
        (-1, -1),
        (True, True),
        ("2025-10-09T08:53:20.500Z", "2025-10-09T08:53:20.500Z"),
    ],
)
def test_times_of_samples_become_dates_if_they_are_some(tmp_path: Path, moment: Any, written: Any) -> None:
    (tmp_path / "x").write_text(json.dumps({"time": moment, "rank": 0}) + "\n")
    assert list(read_samples(tmp_path / "x")) == [{"time": written, "rank": 0}]
