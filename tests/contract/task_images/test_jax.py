"""The backend jax in real processes. Most is skipped if JAX is not installed: pip install -e '.[jax]'."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from tests.contract.task_images.ranks import RankServer, launch_within

HAS_JAX = importlib.util.find_spec("jax") is not None
SECONDS = 250.0
TRAINING_SECONDS = 900.0  # XLA compiles for seconds, several times as long on a machine that is busy
BACKEND = {"MLBENCH_BACKEND": "jax"}
SIZES = [1, pytest.param(2, marks=pytest.mark.nightly)]
with_jax = pytest.mark.skipif(not HAS_JAX, reason="JAX, 0.4 GB, is not installed (extra: jax)")


@pytest.mark.skipif(HAS_JAX, reason="JAX is installed here")
def test_without_jax_it_says_how_to_get_it(ranks: RankServer, tmp_path: Path) -> None:
    (ended,) = ranks.run(
        "task_images.allreduce", 1, tmp_path, load_task("allreduce").resolve("tiny", {}), MLBENCH_BACKEND="jax"
    )
    assert ended.code == 78
    assert "pip install '.[jax]'" in ended.stderr


@with_jax
@pytest.mark.parametrize("size", SIZES)
def test_what_jax_has_is_measured_and_checked_like_all_others(tmp_path: Path, size: int) -> None:
    changes = {"collectives": "all", "dtypes": "all", "places": "all", "sizes": "100B,10KB", "samples": 3}
    parameters = load_task("allreduce").resolve("tiny", {**changes, "seconds_total": 0.0})
    ended = launch_within(SECONDS, "task_images.allreduce", size, tmp_path, parameters, BACKEND)
    assert [one.code for one in ended] == [0] * size, ended[0].stderr
    environment, result = ended[0].events("environment")[0], ended[0].result
    assert (environment["framework"], environment["backend"]) == ("jax", "jax")
    found = [(one["collective"], one["place"]) for one in result["details"]["series"] if one["sizes"] == 2]
    wanted = [("all_reduce", "in_place")]
    wanted += [(name, "out_of_place") for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")]
    assert sorted(found) == sorted(4 * wanted)  # each with four data types
    document = json.loads((tmp_path / "output-0/results/collectives.json").read_text())
    assert len(document["rows"]) == 2 * len(found)
    refused = {one["why"] for one in document["not_supported"]}
    assert any("only out of place" in why for why in refused)


@with_jax
def test_a_wrong_sum_is_noticed(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong_jax.py"
    wrong.write_text(
        "from task_images.harness.jax_ranks import JaxRanks; from task_images.allreduce.task import main\n"
        "from task_images.harness.entry import run\n"
        "JaxRanks.collective = lambda self, name, donate: lambda array: array + 0\n"
        "run(main)\n"
    )
    parameters = load_task("allreduce").resolve("tiny", {"dtypes": "fp32"})
    paths = {**BACKEND, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    ended = launch_within(SECONDS, "wrong_jax", 2, tmp_path, parameters, paths)
    assert [one.code for one in ended] == [70, 70]
    assert "wrong result" in ended[0].stderr


@with_jax
@pytest.mark.timeout(2 * TRAINING_SECONDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("digits_resnet", {"epochs": 2, "goal_full": 100.0, "batch_size": 50}),  # the last update has smaller batches
        ("gpt_pretraining", {"steps": 40, "evaluate_every": 20, "goal_full": 0.5, "micro_batch": 8}),
    ],
)
def test_a_training_in_jax_has_the_curve_of_the_same_training_in_torch(
    tmp_path: Path, task: str, changes: dict[str, Any], size: int
) -> None:
    parameters = load_task(task).resolve("tiny", changes)
    curves = {}
    for backend in ("gloo", "jax"):
        folder = tmp_path / backend
        folder.mkdir()
        ended = launch_within(
            TRAINING_SECONDS, f"task_images.{task}", size, folder, parameters, {"MLBENCH_BACKEND": backend}
        )
        assert [one.code for one in ended] == [0] * size, ended[0].stderr
        curves[backend] = ended[0].result["details"]["curve"]
    assert len(curves["gloo"]) == 2
    for one, other in zip(curves["gloo"], curves["jax"], strict=True):
        for name in {"train_loss", "loss", "Prec@1", "train_Prec@1"} & one.keys():
            assert other[name] == pytest.approx(one[name], rel=1e-3), name


@with_jax
@pytest.mark.parametrize(
    ("task", "changes", "what"),
    [
        ("gpt_pretraining", {"documents": "separate"}, "does not have documents=separate"),
        ("gpt_pretraining", {"precision": "bf16"}, "cannot compute in bf16"),
    ],
)
def test_what_only_torch_does_is_refused(tmp_path: Path, task: str, changes: dict[str, Any], what: str) -> None:
    parameters = load_task(task).resolve("tiny", changes)
    (ended,) = launch_within(SECONDS, f"task_images.{task}", 1, tmp_path, parameters, BACKEND)
    assert ended.code == 64
    assert what in ended.stderr
