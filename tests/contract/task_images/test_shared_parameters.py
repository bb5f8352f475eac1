"""Parameters that all training tasks share mean the same in each: nightly, each test is for the whole catalog."""

import math
from pathlib import Path

import pytest

from mlbench_cli.tasks.catalog import BUDGET, load_catalog
from tests import NIGHTLY
from tests.contract.task_images.ranks import Parameters, RankServer

# Tasks that have a goal are trained to it. TensorFlow's is tested if TensorFlow is installed.
TRAINED = [name for name, task in load_catalog().items() if task.goal and "tensorflow" not in name]
SMALL: dict[str, Parameters] = {
    "digits_resnet": {"depth": 8},
    "imagenet_resnet": {"training_images": 64, "validation_images": 16},
    "wmt16_gnmt": {"width": 8, "layers": 2, "longest_translation": 5, "beam": 1},
    "wmt17_transformer": {"width": 8, "inner": 8, "layers": 1, "heads": 1, "longest_translation": 5, "beam": 1},
    "wikitext2_awd_lstm": {"embedding": 8, "hidden": 8},
    "gpt_pretraining": {"validation_sequences": 8, "global_batch": 8},
    "bert_pretraining": {"validation_sequences": 8, "global_batch": 8},
}


# By day one training each; test_golden.py trains every task.
@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED if NIGHTLY else ["epsilon_logistic_regression"])
def test_a_budget_ends_every_training_soon_after_it(ranks: RankServer, tmp_path: Path, name: str) -> None:
    """Without end otherwise: there are epochs enough for hours, and the goal is met at once but ends nothing."""
    task = load_catalog()[name]
    assert BUDGET in task.parameters, "a task with a goal takes --budget"
    assert task.goal is not None
    easy = 1e3 if task.goal.comparison == "<=" else 0.0
    endless = {name: 100_000 for name in ("epochs", "steps") if name in task.parameters}
    changes: Parameters = {**endless, BUDGET: 1.0, "goal_full": easy, "goal_light": easy, **SMALL.get(name, {})}
    parameters = task.resolve("tiny", changes)
    environment = {"MLBENCH_DATA_DIR": str(tmp_path / "data")}
    first, second = ranks.run(f"task_images.run {name}", 2, tmp_path, parameters, **environment)
    assert [(one.code, one.stderr) for one in (first, second)] == [(0, "")] * 2
    result = first.result
    assert result["outcome"] == "budget_spent"
    assert result["budget_seconds"] == 1.0
    measured = result["details"]["measured_at_seconds"]
    assert measured == result["details"]["curve"][-1]["seconds"] >= 1.0
    assert result["goal"]["last"] == first.metric(f"val_global_{task.goal.metric}")[-1]
    # What counts up to the end is the budget, the update under way, and the last validation.
    longest = result["timings"]["validation"]["rank0"] + 10 * result["training_seconds"] / result["updates"]
    assert measured <= 1.0 + longest + 0.5
    assert math.isfinite(result["goal"]["last"])


@pytest.mark.parametrize("name", TRAINED if NIGHTLY else ["digits_resnet"])
def test_every_training_is_measured_by_the_protocol_and_names_its_options(
    ranks: RankServer, tmp_path: Path, name: str
) -> None:
    task = load_catalog()[name]
    assert task.resolve("throughput")["blocks"] == 10
    changes: Parameters = {"blocks_after": 1, "blocks": 2, "block_updates": 2, **SMALL.get(name, {})}
    environment = {"MLBENCH_DATA_DIR": str(tmp_path / "data")}
    first, second = ranks.run(f"task_images.run {name}", 2, tmp_path, task.resolve("tiny", changes), **environment)
    assert [(one.code, one.stderr) for one in (first, second)] == [(0, "")] * 2
    result, details = first.result, first.result["details"]
    assert (result["outcome"], result["goal"], result["updates"]) == ("completed", None, 4)
    measured = details["throughput_protocol"]
    assert len(measured["rates"]) == len(measured["seconds"]) == 2
    assert first.metric(f"{measured['unit']}_per_second") == [measured["summary"]["mean"]]
    assert details["peak_memory_bytes"] > 0
    assert 0 <= details["throughput"].get("data_wait_share", 0.0) < 1
    assert {"precision", "tf32", "cudnn", "compile", "fused_optimizer", "reduction"} <= set(details["options"])
    assert not [metric for metric in first.events("metric") if metric["name"].startswith("val_")]
