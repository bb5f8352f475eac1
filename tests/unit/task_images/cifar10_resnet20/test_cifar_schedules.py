"""The learning rates of the official image classification, by the tables of its specification."""

import math

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.cifar10_resnet20 import Settings, make_schedule
from task_images.cifar10_resnet20_ddp.task import Settings as DdpSettings
from task_images.contract import TaskUsageError
from task_images.parameters import read_parameters

WORKERS = (1, 2, 4, 8, 16, 32)


def settings(preset: str, task: str = "cifar10_resnet20") -> Settings:
    return read_parameters(Settings, load_task(task).resolve(preset))


def rates(preset: str, workers: int, losses: list[float]) -> list[float]:
    """The rate of every epoch, given the validation loss after each."""
    schedule = make_schedule(settings(preset), workers)
    found = []
    for loss in losses:
        found.append(schedule.rate(0))
        schedule.after_epoch(loss)
    return found


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("preset", ["spec", "legacy"])
def test_official_warm_up(preset: str, workers: int) -> None:
    """After epoch e <= W = log2 k: (e/W) k 0.02 + (1 - e/W) 0.02; epoch 1 at 0.02."""
    warmup = int(math.log2(workers))
    falling = [10.0 - epoch for epoch in range(10)]
    expected = [0.02 + min(1.0, epoch / warmup if warmup else 1.0) * 0.02 * (workers - 1) for epoch in range(10)]
    assert rates(preset, workers, falling) == pytest.approx(expected)


def test_official_plateau() -> None:
    """Halved at the second epoch in a row that does not improve by more than 0.01, counted from after the warm-up."""
    flat = [1.0] * 12
    # Two epochs of warm-up; epoch 3 sets the mark, 4 and 5 do not better it, 6 is halved, and so on down to 0.02.
    assert rates("spec", 4, flat) == pytest.approx(
        [0.02, 0.05, 0.08, 0.08, 0.08, 0.04, 0.04, 0.02, 0.02, 0.02, 0.02, 0.02]
    )
    barely = [1.0 - 0.009 * epoch for epoch in range(12)]
    assert rates("spec", 4, barely)[5] == 0.08  # 0.018 better after two epochs
    # A single worker's rate is its floor.
    assert rates("spec", 1, flat) == [0.02] * 12


@pytest.mark.parametrize("workers", WORKERS)
def test_2018(workers: int) -> None:
    """0.1/256 per sample, b = 32: 0.0125; five epochs of warm-up to k times that; a tenth from epochs 82 and 109 on."""
    found = rates("2018", workers, [1.0] * 164)
    assert found[:7] == pytest.approx([0.0125 * (1 + min(1.0, epoch / 5) * (workers - 1)) for epoch in range(7)])
    assert found[81] == pytest.approx(0.0125 * workers)
    assert found[82] == pytest.approx(0.00125 * workers)
    assert found[108] == pytest.approx(0.00125 * workers)
    assert found[109:] == pytest.approx([0.000125 * workers] * 55)


def test_scaling_lr_and_ddp() -> None:
    assert rates("scaling-lr", 8, [1.0] * 7) == pytest.approx([0.1, 0.24, 0.38, 0.52, 0.66, 0.8, 0.8])
    plain = make_schedule(read_parameters(DdpSettings, load_task("cifar10_resnet20_ddp").resolve("spec")), 8)
    assert plain.rate(0) == 0.1
    for _ in range(82):
        plain.after_epoch(1.0)
    assert plain.rate(0) == pytest.approx(0.01)


def test_a_warm_up_beyond_the_first_milestone_is_refused() -> None:
    with pytest.raises(TaskUsageError, match="warm-up"):
        make_schedule(Settings(schedule="multistep", warmup_epochs=82), 2)
    with pytest.raises(TaskUsageError, match="milestones"):
        make_schedule(Settings(schedule="multistep", milestones=["x"]), 2)  # type: ignore[list-item]
