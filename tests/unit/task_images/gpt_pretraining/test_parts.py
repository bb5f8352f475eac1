"""Parts of the decoder, each against its formula written down again; the modern decoder against modded-nanogpt's."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mlbench_cli.tasks.catalog import load_task
from task_images.gpt_pretraining.head import sum_cross_entropy
from task_images.gpt_pretraining.model import Decoder, join_qkv, split_qkv
from task_images.gpt_pretraining.plan import SHAPES, Shape, choose_shape
from task_images.language.parallel import fill_parameters

SMALL = Shape(90, 32, 64, 2, 4, 4, 128)
MODERN = replace(SHAPES["124M-modern"], vocabulary=90, context=32, width=64, layers=2, heads=2, kv_heads=2, hidden=256)


def make_decoder(shape: Shape, **options: Any) -> Decoder:
    model = Decoder(shape, **options)
    fill_parameters(model, lambda name: 0.3, seed=1)
    with torch.no_grad():  # scales and biases that say something
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return model


def make_tokens(shape: Shape, rows: int = 3) -> Tensor:
    return torch.randint(shape.vocabulary, (rows, shape.context), generator=torch.Generator().manual_seed(2))


# --- the modern decoder, as train_gpt_simple.py of modded-nanogpt computes it ----------------------------------------


def rotate_as_there(x: Tensor) -> Tensor:
    """x [B, T, heads, size]. There the halves of a head turn the other way, which is the same with the halves swapped;
    weights that are learned may have them either way."""
    x = torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)
    size = x.shape[-1]
    frequency = (1 / 1024) ** torch.linspace(0, 1, steps=size // 4)
    frequency = torch.cat([frequency, frequency.new_zeros(size // 4)])
    theta = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), frequency)[None, :, None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * theta.cos() + second * theta.sin(), first * -theta.sin() + second * theta.cos()), dim=3)


def modern_logits(state: dict[str, Tensor], shape: Shape, tokens: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), state[f"{name}.weight"], shape.eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    x = norm(state["embedding.weight"][tokens], "embedding_norm")
    for number in range(shape.layers):
        block = f"blocks.{number}"
        inside = norm(x, f"{block}.attention_norm")
        weights = split_qkv(state[f"{block}.attention.qkv.weight"], shape)
        biases = split_qkv(state[f"{block}.attention.qkv.bias"], shape)
        q, k, v = (
            F.linear(inside, weight, bias).view(*x.shape[:2], shape.heads, shape.head_size)
            for weight, bias in zip(weights, biases, strict=True)
        )
        q, k = (F.rms_norm(part, (part.shape[-1],), eps=shape.eps) for part in (q, k))
        q, k = rotate_as_there(q), rotate_as_there(k)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.12
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(2)
        x = x + linear(mixed, f"{block}.attention.output")
        inside = norm(x, f"{block}.feed_forward_norm")
        x = x + linear(linear(inside, f"{block}.feed_forward.up").relu().square(), f"{block}.feed_forward.down")
    logits = linear(norm(x, "output.norm"), "output.head")
    return 15 * logits * (logits.square() + 15**2).rsqrt()


def test_the_modern_decoder_computes_what_modded_nanogpts_does() -> None:
    model, tokens = make_decoder(MODERN), make_tokens(MODERN)
    state = {name: value.detach() for name, value in model.state_dict().items()}
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), modern_logits(state, MODERN, tokens), rtol=1e-5, atol=1e-4)


def test_the_modern_decoder_begins_as_modded_nanogpts_does() -> None:
    """What is added to the stream and the output layer are 0, so every word is as likely as every other one."""
    from task_images.gpt_pretraining.model import initial_deviation

    model = Decoder(MODERN)
    fill_parameters(model, lambda name: initial_deviation(name, MODERN), seed=1)
    tokens = make_tokens(MODERN)
    loss = model(tokens, None, None, tokens) / tokens.numel()
    assert loss.item() == pytest.approx(math.log(90), rel=1e-6)
    assert model.embedding.weight.std().item() == pytest.approx(1.0, rel=0.05)
    width = model.get_parameter("blocks.0.feed_forward.up.weight").std().item()
    assert width == pytest.approx((0.33 / 64) ** 0.5, rel=0.05)


# --- one part at a time ----------------------------------------------------------------------------------------------


def test_rows_of_the_fused_matrix_are_cut_and_joined_again() -> None:
    for shape in (SMALL, replace(SMALL, kv_heads=2)):
        matrix = torch.randn((shape.heads + 2 * shape.kv_heads) * shape.head_size, 5)
        query, key, value = split_qkv(matrix, shape)
        assert (len(query), len(key), len(value)) == (64, *[shape.kv_heads * shape.head_size] * 2)
        assert torch.equal(join_qkv(query, key, value, shape), matrix)


@pytest.mark.parametrize("positions", ["rotary", "half-rotary"])
def test_rotations_are_products_of_complex_numbers(positions: str) -> None:
    from task_images.gpt_pretraining.model import make_rotation, rotate

    shape = replace(SMALL, positions=positions, theta=100.0)
    x, half = torch.randn(7, shape.head_size), shape.head_size // 2
    found = rotate(x, *make_rotation(shape, 7, torch.device("cpu")))
    for place in range(7):
        for pair in range(half):
            if positions == "rotary":
                frequency = 100.0 ** (-pair / half)
            else:
                quarter = half // 2
                frequency = 100.0 ** (-pair / (quarter - 1)) if pair < quarter else 0.0
            turned = complex(x[place, pair], x[place, pair + half]) * complex(
                math.cos(place * frequency), math.sin(place * frequency)
            )
            assert found[place, pair].item() == pytest.approx(turned.real, abs=1e-5)
            assert found[place, pair + half].item() == pytest.approx(turned.imag, abs=1e-5)


def test_the_square_of_relu() -> None:
    layer = make_decoder(replace(SMALL, activation="relu2")).get_submodule("blocks.0.feed_forward")
    up, down = layer.get_parameter("up.weight"), layer.get_parameter("down.weight")
    x = torch.randn(5, 64)
    torch.testing.assert_close(layer(x), (x @ up.t()).clamp(min=0) ** 2 @ down.t())


def test_a_cap_keeps_logits_within_its_bounds_and_small_ones_as_they_are() -> None:
    model, tokens = make_decoder(replace(SMALL, softcap=2.0)), make_tokens(SMALL)
    plain = make_decoder(SMALL)
    with torch.no_grad():
        logits, wanted = model(tokens), plain(tokens)
    torch.testing.assert_close(logits, 2 * wanted / (wanted**2 + 4).sqrt())
    assert logits.abs().max() < 2


def test_queries_and_keys_are_normalized_so_their_size_says_nothing() -> None:
    model, tokens = make_decoder(replace(SMALL, qk_norm=True)), make_tokens(SMALL)
    plain = make_decoder(SMALL)
    with torch.no_grad():
        before, plain_before = model(tokens), plain(tokens)
        for one in (model, plain):
            for block in range(2):
                matrix = one.get_parameter(f"blocks.{block}.attention.qkv.weight")
                query, key, value = split_qkv(matrix, SMALL)
                matrix.copy_(join_qkv(3 * query, 5 * key, value, SMALL))
        torch.testing.assert_close(model(tokens), before, rtol=1e-3, atol=1e-3)
        assert (plain(tokens) - plain_before).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "value", "field", "wanted"),
    [
        ("norm", "layer", "norm", "layer"),
        ("positions", "learned", "positions", "learned"),
        ("activation", "relu2", "activation", "relu2"),
        ("qk_norm", "yes", "qk_norm", True),
        ("tied", "yes", "tied", True),
        ("softcap", 15.0, "softcap", 15.0),
    ],
)
def test_a_parameter_changes_its_part_alone_and_counts_stay_right(
    name: str, value: object, field: str, wanted: object
) -> None:
    task = load_task("gpt_pretraining")
    plain = choose_shape(task.resolve("tiny"))
    shape = choose_shape(task.resolve("tiny", {name: value}))
    assert replace(shape, **{field: getattr(plain, field)}) == plain
    assert getattr(shape, field) == wanted
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Decoder(shape).parameters()) == shape.parameters


# --- options that change how, not what -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [SMALL, MODERN, replace(SMALL, multiple=64, tied=True)], ids=["llama", "modern", "padded"]
)
@pytest.mark.parametrize("part", ["whole", "output"])
def test_the_model_compiles_without_a_break_and_computes_the_same(shape: Shape, part: str) -> None:
    """One graph of forward pass, output layer and loss; nothing is written to behind autograd's back."""
    graphs: list[int] = []

    def count(module: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(len(module.graph.nodes))
        return module.forward

    model, tokens = make_decoder(shape), make_tokens(shape)
    targets = torch.roll(tokens, -1, 1)
    targets[0, 3] = -100
    wanted = model(tokens, None, None, targets)
    torch.autograd.backward(wanted)
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    torch._dynamo.reset()
    (model if part == "whole" else model.output).compile(backend=count, fullgraph=True)
    found = model(tokens, None, None, targets)
    torch.autograd.backward(found)
    assert len(graphs) == 1
    torch.testing.assert_close(found, wanted)
    assert len(gradients) == len(list(model.parameters()))
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad, gradients[name], msg=name)


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    shape = replace(SMALL, multiple=64)
    model, tokens = make_decoder(shape), make_tokens(shape)
    targets = torch.roll(tokens, -1, 1)
    logits = model(tokens)
    assert logits.shape == (3, 32, 90)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        model(tokens, None, None, targets), sum_cross_entropy(logits.flatten(0, 1), targets.flatten())
    )


def test_a_stream_in_bf16_is_near_that_in_fp32() -> None:
    tokens = make_tokens(SMALL)
    with torch.autocast("cpu", torch.bfloat16):
        plain = make_decoder(SMALL)(tokens, None, None, tokens) / tokens.numel()
        model = make_decoder(SMALL, stream=torch.bfloat16)
        seen: list[torch.dtype] = []
        model.output.register_forward_pre_hook(lambda module, given: seen.append(given[0].dtype))
        found = model(tokens, None, None, tokens) / tokens.numel()
    assert seen == [torch.bfloat16]
    assert found.item() == pytest.approx(plain.item(), rel=0.02)
