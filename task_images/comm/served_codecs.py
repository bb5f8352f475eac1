"""Codecs whose payloads cannot be added up (sign, topk, qsgd) at parameter servers.

A trainer sends its payload behind two integers: how many numbers it stands for, and their type. The server decodes all
payloads, adds them up in the order of ranks, as `Codec.aggregate` does on every rank of an all-gather, and answers with
the sum in its shortest exact form: bits of the majority, entries that are not zero, or all numbers.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from task_images.comm.codecs import (
    Codec,
    Payload,
    Sign,
    TopK,
    join_payload,
    make_codec,
    pack_bits,
    split_payload,
    unpack_bits,
)
from task_images.comm.methods import Method
from task_images.comm.wire import DTYPES

_HEADER_BYTES = 16


def make_request(payload: Payload, flat: Tensor) -> Tensor:
    """The bytes that a trainer sends for a payload of the gradient `flat`: (16 + payload), uint8."""
    header = torch.tensor([flat.numel(), DTYPES.index(flat.dtype)]).view(torch.uint8)
    return torch.cat([header, join_payload(payload).cpu()])


def make_adder(method: Method) -> Callable[[Mapping[int, Tensor]], Tensor] | None:
    """The server's function from requests by rank to the answer; None if payloads are added as they are."""
    codec = make_codec(method, 0)
    if codec.additive:
        return None

    def add(requests: Mapping[int, Tensor]) -> Tensor:
        count, kind = requests[min(requests)][:_HEADER_BYTES].view(torch.int64).tolist()
        like = torch.zeros(count, dtype=DTYPES[kind])
        shapes = codec.encode(like, 0)
        payloads = [split_payload(requests[rank][_HEADER_BYTES:], shapes) for rank in sorted(requests)]
        return _shorten(codec, codec.aggregate(payloads, like, 0))

    return add


def _shorten(codec: Codec, total: Tensor) -> Tensor:
    if isinstance(codec, Sign) and not codec.is_scaled:
        return pack_bits(total < 0)
    if isinstance(codec, TopK):
        places = total.nonzero().squeeze(1)
        return join_payload([places.to(torch.int32), total[places]])
    return join_payload([total])


def read_answer(answer: Tensor, codec: Codec, flat: Tensor) -> None:
    """Put the sum that a server answered with into `flat` (n)."""
    if isinstance(codec, Sign) and not codec.is_scaled:
        flat.copy_(1 - 2 * unpack_bits(answer, flat.numel()).to(flat.dtype))
    elif isinstance(codec, TopK):
        count = answer.numel() // (4 + flat.element_size())
        like = [torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=flat.dtype)]
        places, values = split_payload(answer, like)
        flat.zero_().index_copy_(0, places.long().to(flat.device), values.to(flat.device))
    else:
        flat.copy_(answer.view(flat.dtype))
