"""Parts of the decoder, each against its formula written down again."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from task_images.gpt_pretraining.model import Decoder, make_rotation, rotate
from task_images.gpt_pretraining.plan import Shape
from task_images.language.model import fill_parameters

SMALL = Shape(90, 32, 64, 2, 4, 4, 128)


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


# --- one part at a time ----------------------------------------------------------------------------------------------


def test_rotations_are_products_of_complex_numbers() -> None:
    shape = replace(SMALL, theta=100.0)
    x, half = torch.randn(7, shape.head_size), shape.head_size // 2
    found = rotate(x, *make_rotation(shape, 7, torch.device("cpu")))
    for place in range(7):
        for pair in range(half):
            frequency = 100.0 ** (-pair / half)
            turned = complex(x[place, pair], x[place, pair + half]) * complex(
                math.cos(place * frequency), math.sin(place * frequency)
            )
            assert found[place, pair].item() == pytest.approx(turned.real, abs=1e-5)
            assert found[place, pair + half].item() == pytest.approx(turned.imag, abs=1e-5)


# --- options that change how, not what -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, multiple=64, tied=True)], ids=["llama", "padded"])
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
    wanted = model(tokens, targets)
    torch.autograd.backward(wanted)
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    torch._dynamo.reset()
    (model if part == "whole" else model.output).compile(backend=count, fullgraph=True)
    found = model(tokens, targets)
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
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, targets), wanted)


def test_a_stream_in_bf16_is_near_that_in_fp32() -> None:
    tokens = make_tokens(SMALL)
    with torch.autocast("cpu", torch.bfloat16):
        plain = make_decoder(SMALL)(tokens, tokens) / tokens.numel()
        model = make_decoder(SMALL, stream=torch.bfloat16)
        seen: list[torch.dtype] = []
        model.output.register_forward_pre_hook(lambda module, given: seen.append(given[0].dtype))
        found = model(tokens, tokens) / tokens.numel()
    assert seen == [torch.bfloat16]
    assert found.item() == pytest.approx(plain.item(), rel=0.02)
