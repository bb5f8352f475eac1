"""Codecs by hand: small messages whose bytes, parts and sums can be worked out."""

import math

import numpy as np
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
    elect,
    flip_coins,
    join_payload,
    make_codec,
    orthogonalize,
    pack_bits,
    split_payload,
    unpack_bits,
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


@pytest.mark.parametrize(("codec", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_numbers_are_rounded_to_16_bits_and_back(codec: str, dtype: torch.dtype) -> None:
    flat = numbers(50)
    made = make_codec(Method(codec=codec), 0)
    payload = made.encode(flat, 0)
    assert payload[0].dtype == dtype
    found = made.decode(payload, flat, 0)
    assert found.dtype == torch.float32
    assert torch.equal(found, flat.to(dtype).float())


def test_without_a_codec_the_sum_is_the_sum_and_changes_no_payload() -> None:
    payloads = [[torch.tensor([1.0, 2.0])], [torch.tensor([10.0, 20.0])], [torch.tensor([100.0, 200.0])]]
    assert Codec().aggregate(payloads, torch.zeros(2), 0).tolist() == [111.0, 222.0]
    assert payloads[0][0].tolist() == [1.0, 2.0]


def test_bits_are_packed_as_numpy_packs_them_lowest_first() -> None:
    bits = numbers(21) < 0
    wanted = np.packbits(bits.numpy(), bitorder="little")
    assert pack_bits(bits).tolist() == wanted.tolist()
    assert unpack_bits(torch.from_numpy(wanted), 21).tolist() == bits.int().tolist()


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


def test_the_majority_of_three_and_the_coins_of_a_tie() -> None:
    votes = torch.tensor([3.0, 1.0, -1.0, -3.0, 0.0, 0.0])
    coins = torch.tensor([1, 1, 0, 0, 1, 0], dtype=torch.uint8)
    assert elect(votes, coins).tolist() == [False, False, True, True, True, False]
    found = flip_coins(torch.zeros(4000), 3)
    assert found.dtype == torch.uint8
    assert set(found.tolist()) == {0, 1}
    assert 1800 < int(found.sum()) < 2200
    assert torch.equal(found, flip_coins(torch.zeros(4000), 3))


def test_topk_takes_the_share_of_each_part_with_indices_of_the_message() -> None:
    flat = torch.tensor([0.1, -5.0, 0.3, 0.2, 7.0, 0.05, -0.06, 0.01, 0.02, 0.03])
    codec = TopK(0.5, sizes=[4, 6])
    indices, values = codec.encode(flat, 0)
    assert indices.dtype == torch.int32
    assert sorted(indices.tolist()) == [1, 2, 4, 5, 6]
    assert {int(at): float(value) for at, value in zip(indices, values, strict=True)} == {
        int(at): float(flat[at]) for at in (1, 2, 4, 5, 6)
    }
    decoded = codec.decode([indices, values], flat, 0)
    assert decoded.nonzero().flatten().tolist() == [1, 2, 4, 5, 6]
    whole = TopK(0.5).encode(flat, 0)[0]
    assert sorted(whole.tolist()) == [0, 1, 2, 3, 4]


def test_a_warm_up_sends_more_at_first() -> None:
    codec = TopK(0.01, warmup=10)
    counts = []
    for update in (1, 3, 10, 11):
        codec.update = update
        counts.append(len(codec.encode(numbers(1600), 0)[0]))
    assert counts == [400, 100, 16, 16]


def test_a_sample_chooses_among_more_than_4096_elements_and_rarely_misses_a_large_one() -> None:
    flat = numbers(5000)
    exact = set(flat.abs().topk(500).indices.tolist())
    found = set(TopK(0.1, sampled=True).encode(flat, 1)[0].tolist())
    assert len(found) == 500
    assert len(exact & found) >= 495
    few = numbers(4096)
    assert set(TopK(0.1, sampled=True).encode(few, 1)[0].tolist()) == set(few.abs().topk(409).indices.tolist())


def test_a_sample_with_too_few_elements_above_its_threshold_falls_back_to_all() -> None:
    """All elements of the sample may be larger than most: the density is then reached by looking at all."""
    flat = torch.ones(5000)
    assert len(TopK(0.9, sampled=True).encode(flat, 1)[0]) == 4500


def test_random_entries_are_scaled_by_the_inverse_share_of_their_part() -> None:
    flat = torch.ones(30)
    codec = RandomK(0.25, unbiased=True, sizes=[20, 10])
    values = codec.encode(flat, 5)[0]
    assert len(values) == 5 + 2
    found = codec.decode([values], flat, 5)
    assert found[:20].sum() == 20
    assert found[20:].sum() == 10
    plain = RandomK(0.25, unbiased=False, sizes=[20, 10])
    assert plain.decode(plain.encode(flat, 5), flat, 5).sum() == 7
    assert torch.equal(plain.decode([values], flat, 5).bool(), found.bool())


def test_places_are_drawn_once_per_message() -> None:
    codec, flat = RandomK(0.5, unbiased=False), torch.ones(100)
    first = codec._places(flat, 1)
    assert codec._places(flat, 1) is first
    assert codec._places(flat, 2) is not first
    assert torch.equal(codec._places(flat, 1), first)
    assert len(codec._places(torch.ones(10), 1)) == 5


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


def test_one_large_number_has_the_highest_level_and_keeps_its_sign() -> None:
    flat = torch.tensor([-4.0, 0.0])
    codec = Qsgd(127, 0)
    levels, norms = codec.encode(flat, 1)
    assert levels.tolist() == [-127, 0]
    assert codec.decode([levels, norms], flat, 1).tolist() == [-4.0, 0.0]


def test_a_message_is_split_at_any_address() -> None:
    """Five bytes come before the numbers of four bytes, which need aligned addresses."""
    payload = [torch.arange(5, dtype=torch.uint8), torch.tensor([1.5, -2.5]), torch.tensor([7], dtype=torch.int8)]
    message = join_payload(payload)
    assert message.dtype == torch.uint8
    assert message.numel() == 5 + 8 + 1
    for one, other in zip(payload, split_payload(message, payload), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert join_payload([torch.ones(3)]).numel() == 12


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
