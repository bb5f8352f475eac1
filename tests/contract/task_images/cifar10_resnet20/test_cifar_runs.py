"""The image classification on two ranks: to the goal, however reduced, interrupted, in a budget, with bad input."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from tests.contract.task_images.ranks import Ended, Parameters, RankServer
from tests.contract.task_images.test_tiny_runs import check_times
from tests.unit.task_images.cifar10_resnet20.cifar_files import binary_files, unpack

TASK = "cifar10_resnet20"
# Two steps an epoch of the smallest model.
SMALL: Parameters = {
    "training_images": 64,
    "validation_images": 40,
    "batch_size": 16,
    "goal_full": 100.0,
    "goal_light": 100.0,
}


def run(
    ranks: RankServer,
    folder: Path,
    task: str = TASK,
    size: int = 2,
    environment: dict[str, str] | None = None,
    **changes: Any,
) -> list[Ended]:
    folder.mkdir(exist_ok=True)
    parameters = load_task(task).resolve("tiny") | changes
    return ranks.run(f"task_images.run {task}", size, folder, parameters, **(environment or {}))


def finished_result(ended: list[Ended]) -> dict[str, Any]:
    assert [(one.code, one.stderr) for one in ended] == [(0, "")] * len(ended)
    check_times(ended[0].result)
    return ended[0].result


def losses(result: dict[str, Any]) -> list[float]:
    return [point["train_loss"] for point in result["details"]["curve"]]


# The training of the preset, and by day a goal that any training reaches; the digits learn by the same loop.
EASY = SMALL | {"goal_full": 0.0, "goal_light": 0.0}


@pytest.mark.parametrize(
    ("changes", "images", "steps"), [(EASY, 64, 2), pytest.param({}, 600, 10, marks=pytest.mark.nightly)]
)
def test_tiny_reaches_its_goal(ranks: RankServer, tmp_path: Path, changes: Parameters, images: int, steps: int) -> None:
    ended = run(ranks, tmp_path, **changes)
    result = finished_result(ended)
    assert result["outcome"] == "goal_reached"
    assert result["goal"]["metric"] == "Prec@1"
    assert result["goal"]["value"] >= changes.get("goal_full", 80.0)
    assert result["synthetic"] is True
    assert result["samples"] == images * result["epochs"]
    assert result["updates"] == steps * result["epochs"] == result["details"]["communication"]["messages"]
    assert result["details"]["options"]["channels_last"] is True
    point = {
        "epoch",
        "update",
        "seconds",
        "train_loss",
        "train_Prec@1",
        "samples_per_second",
        "loss",
        "Prec@1",
        "Prec@5",
    }
    assert set(result["details"]["curve"][0]) == point
    throughput = result["details"]["throughput"]
    assert 0 < throughput["least"] <= throughput["samples_per_second"] <= throughput["most"]
    assert 0 <= throughput["data_wait_share"] < 1
    assert ended[0].metric("val_global_Prec@5")[-1] >= ended[0].metric("val_global_Prec@1")[-1]


@pytest.mark.slow
def test_a_resumed_training_goes_on_as_if_nothing_had_happened(ranks: RankServer, tmp_path: Path) -> None:
    whole = finished_result(run(ranks, tmp_path / "whole", **SMALL, epochs=4))
    first = finished_result(run(ranks, tmp_path / "first", **SMALL, epochs=2, checkpoint_every=2))
    written = tmp_path / "first" / "output-0" / "checkpoints" / "4"
    assert sorted(file.name for file in written.iterdir()) == [".metadata", "__0_0.distcp", "main.pt", "rank-0.pt"]
    second = finished_result(run(ranks, tmp_path / "second", **SMALL, epochs=4, resume=str(written)))
    assert losses(second) == losses(whole)[2:]
    assert second["details"]["resumed"] == {"epoch": 2, "updates": 4}
    # The clock goes on: what the first run took until its last checkpoint counts.
    assert second["wall_seconds"] > 0.9 * first["details"]["curve"][-1]["seconds"]
    assert second["details"]["curve"][0]["seconds"] > first["details"]["curve"][-1]["seconds"]
    assert second["updates"] == whole["updates"] == 8
    assert second["samples"] == whole["samples"]
    assert [point["epoch"] for point in second["details"]["curve"]] == [3, 4]

    for one in run(ranks, tmp_path / "other", **SMALL | {"batch_size": 8}, epochs=4, resume=str(written)):
        assert one.code == 64
        assert "global_batch = 32, this run has 16" in one.stderr
    (written / "main.pt").write_bytes((written / "main.pt").read_bytes()[:500])
    for one in run(ranks, tmp_path / "damaged", **SMALL, epochs=4, resume=str(written)):
        assert one.code == 78
        assert "main.pt cannot be read" in one.stderr


@pytest.mark.slow
def test_an_empty_share_of_the_validation_set_hangs_nobody(ranks: RankServer, tmp_path: Path) -> None:
    """One image, two ranks: the second one has nothing to validate. Buffers used to be broadcast in its absence."""
    changes = SMALL | {"validation_images": 1, "epochs": 2}
    results = [
        finished_result(run(ranks, tmp_path / task, task=task, **changes))
        for task in ("cifar10_resnet20", "cifar10_resnet20_ddp")
    ]
    assert [result["epochs"] for result in results] == [2, 2]


def test_files_in_the_official_format_are_trained_on(ranks: RankServer, tmp_path: Path) -> None:
    unpack(binary_files(), tmp_path / "data")
    changes = SMALL | {"data": "cifar10", "epochs": 1}
    result = finished_result(
        run(ranks, tmp_path / "run", environment={"MLBENCH_DATA_DIR": str(tmp_path / "data")}, **changes)
    )
    assert result["synthetic"] is False
    assert result["data"] == "CIFAR-10"
    assert result["details"]["images"] == [35, 7]
    identity = result["data_identity"]
    assert identity["counts"] == {"training images": 35, "validation images": 7}
    assert identity["official"] is False
    assert identity["reason"].startswith("a part of the official data: 35 training images instead of 50000")
    assert identity["digest"].startswith("sha256:")


def test_a_model_spoilt_by_its_last_update_reaches_no_goal(ranks: RankServer, tmp_path: Path) -> None:
    """The loss of the only step was finite, and any accuracy would do."""
    for one in run(ranks, tmp_path, **SMALL | {"learning_rate": 1e30, "goal_full": 0.0, "batch_size": 32, "epochs": 1}):
        assert one.code == 1
        assert "the validation loss is nan in epoch 1: the training has diverged" in one.stderr
        assert not one.events("result")


def test_nesterov_without_momentum_is_refused(ranks: RankServer, tmp_path: Path) -> None:
    for one in run(ranks, tmp_path, **SMALL, momentum=0.0):
        assert (one.code, one.stderr.count("\n")) == (64, 2)
        assert "nesterov" in one.stderr


def test_more_ranks_than_images_fail_in_a_line(ranks: RankServer, tmp_path: Path) -> None:
    for one in run(ranks, tmp_path, **SMALL | {"training_images": 1}):
        assert one.code == 64
        assert "1 samples cannot be shared among 2 ranks" in one.stderr
        assert "Traceback" not in one.stderr
