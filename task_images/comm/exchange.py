"""The processing of one message: error feedback around the codec, and the transports that sum it over ranks.

All functions run on the communication thread, with the same messages in the same order on all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from task_images.comm.codecs import (
    Codec,
    Payload,
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
from task_images.comm.link import Link
from task_images.comm.methods import Method

POWER_MIN_RATE = 2  # powersgd sends matrices uncompressed if it would not shrink them by this factor


@dataclass
class Matrix:
    """A parameter inside a message: offset of its first element, rows and columns, and its name for the checkpoint."""

    name: str
    start: int
    rows: int
    columns: int


@dataclass
class Message:
    """One message of every update.

    number     index in the plan; flat: its gradients, a view of the group's buffer
    residual   what the codec left out so far; velocity: for momentum correction. None if unused
    matrices   parameters inside it (powersgd); factors: their warm-started right factors, by name
    """

    number: int
    flat: Tensor
    codec: Codec
    residual: Tensor | None = None
    velocity: Tensor | None = None
    matrices: list[Matrix] = field(default_factory=list)
    factors: dict[str, Tensor] = field(default_factory=dict)
    shard: Tensor | None = None
    kept: tuple[Tensor | None, Tensor | None, dict[str, Tensor]] | None = None

    def keep(self) -> None:
        """Save the state before an update that may be skipped."""
        residual, velocity = (None if part is None else part.clone() for part in (self.residual, self.velocity))
        self.kept = residual, velocity, dict(self.factors)

    def restore(self) -> None:
        """Restore the state after a skipped update."""
        assert self.kept is not None
        self.residual, self.velocity, self.factors = self.kept

    @property
    def size(self) -> int:
        """Bytes of its gradients."""
        return self.flat.numel() * self.flat.element_size()

    def encode(self, seed: int, factor: float) -> Payload:
        """The payload for the gradients in `flat`, with error feedback."""
        if self.residual is None:
            return self.codec.encode(self.flat, seed)
        if self.velocity is not None:  # Lin et al. 2018, momentum correction and factor masking
            self.velocity.mul_(factor).add_(self.flat)
            self.residual.add_(self.velocity)
        else:
            self.residual.add_(self.flat)
        payload = self.codec.encode(self.residual, seed)
        if isinstance(self.codec, TopK):
            chosen = payload[0].long()
            self.residual.index_fill_(0, chosen, 0)
            if self.velocity is not None:
                self.velocity.index_fill_(0, chosen, 0)
        else:
            self.residual.sub_(self.codec.decode(payload, self.flat, seed))
        return payload


@dataclass(frozen=True)
class UnderWay:
    """A message in flight at a backend or server. `finish` waits for it; `is_done`: whether `finish` would return at
    once."""

    is_done: Callable[[], bool]
    finish: Callable[[], None]


class Transport(Protocol):
    """Sums one message over ranks. `start` may leave it in flight."""

    def start(self, message: Message, seed: int) -> UnderWay | None:
        """Start summing a message over ranks; None means that it is already done.

        `seed` is the same on all ranks for the same message and update.
        """


class AllReduce:
    """For additive codecs: payloads are summed without decoding, and several messages may be in flight."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def start(self, message: Message, seed: int) -> UnderWay | None:
        """Start an asynchronous all-reduce of the encoded message."""
        payload = message.encode(seed, 0.0)
        flat = message.flat
        summed = payload[0]
        work = self._link.start_all_reduce(summed)

        def finish() -> None:
            work.wait()
            if summed is not flat:
                flat.copy_(message.codec.decode(payload, flat, seed))

        return UnderWay(work.is_completed, finish)


class ScatterGather:
    """Reduce-scatter, then all-gather: directly, or, with `split`, when `gather` is called."""

    def __init__(self, link: Link, split: bool = False) -> None:
        self._link = link
        self._split = split

    def start(self, message: Message, seed: int) -> UnderWay | None:
        """Reduce-scatter the encoded message, padded to a multiple of the number of ranks, and gather it unless
        `split`."""
        payload = message.encode(seed, 0.0)[0]
        rest = -payload.numel() % self._link.size
        padded = torch.nn.functional.pad(payload, (0, rest)) if rest else payload
        message.shard = self._link.reduce_scatter(padded)
        if not self._split:
            self.gather(message)
        return None

    def gather(self, message: Message) -> None:
        """The second half: all-gather each rank's shard of the sum."""
        assert message.shard is not None
        whole = message.shard.new_empty(message.shard.numel() * self._link.size)
        self._link.all_gather_into(whole, message.shard)
        message.shard = None
        message.flat.copy_(whole[: message.flat.numel()])


class AllGather:
    """All-gathers payloads; each rank decodes and sums them."""

    def __init__(self, link: Link, method: Method) -> None:
        self._link = link
        self._factor = 0.0 if method.momentum == "none" else float(method.momentum)

    def start(self, message: Message, seed: int) -> UnderWay | None:
        """Gather the payloads of all ranks, decode and sum them."""
        payload = message.encode(seed, self._factor)
        rows = self._link.all_gather(join_payload(payload))
        payloads = [split_payload(row, payload) for row in rows]
        message.flat.copy_(message.codec.aggregate(payloads, message.flat, seed))
        return None


class VoteByShards:
    """Majority vote by shards: each rank counts the votes of its shard, then the packed results are all-gathered."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def start(self, message: Message, seed: int) -> UnderWay | None:
        """Exchange bits by shard, count votes, gather the results. Random bits decide ties, as in `Sign`."""
        flat, size = message.flat, self._link.size
        negative = torch.nn.functional.pad(flat < 0, (0, -flat.numel() % (8 * size)))
        shards = self._link.all_to_all(pack_bits(negative))
        count = negative.numel() // size
        negatives = torch.stack([unpack_bits(shard, count) for shard in shards]).sum(0, dtype=torch.int32)
        coins = torch.nn.functional.pad(flip_coins(flat, seed), (0, size * count - flat.numel()))
        elected = self._link.all_gather(pack_bits(elect(size - 2 * negatives, coins.chunk(size)[self._link.rank])))
        signs = 1 - 2 * torch.cat([unpack_bits(part, count) for part in elected])[: flat.numel()].to(flat.dtype)
        flat.copy_(signs)
        return None


class GlobalTopK:
    """Top-k of the sum, merged along a binary tree of ranks (any number), then broadcast (Shi et al. 2019).

    A node that drops an entry while merging keeps it in its residual, so no gradient is lost.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def start(self, message: Message, seed: int) -> UnderWay | None:
        """Merge payloads along a binary tree, then broadcast rank 0's."""
        assert message.residual is not None
        payload = message.encode(seed, 0.0)
        rank, distance = self._link.rank, 1
        while distance < self._link.size:
            if rank % (2 * distance) == distance:
                self._link.send(join_payload(payload), rank - distance)
                break
            if rank + distance < self._link.size:
                other = torch.empty_like(join_payload(payload))
                received = split_payload(self._link.receive(other, rank + distance), payload)
                payload = self._merge(payload, received, message.residual)
            distance *= 2
        final = split_payload(self._link.broadcast(join_payload(payload)), payload)
        message.flat.zero_().index_add_(0, final[0].long(), final[1])
        return None

    def _merge(self, own: Payload, other: Payload, residual: Tensor) -> Payload:
        places, inverse = torch.unique(torch.cat([own[0], other[0]]), return_inverse=True)
        values = own[1].new_zeros(len(places)).index_add_(0, inverse, torch.cat([own[1], other[1]]))
        kept = values.abs().topk(own[0].numel(), sorted=False).indices
        dropped = torch.ones(len(places), dtype=torch.bool, device=values.device).index_fill_(0, kept, False)
        residual.index_add_(0, places[dropped].long(), values[dropped])
        return [places[kept], values[kept]]


class PowerSgd:
    """Low-rank compression: each matrix [n, m] becomes [n, r] times [m, r], both summed over ranks; the second is the
    start for the next update. A rank's approximation error is its residual (Vogels et al. 2019)."""

    def __init__(self, link: Link, rank: int, warmup: int) -> None:
        self._link = link
        self._rank = rank
        self._warmup = warmup

    def start(self, message: Message, seed: int) -> UnderWay | None:
        """Sum both factors of each matrix worth compressing, and the other parts uncompressed."""
        assert message.residual is not None
        total = message.residual.add_(message.flat)
        is_on = message.codec.update > self._warmup
        thin = [matrix for matrix in message.matrices if is_on and self._is_worth_it(matrix)]
        left = [self._view(total, matrix) @ self._factor(message, matrix) for matrix in thin]
        plain = [matrix for matrix in message.matrices if not is_on or not self._is_worth_it(matrix)]
        parts = [part.reshape(-1) for part in left] + [self._span(total, matrix) for matrix in plain]
        self._sum(parts)
        left = [orthogonalize(part.view(matrix.rows, -1)) for part, matrix in zip(parts, thin, strict=False)]
        own = [self._view(total, matrix).T @ basis for matrix, basis in zip(thin, left, strict=True)]
        right = [part.clone().reshape(-1) for part in own]
        if right:
            self._sum(right)
        for matrix, basis, mine, summed in zip(thin, left, own, right, strict=True):
            factor = summed.view(matrix.columns, -1)
            message.factors[matrix.name] = factor
            self._view(message.flat, matrix).copy_(basis @ factor.T)
            self._view(total, matrix).sub_(basis @ mine.T)
        for matrix, part in zip(plain, parts[len(thin) :], strict=True):
            self._span(message.flat, matrix).copy_(part)
            self._span(total, matrix).zero_()
        return None

    def _sum(self, parts: list[Tensor]) -> None:
        """Sum all of `parts` over ranks, in one message."""
        flat = self._link.all_reduce(torch.cat(parts))
        parts[:] = list(torch.split(flat, [part.numel() for part in parts]))

    def _is_worth_it(self, matrix: Matrix) -> bool:
        rank = self._width(matrix)
        return (matrix.rows + matrix.columns) * rank * POWER_MIN_RATE < matrix.rows * matrix.columns or (
            # Full rank is exact, so it is used even though it saves nothing.
            rank == min(matrix.rows, matrix.columns) > 1
        )

    def _width(self, matrix: Matrix) -> int:
        return min(self._rank, matrix.rows, matrix.columns)

    def _factor(self, message: Message, matrix: Matrix) -> Tensor:
        """The right factor to start from: the last one, or initially random numbers that are the same on all ranks."""
        found = message.factors.get(matrix.name)
        if found is None:
            generator = torch.Generator().manual_seed(matrix.start * 31 + message.number)
            found = torch.randn(matrix.columns, self._width(matrix), generator=generator)
        return orthogonalize(found.to(message.flat))

    def _view(self, flat: Tensor, matrix: Matrix) -> Tensor:
        return self._span(flat, matrix).view(matrix.rows, matrix.columns)

    @staticmethod
    def _span(flat: Tensor, matrix: Matrix) -> Tensor:
        return flat[matrix.start : matrix.start + matrix.rows * matrix.columns]


class NoExchange:
    """Nothing is sent."""

    def start(self, message: Message, seed: int) -> UnderWay | None:
        """Do nothing: each rank keeps its own gradients."""
        return None


def make_transport(method: Method, link: Link) -> Transport:
    """The transport of a method. Those of parameter servers are in `client`."""
    if method.codec_name == "powersgd":
        return PowerSgd(link, int(method.codec.partition(":")[2]), method.warmup_updates)
    if method.transport == "rsag":
        return ScatterGather(link, split=method.barrier == "none")
    if method.transport == "allgather":
        return AllGather(link, method)
    if method.transport == "a2a":
        return VoteByShards(link)
    if method.transport == "gtopk":
        return GlobalTopK(link)
    if method.transport == "noop":
        return NoExchange()
    return AllReduce(link)


def make_message(
    method: Method, number: int, flat: Tensor, rank: int, sizes: Sequence[int], matrices: list[Matrix]
) -> Message:
    """A message of tensors with `sizes` elements, with the state that its method needs, zero-initialized."""
    feedback = method.feedback == "ef"
    return Message(
        number,
        flat,
        make_codec(method, rank, sizes),
        residual=torch.zeros_like(flat) if feedback else None,
        velocity=torch.zeros_like(flat) if method.momentum != "none" else None,
        matrices=matrices,
    )
