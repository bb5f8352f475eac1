"""Learning rates, planned bytes, losses and means of a pretraining, worked out by hand."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from task_images.gpt_pretraining.head import sum_cross_entropy, sum_in_chunks
from task_images.language import PretrainingSettings
from task_images.language.layout import plan_layout
from task_images.language.pretraining import (
    WarmupCosine,
    WarmupStableLinear,
    make_schedule,
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
    ("update", "rate"),
    [
        # Constant at 8 until update 10 of 20, then down to a quarter.
        *((0, 2.0), (2, 6.0), (3, 8.0), (4, 8.0), (10, 8.0), (11, 8 - 0.6), (15, 5.0), (19, 2.6), (20, 2.0), (25, 2.0)),
    ],
)
def test_a_linear_decay_covers_the_last_share_of_the_updates(update: int, rate: float) -> None:
    assert WarmupStableLinear(8.0, 4, 20, 0.25, 0.5)(update) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [("linear", WarmupStableLinear(0.5, 3, 50, 0.2, 0.4)), ("cosine", WarmupCosine(0.5, 3, 50, 0.2))],
)
def test_the_parameters_name_the_schedule(schedule: str, kind: Any) -> None:
    settings = replace(
        SETTINGS, schedule=schedule, learning_rate=0.5, warmup_steps=3, steps=50, final_rate=0.2, decay_share=0.4
    )
    made = make_schedule(settings)
    assert [made.rate(update) for update in (0, 2, 10, 45, 60)] == pytest.approx(
        [kind(update) for update in (0, 2, 10, 45, 60)]
    )


@pytest.mark.parametrize(
    ("layout", "settings", "kinds"),
    [
        # 1000 parameters, 3 passes per update.
        (("ddp", 1), {}, {}),
        (("ddp", 4), {}, {"all_reduce": 4000}),
        (("tp", 4), {}, {}),  # one group of data
        # bf16: 2 bytes are gathered, twice in each pass if they are freed.
        (("fsdp2", 4), {}, {"all_gather": 2 * 1000 * 3 * 2, "reduce_scatter": 4000}),
        (("fsdp2", 4), {"reshard": False}, {"all_gather": 2 * 1000 * 3, "reduce_scatter": 4000}),
        (("fsdp2", 4), {"precision": "fp32"}, {"all_gather": 4 * 1000 * 3 * 2, "reduce_scatter": 4000}),
        (("tp+fsdp2", 4), {}, {"all_gather": 2 * 500 * 3 * 2, "reduce_scatter": 2000}),
        (("hsdp", 8), {}, {"all_gather": 2 * 1000 * 3 * 2, "reduce_scatter": 4000, "all_reduce": 1000}),
    ],
)
def test_planned_bytes_of_an_update(
    layout: tuple[str, int], settings: Mapping[str, Any], kinds: Mapping[str, int]
) -> None:
    found = planned_communication(plan_layout(*layout), replace(SETTINGS, **settings), 1000, 3)
    assert found == {"bytes_per_update": sum(kinds.values()), "kinds": kinds}


@pytest.mark.parametrize("tokens", [1, 3, 4, 12, 100])
def test_a_loss_in_chunks_ignores_what_the_whole_one_ignores(tokens: int) -> None:
    torch.manual_seed(1)
    head = nn.Linear(5, 7)
    features = torch.randn(3, 4, 5, requires_grad=True)
    targets = torch.randint(0, 7, (3, 4))
    targets[1, 2] = targets[0, 0] = -100
    whole = sum_cross_entropy(head(features).flatten(0, 1), targets.flatten())
    logs = head(features).log_softmax(-1)
    kept = targets != -100
    assert float(whole.detach()) == pytest.approx(-logs[kept].gather(1, targets[kept][:, None]).sum().item(), rel=1e-5)
    parts = sum_in_chunks(head, features, targets, tokens)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts, features)[0], torch.autograd.grad(whole, features)[0])


def test_a_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    logits = torch.randn(6, 9).to(torch.bfloat16)
    found = sum_cross_entropy(logits, torch.zeros(6, dtype=torch.int64))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, -logits.float().log_softmax(1)[:, 0].sum())
