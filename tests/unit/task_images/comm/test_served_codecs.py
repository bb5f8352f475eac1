"""Sums of codecs at parameter servers: the same bits as each rank's own sum after an all-gather, in fewer bytes."""

import pytest
import torch

from task_images.comm.codecs import make_codec
from task_images.comm.methods import Method
from task_images.comm.presets import resolve
from task_images.comm.served_codecs import make_adder, make_request, read_answer

RANKS = 3
METHODS = {
    "sign": resolve("bsp-ps", {"codec": "sign"}),
    "scaled sign": resolve("bsp-ps", {"codec": "sign", "feedback": "ef"}),
    "topk": resolve("bsp-ps", {"codec": "topk:0.1"}),
    "qsgd": resolve("bsp-ps", {"codec": "qsgd:7"}),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[1], [7], [1000], [400, 1, 99, 500]])
def test_the_answer_is_the_sum_that_ranks_make_themselves(method: Method, dtype: torch.dtype, sizes: list[int]) -> None:
    size = sum(sizes)
    torch.manual_seed(size)
    gradients = [torch.randn(size, dtype=torch.float64).to(dtype) for _ in range(RANKS)]
    codecs = [make_codec(method, rank, sizes) for rank in range(RANKS)]
    payloads = [codec.encode(flat, 5) for codec, flat in zip(codecs, gradients, strict=True)]
    add = make_adder(method)
    assert add is not None
    # Requests come in any order.
    answer = add({rank: make_request(payloads[rank], gradients[rank], codecs[rank], 5) for rank in (2, 0, 1)})
    found = torch.full((size,), 9.0, dtype=dtype)
    read_answer(answer, codecs[0], found)
    assert torch.equal(found, codecs[0].aggregate(payloads, found, 5))


def test_answers_are_as_short_as_exact_sums_can_be() -> None:
    flat = torch.randn(1000)
    lengths = {}
    for name, method in METHODS.items():
        codec, add = make_codec(method, 0), make_adder(method)
        assert add is not None
        lengths[name] = add(
            {rank: make_request(codec.encode(flat, 5), flat, codec, 5) for rank in range(RANKS)}
        ).numel()
    assert lengths == {"sign": 125, "scaled sign": 4000, "topk": 800, "qsgd": 4000}


def test_payloads_that_add_up_need_no_codec_at_the_server() -> None:
    assert make_adder(resolve("bsp-ps")) is None
    assert make_adder(resolve("bsp-ps", {"codec": "fp16"})) is None
