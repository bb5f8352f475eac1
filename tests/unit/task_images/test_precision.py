"""Number formats on GPUs, of which there is none here, and the loss scale of fp16 by its defaults."""

import pytest
import torch

from task_images.methods.base import LossScale
from task_images.train import Precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("asked", "device", "used", "has_scale"),
    [
        ("fp32", CPU, "fp32", False),
        ("fp32", GPU, "fp32", False),
        ("bf16", CPU, "bf16", False),
        ("bf16", GPU, "bf16", False),
        ("fp16", CPU, "fp32", False),  # which CPUs do not have
        ("fp16", GPU, "fp16", True),
    ],
)
def test_only_fp16_has_a_loss_scale_and_only_on_gpus(
    asked: str, device: torch.device, used: str, has_scale: bool
) -> None:
    scale = LossScale(64.0)
    found = Precision(asked, device, scale)
    assert (found.used, found.scale) == (used, scale if has_scale else None)
    assert found.factor == (64.0 if has_scale else 1.0)
    scale.value = 32.0
    assert found.factor == (32.0 if has_scale else 1.0)
    assert (Precision(asked, device).scale is not None) == has_scale  # the first one


def test_the_loss_scale_grows_after_a_whole_window_without_an_overflow() -> None:
    scale, values = LossScale(8.0, window=3), []
    for finite in (True, True, False, True, True, True, True, True, True):
        scale.observe(finite)
        values.append(scale.value)
    assert values == [8, 8, 4, 4, 4, 8, 8, 8, 16]
