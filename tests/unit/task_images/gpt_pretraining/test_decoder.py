"""The decoder: sizes as published, outputs as transformers'."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mlbench_cli.tasks.catalog import load_task
from task_images.contract import Contract, TaskUsageError
from task_images.gpt_pretraining.model import Decoder, count_unused_rows
from task_images.gpt_pretraining.plan import SHAPES, Shape, choose_shape
from task_images.gpt_pretraining.task import main
from task_images.language.model import fill_parameters
from tests.needs import needs

PUBLISHED = {"tiny": 125_248, "124M": 124_439_808, "1B": 1_235_814_400, "8B": 8_030_261_248}
SMALL = Shape(100, 32, 64, 2, 4, 2, 176, theta=500_000.0)
GPT2_SMALL = Shape(
    100, 32, 64, 2, 4, 4, 256, tied=True, norm="layer", positions="learned", activation="gelu", bias=True
)


def make_decoder(shape: Shape) -> Decoder:
    model = Decoder(shape)
    fill_parameters(model, lambda name: 0.2, seed=1)
    return model.eval()


@pytest.mark.parametrize("name", list(SHAPES))
def test_the_models_have_exactly_the_published_numbers_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(SHAPES[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == SHAPES[name].parameters == PUBLISHED[name]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "billions"), [("124M", 0.854), ("1B", 10.636)])
def test_the_formula_of_flops_is_what_torch_counts(name: str, billions: float) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model, tokens = Decoder(shape), torch.zeros(1, shape.context, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert shape.flops_per_token(shape.context) * shape.context == counter.get_total_flops()
    assert shape.flops_per_token(shape.context) == pytest.approx(billions * 1e9, rel=1e-3)


LLAMA_NAMES = (
    *(("embedding.", "model.embed_tokens."), ("blocks.", "model.layers.")),
    *(("feed_forward_norm", "post_attention_layernorm"), ("attention_norm", "input_layernorm")),
    *((f"attention.{own}", f"self_attn.{own[0]}_proj") for own in ("query", "key", "value", "output")),
    *(("feed_forward.", "mlp."), ("gate.", "gate_proj."), ("up.", "up_proj."), ("down.", "down_proj.")),
)


def llama_name(name: str) -> str:
    for own, theirs in LLAMA_NAMES:
        name = name.replace(own, theirs)
    return {"output.norm.weight": "model.norm.weight", "output.head.weight": "lm_head.weight"}.get(name, name)


def split_fused(state: dict[str, torch.Tensor], shape: Shape) -> dict[str, torch.Tensor]:
    """The same tensors with queries, keys and values apart, by an index of every row."""
    found, shared = {}, shape.heads // shape.kv_heads
    rows = {"query": [], "key": [], "value": []}  # type: dict[str, list[int]]
    for group in range(shape.kv_heads):
        for place in range(shared + 2):
            begin = (group * (shared + 2) + place) * shape.head_size
            kind = "query" if place < shared else "key" if place == shared else "value"
            rows[kind] += range(begin, begin + shape.head_size)
    for name, tensor in state.items():
        if ".qkv." not in name:
            found[name] = tensor
            continue
        for kind, chosen in rows.items():
            found[name.replace("qkv", kind)] = tensor[chosen]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_transformers_llama_with_the_same_weights(tied: bool) -> None:
    transformers = needs("transformers")
    shape = replace(SMALL, tied=tied)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.context,
            rms_norm_eps=shape.eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
            tie_word_embeddings=tied,
        )
    ).eval()
    ours = make_decoder(shape)
    own = split_fused(ours.state_dict(), shape)
    theirs.load_state_dict({llama_name(name): value for name, value in own.items()})
    tokens = torch.randint(shape.vocabulary, (2, shape.context), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-6)


def test_logits_equal_those_of_transformers_gpt2_with_the_same_weights() -> None:
    transformers = needs("transformers")
    shape = GPT2_SMALL
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=100, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    ).eval()
    ours = make_decoder(shape)
    own = split_fused(ours.state_dict(), shape)
    for name, value in theirs.state_dict().items():
        value.copy_(gpt2_tensor(name, own))
    tokens = torch.randint(100, (2, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


def gpt2_tensor(name: str, own: dict[str, torch.Tensor]) -> torch.Tensor:
    """Our tensor for one of GPT-2's, whose matrices are (inputs, outputs)."""
    ends = {"wte.weight": "embedding.weight", "wpe.weight": "positions.weight", "lm_head.weight": "output.head.weight"}
    short = name.removeprefix("transformer.")
    if short in ends:
        return own[ends[short]]
    if short.startswith("ln_f"):
        return own[short.replace("ln_f", "output.norm")]
    _, block, layer, *rest = short.split(".")
    prefix, kind = f"blocks.{block}", rest[-1]
    if layer.startswith("ln_"):
        return own[f"{prefix}.{'attention_norm' if layer == 'ln_1' else 'feed_forward_norm'}.{kind}"]
    if rest[0] == "c_attn":
        found = torch.cat([own[f"{prefix}.attention.{part}.{kind}"] for part in ("query", "key", "value")])
    elif layer == "attn":
        found = own[f"{prefix}.attention.output.{kind}"]
    else:
        found = own[f"{prefix}.feed_forward.{'up' if rest[0] == 'c_fc' else 'down'}.{kind}"]
    return found.t() if kind == "weight" else found


def compute_losses(shape: Shape) -> tuple[list[float], Decoder]:
    """Losses before each of three AdamW updates, and the model after them."""
    model = Decoder(shape)
    fill_parameters(model, lambda name: 0.2, 1, count_unused_rows(shape))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    tokens = torch.randint(shape.vocabulary, (3, 8), generator=torch.Generator().manual_seed(2))
    targets, losses = torch.roll(tokens, -1, 1), []
    for _ in range(3):
        loss = model(tokens, targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, model


@pytest.mark.parametrize("tied", [False, True])
def test_a_padded_vocabulary_trains_as_the_words_alone(tied: bool) -> None:
    """Rows that only pad it stay 0, and count neither as parameters nor as FLOPs."""
    shape = replace(SMALL, tied=tied)
    padded = replace(shape, multiple=64)
    assert (padded.padded_vocabulary, padded.parameters) == (128, shape.parameters)
    assert padded.flops_per_token(32) == shape.flops_per_token(32)
    losses, plain = compute_losses(shape)
    found, model = compute_losses(padded)
    assert found == pytest.approx(losses, rel=1e-5)
    for (name, wanted), tensor in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(tensor[: len(wanted)], wanted, rtol=1e-4, atol=1e-5, msg=name)
        assert not tensor[len(wanted) :].any(), name
    assert model.get_parameter("output.head.weight").shape[0] == 128


def test_gpt_2_has_a_head_of_round_size_by_default() -> None:
    shape = choose_shape(load_task("gpt_pretraining").resolve("spec"))
    assert (shape.vocabulary, shape.padded_vocabulary) == (50_257, 50_304)
    assert shape.parameters == PUBLISHED["124M"]
    assert choose_shape(load_task("gpt_pretraining").resolve("tiny")).padded_vocabulary == 256


@pytest.mark.parametrize("compiled", ["whole", "graphs"])
def test_a_model_in_parts_is_not_compiled_as_a_whole(compiled: str) -> None:
    parameters = {"compile": compiled, "activation_checkpointing": "full"}
    contract = Contract({"MLBENCH_PARAMETERS": json.dumps(parameters)})
    with pytest.raises(TaskUsageError, match="the model cannot be compiled as a whole") as caught:
        main(contract)
    assert "--set compile=blocks" in str(caught.value.hint)
