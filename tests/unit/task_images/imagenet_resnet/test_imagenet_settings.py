"""The settings of ImageNet's task: which go together, at their bounds, and what each of them becomes in a training."""

from typing import Any

import pytest

from task_images.contract import TaskUsageError
from task_images.imagenet_resnet.task import Settings, check

TINY = {"data": "generated", "classes": 10, "training_images": 10, "validation_images": 10}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loaders": 0},
        TINY,  # an image of every class in both parts
        {"data": "imagenet", "training_images": 1, "validation_images": 1},  # only generated images have a number
        {"data": "fake", "training_images": 1},
        {"model": "inception3", "side": 75},
        {"model": "resnet18", "side": 32, "shorter": 32},
        {"model": "vgg11", "side": 74},
        {"side": 256},  # as large as the scaled image
        {"momentum": 0.0, "nesterov": False},
    ],
)
def test_settings_go_together_up_to_their_bounds(changes: dict[str, Any]) -> None:
    check(Settings(**changes), 1)


@pytest.mark.parametrize("changes", [{"width": 0.5}, {"norm": "group"}])
def test_only_resnets_have_a_width_and_another_norm(changes: dict[str, Any]) -> None:
    check(Settings(**changes), 1)
    with pytest.raises(TaskUsageError, match="as torchvision has it"):
        check(Settings(model="vgg16", **changes), 1)
