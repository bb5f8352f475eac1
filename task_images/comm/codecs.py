"""Codecs: what becomes of a flat gradient on the wire. Each has a formula for its bytes in `methods.payload_bytes`.

A payload is a list of tensors whose shapes depend on the number of elements alone, so that all ranks' are alike.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from task_images.comm.methods import Method, count_topk

Payload = list[Tensor]
QSGD_BUCKET = 512
SAMPLED_SHARE = 0.01


class Codec:
    """Encodes flat tensors of one type. `additive`: payloads can be summed element by element before decoding."""

    additive = True

    def encode(self, flat: Tensor, seed: int) -> Payload:
        """What is sent of `flat` (n). `seed` is a number of update and message, the same on all ranks."""
        return [flat]

    def decode(self, payload: Payload, like: Tensor, seed: int) -> Tensor:
        """What the payload stands for, with shape and type of `like`."""
        return payload[0]

    def aggregate(self, payloads: Sequence[Payload], like: Tensor, seed: int) -> Tensor:
        """The sum over ranks of what the payloads stand for."""
        total = self.decode(payloads[0], like, seed).clone()
        for payload in payloads[1:]:
            total += self.decode(payload, like, seed)
        return total


class Cast(Codec):
    """Another floating-point format on the wire."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, flat: Tensor, seed: int) -> Payload:
        """The flat gradient [n] in the other format: one tensor [n]."""
        return [flat.to(self._dtype)]

    def decode(self, payload: Payload, like: Tensor, seed: int) -> Tensor:
        """Back to the type of `like`."""
        return payload[0].to(like.dtype)


class Sign(Codec):
    """One bit per number, packed. Zero counts as positive. With `scaled` also the mean magnitude, and payloads stand
    for scale x sign; without, the sum is the sign of the majority, a tie being positive (Bernstein et al. 2019)."""

    additive = False

    def __init__(self, scaled: bool) -> None:
        self.is_scaled = scaled

    def encode(self, flat: Tensor, seed: int) -> Payload:
        """Signs as bits, [ceil(n / 8)] bytes; with `scaled` also the mean magnitude, [1] in float32."""
        packed = pack_bits(flat < 0)
        return [packed, flat.abs().mean(dtype=torch.float32).reshape(1)] if self.is_scaled else [packed]

    def decode(self, payload: Payload, like: Tensor, seed: int) -> Tensor:
        """+1 or -1 for each number, [n], times the mean magnitude if `scaled`."""
        signs = 1 - 2 * unpack_bits(payload[0], like.numel()).to(like.dtype)
        return signs * payload[1].to(like.dtype) if self.is_scaled else signs

    def aggregate(self, payloads: Sequence[Payload], like: Tensor, seed: int) -> Tensor:
        """The sum of what all payloads stand for; without `scaled`, the sign of the majority."""
        votes = super().aggregate(payloads, like, seed)
        return votes if self.is_scaled else torch.where(votes < 0, -1, 1).to(like.dtype)


class TopK(Codec):
    """The entries of greatest magnitude: values, and indices as 32-bit integers."""

    additive = False

    def __init__(self, density: float, sampled: bool = False) -> None:
        self._density = density
        self._sampled = sampled

    def encode(self, flat: Tensor, seed: int) -> Payload:
        """Indices as int32 and values, [k] each."""
        indices = self.select(flat, seed)
        return [indices.to(torch.int32), flat[indices]]

    def decode(self, payload: Payload, like: Tensor, seed: int) -> Tensor:
        """The entries at their places, zero elsewhere: [n]."""
        return torch.zeros_like(like).index_add_(0, payload[0].long(), payload[1])

    def aggregate(self, payloads: Sequence[Payload], like: Tensor, seed: int) -> Tensor:
        """The sum of all payloads, added up sparsely: [n]."""
        total = torch.zeros_like(like)
        for indices, values in payloads:
            total.index_add_(0, indices.long(), values)
        return total

    def select(self, flat: Tensor, seed: int) -> Tensor:
        """Indices of the k entries of greatest magnitude, k = max(1, floor(density n)).

        Sampled: entries above a threshold from a sample are looked at only, and all if these are too few.
        """
        count = count_topk(flat.numel(), self._density)
        magnitudes = flat.abs()
        if self._sampled and flat.numel() > 4096:
            generator = torch.Generator(flat.device).manual_seed(seed)
            number = max(64, int(SAMPLED_SHARE * flat.numel()))
            sample = magnitudes[torch.randint(flat.numel(), (number,), generator=generator, device=flat.device)]
            threshold = float(sample.kthvalue(max(1, number - int(1.3 * self._density * number)))[0])
            above = (magnitudes >= threshold).nonzero().squeeze(1)
            if above.numel() >= count:
                return above[magnitudes[above].topk(count, sorted=False).indices]
        return magnitudes.topk(count, sorted=False).indices


class RandomK(Codec):
    """Entries at random places, the same on all ranks. `unbiased` scales them up to what all are in expectation."""

    def __init__(self, density: float, unbiased: bool) -> None:
        self._density = density
        self._unbiased = unbiased

    def encode(self, flat: Tensor, seed: int) -> Payload:
        """The values at the places that `seed` chooses: [k]. Indices need not travel."""
        return [flat[self._places(flat, seed)]]

    def decode(self, payload: Payload, like: Tensor, seed: int) -> Tensor:
        """The values at their places, zero elsewhere: [n]; scaled by n / k if `unbiased`."""
        places = self._places(like, seed)
        scale = like.numel() / len(places) if self._unbiased else 1.0
        found = torch.zeros_like(like)
        found[places] = payload[0] * scale
        return found

    def _places(self, flat: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        count = count_topk(flat.numel(), self._density)
        return torch.randperm(flat.numel(), generator=generator)[:count].to(flat.device)


class Qsgd(Codec):
    """Every number as one of `levels` fractions of its bucket's norm, rounded at random without bias."""

    additive = False

    def __init__(self, levels: int, rank: int) -> None:
        self._levels = levels
        self._rank = rank

    def encode(self, flat: Tensor, seed: int) -> Payload:
        """Signed levels as int8 [n], and the norm of each bucket in float32 [ceil(n / QSGD_BUCKET)].

        Rounding is random by `seed` and rank, so that errors of ranks are independent.
        """
        generator = torch.Generator(flat.device).manual_seed(seed * 65_537 + self._rank)
        norms = self._buckets(flat).norm(dim=1).float()
        scale = torch.where(norms > 0, self._levels / norms, 0).repeat_interleave(QSGD_BUCKET)[: flat.numel()]
        magnitudes = flat.abs() * scale
        noise = torch.rand(flat.shape, generator=generator, device=flat.device)
        steps = (magnitudes + noise).floor().clamp_(max=self._levels)
        return [(steps * flat.sign()).to(torch.int8), norms]

    def decode(self, payload: Payload, like: Tensor, seed: int) -> Tensor:
        """Levels times the norm of their bucket over the number of levels: [n]."""
        scale = (payload[1] / self._levels).repeat_interleave(QSGD_BUCKET)[: like.numel()]
        return (payload[0] * scale).to(like.dtype)

    def _buckets(self, flat: Tensor) -> Tensor:
        rest = -flat.numel() % QSGD_BUCKET
        return torch.nn.functional.pad(flat, (0, rest)).view(-1, QSGD_BUCKET)


def make_codec(method: Method, rank: int) -> Codec:
    """The codec of a method; powersgd, which is none of messages, is a part of the reducer."""
    word, _, argument = method.codec.partition(":")
    if word in ("fp16", "bf16"):
        return Cast(torch.float16 if word == "fp16" else torch.bfloat16)
    if word == "sign":
        return Sign(scaled=method.feedback == "ef")
    if word == "topk":
        return TopK(float(argument), method.selection == "sampled")
    if word == "randomk":
        return RandomK(float(argument), unbiased=method.feedback == "none")
    if word == "qsgd":
        return Qsgd(int(argument), rank)
    return Codec()


def pack_bits(bits: Tensor) -> Tensor:
    """bits (n), bool -> (ceil(n/8)), uint8; the first is the lowest bit, and what is filled up is 0."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack_bits`: (count), uint8 of 0 and 1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & 1).view(-1)[:count]


def join_payload(payload: Payload) -> Tensor:
    """All tensors of a payload as the bytes of one message."""
    if len(payload) == 1:
        return payload[0].contiguous().view(torch.uint8)
    return torch.cat([part.contiguous().view(torch.uint8) for part in payload])


def split_payload(message: Tensor, like: Payload) -> Payload:
    """The inverse of `join_payload`, for a payload of the same shapes and types as `like`."""
    parts, start = [], 0
    for part in like:
        size = part.numel() * part.element_size()
        piece = message[start : start + size]
        # A view as another type needs an address that is a multiple of its size.
        parts.append((piece.clone() if piece.storage_offset() % part.element_size() else piece).view(part.dtype))
        start += size
    return parts


def orthogonalize(matrix: Tensor) -> Tensor:
    """matrix (n, r) with columns made orthonormal; columns of zeros get other directions, so no NaN comes of them."""
    # The decomposition exists for 32 and 64 bits only.
    wide = torch.promote_types(matrix.dtype, torch.float32)
    basis: Tensor = torch.linalg.qr(matrix.to(wide))[0]
    return basis.to(matrix.dtype)
