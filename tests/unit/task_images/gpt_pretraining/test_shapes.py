"""Shapes of decoders: rows that pad, initial values, rotations and splits, by the formulas of the sources."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from task_images.gpt_pretraining.model import (
    Decoder,
    count_unused_rows,
    initial_deviation,
    make_rotation,
    rotate,
)
from task_images.gpt_pretraining.plan import Shape

SMALL = Shape(100, 32, 64, 2, 4, 2, 176)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("vocabulary", "multiple", "rows"),
    [(100, 1, 100), (100, 64, 128), (128, 64, 128), (129, 64, 192), (50_257, 128, 50_304)],
)
def test_a_head_of_round_size_has_unused_rows(vocabulary: int, multiple: int, rows: int) -> None:
    shape = replace(SMALL, vocabulary=vocabulary, multiple=multiple)
    assert shape.padded_vocabulary == rows
    unused = count_unused_rows(shape)
    if rows == vocabulary:
        assert unused == {}
    else:
        assert unused == dict.fromkeys(
            ("embedding.weight", "output.head.weight", "output.head.bias"), rows - vocabulary
        )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True},
        {"bias": True},
        {"bias": True, "tied": True},
        {"norm": "layer"},
        {"positions": "learned"},
        {"activation": "gelu"},
        {"kv_heads": 4},
        {"kv_heads": 1},
    ],
)
def test_every_part_is_counted(changes: dict[str, Any]) -> None:
    shape = replace(SMALL, **changes)
    with torch.device("meta"):
        model = Decoder(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    products = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and not name.startswith(("embedding.", "positions."))
    )
    assert shape.matmul_parameters == products + (100 * 64 if shape.tied else 0)


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("blocks.1.attention.output.weight", 0.02 / 2),
        ("blocks.1.feed_forward.down.weight", 0.02 / 2),
        ("blocks.1.attention.qkv.weight", 0.02),
        ("embedding.weight", 0.02),
        ("output.head.weight", 0.02),
    ],
)
def test_initial_values_are_smaller_for_what_is_added_to_the_stream(name: str, deviation: float) -> None:
    """GPT-2 divides them by the square root of twice the layers: here of four."""
    assert initial_deviation(name, SMALL) == pytest.approx(deviation)


def test_rotations_have_the_published_frequencies() -> None:
    cosines, sines = make_rotation(SMALL, 5, CPU)
    angles = np.arange(5)[:, None] * 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(cosines, np.cos(np.tile(angles, 2)), atol=1e-6)
    np.testing.assert_allclose(sines, np.sin(np.tile(angles, 2)), atol=1e-6)


def test_a_rotation_keeps_lengths_and_only_distances_matter() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 16), torch.randn(1, 16)
    cosines, sines = make_rotation(SMALL, 30, CPU)

    def turn(x: torch.Tensor, place: int) -> torch.Tensor:
        return rotate(x, cosines[place : place + 1], sines[place : place + 1])

    assert turn(query, 7).norm().item() == pytest.approx(query.norm().item(), rel=1e-5)
    near = [(turn(query, place) * turn(key, place - 3)).sum().item() for place in (3, 10, 29)]
    assert near == pytest.approx([near[0]] * 3, rel=1e-4)
    assert torch.equal(turn(query, 0), query)
