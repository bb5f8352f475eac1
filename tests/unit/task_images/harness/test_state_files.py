"""Checkpoints and means of losses: whose file is read, what is another run's, and when a device is read."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from task_images.contract import Contract
from task_images.harness.array_checkpoint import load_arrays, save_arrays
from task_images.harness.checkpoint import find_own, load_checkpoint, save_checkpoint
from task_images.harness.distributed import World
from task_images.harness.errors import DivergedError, EnvironmentUnfitError, TaskUsageError
from task_images.harness.losses import MAX_HELD, TrainingLoss, check_finite
from task_images.harness.updates import SampleBatches, plan_passes

WORLD = World(Contract({}), torch.device("cpu"), 1, grouped=False)


def test_a_file_of_a_rank_is_beside_the_checkpoint_or_in_that_ranks_folder(tmp_path: Path) -> None:
    path = tmp_path / "output-0" / "checkpoint.pt"
    path.parent.mkdir()
    assert find_own(path, 20, 3) == tmp_path / "output-3" / "checkpoint-20-rank-3.pt"
    (path.parent / "checkpoint-20-rank-3.pt").touch()
    assert find_own(path, 20, 3) == path.parent / "checkpoint-20-rank-3.pt"


def test_a_checkpoint_keeps_only_the_newest_file_of_a_rank(tmp_path: Path) -> None:
    for total in (10, 20):
        state = {"position": {"total": total}, "method": {"update": total, "ranks": ["own"]}, "size": 3}
        save_checkpoint(WORLD, tmp_path / "checkpoint.pt", "a_task", state)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.pt", "checkpoint-20-rank-0.pt"}
    found = load_checkpoint(WORLD, tmp_path / "checkpoint.pt", "a_task", {"size": 3})
    assert found["method"] == {"update": 20, "ranks": ["own"]}
    assert (found["form"], found["task"], found["method_ranks"]) == (3, "a_task", 1)
    with pytest.raises(TaskUsageError, match="was made with size = 3, this run has 4"):
        load_checkpoint(WORLD, tmp_path / "checkpoint.pt", "a_task", {"size": 4})
    with pytest.raises(TaskUsageError, match="is not a checkpoint of other in the form 3"):
        load_checkpoint(WORLD, tmp_path / "checkpoint.pt", "other", {})


@pytest.mark.parametrize(("form", "is_read"), [(1, False), (2, True), (3, True), (4, False)])
def test_the_last_two_forms_are_read(tmp_path: Path, form: int, is_read: bool) -> None:
    torch.save({"form": form, "task": "a_task"}, tmp_path / "checkpoint.pt")
    if is_read:
        assert load_checkpoint(WORLD, tmp_path / "checkpoint.pt", "a_task", {})["form"] == form
        return
    with pytest.raises(TaskUsageError, match="is not a checkpoint"):
        load_checkpoint(WORLD, tmp_path / "checkpoint.pt", "a_task", {})


def test_a_missing_checkpoint_names_the_rank_that_lacks_it(tmp_path: Path) -> None:
    world = World(Contract({"RANK": "1", "WORLD_SIZE": "2"}), torch.device("cpu"), 1, grouped=False)
    with pytest.raises(EnvironmentUnfitError, match="rank 1 finds no checkpoint") as caught:
        load_checkpoint(world, tmp_path / "none.pt", "a_task", {})
    assert "Every worker needs a copy" in str(caught.value.hint)


def test_arrays_come_back_in_their_order_and_types(tmp_path: Path) -> None:
    arrays: list[Any] = [np.arange(3, dtype=np.int16), np.ones((2, 2)), np.zeros(0, np.float32)]
    save_arrays(WORLD, tmp_path / "c.npz", "a_task", {"epoch": 2}, arrays)
    state, found = load_arrays(tmp_path / "c.npz", "a_task", {"epoch": 2})
    assert state == {"form": 1, "task": "a_task", "epoch": 2}
    assert [(item.dtype, item.tolist()) for item in found] == [(item.dtype, item.tolist()) for item in arrays]
    with pytest.raises(TaskUsageError, match="task = 'a_task', this run has 'other'"):
        load_arrays(tmp_path / "c.npz", "other", {})
    (tmp_path / "c.npz").write_bytes(b"broken")
    with pytest.raises(EnvironmentUnfitError, match="cannot be read as a checkpoint"):
        load_arrays(tmp_path / "c.npz", "a_task", {})
    second = World(Contract({"RANK": "1", "WORLD_SIZE": "2"}), torch.device("cpu"), 1, grouped=False)
    save_arrays(second, tmp_path / "second.npz", "a_task", {}, arrays)
    assert not (tmp_path / "second.npz").exists()


# --- losses ---------------------------------------------------------------------------------------------------------


class Two:
    """Two ranks, of which the other had a mean of 4 over 10 samples."""

    def sum(self, values: Sequence[float]) -> list[float]:
        return [values[0] + 40.0, values[1] + 10.0]


def test_a_mean_weighs_passes_and_ranks_by_their_samples() -> None:
    reads: list[int] = []

    def read(held: list[Any]) -> list[float]:
        reads.append(len(held))
        return held

    losses, world = TrainingLoss(read), Two()
    losses.add(1.0, 20.0)
    losses.add(2.0, 10.0)
    assert losses.collect_recent(world, 1, 2) == pytest.approx((20 + 20 + 40) / 40)  # type: ignore[arg-type]
    losses.add(5.0, 10.0)
    assert losses.collect_recent(world, 1, 3) == pytest.approx((50 + 40) / 20)  # type: ignore[arg-type]
    assert losses.collect_whole(world) == pytest.approx((20 + 20 + 50 + 40) / 50)  # type: ignore[arg-type]
    assert losses.collect_whole(world) == 4.0  # type: ignore[arg-type]
    assert reads == [2, 1]


def test_losses_stay_on_the_device_until_there_are_64() -> None:
    reads: list[int] = []

    def read(held: list[Any]) -> list[float]:
        reads.append(len(held))
        return held

    losses = TrainingLoss(read)
    for _ in range(MAX_HELD - 1):
        losses.add(1.0, 1.0)
    assert reads == []
    losses.add(3.0, 1.0)
    assert reads == [64]
    losses.add(1.0, 1.0)
    assert losses.state_dict() == {"recent": [67.0, 65.0], "whole": [67.0, 65.0]}
    other = TrainingLoss(read)
    other.load_state_dict({"recent": [6.0, 3.0], "whole": [8.0, 2.0]})
    assert other.collect_recent(WORLD, 1, 1) == 2.0
    assert other.collect_whole(WORLD) == 4.0
    assert math.isnan(other.collect_whole(WORLD))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_with_its_step(loss: float) -> None:
    losses = TrainingLoss(list)
    losses.add(loss, 1.0)
    with pytest.raises(DivergedError, match=f"the training loss is {loss} in epoch 3, at step 25"):
        losses.collect_recent(WORLD, 3, 25)
    with pytest.raises(DivergedError, match=f"the validation loss is {loss} in epoch 3"):
        check_finite({"loss": loss}, 3)
    assert check_finite({"loss": 1.0, "other": loss}, 3)["loss"] == 1.0


# --- updates --------------------------------------------------------------------------------------------------------


class Data:
    steps = 3

    def training(self, epoch: int) -> list[Any]:
        class Sized:
            def __init__(self, size: int) -> None:
                self.size, self.total = size, 10 * size

        return [Sized(number) for number in (4, 4, 2)]


def test_batches_become_updates_of_one_pass_with_their_sizes_as_weights() -> None:
    batches: SampleBatches[Any] = SampleBatches(Data())
    assert batches.count(1) == 3
    found = [(update.count, update.weight, update.total, update.samples) for update in batches.updates(1, begin=1)]
    assert found == [(1, 4, 40, 40), (1, 2, 20, 20)]
    first = next(batches.updates(1))
    assert (first.first, first.rate_factor, len(list(first.passes))) == (None, 1.0, 1)


@pytest.mark.parametrize(
    ("batch", "largest", "ranks", "passes"),
    [
        (128, 128, 1, (1, 128)),
        (129, 128, 3, (1, 43)),
        (256, 128, 1, (2, 128)),
        (260, 128, 2, (2, 65)),
        (2, 1, 2, (1, 1)),
    ],
)
def test_passes_are_as_few_as_fit(batch: int, largest: int, ranks: int, passes: tuple[int, int]) -> None:
    assert plan_passes(batch, largest, ranks) == passes


@pytest.mark.parametrize(("batch", "ranks", "even"), [(3, 2, 4), (7, 4, 8), (1, 4, 4), (257, 1, 258)])
def test_a_batch_that_cannot_be_shared_evenly_has_a_neighbor_that_can(batch: int, ranks: int, even: int) -> None:
    with pytest.raises(TaskUsageError, match=f"a global batch of {batch} cannot be shared evenly by {ranks}") as caught:
        plan_passes(batch, 128, ranks)
    assert f"global_batch={even}." in str(caught.value.hint)
    plan_passes(even, 128, ranks)
