"""What the presets of ImageNet's task say: rates by the published formula, what decays; and that all are taken."""

from typing import cast

import pytest
import torch

from mlbench_cli.tasks.catalog import load_task
from task_images.contract import Contract, TaskUsageError
from task_images.imagenet_resnet.model import imagenet_model
from task_images.imagenet_resnet.task import Settings, main, make_schedule
from task_images.parameters import read_parameters
from task_images.train import split_decay
from tests.contract.task_images.ranks import Record

TASK = load_task("imagenet_resnet")
STEPS = 100


def settings(preset: str, **changes: object) -> Settings:
    return read_parameters(Settings, TASK.resolve(preset) | changes)


def rates(preset: str, workers: int, epochs: list[float]) -> list[float]:
    schedule = make_schedule(settings(preset), workers, STEPS)
    return [schedule.rate(round(epoch * STEPS)) for epoch in epochs]


@pytest.mark.parametrize("workers", [8, 16, 64, 256])
def test_goyal(workers: int) -> None:
    """32 images a worker; 0.1 per 256 images, reached from 0.1 within 5 epochs; a tenth from 30, 60 and 80 on."""
    full = 0.1 * workers / 8
    expected = [0.1, 0.1 + (full - 0.1) / 2, full, full, full / 10, full / 100, full / 1000]
    assert rates("goyal", workers, [0, 2.5, 5, 29.99, 30, 60, 80]) == pytest.approx(expected)


def test_few_workers_have_nothing_to_warm_up_to() -> None:
    """Below 256 images a step the rate is below 0.1, from the beginning."""
    assert rates("goyal", 2, [0, 1, 5, 20]) == pytest.approx([0.025] * 4)


def test_spec_goes_down_along_half_a_cosine() -> None:
    full = 0.1 * 64 * 16 / 256
    assert rates("spec", 16, [0, 5, 47.5, 90]) == pytest.approx([0.1, full, full / 2, 0.0], abs=1e-12)
    quarter = 5 + 85 / 4
    assert rates("spec", 16, [quarter])[0] == pytest.approx(full * (1 + 2**-0.5) / 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"warmup_epochs": 90.0},
        {"schedule": "multistep", "warmup_epochs": 30.0},
        {"schedule": "multistep", "milestones": ["x"]},
    ],
)
def test_rates_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(TaskUsageError, match="epochs of warm-up"):
        make_schedule(settings("spec", **changes), 8, STEPS)


def test_scales_shifts_and_biases_do_not_decay() -> None:
    with torch.device("meta"):
        model = imagenet_model("resnet50")
    decayed, free = cast("list[Record]", split_decay(model, 1e-4))
    assert (decayed["weight_decay"], free["weight_decay"]) == (1e-4, 0.0)
    # 53 convolutions and the classifier; 53 normalizations of two each, and the classifier's bias.
    assert (len(decayed["params"]), len(free["params"])) == (54, 107)
    assert sum(item.numel() for group in (decayed, free) for item in group["params"]) == 25_557_032


@pytest.mark.parametrize("name", ["data", "model", "norm", "schedule", "goal_on", "compile"])
def test_words_given_by_hand_are_checked(name: str) -> None:
    contract = Contract({"MLBENCH_PARAMETERS": f'{{"{name}": "nonsense"}}'})
    with pytest.raises(TaskUsageError, match=f"the parameter \"{name}\" is 'nonsense'"):
        main(contract)


def test_both_ways_to_reduce_of_1a_have_the_same_parameters() -> None:
    plain, ddp = (load_task(name).parameters for name in ("cifar10_resnet20", "cifar10_resnet20_ddp"))
    assert ddp == plain
