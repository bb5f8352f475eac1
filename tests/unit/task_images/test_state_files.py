"""Checkpoints and means of losses: whose file is read, what is another run's, and when a device is read."""

from pathlib import Path

import pytest
import torch

from task_images.checkpoint import load_checkpoint
from task_images.contract import Contract
from task_images.errors import TaskUsageError
from task_images.loop import plan_passes
from task_images.world import World

WORLD = World(Contract({}), torch.device("cpu"), 1, grouped=False)


@pytest.mark.parametrize(("form", "is_read"), [(1, False), (2, True), (3, True), (4, False)])
def test_the_last_two_forms_are_read(tmp_path: Path, form: int, is_read: bool) -> None:
    torch.save({"form": form, "task": "a_task"}, tmp_path / "checkpoint.pt")
    if is_read:
        assert load_checkpoint(WORLD, tmp_path / "checkpoint.pt", "a_task", {})["form"] == form
        return
    with pytest.raises(TaskUsageError, match="is not a checkpoint"):
        load_checkpoint(WORLD, tmp_path / "checkpoint.pt", "a_task", {})


# --- losses ---------------------------------------------------------------------------------------------------------


# --- updates --------------------------------------------------------------------------------------------------------


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
