"""ImageNet's task on small folders and real ranks: to its goal, from files, for throughput, interrupted, misused."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from tests.contract.task_images.cifar10_resnet20.test_cifar_runs import finished_result, losses
from tests.contract.task_images.ranks import Ended, Parameters, RankServer
from tests.unit.task_images.imagenet_resnet.imagenet_files import PER_CLASS, write_folders

TASK = "imagenet_resnet"
# Two steps an epoch of the narrowest model.
SMALL: Parameters = {
    "training_images": 30,
    "validation_images": 12,
    "batch_size": 8,
    "width": 0.125,
    "goal_full": 100.0,
}


def run(
    ranks: RankServer,
    folder: Path,
    size: int = 2,
    preset: str = "tiny",
    method: Parameters | None = None,
    **changes: Any,
) -> list[Ended]:
    folder.mkdir(exist_ok=True)
    given = {"MLBENCH_DATA_DIR": str(folder.parent / "data"), "MLBENCH_METHOD": json.dumps(method) if method else ""}
    return ranks.run(f"task_images.run {TASK}", size, folder, load_task(TASK).resolve(preset) | changes, **given)


@pytest.mark.nightly
def test_tiny_reaches_its_goal(ranks: RankServer, tmp_path: Path) -> None:
    ended = run(ranks, tmp_path / "run")
    result = finished_result(ended)
    assert result["outcome"] == "goal_reached"
    assert result["goal"]["value"] >= 80.0
    assert result["synthetic"] is True
    assert "generated" in result["data"]
    assert result["samples"] == 256 * result["epochs"]
    assert result["details"]["options"]["loaders"] == 1
    assert result["details"]["decoding"] == "draft"
    assert 0 <= result["details"]["throughput"]["data_wait_share"] < 1
    # Four classes have no five best.
    assert "Prec@5" not in result["details"]["curve"][0]


@pytest.mark.slow
def test_folders_are_trained_on_however_reduced(ranks: RankServer, tmp_path: Path) -> None:
    """The last of two steps of an epoch has 2 images for one rank and 1 for the other."""
    write_folders(tmp_path / "data")
    same = SMALL | {"data": "imagenet", "classes": 3, "batch_size": 3, "epochs": 3, "norm": "group"}
    same["learning_rate"] = 0.02
    flat = finished_result(run(ranks, tmp_path / "flat", method={"name": "bsp"}, **same))
    assert flat["synthetic"] is False
    assert flat["details"]["images"] == [3 * PER_CLASS, 6]
    assert flat["data_identity"]["official"] is False
    ddp = finished_result(run(ranks, tmp_path / "ddp", method={"name": "ddp", "bucket": "50kB"}, **same, loaders=2))
    assert losses(ddp) == pytest.approx(losses(flat), rel=1e-3)
    assert ddp["details"]["communication"]["messages"] > flat["details"]["communication"]["messages"]


def test_fake_data_measure_throughput_and_nothing_else(ranks: RankServer, tmp_path: Path) -> None:
    small: Parameters = {
        "model": "resnet18",
        "width": 0.125,
        "side": 32,
        "classes": 10,
        "batch_size": 2,
        "steps": 2,
        "blocks_after": 1,
        "blocks": 3,
        "block_updates": 2,
    }
    ended = run(ranks, tmp_path / "run", preset="throughput", **small)
    result = finished_result(ended)
    assert (result["outcome"], result["goal"]) == ("completed", None)
    assert result["synthetic"] is True
    assert "no files and no decoding" in result["data"]
    assert (result["updates"], result["samples"]) == (6, 24)
    details = result["details"]
    measured = details["throughput_protocol"]
    assert (measured["unit"], measured["per_update"], len(measured["rates"])) == ("images", 4, 3)
    assert ended[0].metric("images_per_second") == [measured["summary"]["mean"]]
    assert details["flops_per_update"] > 1e6
    assert 0 < details["mfu_of_measured_peak"] < 1
    assert not ended[0].metric("val_global_Prec@1")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"data": "imagenet"}, 78, "ImageNet is missing"),
        ({"validation_images": 3}, 64, "too few for 4 classes"),
        ({"training_images": 18}, 64, "a rank has 1 image in a step"),
        ({"learning_rate": 1e30, "goal_full": 0.0}, 1, "training has diverged"),
    ],
)
def test_bad_input_is_told_in_two_lines(
    ranks: RankServer, tmp_path: Path, changes: dict[str, Any], code: int, words: str
) -> None:
    for one in run(ranks, tmp_path / "run", **SMALL | changes):
        assert (one.code, one.stderr.count("\n")) == (code, 2), one.stderr
        assert words in one.stderr
        assert not one.events("result")
