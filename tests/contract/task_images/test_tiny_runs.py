"""Each task's preset `tiny` on two ranks: real processes, a real gloo group, and the events that come out."""

import bz2
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.contract import CATEGORIES, MIXED_CATEGORIES
from tests.contract.task_images.ranks import Ended, RankServer


def run_tiny(ranks: RankServer, task: str, folder: Path, preset: str = "tiny", **changes: Any) -> list[Ended]:
    ended = ranks.run(f"task_images.run {task}", 2, folder, load_task(task).resolve(preset) | changes)
    assert [(one.code, one.stderr) for one in ended] == [(0, "")] * 2
    return ended


def check_times(result: dict[str, Any]) -> None:
    timings, wall = result["timings"], result["wall_seconds"]
    mixed = {*CATEGORIES, MIXED_CATEGORIES["backward"]} - {"backward", "communication"}  # DDP sends during backward
    assert set(timings) in (set(CATEGORIES), mixed)
    assert sum(times["rank0"] for times in timings.values()) == pytest.approx(wall, rel=0.01)
    # The other rank was in the same training, but its clock begins when it is ready.
    assert sum(times["mean"] for times in timings.values()) == pytest.approx(wall, rel=0.5)
    assert all(times["min"] <= times["mean"] <= times["max"] for times in timings.values())
    assert 0 <= result["training_seconds"] <= wall


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mnist", "wikitext2_awd_lstm", "wmt16_gnmt", "wmt17_transformer"])
def test_tiny_reaches_its_light_goal_on_two_ranks(ranks: RankServer, tmp_path: Path, name: str) -> None:
    task = load_task(name)
    ended = ranks.run(f"task_images.run {name}", 2, tmp_path, task.resolve("tiny"), MLBENCH_GOAL="light")
    assert [one.code for one in ended] == [0, 0], ended[0].stderr[-2000:] + ended[1].stderr[-2000:]
    result = ended[0].result
    check_times(result)
    assert (result["outcome"], result["goal"]["kind"]) == ("goal_reached", "light")
    assert task.goal is not None
    assert result["goal"]["metric"] == task.goal.metric


@pytest.mark.parametrize(
    ("task", "synthetic"),
    [("epsilon_logistic_regression", True), pytest.param("digits_resnet", False, marks=pytest.mark.nightly)],
)
def test_a_classification_reaches_its_goal_on_two_ranks(
    ranks: RankServer, tmp_path: Path, task: str, synthetic: bool
) -> None:
    first, second = run_tiny(ranks, task, tmp_path)
    parameters = load_task(task).resolve("tiny")
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
    assert len(first.metric("learning_rate")) == len(first.metric("train_loss"))
    assert all(rate > 0 for rate in first.metric("learning_rate"))
    assert len(first.metric("train_Prec@1")) == result["epochs"]
    assert all(0 <= value <= 100 for value in first.metric("train_Prec@1"))
    assert not second.events("result")
    assert not second.events("metric")
    assert [one.events("environment")[0]["threads"] for one in (first, second)] == [1, 1]
    phases = [event["phase"] for event in first.events("phase")]
    assert phases[0] == "loading"
    assert phases[-1] == "finished"
    assert {"training", "validation"} < set(phases)


def test_the_light_goal_stops_earlier(ranks: RankServer, tmp_path: Path) -> None:
    parameters = load_task("epsilon_logistic_regression").resolve("tiny")
    [ended] = ranks.run("task_images.run epsilon_logistic_regression", 1, tmp_path, parameters, MLBENCH_GOAL="light")
    assert ended.code == 0
    assert ended.result["goal"]["kind"] == "light"
    assert ended.result["goal"]["threshold"] == parameters["goal_light"]
    assert list(ended.result["details"]["goals"]) == ["light"]


@pytest.mark.slow
@pytest.mark.parametrize("goal_on", ["training", "validation"])
def test_a_goal_is_on_training_or_validation_samples_and_both_are_reported(
    ranks: RankServer, tmp_path: Path, goal_on: str
) -> None:
    first, _ = run_tiny(ranks, "epsilon_logistic_regression", tmp_path, goal_on=goal_on, goal_full=70.0)
    goal, curve = first.result["goal"], first.result["details"]["curve"]
    name = {"training": "train_Prec@1", "validation": "Prec@1"}[goal_on]
    assert goal["metric"] == name
    assert goal["value"] == curve[-1][name] >= goal["threshold"]
    assert first.metric("train_Prec@1") == [point["train_Prec@1"] for point in curve]
    assert first.metric("val_global_Prec@1") == [point["Prec@1"] for point in curve]
    assert all(point[name] < goal["threshold"] for point in curve[:-1])


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
        text = "".join(f"{line}\n" for line in lines).encode()
        (folder / name).write_bytes(bz2.compress(text) if name.endswith(".bz2") else text)

    parameters = load_task("epsilon_logistic_regression").resolve("spec", {"epochs": 5})
    data = str(tmp_path / "data")
    first, second = ranks.run(
        "task_images.run epsilon_logistic_regression", 2, tmp_path, parameters, MLBENCH_DATA_DIR=data
    )

    assert [(one.code, one.stderr) for one in (first, second)] == [(0, "")] * 2
    assert first.result["synthetic"] is False
    assert first.result["data"] == "epsilon"
    assert first.result["details"]["rows"] == [400, 100]
    assert first.result["details"]["target_loss"] == 0.2828  # of the original's figure of these data
    assert first.result["outcome"] == "goal_reached"  # the first feature tells the label
