"""Codecs: how a flat gradient is encoded for sending. `methods.payload_bytes` has the size of each.

A payload is a list of tensors whose shapes depend only on the number of elements, so they are equal on all ranks.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from task_images.comm.methods import Method, count_topk, find_density

Payload = list[Tensor]
QSGD_BUCKET = 512
SAMPLED_SHARE = 0.01


class Codec:
    """Encodes flat tensors of one type.

    additive   payloads can be summed element by element before decoding
    sizes      number of elements of each part that is compressed separately: one part per tensor, or one for all.
               Tensors of different magnitude would otherwise share one scale or threshold
    update     number of the current update, from 1: some codecs compress less at the beginning
    """

    additive = True
    sizes: Sequence[int] = ()
    update = 1

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """The parts of a message that are compressed separately."""
        return torch.split(flat, list(self.sizes)) if len(self.sizes) > 1 else (flat,)

    def encode(self, flat: Tensor, seed: int) -> Payload:
        """The payload for `flat` [n]. `seed` depends on update and message, and is the same on all ranks."""
        return [flat]

    def decode(self, payload: Payload, like: Tensor, seed: int) -> Tensor:
        """The decoded payload, with shape and type of `like`."""
        return payload[0]

    def aggregate(self, payloads: Sequence[Payload], like: Tensor, seed: int) -> Tensor:
        """The sum over ranks of the decoded payloads."""
        total = self.decode(payloads[0], like, seed).clone()
        for payload in payloads[1:]:
            total += self.decode(payload, like, seed)
        return total


class Cast(Codec):
    """Sends numbers in another floating-point format."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, flat: Tensor, seed: int) -> Payload:
        """The flat gradient [n] in the other format: one tensor [n]."""
        return [flat.to(self._dtype)]

    def decode(self, payload: Payload, like: Tensor, seed: int) -> Tensor:
        """Back to the type of `like`."""
        return payload[0].to(like.dtype)


class Sign(Codec):
    """One bit per number, packed. Zero counts as positive. With `scaled`, the mean magnitude of each part is sent too,
    and payloads decode to scale x sign. Without it, the sum is the sign of the majority (Bernstein et al. 2019), and
    random bits decide ties."""

    additive = False

    def __init__(self, scaled: bool, sizes: Sequence[int] = ()) -> None:
        self.is_scaled = scaled
        self.sizes = sizes

    def encode(self, flat: Tensor, seed: int) -> Payload:
        """Signs as bits, [ceil(n / 8)] bytes; with `scaled` also the mean magnitude of each part, in float32."""
        packed = pack_bits(flat < 0)
        if not self.is_scaled:
            return [packed]
        return [packed, torch.stack([part.abs().mean(dtype=torch.float32) for part in self.split(flat)])]

    def decode(self, payload: Payload, like: Tensor, seed: int) -> Tensor:
        """+1 or -1 for each number, [n], times the mean magnitude of its part if `scaled`."""
        signs = 1 - 2 * unpack_bits(payload[0], like.numel()).to(like.dtype)
        if self.is_scaled:
            for part, scale in zip(self.split(signs), payload[1].to(like.dtype), strict=True):
                part.mul_(scale)
        return signs

    def aggregate(self, payloads: Sequence[Payload], like: Tensor, seed: int) -> Tensor:
        """The sum of the decoded payloads; without `scaled`, the sign of the majority."""
        votes = super().aggregate(payloads, like, seed)
        if self.is_scaled:
            return votes
        return 1 - 2 * elect(votes, flip_coins(votes, seed)).to(like.dtype)


class TopK(Codec):
    """The entries of greatest magnitude: values, and indices as 32-bit integers."""

    additive = False

    def __init__(self, density: float, sampled: bool = False, sizes: Sequence[int] = (), warmup: int = 0) -> None:
        self._final = density
        self._sampled = sampled
        self.sizes = sizes
        self._warmup = warmup

    @property
    def _density(self) -> float:
        return find_density(self._final, self._warmup, self.update)

    def encode(self, flat: Tensor, seed: int) -> Payload:
        """Indices as int32 and values, [k] each."""
        indices = self.select(flat, seed)
        return [indices.to(torch.int32), flat[indices]]

    def decode(self, payload: Payload, like: Tensor, seed: int) -> Tensor:
        """The entries at their indices, zero elsewhere: [n]."""
        return torch.zeros_like(like).index_add_(0, payload[0].long(), payload[1])

    def aggregate(self, payloads: Sequence[Payload], like: Tensor, seed: int) -> Tensor:
        """The sum of all payloads, added up sparsely: [n]."""
        total = torch.zeros_like(like)
        for indices, values in payloads:
            total.index_add_(0, indices.long(), values)
        return total

    def select(self, flat: Tensor, seed: int) -> Tensor:
        """Indices of the k entries of greatest magnitude of each part, k = max(1, floor(density n))."""
        parts = self.split(flat)
        found = [self._select(part, seed + number) for number, part in enumerate(parts)]
        starts = itertools.accumulate((part.numel() for part in parts[:-1]), initial=0)
        return torch.cat([indices + start for indices, start in zip(found, starts, strict=True)])

    def _select(self, flat: Tensor, seed: int) -> Tensor:
        """Sampled: only entries above a threshold estimated from a sample are considered, or all if there are too
        few."""
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
    """Entries at random indices, the same on all ranks. `unbiased` scales them so that the expectation is the full
    gradient."""

    def __init__(self, density: float, unbiased: bool, sizes: Sequence[int] = ()) -> None:
        self._density = density
        self._unbiased = unbiased
        self.sizes = sizes
        self._chosen: tuple[tuple[int, int, torch.device], Tensor] | None = None

    def encode(self, flat: Tensor, seed: int) -> Payload:
        """The values at the indices that `seed` determines: [k]. Indices are not sent."""
        return [flat[self._places(flat, seed)]]

    def decode(self, payload: Payload, like: Tensor, seed: int) -> Tensor:
        """The values at their indices, zero elsewhere: [n]; scaled by n / k of their part if `unbiased`."""
        found = torch.zeros_like(like)
        found[self._places(like, seed)] = payload[0]
        if self._unbiased:
            for part in self.split(found):
                part.mul_(part.numel() / count_topk(part.numel(), self._density))
        return found

    def _places(self, flat: Tensor, seed: int) -> Tensor:
        """The indices, cached until the next message: the permutation is the most expensive step, and decoding needs it
        again."""
        key = (seed, flat.numel(), flat.device)
        if self._chosen is not None and self._chosen[0] == key:
            return self._chosen[1]
        generator, start, found = torch.Generator().manual_seed(seed), 0, []
        for part in self.split(flat):
            count = count_topk(part.numel(), self._density)
            found.append(start + torch.randperm(part.numel(), generator=generator)[:count])
            start += part.numel()
        self._chosen = key, torch.cat(found).to(flat.device)
        return self._chosen[1]


class Qsgd(Codec):
    """Quantizes each number to one of `levels` fractions of its bucket's norm, with unbiased random rounding."""

    additive = False

    def __init__(self, levels: int, rank: int) -> None:
        self._levels = levels
        self._rank = rank

    def encode(self, flat: Tensor, seed: int) -> Payload:
        """Signed levels as int8 [n], and the norm of each bucket in float32 [ceil(n / QSGD_BUCKET)].

        Rounding depends on `seed` and rank, so errors are independent across ranks.
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


def make_codec(method: Method, rank: int, sizes: Sequence[int] = ()) -> Codec:
    """The codec of a method, for messages of tensors with `sizes` elements. Powersgd needs several rounds, so it is a
    transport."""
    parts = () if method.scope == "message" else sizes
    word, _, argument = method.codec.partition(":")
    if word in ("fp16", "bf16"):
        return Cast(torch.float16 if word == "fp16" else torch.bfloat16)
    if word == "sign":
        return Sign(method.feedback == "ef", parts)
    if word == "topk":
        return TopK(float(argument), method.selection == "sampled", parts, method.warmup_updates)
    if word == "randomk":
        return RandomK(float(argument), method.feedback == "none", parts)
    if word == "qsgd":
        return Qsgd(int(argument), rank)
    return Codec()


def flip_coins(like: Tensor, seed: int) -> Tensor:
    """A random bit for each number, [n], the same on all ranks."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randint(2, like.shape, generator=generator, device=like.device, dtype=torch.uint8)


def elect(votes: Tensor, coins: Tensor) -> Tensor:
    """Whether the majority is negative, [n], from the sums of all ranks' signs. `coins` decide ties, which are frequent
    (half of all votes of two ranks): counting them as positive would move every weight downwards by noise alone."""
    return (votes < 0) | ((votes == 0) & (coins > 0))


def pack_bits(bits: Tensor) -> Tensor:
    """bits [n], bool -> [ceil(n/8)], uint8; the first bit is the lowest one, padding is 0."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack_bits`: [count], uint8 of 0 and 1."""
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
        # Viewing bytes as another type requires aligned addresses.
        parts.append((piece.clone() if piece.storage_offset() % part.element_size() else piece).view(part.dtype))
        start += size
    return parts


def orthogonalize(matrix: Tensor) -> Tensor:
    """matrix [n, r] with orthonormalized columns; columns of zeros get other directions instead of NaN."""
    # The decomposition supports only 32 and 64 bits.
    wide = torch.promote_types(matrix.dtype, torch.float32)
    basis: Tensor = torch.linalg.qr(matrix.to(wide))[0]
    return basis.to(matrix.dtype)
