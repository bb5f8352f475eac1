"""Codecs by hand: small messages whose bytes, parts and sums can be worked out."""

import math

import pytest
import torch
from torch import Tensor

from task_images.comm.codecs import (
    Cast,
    Codec,
    Qsgd,
    RandomK,
    Sign,
    TopK,
    make_codec,
    orthogonalize,
)
from task_images.comm.methods import Method


def numbers(size: int, seed: int = 1) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("codec", "changes", "kind"),
    [
        ("none", {}, Codec),
        ("fp16", {}, Cast),
        ("bf16", {}, Cast),
        ("sign", {}, Sign),
        ("topk:0.5", {}, TopK),
        ("randomk:0.5", {}, RandomK),
        ("qsgd:7", {}, Qsgd),
    ],
)
def test_each_codec_of_a_method_has_its_class(codec: str, changes: dict[str, str], kind: type) -> None:
    made = make_codec(Method(codec=codec, **changes), 0, [2, 2])
    assert type(made) is kind
    assert made.additive is (kind in (Codec, Cast, RandomK))


def test_signs_have_the_mean_magnitude_of_their_tensor_and_zero_is_positive() -> None:
    flat = torch.tensor([1.0, -3.0, 0.0, -8.0, 10.0])
    codec = Sign(scaled=True, sizes=[3, 2])
    payload = codec.encode(flat, 0)
    assert payload[0].tolist() == [0b01010]
    assert payload[1].tolist() == pytest.approx([4 / 3, 9.0])
    assert payload[1].dtype == torch.float32
    assert codec.decode(payload, flat, 0).tolist() == pytest.approx([4 / 3, -4 / 3, 4 / 3, -9.0, 9.0])
    doubled = codec.aggregate([payload, payload], flat, 0)
    assert doubled.tolist() == pytest.approx([8 / 3, -8 / 3, 8 / 3, -18.0, 18.0])
    assert Sign(scaled=False).decode(payload[:1], flat, 0).tolist() == [1, -1, 1, -1, 1]


def test_a_bucket_of_512_numbers_has_its_own_norm() -> None:
    flat = torch.cat([torch.full((512,), 2.0), torch.full((88,), 3.0)])
    codec = Qsgd(7, 0)
    levels, norms = codec.encode(flat, 1)
    assert levels.dtype == torch.int8
    assert norms.tolist() == pytest.approx([2 * math.sqrt(512), 3 * math.sqrt(88)])
    # 2 / norm * 7 = 0.31 of a level, 3 / norm * 7 = 0.75: rounded to 0 or 1.
    assert set(levels[:512].tolist()) == {0, 1}
    assert 0.2 < float(levels[:512].float().mean()) < 0.42
    assert 0.55 < float(levels[512:].float().mean()) < 0.95
    decoded = codec.decode([levels, norms], flat, 1)
    assert sorted(set(decoded.tolist())) == pytest.approx([0.0, 3 * math.sqrt(88) / 7, 2 * math.sqrt(512) / 7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_columns_become_orthonormal_in_their_own_type(dtype: torch.dtype) -> None:
    matrix = numbers(24).view(8, 3).to(dtype)
    found = orthogonalize(matrix)
    assert found.dtype == dtype
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.double().T @ found.double(), torch.eye(3).double(), atol=tolerance, rtol=0)
    # The span is that of the columns: projecting changes nothing.
    wide = matrix.double()
    torch.testing.assert_close(found.double() @ (found.double().T @ wide), wide, atol=10 * tolerance, rtol=0)
    assert not orthogonalize(torch.zeros(4, 2, dtype=dtype)).isnan().any()
