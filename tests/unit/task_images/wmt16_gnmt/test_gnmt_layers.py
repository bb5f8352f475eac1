"""GNMT's wiring, layer by layer with torch's LSTMs on one sentence at a time, and its attention in numpy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from task_images.wmt16_gnmt.task import Attention, Gnmt, Size

PADDING = 1


def attend(attention: Attention, queries: np.ndarray, keys: np.ndarray, seen: int) -> np.ndarray:
    """The formula of the class, pair by pair."""
    weight, key, v, g, b = (
        parameter.detach().numpy().astype(np.float64)
        for parameter in (
            attention.query.weight,
            attention.key.weight,
            attention.direction,
            attention.scale,
            attention.bias,
        )
    )
    found = np.zeros((len(queries), len(keys)))
    for row, query in enumerate(queries):
        scores = [g[0] * v / np.linalg.norm(v) @ np.tanh(weight @ query + key @ one + b) for one in keys[:seen]]
        exponentials = np.exp(np.array(scores) - max(scores))
        found[row, :seen] = exponentials / exponentials.sum()
    return found


@pytest.mark.parametrize("at_once", [1, 120, 1 << 25])
@pytest.mark.parametrize("learns", [True, False])
def test_attention_is_additive_and_normalized_in_any_number_of_parts(at_once: int, learns: bool) -> None:
    torch.manual_seed(0)
    attention = Attention(5)
    with torch.no_grad():
        attention.bias.uniform_(-1, 1)
        attention.scale.fill_(3.0)
    attention.at_once = at_once
    queries, memory = torch.randn(2, 3, 5), torch.randn(2, 4, 5)
    mask = torch.tensor([[[True] * 4], [[True, True, False, False]]])
    with torch.set_grad_enabled(learns):
        weights = attention.weights(queries, attention.keys(memory), mask)
        contexts = attention(queries, memory, attention.keys(memory), mask)
    for row, seen in enumerate((4, 2)):
        expected = attend(attention, queries[row].numpy(), memory[row].numpy(), seen)
        np.testing.assert_allclose(weights[row].detach(), expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(contexts[row].detach(), expected @ memory[row].numpy(), rtol=1e-4, atol=1e-5)
    if learns:
        contexts.sum().backward()
        assert attention.direction.grad is not None
        assert attention.direction.grad.abs().max() > 0


def test_parts_of_a_pass_have_the_gradients_of_the_whole() -> None:
    torch.manual_seed(0)
    queries, memory = torch.randn(2, 7, 5), torch.randn(2, 4, 5)
    mask = torch.ones(2, 1, 4, dtype=torch.bool)
    found: list[Tensor] = []
    for at_once in (1, 1 << 25):
        torch.manual_seed(1)
        attention = Attention(5)
        attention.at_once = at_once
        attention(queries, memory, attention.keys(memory), mask).square().sum().backward()
        assert attention.query.weight.grad is not None
        found.append(attention.query.weight.grad)
    torch.testing.assert_close(found[0], found[1])


def test_parameters_begin_uniformly_and_the_second_biases_of_lstms_with_zeros() -> None:
    torch.manual_seed(0)
    model = Gnmt(300, Size(64, 4, 0.2, initial=0.1), padding=PADDING)
    for name, parameter in model.named_parameters():
        if "bias_hh" in name:
            assert not parameter.any(), name
        elif name == "attention.scale":
            assert parameter.item() == pytest.approx(64**-0.5)
        elif name == "attention.bias":
            assert not parameter.any()
        else:
            assert 0.08 < parameter.abs().max() <= 0.1, name
            assert parameter.std().item() == pytest.approx(0.1 / math.sqrt(3), rel=0.2), name
