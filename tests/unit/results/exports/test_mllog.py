"""MLPerf's lines of a run, in order and as wholes. mlperf-logging's compliance checker demands their order."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli import __version__
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.exports.mllog import DEMANDED, MlLogLine, Submitter, list_missing, make_lines

BEGIN = 1767225600  # 2026-01-01T00:00:00Z
GOAL: dict[str, Any] = {"metric": "Prec@1", "reached": True, "seconds": {"wall": 30.0, "training": 20.0}}


def phase(at: float, name: str, epoch: Any = 0, rank: int = 0) -> dict[str, Any]:
    return {"event": "phase", "rank": rank, "time": BEGIN + at, "phase": name, "epoch": epoch}


def row(second: int, value: Any, name: str = "val_Prec@1", rank: int = 0, epoch: Any = 0) -> dict[str, Any]:
    return {"time": f"2026-01-01T00:00:{second:02}Z", "rank": rank, "name": name, "value": value, "epoch": epoch}


PHASES = [
    *(phase(1, "loading"), phase(10, "training"), phase(15, "training"), phase(20, "validation")),
    *(phase(25, "training", 1), phase(35, "validation", 1), phase(38, "training", 2, rank=1)),
]


def archive(
    phases: list[dict[str, Any]] | None = None,
    rows: list[dict[str, Any]] | None = None,
    parameters: dict[str, Any] | None = None,
    **result: Any,
) -> Archive:
    facts: dict[str, Any] = {
        "task": "mine",
        "started": "2026-01-01T00:00:00Z",
        "cluster": "c",
        "workers": 2,
        "device": "cpu",
        "world_size": 4,
        "details": {},
        "data_identity": None,
        "goal": None,
        "outcome": "completed",
        "task_seconds": {"wall": 40.0},
    }
    return cast(
        Archive,
        SimpleNamespace(
            run={
                "created": "2026-01-01T00:00:02Z",
                "spec": {"task": "mine", "seed": 7, "parameters": {} if parameters is None else parameters},
            },
            result={**facts, **result},
            events=lambda rank: iter([*(PHASES if phases is None else phases), {"event": "metric", "rank": 0}]),
            metrics=lambda: iter(rows or []),
        ),
    )


def lines(found: Archive, **submitter: str) -> list[tuple[float, str, Any]]:
    """Seconds since the start of the run, key and value of each line."""
    return [(line.time_ms / 1e3 - BEGIN, line.key, line.value) for line in make_lines(found, Submitter(**submitter))]


def training(found: Archive) -> list[tuple[float, str, Any]]:
    """(seconds, key, metadata) of the lines from the start of the training on."""
    every = [(line.time_ms / 1e3 - BEGIN, line.key, line.metadata) for line in make_lines(found, Submitter())]
    return every[[key for _, key, _ in every].index("init_stop") :]


def test_a_run_begins_with_who_submitted_what() -> None:
    parameters = {"batch_size": 32, "learning_rate": 0.1, "momentum": 0.9, "weight_decay": "none"}
    counts = {"counts": {"Train": 50000, "test": 10000, "other": 1}}
    found = lines(archive(parameters=parameters, data_identity=counts))
    assert found[: found.index((0.0, "init_start", None)) + 1] == [
        (0.0, "submission_benchmark", "mine"),
        (0.0, "submission_org", "none"),
        (0.0, "submission_division", "open"),
        (0.0, "submission_status", "research"),
        (0.0, "submission_platform", "c, 2 x cpu"),
        (0.0, "mlbench_version", __version__),
        (0.0, "seed", 7),
        (0.0, "global_batch_size", 128),
        (0.0, "train_samples", 50000),
        (0.0, "eval_samples", 10000),
        (0.0, "opt_base_learning_rate", 0.1),
        (0.0, "opt_momentum", 0.9),
        (0.0, "cache_clear", False),
        (0.0, "init_start", None),
    ]
    named = lines(archive(started=None), organization="me", platform="box", status="cloud")
    assert {(key, value) for _, key, value in named if key.startswith("submission")} == {
        *(("submission_benchmark", "mine"), ("submission_org", "me"), ("submission_division", "open")),
        *(("submission_status", "cloud"), ("submission_platform", "box")),
    }
    assert named[0][0] == 2.0  # it never started: the moment that it was recorded


@pytest.mark.parametrize(
    ("task", "benchmark"), [("imagenet_resnet", "resnet"), ("wmt16_gnmt", "gnmt"), ("wmt17_transformer", "transformer")]
)
def test_tasks_after_mlperfs_benchmarks_have_their_names(task: str, benchmark: str) -> None:
    assert lines(archive(task=task))[0][2] == benchmark


@pytest.mark.parametrize(
    ("details", "parameters", "size"),
    [
        ({"global_batch": 96}, {"batch_size": 32}, 96),
        ({"global_batch": 0}, {"batch_size": 32}, 128),
        ({}, {"batch_size": "auto"}, None),
        ({}, {}, None),
    ],
)
def test_the_batch_size_is_the_tasks_own_or_that_of_all_ranks(
    details: dict[str, Any], parameters: dict[str, Any], size: int | None
) -> None:
    found = {key: value for _, key, value in lines(archive(parameters=parameters, details=details))}
    assert found.get("global_batch_size") == size


def test_epochs_and_evaluations_alternate_until_the_end() -> None:
    assert training(archive()) == [
        (10.0, "init_stop", None),
        (10.0, "run_start", None),
        (10.0, "epoch_start", {"epoch_num": 0}),
        (20.0, "epoch_stop", {"epoch_num": 0}),
        (20.0, "eval_start", {"epoch_num": 0}),
        (25.0, "eval_stop", {"epoch_num": 0}),
        (25.0, "epoch_start", {"epoch_num": 1}),
        (35.0, "epoch_stop", {"epoch_num": 1}),
        (35.0, "eval_start", {"epoch_num": 1}),
        (50.0, "eval_stop", {"epoch_num": 1}),
        (50.0, "run_stop", {"status": "aborted"}),
    ]


def test_the_clock_stops_at_the_goal() -> None:
    """30 s after the start at 10 s: what follows is not part of the run."""
    rows = [row(24, 40.0), row(39, 81.0, epoch=1), row(39, 3.0, "val_loss"), row(24, 5.0, rank=1)]
    found = training(archive(rows=rows, goal=GOAL, outcome="goal_reached"))
    assert [entry for entry in found if entry[1] == "eval_accuracy"] == [
        (24.0, "eval_accuracy", {"epoch_num": 0}),
        (39.0, "eval_accuracy", {"epoch_num": 1}),
    ]
    assert found[-1] == (40.0, "run_stop", {"status": "success"})
    values = [value for _, key, value in lines(archive(rows=rows, goal=GOAL)) if key == "eval_accuracy"]
    assert values == [0.4, 0.81]
    late = training(archive(rows=[row(45, 81.0)], goal=GOAL))
    assert late[-1][0] == 45.0  # the metric that showed it was reported later


@pytest.mark.parametrize(
    ("change", "end"),
    [
        ({"goal": {**GOAL, "reached": False}}, 50.0),
        ({"goal": {**GOAL, "seconds": None}}, 50.0),
        ({"goal": {**GOAL, "seconds": {"wall": None}}}, 50.0),
        ({"task_seconds": {"wall": None}}, 35.0),  # the last that is known
    ],
)
def test_without_a_goal_the_clock_stops_at_the_end_of_the_training(change: dict[str, Any], end: float) -> None:
    assert training(archive(**change))[-1][:2] == (end, "run_stop")


def test_metrics_that_are_no_shares_stay_as_they_are() -> None:
    goal = {**GOAL, "metric": "bleu"}
    rows = [row(20, 24.5, "val_bleu"), row(21, "nan", "val_bleu"), row(22, 1.0, "val_bleu", epoch=None)]
    found = [value for _, key, value in lines(archive(rows=rows, goal=goal)) if key == "eval_accuracy"]
    assert found == [24.5]


def test_a_run_that_never_trained_has_no_start() -> None:
    keys = [key for _, key, _ in lines(archive(phases=[phase(1, "loading")]))]
    assert keys[-1] == "init_start"
    assert {"init_stop", "run_start", "run_stop"} <= set(list_missing(make_lines(archive(phases=[]), Submitter())))


def test_a_training_that_seems_to_start_first_starts_a_millisecond_later() -> None:
    found = training(archive(phases=[phase(-5, "training")]))
    assert round(found[0][0], 6) == 0.001


def test_a_line_has_the_form_of_mlperf_logging() -> None:
    line = MlLogLine(5, "run_stop", None, "INTERVAL_END", {"status": "success"})
    assert str(line) == (
        ':::MLLOG {"namespace": "", "time_ms": 5, "event_type": "INTERVAL_END", "key": "run_stop", "value": null, '
        '"metadata": {"file": "mlbench", "lineno": 0, "status": "success"}}'
    )
    huge = archive(task_seconds={"wall": 1e308})
    assert all(math.isfinite(line.time_ms) for line in make_lines(huge, Submitter()))


def test_what_is_demanded_and_missing_is_named_in_order() -> None:
    found = make_lines(archive(rows=[row(20, 50.0)], goal=GOAL), Submitter())
    assert list_missing(found) == ["train_samples", "eval_samples"]
    assert list_missing([]) == list(DEMANDED)


def test_starts_and_stops_are_the_ends_of_intervals() -> None:
    """https://github.com/mlcommons/logging: INTERVAL_START, INTERVAL_END and POINT_IN_TIME are the three types."""
    found = make_lines(archive(rows=[row(20, 50.0)], goal=GOAL), Submitter())
    kinds = {
        (line.key.rpartition("_")[2] in ("start", "stop"), line.key.endswith("start"), line.kind) for line in found
    }
    assert kinds == {
        (True, True, "INTERVAL_START"),
        (True, False, "INTERVAL_END"),
        (False, False, "POINT_IN_TIME"),
    }


def test_only_the_log_of_rank_0_is_read() -> None:
    asked: list[int] = []
    found = archive()
    events = found.events

    def read(rank: int | None = None) -> Any:
        asked.append(-1 if rank is None else rank)
        return events(rank)

    found.events = read  # type: ignore[method-assign]
    make_lines(found, Submitter())
    assert asked == [0]


def test_a_phase_at_the_very_end_still_counts() -> None:
    """The clock stops 40 s after the training has begun at 10 s."""
    ends = [phase(10, "training"), phase(50, "validation"), phase(50.001, "training", 1)]
    assert [entry[1] for entry in training(archive(phases=ends))] == [
        *("init_stop", "run_start", "epoch_start", "epoch_stop", "eval_start", "eval_stop", "run_stop"),
    ]


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ({"Training images": 5}, {"train_samples": 5}),
        ({"validation": 6, "test": 7}, {"eval_samples": 6}),
        ({"dev": 8}, {"eval_samples": 8}),
        ({"test": 7.0, "train": "many"}, {"eval_samples": 7}),
        ({"retrain": 5, "invalid": 6}, {}),
        (None, {}),
    ],
)
def test_numbers_of_samples_are_found_by_the_names_of_their_parts(counts: Any, found: dict[str, int]) -> None:
    every = {key: value for _, key, value in lines(archive(data_identity={"counts": counts}))}
    assert {key: value for key, value in every.items() if key.endswith("_samples")} == found
