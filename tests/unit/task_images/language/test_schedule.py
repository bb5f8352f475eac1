"""Learning rates, planned bytes, losses and means of a pretraining, worked out by hand."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from task_images.language import PretrainingSettings
from task_images.language.layout import plan_layout
from task_images.language.pretraining import (
    WarmupCosine,
    planned_communication,
)

SETTINGS = PretrainingSettings()


@pytest.mark.parametrize(
    ("update", "rate"),
    [
        # Four updates of warm-up to 8, then half a cosine to a quarter of it at update 12.
        *((0, 2.0), (1, 4.0), (3, 8.0), (4, 8.0), (8, 5.0), (12, 2.0), (20, 2.0)),
        (6, 2 + 6 * (1 + math.cos(math.pi / 4)) / 2),
    ],
)
def test_a_cosine_begins_after_the_warm_up_and_stays_at_its_end(update: int, rate: float) -> None:
    assert WarmupCosine(8.0, 4, 12, 0.25)(update) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("layout", "settings", "kinds"),
    [
        # 1000 parameters, 3 passes per update.
        (("ddp", 1), {}, {}),
        (("ddp", 4), {}, {"all_reduce": 4000}),
        # bf16: 2 bytes are gathered, twice in each pass if they are freed.
        (("fsdp2", 4), {}, {"all_gather": 2 * 1000 * 3 * 2, "reduce_scatter": 4000}),
        (("fsdp2", 4), {"reshard": False}, {"all_gather": 2 * 1000 * 3, "reduce_scatter": 4000}),
        (("fsdp2", 4), {"precision": "fp32"}, {"all_gather": 4 * 1000 * 3 * 2, "reduce_scatter": 4000}),
        (("hsdp", 8), {}, {"all_gather": 2 * 1000 * 3 * 2, "reduce_scatter": 4000, "all_reduce": 1000}),
    ],
)
def test_planned_bytes_of_an_update(
    layout: tuple[str, int], settings: Mapping[str, Any], kinds: Mapping[str, int]
) -> None:
    found = planned_communication(plan_layout(*layout), replace(SETTINGS, **settings), 1000, 3)
    assert found == {"bytes_per_update": sum(kinds.values()), "kinds": kinds}
