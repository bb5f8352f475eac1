"""What figures over time show: use of machines, by hand, and metrics of runs."""

import json
from pathlib import Path

import pytest

from mlbench_cli.results.analysis.tables import ResourceSample
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.figures.curves import LatestSamples, RunData, metric_charts, use_now
from tests.unit.results.runs import event, sealed_run


def test_counters_become_rates_and_both_directions_are_added() -> None:
    counted = {"cpu_seconds": 3.0, "received_bytes": 4e6, "sent_bytes": 2e6, "read_bytes": 1e6, "write_bytes": 1e6}
    before = ResourceSample("r", 0, 100.0, **dict.fromkeys(counted, 0.0), rss_bytes=1.0)
    after = ResourceSample("r", 0, 102.0, **counted, rss_bytes=3 * 2.0**30, gpu_percent=40.0)
    [(rank, found)] = use_now(LatestSamples.of("r", [before, after])).items()
    assert rank == 0
    assert found == pytest.approx({"cpu": 1.5, "network": 3.0, "disk": 1.0, "memory": 3.0, "gpu": 40.0})


def test_the_curve_of_a_metric_is_that_of_rank_0(tmp_path: Path) -> None:
    made = sealed_run(tmp_path / "run")
    assert {json.loads(line)["rank"] for line in (made / "metrics.jsonl").read_text().splitlines()} == {0, 1}
    data = RunData(Archive.open(made))
    assert [point.rank for point in data.curves["train_loss"]] == [0, 0, 0]


def test_runs_with_different_targets_have_no_common_one(tmp_path: Path) -> None:
    runs = [
        RunData(Archive.open(sealed_run(tmp_path / name, name=name, details={"target_loss": target})))
        for name, target in (("a", 0.5), ("b", 0.25))
    ]
    names = [[row["series"] for chart in metric_charts(some, "") for row in chart.rows] for some in (runs[:1], runs)]
    assert ["target: 0.5" in found for found in names] == [True, False]
    assert not any("target: 0.25" in found for found in names)


def test_seconds_of_a_metric_without_them_begin_with_the_training(tmp_path: Path) -> None:
    lines = [event("metric", at=at, name="speed", value=at) for at in (10.5, 20.5)]
    data = RunData(Archive.open(sealed_run(tmp_path / "run", lines=lines)))
    [chart] = [chart for chart in metric_charts([data], "") if chart.title == "Speed"]
    assert [row["x"] for row in chart.rows] == pytest.approx([10.0, 20.0])  # the training began at 0.5
