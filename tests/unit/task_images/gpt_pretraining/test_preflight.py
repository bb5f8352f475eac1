"""What follows from the parameters of a decoder before anything starts: its shape, its layout, and its memory."""

from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.gpt_pretraining.preflight import Plan, choose_parts, choose_shape, make_plan

TASK = load_task("gpt_pretraining")


def parameters(preset: str = "tiny", **changes: Any) -> dict[str, Any]:
    return {**TASK.resolve(preset), **changes}


def plan(ranks: int = 1, per_node: int = 1, preset: str = "tiny", **changes: Any) -> Plan:
    return make_plan(parameters(preset, **changes), ranks, per_node)


# --- the shape ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"norm": "layer"}, {"norm": "layer"}),
        ({"positions": "learned"}, {"positions": "learned"}),
        ({"activation": "relu2"}, {"activation": "relu2"}),
        ({"qk_norm": "yes"}, {"qk_norm": True}),
        ({"qk_norm": "no"}, {"qk_norm": False}),
        ({"tied": "yes"}, {"tied": True}),
        ({"tied": "no"}, {"tied": False}),
        ({"softcap": 15.0}, {"softcap": 15.0}),
        ({"softcap": 0.0}, {"softcap": 0.0}),  # none, whatever the model has
        ({"softcap": -1.0}, {}),
        (
            {"norm": "rms", "tied": "no", "softcap": 2.0},
            {"norm": "rms", "tied": False, "softcap": 2.0},
        ),
    ],
)
def test_parts_that_are_named_replace_the_models_own(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    own = {"norm": "model", "positions": "model", "activation": "model", "qk_norm": "model", "tied": "model"}
    assert choose_parts({**own, "softcap": -1.0, **changes}) == expected


@pytest.mark.parametrize(
    ("model", "length", "context"),
    [("tiny", 8, 64), ("tiny", 64, 64), ("tiny", 65, 65), ("tiny", 4000, 4000), ("124M", 1024, 1024)],
)
def test_rotary_models_grow_with_the_sequence(model: str, length: int, context: int) -> None:
    assert choose_shape(parameters("124M", model=model, sequence_length=length)).context == context


# --- layout and memory ----------------------------------------------------------------------------------------------


TINY_BATCH: dict[str, Any] = {
    "global_batch": 6,
    "micro_batch": 3,
    "batch_per_rank": 0,
    "sequence_length": 32,
    "compile": "no",
}
BLOCK = 10 * 64 + 4 * 176  # tensors of 64 and of 176 channels that a block keeps per token


@pytest.mark.parametrize(
    ("precision", "chunk", "activation", "logit", "tokens"),
    [
        ("fp32", 0, 4, 12, 96),
        ("bf16", 0, 2, 10, 96),
        ("fp32", 40, 4, 12, 40),
        ("fp32", 1000, 4, 12, 96),  # no more than there are
    ],
)
def test_memory_of_activations_and_logits(precision: str, chunk: int, activation: int, logit: int, tokens: int) -> None:
    """Three sequences of 32 tokens; a logit has an fp32 copy and its gradient."""
    memory = plan(precision=precision, loss_chunk=chunk, activation_checkpointing="none", **TINY_BATCH).memory
    assert memory.activations == 2 * 96 * BLOCK * activation
    assert memory.logits == tokens * 256 * logit
    assert memory.state == 125_248 * 16
    assert memory.gathered == 0
