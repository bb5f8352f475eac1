"""What a pretraining refuses before it begins, and the limits of layouts and memory by hand."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from task_images.contract import Contract
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError
from task_images.harness.language.layout import (
    Layout,
    LayoutError,
    Memory,
    check_memory,
    check_tensor_parallel,
    count_logit_bytes,
    count_nodes,
    estimate_memory,
    plan_accumulation,
    plan_batch,
    plan_layout,
)
from task_images.harness.language.program import (
    Program,
    layout_errors_as_usage,
    refuse_on_device,
    require_data_dir,
)
from task_images.harness.settings import PretrainingSettings


@dataclass(frozen=True)
class Settings(PretrainingSettings):
    """As tasks declare them."""


def read(**parameters: Any) -> Settings:
    program: Any = SimpleNamespace(settings=Settings)
    contract: Any = SimpleNamespace(parameters=parameters)
    settings: Settings = Program._read_settings(program, contract)
    return settings


@pytest.mark.parametrize(
    ("parameters", "words", "hint"),
    [
        (
            {"compile": "whole", "parallel": "fsdp2"},
            "compile=whole needs the whole model, but parallel=fsdp2",
            "blocks",
        ),
        ({"compile": "graphs", "parallel": "tp"}, "compile=graphs needs the whole model, but parallel=tp", "ddp"),
        ({"compile": "whole", "activation_checkpointing": "full"}, "cannot be compiled as a whole", "compile=blocks"),
        ({"compile": "graphs", "activation_checkpointing": "selective"}, "cannot be compiled", "compile=blocks"),
        ({"checkpoint_every": 5}, "needs a folder that all ranks share", "checkpoint_dir=/shared"),
    ],
)
def test_parameters_that_do_not_go_together(parameters: dict[str, Any], words: str, hint: str) -> None:
    with pytest.raises(TaskUsageError, match=words) as caught:
        read(**parameters)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"compile": "whole"},
        {"compile": "graphs"},
        {"compile": "blocks", "parallel": "fsdp2", "activation_checkpointing": "full"},
        {"compile": "no", "parallel": "tp"},
        {"checkpoint_every": 5, "checkpoint_dir": "/shared"},
        {"checkpoint_dir": "/shared"},
    ],
)
def test_parameters_that_go_together(parameters: dict[str, Any]) -> None:
    assert read(**parameters) == Settings(**parameters)


def test_a_layout_that_does_not_fit_is_a_usage_error_with_the_same_hint() -> None:
    with pytest.raises(TaskUsageError, match="too small") as caught, layout_errors_as_usage():
        raise LayoutError("too small", "--set more=1")
    assert caught.value.hint == "--set more=1"


def test_a_card_with_less_memory_than_the_estimate_is_refused_and_a_cpu_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    memory = Memory(40, 30, 20, 10)
    refuse_on_device(memory, torch.device("cuda", 0))
    properties.total_memory = 99
    refuse_on_device(memory, torch.device("cpu"))
    with pytest.raises(TaskUsageError, match="the model needs about"):
        refuse_on_device(memory, torch.device("cuda", 0))


def test_a_text_needs_a_folder() -> None:
    assert str(require_data_dir(Contract({"MLBENCH_DATA_DIR": "/data"}), "a text")) == "/data"
    with pytest.raises(EnvironmentUnfitError, match="no folder with a text was given"):
        require_data_dir(Contract({}), "a text")


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "per_node", "groups"), [(4, 1, 2), (8, 8, 2), (16, 8, 2), (24, 8, 3), (12, 8, 2), (64, 4, 16)]
)
def test_shard_groups_are_nodes_or_two(ranks: int, per_node: int, groups: int) -> None:
    assert count_nodes(ranks, per_node) == groups


@pytest.mark.parametrize(
    ("name", "is_sharded", "shares", "data"),
    [("ddp", False, 1, 8), ("fsdp2", True, 8, 8), ("hsdp", True, 4, 8), ("tp", False, 8, 1), ("tp+fsdp2", True, 8, 4)],
)
def test_who_shares_the_state_of_eight_ranks(name: str, is_sharded: bool, shares: int, data: int) -> None:
    layout = plan_layout(name, 8)
    assert (layout.is_sharded, layout.state_shares, layout.data, layout.ranks) == (is_sharded, shares, data, 8)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("hsdp", 6, 0, 4), "--set replicas=3, or a multiple of 4 workers"),
        (("tp+fsdp2", 9, 4), "--set tensor_parallel=3, or a multiple of 4 workers"),
        (("hsdp", 7, 0, 4), "--set replicas=1, or a multiple of 4 workers"),
        (("tp", 8, 4), "--set parallel=tp+fsdp2, or tensor_parallel=8"),
        (("zero3", 8), "--set parallel=ddp"),
        (("ddp", 8, 2), "--set parallel=tp or tp+fsdp2"),
        (("fsdp2", 8, 0, 2), "--set parallel=hsdp"),
    ],
)
def test_the_hint_has_the_nearest_layout(arguments: Any, hint: str) -> None:
    with pytest.raises(LayoutError) as caught:
        plan_layout(*arguments)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("sizes", "words", "hint"),
    [
        ({}, "", ""),
        ({"heads": 6}, "heads is 6, which 4 tensor-parallel ranks", "--set tensor_parallel=3"),
        ({"kv_heads": 2}, "kv_heads is 2, which 4", "--set tensor_parallel=2"),
        ({"length": 101}, "sequence_length is 101, which 4", "--set tensor_parallel=1"),
        ({"hidden": 10}, "hidden is 10, which 4", "--set tensor_parallel=2"),
    ],
)
def test_tensor_parallel_ranks_share_evenly(sizes: dict[str, int], words: str, hint: str) -> None:
    given = {"heads": 8, "kv_heads": 4, "length": 100, "hidden": 12, **sizes}
    layout = Layout("tp", 1, 1, 4)
    if not words:
        check_tensor_parallel(layout, **given)
        return
    with pytest.raises(LayoutError, match=words) as caught:
        check_tensor_parallel(layout, **given)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("parameters", "plan"),
    [
        ({"batch_per_rank": 0, "global_batch": 32, "micro_batch": 2}, (32, 4, 2)),
        ({"batch_per_rank": 6, "global_batch": 32, "micro_batch": 2}, (24, 3, 2)),
        ({"batch_per_rank": 0, "global_batch": 32, "micro_batch": 0}, (32, 1, 8)),
    ],
)
def test_a_batch_is_global_or_per_rank(parameters: dict[str, int], plan: tuple[int, int, int]) -> None:
    assert plan_batch(plan_layout("ddp", 4), parameters) == plan


@pytest.mark.parametrize(
    ("batch", "micro", "nearest"), [(2, 1, 4), (30, 4, 32), (33, 4, 32), (3, 0, 4), (23, 4, 16), (25, 4, 32)]
)
def test_the_nearest_batch_is_named(batch: int, micro: int, nearest: int) -> None:
    with pytest.raises(LayoutError, match=f"a global batch of {batch} sequences cannot be split") as caught:
        plan_accumulation(plan_layout("ddp", 4), batch, micro)
    assert caught.value.hint.startswith(f"--set global_batch={nearest},")


SIZES: dict[str, Any] = {
    "parameters": 1000,
    "largest_group": 300,
    "tokens": 7,
    "width": 5,
    "hidden": 11,
    "layers": 3,
    "head_tokens": 6,
    "vocabulary": 13,
    "activation_bytes": 2,
    "logit_bytes": 10,
}
BLOCK = 7 * (10 * 5 + 4 * 11) * 2


@pytest.mark.parametrize(
    ("name", "checkpointing", "memory"),
    [
        ("ddp", "none", (16_000, 4000, 3 * BLOCK, 780)),
        ("ddp", "selective", (16_000, 4000, 3 * BLOCK // 2, 780)),
        ("ddp", "full", (16_000, 4000, 3 * 7 * 5 * 2 + BLOCK, 780)),
        ("fsdp2", "none", (4000, 2400, 3 * BLOCK, 780)),
        ("tp+fsdp2", "none", (4000, 1200, 3 * (BLOCK // 2), 390)),
        ("tp", "full", (4000, 0, 3 * 7 * 5 * 2 // 4 + BLOCK // 4, 195)),
    ],
)
def test_memory_by_hand(name: str, checkpointing: str, memory: tuple[int, int, int, int]) -> None:
    found = estimate_memory(plan_layout(name, 4), **SIZES, checkpointing=checkpointing)
    assert (found.state, found.gathered, found.activations, found.logits) == memory
    assert found.total == sum(memory)


@pytest.mark.parametrize(
    ("precision", "compiled", "size"),
    [("bf16", "no", 10), ("fp32", "no", 12), ("bf16", "blocks", 4), ("fp32", "whole", 8)],
)
def test_bytes_of_a_logit(precision: str, compiled: str, size: int) -> None:
    assert count_logit_bytes({"precision": precision, "compile": compiled}) == size


def test_memory_is_compared_with_that_of_all_ranks_on_a_machine() -> None:
    memory = Memory(2**33, 2**30, 2**29, 2**28)
    check_memory(memory, None)
    check_memory(memory, float(memory.total))
    check_memory(memory, 3.0 * memory.total, 3)
    with pytest.raises(LayoutError) as caught:
        check_memory(memory, 3.0 * memory.total - 1, 3)
    assert str(caught.value) == (
        "the model needs about 10 GiB per rank (state 8 GiB, gathered 1.00 GiB, activations 0.50 GiB, logits 0.25 GiB)"
        " x 3 ranks, and there are 29 GiB"
    )
    with pytest.raises(LayoutError, match=r"logits 0\.25 GiB\), and there are 1\.00 GiB"):
        check_memory(memory, 2.0**30)
