"""Codecs: what they lose, and what they say they send."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from task_images.comm.codecs import (
    Qsgd,
    RandomK,
    Sign,
    TopK,
    join_payload,
    make_codec,
    pack_bits,
    split_payload,
    unpack_bits,
)
from task_images.comm.exchange import make_message
from task_images.comm.methods import Method, find_density, payload_bytes
from task_images.comm.presets import resolve

NAMES = ("bsp", "fp16", "bf16", "signsgd-mv", "ef-signsgd", "topk", "randomk", "qsgd")


def numbers(size: int, seed: int = 1) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 7, 8, 513, 4096])
def test_a_payload_has_the_bytes_of_the_formula_and_survives_as_one_message(name: str, size: int) -> None:
    method = resolve(name)
    payload = make_codec(method, 0).encode(numbers(size), 5)
    message = join_payload(payload)
    assert message.numel() == payload_bytes(method, [size])
    for one, other in zip(payload, split_payload(message, payload), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("size", [1, 3, 8, 9, 64, 1001])
def test_bits_are_the_same_after_packing(size: int) -> None:
    bits = numbers(size) < 0
    packed = pack_bits(bits)
    assert packed.numel() == -(-size // 8)
    assert torch.equal(unpack_bits(packed, size).bool(), bits)


def test_the_majority_decides_and_a_coin_decides_ties() -> None:
    codec, count = Sign(scaled=False), 4000
    flats = [numbers(count, 1), numbers(count, 2)]
    payloads = [codec.encode(flat, 0) for flat in flats]
    ties = flats[0].sign() != flats[1].sign()
    found = codec.aggregate(payloads, flats[0], 7)
    assert torch.equal(found[~ties], flats[0].sign()[~ties])
    assert float(found[ties].mean().abs()) < 4 / int(ties.sum()) ** 0.5
    assert torch.equal(found, codec.aggregate(payloads, flats[0], 7))
    assert not torch.equal(found, codec.aggregate(payloads, flats[0], 8))


def test_each_tensor_of_a_message_is_compressed_by_itself() -> None:
    """Its bytes are those of the formula, too."""
    large, small = numbers(400, 1), 1e-3 * numbers(100, 2)
    flat = torch.cat([large, small])
    for name in ("ef-signsgd", "topk", "randomk"):
        method = resolve(name)
        codec = make_codec(method, 0, [400, 100])
        payload = codec.encode(flat, 3)
        assert join_payload(payload).numel() == payload_bytes(method, [400, 100])
        found = codec.decode(payload, flat, 3)
        assert 0 < float(found[400:].abs().max()) <= float(small.abs().max()), name
        whole = make_codec(replace(method, scope="message"), 0, [400, 100])
        payload = whole.encode(flat, 3)
        assert join_payload(payload).numel() == payload_bytes(replace(method, scope="message"), [400, 100])
    magnitudes = [float(part.abs().mean()) for part in (large, small)]
    scaled = make_codec(resolve("ef-signsgd"), 0, [400, 100])
    assert [float(part.abs().max()) for part in scaled.split(scaled.decode(scaled.encode(flat, 3), flat, 3))] == (
        pytest.approx(magnitudes)
    )


def test_the_density_falls_in_a_warm_up_as_published() -> None:
    """Lin et al. 2018, section 3.3: 75, 93.75, 98.4375, 99.6, 99.9 % are left out."""
    found = [100 * find_density(0.001, 50, update) for update in (1, 11, 21, 31, 41, 51)]
    assert found == pytest.approx([25, 6.25, 1.5625, 0.390625, 0.1, 0.1], rel=0.03)


def test_a_minority_of_inverted_workers_changes_nothing_that_all_others_agree_on() -> None:
    codec, truth = Sign(scaled=False), numbers(500)
    payloads = [codec.encode(truth if worker < 3 else -truth, 0) for worker in range(5)]
    assert torch.equal(codec.aggregate(payloads, truth, 0), truth.sign())


@pytest.mark.parametrize(("density", "least"), [(0.01, 0.99), (0.1, 0.9), (1.0, 0.0)])
@pytest.mark.parametrize("sampled", [False, True])
def test_topk_contracts_and_its_indices_are_unique(density: float, least: float, sampled: bool) -> None:
    flat = numbers(20_000)
    codec = TopK(density, sampled)
    payload = codec.encode(flat, 3)
    assert len(torch.unique(payload[0])) == len(payload[0]) == max(1, int(density * 20_000))
    lost = flat - codec.decode(payload, flat, 3)
    assert float(lost.square().sum() / flat.square().sum()) <= least
    if not sampled:
        assert float(lost.abs().max()) <= float(payload[1].abs().min())


def test_equal_indices_of_several_workers_add_up() -> None:
    codec, flat = TopK(0.1), torch.zeros(10)
    payloads = [[torch.tensor([3], dtype=torch.int32), torch.tensor([value])] for value in (1.0, 2.5)]
    assert codec.aggregate(payloads, flat, 0)[3] == 3.5


def test_random_places_are_the_same_on_all_ranks_and_others_in_every_update() -> None:
    codec, flat = RandomK(0.1, unbiased=True), torch.ones(1000)
    assert torch.equal(codec.decode(codec.encode(flat, 1), flat, 1), codec.decode(codec.encode(flat, 1), flat, 1))
    assert not torch.equal(codec.decode(codec.encode(flat, 1), flat, 1), codec.decode(codec.encode(flat, 2), flat, 2))
    mean = torch.stack([codec.decode(codec.encode(flat, seed), flat, seed) for seed in range(400)]).mean()
    assert float(mean) == pytest.approx(1.0)


def test_random_rounding_has_no_bias_and_a_bounded_variance() -> None:
    flat, levels, rounds = numbers(512), 4, 600
    codec = Qsgd(levels, rank=0)
    decoded = torch.stack([codec.decode(codec.encode(flat, seed), flat, seed) for seed in range(rounds)])
    spacing = float(flat.norm()) / levels
    assert float((decoded.mean(0) - flat).abs().max()) < 5 * spacing / 2 / rounds**0.5
    error = (decoded - flat).square().sum(1).mean() / flat.square().sum()
    assert float(error) <= min(512 / levels**2, 512**0.5 / levels)
    assert not codec.decode(codec.encode(torch.zeros(9), 1), torch.zeros(9), 1).any()


def test_workers_round_on_their_own_and_the_same_way_again() -> None:
    flat = numbers(600)
    one, other = Qsgd(4, 0).encode(flat, 7)[0], Qsgd(4, 1).encode(flat, 7)[0]
    assert torch.equal(one, Qsgd(4, 0).encode(flat, 7)[0])
    assert not torch.equal(one, other)


@pytest.mark.parametrize("method", [resolve("eftopk"), resolve("ef-signsgd"), resolve("randomk")], ids=lambda m: m.name)
def test_what_is_sent_and_what_is_kept_is_what_came_in(method: Method) -> None:
    message = make_message(method, 0, torch.zeros(4096), 0, [1000, 3096], [])
    received, given = torch.zeros(4096), torch.zeros(4096)
    for step in range(50):
        message.flat.copy_(numbers(4096, step))
        given += message.flat
        received += message.codec.decode(message.encode(step, 0.0), message.flat, step)
    assert message.residual is not None
    torch.testing.assert_close(received + message.residual, given, rtol=1e-4, atol=1e-4)
