"""What follows from the parameters of a decoder before anything starts: its shape."""

from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.gpt_pretraining.plan import choose_shape

TASK = load_task("gpt_pretraining")


def parameters(preset: str = "tiny", **changes: Any) -> dict[str, Any]:
    return {**TASK.resolve(preset), **changes}


# --- the shape ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "length", "context"),
    [("tiny", 8, 64), ("tiny", 64, 64), ("tiny", 65, 65), ("tiny", 4000, 4000), ("124M", 1024, 1024)],
)
def test_rotary_models_grow_with_the_sequence(model: str, length: int, context: int) -> None:
    assert choose_shape(parameters("124M", model=model, sequence_length=length)).context == context
