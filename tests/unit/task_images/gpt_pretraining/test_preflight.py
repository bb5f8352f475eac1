"""What follows from the parameters of a decoder before anything starts: its shape, its layout, and its memory."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mlbench_cli.tasks.catalog import load_task
from task_images.contract import Contract
from task_images.gpt_pretraining import task
from task_images.gpt_pretraining.jax_model import make_decoder
from task_images.gpt_pretraining.model import Decoder
from task_images.gpt_pretraining.preflight import Plan, check, choose_parts, choose_shape, make_plan
from task_images.gpt_pretraining.settings import Settings
from task_images.gpt_pretraining.shapes import FLOPS_FORMULA, SHAPES, Shape
from task_images.gpt_pretraining.split import split_decoder
from task_images.harness.errors import TaskUsageError
from task_images.harness.language.layout import LayoutError
from task_images.harness.language.parallel import fill_parameters
from task_images.harness.language.tokens import IGNORED

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


def test_a_part_of_another_model_makes_another_shape() -> None:
    modern = parameters("124M", model="124M-modern", softcap=0.0, qk_norm="no", tied="yes", activation="gelu")
    assert choose_shape(modern) == replace(
        SHAPES["124M-modern"], softcap=0.0, qk_norm=False, tied=True, activation="gelu", multiple=64
    )


@pytest.mark.parametrize(
    ("model", "length", "context"),
    [("tiny", 8, 64), ("tiny", 64, 64), ("tiny", 65, 65), ("tiny", 4000, 4000), ("124M", 1024, 1024)],
)
def test_rotary_models_grow_with_the_sequence(model: str, length: int, context: int) -> None:
    assert choose_shape(parameters("124M", model=model, sequence_length=length)).context == context


def test_learned_positions_end_with_the_model() -> None:
    with pytest.raises(LayoutError, match="sequence_length is 1025, but the model 124M has 1024 positions") as caught:
        choose_shape(parameters("124M", sequence_length=1025))
    assert caught.value.hint == "--set sequence_length=1024, or a model with rotary positions"
    assert choose_shape(parameters("124M", sequence_length=1025, positions="rotary")).context == 1025


@pytest.mark.parametrize(
    ("data", "vocabulary", "is_valid"),
    [("python-text", 256, True), ("python-text", 255, False), ("synthetic", 255, True), ("python-text", 0, True)],
)
def test_bytes_need_a_vocabulary_of_256(data: str, vocabulary: int, is_valid: bool) -> None:
    given = parameters("tiny", data=data, vocabulary=vocabulary)
    if is_valid:
        assert choose_shape(given).vocabulary == (vocabulary or 256)
        return
    with pytest.raises(LayoutError, match="bytes need a vocabulary of 256, the model has 255") as caught:
        choose_shape(given)
    assert caught.value.hint == "--set vocabulary=256"


# --- layout and memory ----------------------------------------------------------------------------------------------


def test_a_plan_has_passes_that_fill_the_global_batch() -> None:
    made = plan(2, global_batch=24, micro_batch=4, batch_per_rank=0)
    assert (made.global_batch, made.passes, made.micro_batch) == (24, 3, 4)
    made = plan(2, global_batch=24, micro_batch=4, batch_per_rank=8)
    assert (made.global_batch, made.passes, made.micro_batch) == (16, 2, 4)
    assert plan(2, parallel="tp", global_batch=24, micro_batch=4, batch_per_rank=0).passes == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "learned"},
        {"model": "124M-modern"},  # biases, and a norm of the embedding
        {"model": "124M"},
    ],
)
def test_tensor_parallel_ranks_have_llamas_parts_only(changes: dict[str, Any]) -> None:
    changes = {"parallel": "tp", "sequence_length": 64, "vocabulary": 0, **changes}
    with pytest.raises(LayoutError, match="has parts that do not support tensor parallelism") as caught:
        plan(2, **changes)
    assert caught.value.hint == "--set parallel=fsdp2, or a Llama model (1B, 8B)"
    # One rank shares nothing.
    assert plan(1, **changes).layout.tensor == 1


def test_tensor_parallel_ranks_split_sequences_already() -> None:
    with pytest.raises(LayoutError, match="loss_chunk does not support tensor parallelism") as caught:
        plan(2, parallel="tp", loss_chunk=16)
    assert caught.value.hint == "--set loss_chunk=0, or --set parallel=fsdp2"
    assert plan(2, parallel="ddp", loss_chunk=16).memory.logits > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence_length": 63}, "sequence_length is 63, which 2 tensor-parallel ranks cannot share evenly"),
        ({"ranks": 4}, "kv_heads is 2, which 4 tensor-parallel ranks cannot share evenly"),
        ({"ranks": 3}, "heads is 4, which 3 tensor-parallel ranks cannot share evenly"),
    ],
)
def test_heads_and_sequences_are_shared_evenly(changes: dict[str, Any], words: str) -> None:
    ranks = changes.pop("ranks", 2)
    with pytest.raises(LayoutError, match=words):
        plan(ranks, parallel="tp", **{"global_batch": 12, "micro_batch": 2, "batch_per_rank": 0, **changes})


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


def test_the_padded_embedding_is_the_largest_group_that_fsdp_gathers() -> None:
    memory = plan(2, parallel="fsdp2", vocabulary=300, vocabulary_multiple=64, **TINY_BATCH).memory
    assert memory.gathered == 2 * 320 * 64 * 4
    assert memory.logits == 96 * 320 * 12


def test_all_ranks_on_a_machine_share_its_memory() -> None:
    one = plan(2, 2, **TINY_BATCH).memory.total
    given = parameters(**TINY_BATCH)
    check(given, 2, 2, 2.0 * one)
    check(given, 2, 2, None)
    check(given, 2, 1, float(one))
    with pytest.raises(LayoutError, match="x 2 ranks, and there are"):
        check(given, 2, 2, 2.0 * one - 1)


def test_hsdp_shards_within_a_node() -> None:
    layout = plan(8, 4, parallel="hsdp", global_batch=24, micro_batch=3, batch_per_rank=0).layout
    assert (layout.replicas, layout.shards) == (2, 4)
    four = plan(8, 4, parallel="hsdp", replicas=4, global_batch=24, micro_batch=3, batch_per_rank=0).layout
    assert (four.replicas, four.shards) == (4, 2)


# --- in JAX ---------------------------------------------------------------------------------------------------------

LLAMA = Shape(90, 32, 64, 2, 4, 2, 128)


@pytest.mark.parametrize(
    ("shape", "settings", "what", "hint"),
    [
        ({"norm": "layer"}, {}, "this model", "--set model=tiny"),
        ({"positions": "half-rotary"}, {}, "this model", "--set model=tiny"),
        ({"activation": "gelu"}, {}, "this model", "--set model=tiny"),
        ({"bias": True}, {}, "this model", "--set model=tiny"),
        ({"qk_norm": True}, {}, "this model", "--set model=tiny"),
        ({"embedding_norm": True}, {}, "this model", "--set model=tiny"),
        ({"softcap": 15.0}, {}, "this model", "--set model=tiny"),
        ({"scale": 0.12}, {}, "this model", "--set model=tiny"),
        ({}, {"parallel": "fsdp2"}, "parallel=fsdp2", "--set parallel=ddp"),
        ({}, {"documents": "separate"}, "documents=separate", "--set documents=joined"),
        ({}, {"float8": "head"}, "float8", "--set float8=none"),
        ({}, {"resume": "x"}, "these checkpoints", "Leave out resume and checkpoint_every."),
        ({}, {"checkpoint_every": 5}, "these checkpoints", "Leave out resume and checkpoint_every."),
    ],
)
def test_what_the_decoder_in_jax_lacks_is_named(
    shape: dict[str, Any], settings: dict[str, Any], what: str, hint: str
) -> None:
    with pytest.raises(TaskUsageError, match=f"the backend jax does not have {what}") as caught:
        make_decoder(replace(LLAMA, **shape), Settings(**settings), 1)
    assert caught.value.hint == hint


@pytest.mark.parametrize("shape", [{}, {"tied": True}, {"theta": 500.0, "eps": 1e-6}, {"multiple": 64}])
def test_any_size_of_llama_can_be_trained_in_jax(shape: dict[str, Any]) -> None:
    make_decoder(replace(LLAMA, **shape), Settings(), 1)


@pytest.mark.parametrize(("shares", "weight"), [(1, 12.0), (4, 3.0)])
def test_a_pass_in_jax_weighs_its_share_of_the_tokens(shares: int, weight: float) -> None:
    batch: Any = type("Batch", (), {"inputs": "inputs", "targets": "targets", "terms": 12.0})
    found: Any = make_decoder(LLAMA, Settings(), shares)(None).unpack(batch)
    assert found == (("inputs", "targets"), weight, weight)


def attend(query: Any, key: Any, value: Any, is_causal: bool) -> Any:
    """Of [B, T, heads, size], with fewer heads of keys and values."""
    q, k, v = (torch.from_numpy(np.ascontiguousarray(part)).transpose(1, 2) for part in (query, key, value))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return found.transpose(1, 2).numpy()


# What the program uses of JAX, by numpy and torch.
JAX: Any = SimpleNamespace(
    numpy=np,
    nn=SimpleNamespace(
        dot_product_attention=attend,
        silu=lambda x: x / (1 + np.exp(-x)),
        log_softmax=lambda x: torch.from_numpy(x).log_softmax(-1).numpy(),
    ),
)


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"theta": 500.0}, {"multiple": 64}, {"eps": 0.1}])
def test_a_decoder_in_jax_computes_what_torch_computes(changes: dict[str, Any]) -> None:
    shape = replace(Shape(90, 8, 16, 2, 4, 2, 24), **changes)
    model = Decoder(shape)
    fill_parameters(model, lambda name: 0.3, seed=1)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    tokens = torch.randint(90, (2, 8), generator=torch.Generator().manual_seed(2))
    targets = torch.roll(tokens, -1, 1)
    targets[0, 3] = IGNORED
    arrays = {name: value.detach().numpy().astype(np.float64) for name, value in model.named_parameters()}
    program = make_decoder(shape, Settings(), 1)(JAX)
    loss, (same, buffers) = program.train(arrays, {"kept": 1}, tokens.numpy(), targets.numpy())
    wanted = model(tokens, None, None, targets).item()
    assert float(loss) == pytest.approx(wanted, rel=1e-4)
    assert (float(same), buffers) == (float(loss), {"kept": 1})
    assert float(program.evaluate(arrays, {}, tokens.numpy(), targets.numpy())) == float(loss)


# --- the program ----------------------------------------------------------------------------------------------------


def start(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the task says of itself to the common program of language models."""
    given: dict[str, Any] = {}

    class Program:
        def __init__(self, *words: Any, **options: Any) -> None:
            given.update(options, words=words)

        def run(self, contract: Contract) -> None:
            given["contract"] = contract

    monkeypatch.setattr(task, "Program", Program)
    contract = Contract({"MLBENCH_PARAMETERS": json.dumps({})})
    task.main(contract)
    assert given.pop("contract") is contract
    return given


def test_a_result_describes_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    given = start(monkeypatch)
    assert given["words"] == ("gpt_pretraining", "a decoder", Settings, make_plan, task.load)
    assert (given["goal_metric"], given["formula"]) == ("loss", FLOPS_FORMULA)
    made = plan(vocabulary=300, vocabulary_multiple=64)
    settings = Settings(
        documents="separate", loss_chunk=8, stream="bf16", float8="head", optimizer="muon", sequence_length=32,
        global_batch=6,
    )  # fmt: skip
    assert given["details"](made, settings) == {
        "documents": "separate",
        "loss_chunk": 8,
        "stream": "bf16",
        "float8": "head",
        "optimizer": "muon",
        "vocabulary": 300,
        "padded_vocabulary": 320,
    }
    assert given["flops"](made, settings) == made.shape.flops_per_token(32) * 6 * 32
    unit = given["unit"](settings)
    assert (unit.name, unit.per_sample) == ("tokens", 32)
    assert given["unused_rows"](made) == dict.fromkeys(
        ("embedding.weight", "output.head.weight", "output.head.bias"), 20
    )
    assert given["deviation"](made)("embedding.weight") == pytest.approx(0.02)


@pytest.mark.parametrize("tied", ["yes", "no"])
def test_tied_ends_are_sharded_with_the_root(monkeypatch: pytest.MonkeyPatch, tied: str) -> None:
    given = start(monkeypatch)
    model = task.make_model(plan(tied=tied), Settings())
    assert given["apart"](model) == (((), ()) if tied == "yes" else ((model.embedding,), (model.output,)))
    assert given["blocks"](model) is model.blocks
    assert given["compiled"](model) == (model.output,)
    assert given["split_tensor"] is split_decoder


def test_jax_gets_the_passes_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(task, "make_decoder", lambda *words: seen.append(words))
    made, settings = plan(2, global_batch=24, micro_batch=4, batch_per_rank=0), Settings()
    start(monkeypatch)["in_jax"](made, settings)
    assert seen == [(made.shape, settings, 6)]
