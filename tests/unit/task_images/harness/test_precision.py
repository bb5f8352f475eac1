"""Number formats on GPUs, of which there is none here, and the loss scale of fp16 by its defaults."""

import contextlib

import pytest
import torch

from task_images.harness.errors import DivergedError
from task_images.harness.precision import LossScale, Precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_the_scale_grows_after_a_window_without_an_overflow() -> None:
    scale = LossScale(8.0, factor=4.0, window=3)
    found = []
    for finite in (True, True, True, True, True, False, True, True, True):
        scale.observe(finite)
        found.append((scale.value, scale.good))
    assert found == [
        *((8.0, 1), (8.0, 2), (32.0, 0)),
        *((32.0, 1), (32.0, 2), (8.0, 0)),  # an overflow begins a new window
        *((8.0, 1), (8.0, 2), (32.0, 0)),
    ]


def test_by_default_the_scale_doubles_every_2000_updates_and_gives_up_below_a_ten_thousandth() -> None:
    scale = LossScale()
    for _ in range(1999):
        scale.observe(True)
    assert scale.value == 1.0
    scale.observe(True)
    assert scale.value == 2.0
    for _ in range(14):
        scale.observe(False)
    assert scale.value == 2.0**-13
    with pytest.raises(DivergedError):
        scale.observe(False)


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
    assert Precision(asked, device).factor == 1.0


@pytest.mark.parametrize(
    ("asked", "device", "dtype"),
    [("bf16", CPU, torch.bfloat16), ("bf16", GPU, torch.bfloat16), ("fp16", GPU, torch.float16)],
)
def test_products_are_made_in_the_format_of_the_training(
    asked: str, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, torch.dtype]] = []
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype: made.append((kind, dtype)))
    Precision(asked, device).autocast()
    assert made == [(device.type, dtype)]
    context = Precision(asked, device, casts=False).autocast()  # a model that casts by itself
    assert isinstance(context, contextlib.nullcontext)
    assert len(made) == 1
