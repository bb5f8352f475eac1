"""What follows from the parameters of a decoder before anything starts: its shape."""

from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.gpt_pretraining.plan import choose_parts, choose_shape

TASK = load_task("gpt_pretraining")


def parameters(preset: str = "tiny", **changes: Any) -> dict[str, Any]:
    return {**TASK.resolve(preset), **changes}


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
