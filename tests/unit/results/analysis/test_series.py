"""What a series takes from archives, which runs it puts together, and its table, by hand."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.analysis.figures import figures
from mlbench_cli.results.analysis.series import collect, measure
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal
from tests.unit.results.runs import event, new_run, observation_of, result_event, sealed_run, spec, training_log


def archive(path: Path, run: str = "run-2", spec: dict[str, Any] | None = None, **result: Any) -> Archive:
    """A run with the evidence of `path` and some fields of its result replaced."""
    found = Archive.open(path)
    found.run["id"] = found.run["name"] = run
    found.run["spec"].update(spec or {})
    found.result.update(result)  # type: ignore[typeddict-item]
    return found


def timings(**parts: float) -> dict[str, dict[str, float]]:
    return {name: {"min": 0.0, "mean": 99.0, "max": 99.0, "rank0": value} for name, value in parts.items()}


def wall(seconds: float | None) -> dict[str, float | None]:
    return {"wall": seconds, "training": None}


# --- one archive ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "seconds", "parts"),
    [
        ({"task_seconds": wall(10.0), "timings": timings(forward=6.0)}, 10.0, {"forward": 6.0, "other": 4.0}),
        (
            {"task_seconds": wall(10.0), "timings": timings(forward=6.0, other=3.0)},
            10.0,
            {"forward": 6.0, "other": 4.0},
        ),
        ({"task_seconds": wall(5.0), "timings": timings(forward=6.0)}, 6.0, {"forward": 6.0, "other": 0.0}),
        ({"task_seconds": wall(None), "timings": timings(forward=6.0)}, 6.0, {"forward": 6.0, "other": 0.0}),
        ({"task_seconds": wall(None), "timings": {}, "wall_seconds": 8.0}, 8.0, {}),
        ({"task_seconds": wall(None), "timings": {}, "wall_seconds": None}, 0.0, {}),
        ({"task_seconds": wall(5.0), "timings": timings(unknown=6.0)}, 5.0, {"other": 5.0}),
        ({"task_seconds": wall(1e200), "timings": {}}, 1e100, {}),
    ],
)
def test_the_parts_of_a_time_add_up_to_what_the_task_measured(
    sealed: Path, result: dict[str, Any], seconds: float, parts: dict[str, float]
) -> None:
    found = measure(archive(sealed, **result))
    known = {name: found.get(name) for name in ("forward", "other") if name in found.figures}
    assert (found.seconds, known) == (seconds, parts)


@pytest.mark.parametrize(
    ("result", "rate"),
    [
        ({"task_seconds": wall(10.0), "timings": timings(validation=2.0), "samples": 400}, 50.0),
        ({"task_seconds": wall(10.0), "timings": timings(data_wait=2.0), "samples": 400}, 40.0),
        ({"task_seconds": wall(10.0), "timings": {}, "samples": None}, None),
        ({"task_seconds": wall(10.0), "timings": {}, "samples": 0}, None),
        ({"task_seconds": wall(2.0), "timings": timings(validation=2.0), "samples": 400}, None),
        ({"task_seconds": wall(None), "timings": {}, "samples": 400}, None),
    ],
)
def test_throughput_counts_waiting_for_data_and_leaves_validation_out(
    sealed: Path, result: dict[str, Any], rate: float | None
) -> None:
    assert measure(archive(sealed, **result)).get("throughput") == rate


GOAL: dict[str, Any] = {
    "metric": "m",
    "comparison": "<=",
    "threshold": 3.0,
    "kind": "full",
    "wording": "m <= 3",
    "value": 2.9,
    "last": 2.5,
    "reached": True,
    "seconds": None,
}


@pytest.mark.parametrize(
    ("outcome", "goal", "counted", "good"),
    [
        ("goal_reached", GOAL, "goal_reached", True),
        ("goal_missed", GOAL, "goal_missed", False),
        ("budget_spent", GOAL, "budget_spent", True),
        ("completed", None, "completed", True),
        ("completed", GOAL, "goal_missed", False),
        ("failed", None, "failed", False),
        ("stopped", None, "stopped", False),
    ],
)
def test_a_run_that_did_not_prove_its_goal_has_missed_it(
    sealed: Path, outcome: str, goal: dict[str, Any] | None, counted: str, good: bool
) -> None:
    found = measure(archive(sealed, outcome=outcome, goal=goal))
    assert (found.outcome, found.good) == (counted, good)


def test_a_metric_is_what_rank_0_reported(tmp_path: Path) -> None:
    logs = {
        rank: [*training_log(rank)[:-1], event("metric", rank, 99.0, name="score", value=1.0 + rank)]
        for rank in range(2)
    }
    logs[0].append(result_event())
    run = new_run(tmp_path / "run", spec(), logs)
    write_run_document(run)
    seal(run, observation_of())
    found = figures(Archive.open(run.folder))["score"]
    assert (found.value, found.is_metric) == (1.0, True)


def test_the_parts_of_repeats_add_up_to_their_common_time(tmp_path: Path) -> None:
    repeats = [
        Archive.open(sealed_run(tmp_path / f"{seconds}", seconds=seconds, seed=int(seconds)))
        for seconds in (10.0, 40.0)
    ]
    (group,) = collect(repeats).groups
    (point,) = group.points
    assert point.seconds.mean == pytest.approx(20.0)  # the geometric mean
    assert sum(point.parts.values()) == pytest.approx(20.0)
