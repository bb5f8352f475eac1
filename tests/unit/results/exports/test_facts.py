"""What every export says of a run, and what it leaves out."""

import math
from pathlib import Path

import pytest

from mlbench_cli.results.analysis.tables import MetricPoint, ResourceSample
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.exports.facts import (
    MAX_TEXT,
    count_steps,
    describe_settings,
    list_values,
    read_facts,
    summarize_result,
)
from mlbench_cli.results.exports.mllog import MlLogLine, list_missing
from tests.unit.results.runs import START


def test_settings_have_no_variables_and_no_command() -> None:
    spec = {
        "task": "mnist",
        "workers": 2,
        "backend": "",
        "network": None,
        "env": {"TOKEN": "hush"},
        "argv": ["train", "--token", "hush"],
        "parameters": {"b": 2, "a": 1, "list": [1]},
        "method": {"name": "topk"},
    }
    found = describe_settings(spec)
    assert found == {"task": "mnist", "workers": 2, "method.name": "topk", "parameters.a": 1, "parameters.b": 2}
    assert list(found)[-2:] == ["parameters.a", "parameters.b"]


def test_a_long_setting_is_cut_to_what_a_tracker_takes() -> None:
    found = describe_settings({"task": "x" * (MAX_TEXT + 1), "goal": "y" * MAX_TEXT})
    assert (MAX_TEXT, found) == (500, {"task": "x" * 500, "goal": "y" * 500})


def test_a_summary_has_only_finite_numbers() -> None:
    result = {
        "task_seconds": {"wall": 60.0},
        "goal": {"value": None, "threshold": 80.0, "reached": False},
        "price": {"amount": math.inf},
        "timings": {"forward": {"rank0": 16.0}, "other": None},
        "samples": 51200,
        "wall_seconds": math.nan,
    }
    assert summarize_result(result) == {
        "task_seconds": 60.0,
        "goal_threshold": 80.0,
        "goal_reached": 0.0,
        "phase_seconds/forward": 16.0,
        "samples": 51200.0,
    }
    assert summarize_result({"goal": {"reached": True}}) == {"goal_reached": 1.0}
    assert summarize_result({}) == {}


def test_a_sample_has_only_what_was_measured() -> None:
    sample = ResourceSample(run="a", rank=0, time=1.0, cpu_seconds=0.0, gpu_percent=None)
    assert dict(list_values(sample))["machine/cpu_seconds"] == 0.0
    assert "machine/gpu_percent" not in dict(list_values(sample))


@pytest.mark.parametrize(
    ("steps", "counted"),
    [
        ((None, None, None), [0, 1, 2]),
        ((10, 20, None), [10, 20, 21]),
        ((10, 10, 5), [10, 11, 12]),
        ((-1, 0, 2.6), [0, 1, 3]),
    ],
)
def test_steps_of_a_tracker_always_increase(steps: tuple[float | None, ...], counted: list[int]) -> None:
    counts: dict[tuple[str, int], int] = {}
    found = [count_steps(MetricPoint("a", 1, 0, 1.0, "loss", 0.5, step=step), counts) for step in steps]
    assert found == counted
    assert count_steps(MetricPoint("a", 1, 1, 1.0, "loss", 0.5), counts) == 0  # ranks count for themselves


def test_a_line_of_mlperf_is_strict_json() -> None:
    line = str(MlLogLine(1_760_000_000_000, "eval_accuracy", 0.5, metadata={"epoch_num": 2}))
    assert line.startswith(':::MLLOG {"namespace": "", "time_ms": 1760000000000, "event_type": "POINT_IN_TIME"')
    with pytest.raises(ValueError, match="not JSON compliant"):
        str(MlLogLine(0, "x", math.nan))
    assert list_missing([MlLogLine(0, "cache_clear", False)])[:2] == ["submission_org", "submission_platform"]
    assert "cache_clear" not in list_missing([MlLogLine(0, "cache_clear", False)])


def test_all_settings_that_say_what_was_run_are_told_in_their_order() -> None:
    spec = {
        "goal": "light",
        "seed": 0,
        "task": "mnist",
        "preset": "tiny",
        "backend": "gloo",
        "device": "gpu",
        "workers": 2,
        "processes_per_worker": 8,
        "cluster": "c",
        "engine": "local",
        "cpus": 1.5,
        "network": "1gbit",
        "name": "demo-2",
        "image": "x",
        "data_dir": "/home/me",
        "method": {"sync": "every", "name": "bsp"},
        "parameters": {"flag": True, "rate": 0.1, "none": None, "text": "z" * (MAX_TEXT + 1)},
    }
    assert list(describe_settings(spec).items()) == [
        ("task", "mnist"),
        ("preset", "tiny"),
        ("backend", "gloo"),
        ("device", "gpu"),
        ("workers", 2),
        ("processes_per_worker", 8),
        ("seed", 0),
        ("goal", "light"),
        ("cluster", "c"),
        ("engine", "local"),
        ("cpus", 1.5),
        ("network", "1gbit"),
        ("method.name", "bsp"),
        ("method.sync", "every"),
        ("parameters.flag", True),
        ("parameters.rate", 0.1),
        ("parameters.text", "z" * MAX_TEXT),
    ]
    assert describe_settings({"method": None, "parameters": [1]}) == {}


def test_a_summary_has_every_figure_of_a_result() -> None:
    result = {
        "task_seconds": {"wall": 60, "training": 50.0},
        "goal": {"value": 80.5, "threshold": 80.0, "reached": True, "last": 81.0},
        "price": {"amount": 0.5, "per_hour": 2.0},
        "timings": {"forward": {"rank0": 16.0, "mean": 15.0}, "backward": {"rank0": 20}},
        "samples": 51200,
        "wall_seconds": 103.0,
        "updates": 400,
    }
    assert summarize_result(result) == {
        "task_seconds": 60.0,
        "goal_value": 80.5,
        "goal_threshold": 80.0,
        "goal_reached": 1.0,
        "price": 0.5,
        "phase_seconds/forward": 16.0,
        "phase_seconds/backward": 20.0,
        "samples": 51200.0,
        "wall_seconds": 103.0,
    }
    assert {type(value) for value in summarize_result(result).values()} == {float}


def test_facts_of_an_archive(sealed: Path) -> None:
    with Archive.open(sealed) as archive:
        facts = read_facts(archive)
        assert (facts.name, facts.id, facts.task, facts.workers) == ("run-2", archive.run["id"], "unknown-task", 2)
    assert (facts.created, facts.outcome) == (START - 1, "goal_reached")
    assert facts.config["parameters.batch_size"] == 128
    assert (facts.summary["task_seconds"], facts.summary["goal_value"]) == (100.0, 80.5)


def test_values_of_a_sample_have_one_order() -> None:
    sample = ResourceSample("a", 0, 1.0, 5.0, 4.0, 3.0, 2.0, 9.0, 9.0, 1.0, 9.0, 9.0)
    assert list(list_values(sample)) == [
        ("machine/cpu_seconds", 5.0),
        ("machine/rss_bytes", 4.0),
        ("machine/sent_bytes", 2.0),
        ("machine/received_bytes", 3.0),
        ("machine/gpu_percent", 1.0),
    ]


def test_metrics_of_a_rank_are_counted_by_name() -> None:
    counts: dict[tuple[str, int], int] = {}
    points = [MetricPoint("a", 1, 0, 1.0, name, 0.5, step=step) for name, step in (("x", 5), ("y", None), ("x", None))]
    assert [count_steps(point, counts) for point in points] == [5, 0, 6]
    assert counts == {("x", 0): 6, ("y", 0): 0}
