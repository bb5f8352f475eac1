"""Parameter servers for codecs whose payloads cannot be summed directly (sign, topk, qsgd).

A trainer sends a header of integers (element type, the message's seed, the update, the number of parts and the number
of elements of each), then its payload. The server decodes all payloads and sums them in the order of ranks, as
`Codec.aggregate` does on each rank of an all-gather. It answers with the sum in its shortest exact form: majority bits,
non-zero entries, or all elements.
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

_FIXED = 4  # 8-byte integers before the sizes


def make_request(payload: Payload, flat: Tensor, codec: Codec, seed: int) -> Tensor:
    """The request of a trainer for a payload of the gradient `flat`: header + payload, uint8."""
    sizes = [part.numel() for part in codec.split(flat)]
    header = torch.tensor([DTYPES.index(flat.dtype), seed, codec.update, len(sizes), *sizes]).view(torch.uint8)
    return torch.cat([header, join_payload(payload).cpu()])


def make_adder(method: Method) -> Callable[[Mapping[int, Tensor]], Tensor] | None:
    """The server's function from requests by rank to the answer; None if payloads are summed directly."""
    if make_codec(method, 0).additive:
        return None

    def add(requests: Mapping[int, Tensor]) -> Tensor:
        first = requests[min(requests)]
        kind, seed, update, parts = first[: 8 * _FIXED].view(torch.int64).tolist()
        size = 8 * (_FIXED + parts)
        sizes = first[8 * _FIXED : size].view(torch.int64).tolist()
        codec = make_codec(method, 0, sizes)
        like = torch.zeros(sum(sizes), dtype=DTYPES[kind])
        codec.update = update
        shapes = codec.encode(like, seed)
        payloads = [split_payload(requests[rank][size:], shapes) for rank in sorted(requests)]
        total = codec.aggregate(payloads, like, seed)
        if isinstance(codec, Sign) and not codec.is_scaled:
            return pack_bits(total < 0)
        if isinstance(codec, TopK):
            places = total.nonzero().squeeze(1)
            return join_payload([places.to(torch.int32), total[places]])
        return join_payload([total])

    return add


def read_answer(answer: Tensor, codec: Codec, flat: Tensor) -> None:
    """Write the sum in a server's answer into `flat` [n]."""
    if isinstance(codec, Sign) and not codec.is_scaled:
        flat.copy_(1 - 2 * unpack_bits(answer, flat.numel()).to(flat.dtype))
    elif isinstance(codec, TopK):
        count = answer.numel() // (4 + flat.element_size())
        like = [torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=flat.dtype)]
        places, values = split_payload(answer, like)
        flat.zero_().index_copy_(0, places.long().to(flat.device), values.to(flat.device))
    else:
        flat.copy_(answer.view(flat.dtype))
