"""The decoder's task: options that do not go together, groups of the optimizer, corpora, and windows of a rank."""

from typing import Any

import pytest
import torch

from task_images.contract import Contract
from task_images.errors import TaskUsageError
from task_images.gpt_pretraining import Settings
from task_images.gpt_pretraining.task import (
    check_options,
)
from task_images.world import World

CPU = torch.device("cpu")


def make_world(size: int = 1, rank: int = 0, method: str = "") -> World:
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "MLBENCH_METHOD": method, "MLBENCH_SEED": "3"}
    return World(Contract(variables), CPU, 1, grouped=False)


@pytest.mark.parametrize(
    ("settings", "method", "words", "hint"),
    [
        ({}, "", "", ""),
        ({"stream": "bf16"}, "", "", ""),
        ({"stream": "bf16", "precision": "fp32"}, "", "stream=bf16 rounds", "precision=bf16"),
        ({"float8": "head", "parallel": "fsdp2"}, "", "8-bit products do not support sharded", "parallel=ddp"),
        ({"optimizer": "muon"}, "", "", ""),
        ({"optimizer": "muon"}, '{"engine": "ddp"}', "", ""),
        ({"optimizer": "muon", "matrix_rate": 0.1}, "", "", ""),
        ({"optimizer": "muon"}, '{"engine": "zero1"}', "Muon needs every rank's whole gradients", "--method bsp"),
        ({"optimizer": "muon", "parallel": "fsdp2"}, "", "Muon needs every rank's whole gradients", "parallel=ddp"),
        ({"matrix_rate": 0.1}, "", "matrix_rate is the rate of Muon", "optimizer=muon"),
    ],
)
def test_options_that_do_not_go_together(settings: dict[str, Any], method: str, words: str, hint: str) -> None:
    world, plan = make_world(method=method), None
    if not words:
        check_options(Settings(**settings), plan, world)  # type: ignore[arg-type]
        return
    with pytest.raises(TaskUsageError, match=words) as caught:
        check_options(Settings(**settings), plan, world)  # type: ignore[arg-type]
    assert hint in str(caught.value.hint)
