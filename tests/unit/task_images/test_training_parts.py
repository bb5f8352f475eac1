"""Passes, validation, facts and seeds of torch trainings with small models, by hand or with numpy."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from task_images.precision import Precision
from task_images.schedules import (
    Cosine,
    InverseSqrt,
    LinearWarmup,
    MultiStep,
    WarmupInverseSqrt,
)
from task_images.world import measure_distance
from tests.unit.task_images.threads import ThreadWorld, run_ranks

# --- number formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "device", "casts", "dtype"),
    [
        ("fp32", "cpu", True, None),
        ("bf16", "cpu", True, torch.bfloat16),
        ("bf16", "cpu", False, None),
        ("fp16", "cpu", True, None),
    ],
)
def test_products_are_computed_in_the_format_unless_the_model_casts(
    asked: str, device: str, casts: bool, dtype: torch.dtype | None
) -> None:
    precision = Precision(asked, torch.device(device), casts=casts)
    with precision.autocast():
        found = torch.ones(2, 2) @ torch.ones(2, 2)
    assert found.dtype == (dtype or torch.float32)
    assert (precision.scale, precision.factor) == (None, 1.0)


# --- replicas -------------------------------------------------------------------------------------------------------


def test_the_distance_of_replicas_is_relative_to_their_mean() -> None:
    drawn = np.random.default_rng(1).normal(size=(3, 10))
    mean = drawn.mean(0)
    expected = math.sqrt(((drawn - mean) ** 2).sum() / 3) / float(np.linalg.norm(mean))

    def body(world: ThreadWorld) -> float:
        own = torch.from_numpy(drawn[world.rank]).float()
        return measure_distance(world, [own[:4].view(2, 2), own[4:]])

    assert run_ranks(3, body) == pytest.approx([expected] * 3, rel=1e-5)
    assert run_ranks(2, lambda world: measure_distance(world, [torch.ones(3)])) == [0.0, 0.0]


# --- decay, seeds, schedules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formula", "rates"),
    [
        (LinearWarmup(1.0, 3.0, 4), {0: 1.0, 1: 1.5, 3: 2.5, 4: 3.0, 9: 3.0}),
        (MultiStep(8.0, (4, 6), 0.5), {0: 8.0, 3: 8.0, 4: 4.0, 5: 4.0, 6: 2.0, 99: 2.0}),
        (MultiStep(8.0, (4,), 0.5, warmup=2, start=4.0), {0: 4.0, 1: 6.0, 2: 8.0, 4: 4.0}),
        (Cosine(8.0, 4), {0: 8.0, 1: 4 + 4 * math.sqrt(0.5), 2: 4.0, 4: 0.0, 9: 0.0}),
        (Cosine(8.0, 6, warmup=2, start=2.0), {0: 2.0, 1: 5.0, 2: 8.0, 4: 4.0, 6: 0.0}),
        (InverseSqrt(6.0), {0: 6.0, 1: 6.0, 4: 3.0, 9: 2.0}),
        (WarmupInverseSqrt(6.0, 4), {0: 0.0, 2: 3.0, 4: 6.0, 16: 3.0}),
    ],
)
def test_rates_by_hand(formula: Any, rates: dict[int, float]) -> None:
    assert {t: formula(t) for t in rates} == pytest.approx(rates, abs=1e-12)
