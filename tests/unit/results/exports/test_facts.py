"""What every export says of a run, and what it leaves out."""

import math

import pytest

from mlbench_cli.results.analysis.tables import MetricPoint, ResourceSample
from mlbench_cli.results.exports.facts import MAX_TEXT, count_steps, describe_settings, list_values, summarize_result
from mlbench_cli.results.exports.mllog import MlLogLine, list_missing


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
