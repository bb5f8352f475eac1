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
        ({"float8": "head", "parallel": "fsdp2"}, "", "8-bit products do not support sharded", "parallel=ddp"),
        ({"optimizer": "muon"}, "", "", ""),
        ({"optimizer": "muon"}, '{"name": "ddp"}', "", ""),
        ({"optimizer": "muon", "matrix_rate": 0.1}, "", "", ""),
        ({"optimizer": "muon"}, '{"name": "zero1"}', "Muon needs every rank's whole gradients", "--method bsp"),
        ({"optimizer": "muon", "parallel": "fsdp2"}, "", "Muon needs every rank's whole gradients", "parallel=ddp"),
        ({"matrix_rate": 0.1}, "", "matrix_rate is the rate of Muon", "optimizer=muon"),
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
