"""Each task's preset `tiny` on two ranks: real processes, a real gloo group, and the events that come out."""

import bz2
import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlbench_cli.catalog import load_task
from task_images.contract import CATEGORIES
from tests.contract.tasks.ranks import Ended, RankServer, launch


def run_tiny(ranks: RankServer, task: str, folder: Path, preset: str = "tiny", **changes: Any) -> list[Ended]:
    ended = ranks.run(f"task_images.{task}", 2, folder, load_task(task).resolve(preset) | changes)
    assert [(one.code, one.stderr) for one in ended] == [(0, "")] * 2
    return ended


def check_times(result: dict[str, Any]) -> None:
    timings, wall = result["timings"], result["wall_seconds"]
    assert set(timings) == set(CATEGORIES)
    assert sum(times["rank0"] for times in timings.values()) == pytest.approx(wall, rel=0.01)
    assert sum(times["mean"] for times in timings.values()) == pytest.approx(wall, rel=0.05)
    assert all(times["min"] <= times["mean"] <= times["max"] for times in timings.values())
    assert 0 <= result["training_seconds"] <= wall


def test_the_digits_reach_their_goal_on_two_ranks(tmp_path: Path) -> None:
    parameters = load_task("digits_resnet").resolve("tiny")
    first, second = launch("task_images.digits_resnet", 2, tmp_path, parameters)
    assert [(one.code, one.stderr) for one in (first, second)] == [(0, "")] * 2
    check_training(first, second, parameters, synthetic=False)


def test_the_logistic_regression_reaches_its_goal_on_two_ranks(ranks: RankServer, tmp_path: Path) -> None:
    first, second = run_tiny(ranks, "epsilon_logistic_regression", tmp_path)
    check_training(first, second, load_task("epsilon_logistic_regression").resolve("tiny"), synthetic=True)


def check_training(first: Ended, second: Ended, parameters: dict[str, Any], *, synthetic: bool) -> None:
    result = first.result
    check_times(result)
    assert result["outcome"] == "goal_reached"
    assert result["goal"]["metric"] == "Prec@1"
    assert result["goal"]["value"] >= result["goal"]["threshold"] == parameters["goal_full"]
    assert result["goal"]["kind"] == "full"
    assert result["synthetic"] is synthetic
    assert set(result["details"]["goals"]) == {"light", "full"}
    light, full = (result["details"]["goals"][kind] for kind in ("light", "full"))
    assert light["wall_seconds"] <= full["wall_seconds"] == result["wall_seconds"]
    assert sum(full["seconds"].values()) == pytest.approx(full["wall_seconds"])
    assert full["updates"] == result["updates"] == result["details"]["communication"]["messages"]
    assert len(result["details"]["curve"]) == result["epochs"] == full["epoch"]
    assert first.metric("val_global_Prec@1") == [point["Prec@1"] for point in result["details"]["curve"]]
    assert all(math.isfinite(loss) for loss in first.metric("train_loss"))
    assert not second.events("result")
    assert not second.events("metric")
    assert [one.events("environment")[0]["threads"] for one in (first, second)] == [1, 1]
    phases = [event["phase"] for event in first.events("phase")]
    assert phases[0] == "loading"
    assert phases[-1] == "finished"
    assert {"training", "validation"} < set(phases)


def test_the_light_goal_stops_earlier(ranks: RankServer, tmp_path: Path) -> None:
    parameters = load_task("epsilon_logistic_regression").resolve("tiny")
    [ended] = ranks.run("task_images.epsilon_logistic_regression", 1, tmp_path, parameters, MLBENCH_GOAL="light")
    assert ended.code == 0
    assert ended.result["goal"]["kind"] == "light"
    assert ended.result["goal"]["threshold"] == parameters["goal_light"]
    assert list(ended.result["details"]["goals"]) == ["light"]


def test_the_logistic_regression_reads_real_files(ranks: RankServer, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "epsilon"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(1)
    for name, rows in (("epsilon_normalized", 400), ("epsilon_normalized.t.bz2", 100)):
        lines = []
        for number in range(rows):
            label = number % 2 * 2 - 1
            others = sorted(generator.choice(np.arange(2, 2001), 9, replace=False))
            lines.append(f"{label:+d} 1:{0.5 * label} " + " ".join(f"{index}:0.25" for index in others))
        text = "\n".join(lines).encode()
        (folder / name).write_bytes(bz2.compress(text) if name.endswith(".bz2") else text)

    parameters = load_task("epsilon_logistic_regression").resolve("spec", {"epochs": 5})
    data = str(tmp_path / "data")
    first, second = ranks.run("task_images.epsilon_logistic_regression", 2, tmp_path, parameters, MLBENCH_DATA_DIR=data)

    assert [(one.code, one.stderr) for one in (first, second)] == [(0, "")] * 2
    assert first.result["synthetic"] is False
    assert first.result["data"] == "epsilon"
    assert first.result["details"]["rows"] == [400, 100]
    assert first.result["outcome"] == "goal_reached"  # the first feature tells the label


def test_a_goal_out_of_reach_is_missed_and_told_so(ranks: RankServer, tmp_path: Path) -> None:
    first, _ = run_tiny(ranks, "epsilon_logistic_regression", tmp_path, epochs=2, goal_full=100.0, average="weights")
    assert first.result["outcome"] == "goal_missed"
    assert first.result["goal"]["value"] == max(first.metric("val_global_Prec@1"))
    assert first.result["epochs"] == 2
    assert first.result["samples"] == 2 * 2000
    check_times(first.result)


def test_allreduce_measures_checks_and_writes_every_size(ranks: RankServer, tmp_path: Path) -> None:
    first, second = run_tiny(ranks, "allreduce", tmp_path, dtypes=["fp32", "fp16", "bf16"])
    result, rows = first.result, first.result["details"]["rows"]

    check_times(result)
    assert result["outcome"] == "completed"
    assert result["goal"] is None
    assert [row["elements"] for row in rows[::3]] == [1, 10, 100, 1000, 10000, 100000]
    assert [row["dtype"] for row in rows[:3]] == ["fp32", "fp16", "bf16"]
    for row in rows:
        assert row["bytes"] == row["elements"] * (4 if row["dtype"] == "fp32" else 2)
        assert 0 < row["min_seconds"] <= row["median_seconds"] <= row["p95_seconds"] <= row["max_seconds"]
        assert row["algbw"] == pytest.approx(row["bytes"] / row["median_seconds"] / 1e9)
        assert row["busbw"] == pytest.approx(row["algbw"])  # 2 (k - 1) / k is 1 for two ranks
    assert "2 (k - 1) / k" in result["details"]["formula"]
    assert first.metric("all_reduce_fp32_median") == [row["median_seconds"] for row in rows[::3]]
    assert not second.events("result")

    written = json.loads((tmp_path / "output-0" / "allreduce.json").read_text())
    assert written["rows"] == rows
    with open(tmp_path / "output-0" / "allreduce.csv", newline="") as file:
        assert [float(row["median_seconds"]) for row in csv.DictReader(file)] == [row["median_seconds"] for row in rows]
    assert list((tmp_path / "output-1").iterdir()) == []


def test_allreduce_says_what_its_time_budget_left_out(ranks: RankServer, tmp_path: Path) -> None:
    first, _ = run_tiny(ranks, "allreduce", tmp_path, seconds_total=1e-6, seconds_per_size=1e-6, dtypes=["fp32"])
    details = first.result["details"]
    # The first size is always measured: nothing has been spent before it.
    assert len(details["rows"]) + len(details["left_out"]) == 6
    assert len(details["left_out"]) >= 5
    assert "left out" in first.stdout


def test_allreduce_as_the_original_measured_it(ranks: RankServer, tmp_path: Path) -> None:
    first, second = run_tiny(ranks, "allreduce", tmp_path, "legacy", max_exponent=1.0, count=12, samples=5)
    rows = first.result["details"]["rows"]
    sizes = [1, 1, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10]
    assert [row["elements"] for row in rows[::2]] == sizes
    for rank in (first, second):
        assert rank.metric("val_tensor_size") == [size for size in sizes for _ in "ab"]
        assert rank.metric("val_dtype") == [32, 16] * 12
        assert rank.metric("val_cuda") == [0] * 24
        assert len(rank.metric("val_avg_time")) == 24
    assert rows[0]["median_seconds"] is None
