"""The decoder's task: options that do not go together, groups of the optimizer, corpora, and windows of a rank."""

import json
from typing import Any

import pytest
import torch

from task_images.contract import Contract, TaskUsageError
from task_images.gpt_pretraining.task import DecoderPretraining
from task_images.world import World

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "method", "words", "hint"),
    [
        ({}, "", "", ""),
        ({"stream": "bf16"}, "", "", ""),
        ({"stream": "bf16", "precision": "fp32"}, "", "stream=bf16 rounds", "precision=bf16"),
    ],
)
def test_options_that_do_not_go_together(settings: dict[str, Any], method: str, words: str, hint: str) -> None:
    given = {"compile": "no", **settings}
    task = DecoderPretraining(Contract({"MLBENCH_METHOD": method, "MLBENCH_PARAMETERS": json.dumps(given)}))
    task.world = World(task.contract, CPU, 1, grouped=False)
    if not words:
        task.check_options()
        return
    with pytest.raises(TaskUsageError, match=words) as caught:
        task.check_options()
    assert hint in str(caught.value.hint)
