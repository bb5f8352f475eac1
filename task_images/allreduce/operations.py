"""The collectives that are measured: what each moves, how its bandwidth is counted, and what must have arrived.

S is the size of the larger side in bytes and k the number of ranks; factors and sides of the six collectives are those
of nccl-tests, those of ping-pong and bidirectional are the OSU benchmarks'. The latter two are done by pairs, rank r
with rank r + k/2 (so that they are on different machines if there are several), all pairs at once.

torch has all_reduce, broadcast and reduce in place only. Out of place means for them that the result has a buffer of
its own, filled before the clock starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from task_images import Lazy
from task_images.world import World

if TYPE_CHECKING:
    from task_images import tensorflow_ranks
else:
    tensorflow_ranks = Lazy("task_images.tensorflow_ranks")

# --- patterns: buffers whose content is known on every rank, so that a wrong sum or a misplaced part cannot hide ------
# Values are pseudo-random small whole numbers, different on every rank, as nccl-tests seeds its buffers by rank: a rank
# whose share is lost or counted twice changes the sum, whatever the distance between the ranks, and so does a result
# that is reversed or rotated. Every data type holds values and sums exactly, bfloat16 (up to 256) included; none is
# negative.

_EXACT = 256
_LARGEST = 5  # values that are summed are below it, while the sums stay exact
_WIDE = 251  # values that are moved are below it
_TILE = 57_331  # elements until a pattern repeats: a prime, so that parts and positions do not fall into step
_STRIDE = 4099  # between ranks in what is moved

Words = npt.NDArray[np.uint64]


class Tile:
    """A row of numbers that repeats. Filling and checking cost the memory of one tile, whatever the buffer's size."""

    def __init__(self, values: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self._length = len(values)
        self._values = values.repeat(2).to(device, dtype)

    def fill(self, buffer: Tensor, shift: int = 0) -> None:
        """Element i of `buffer` (1-D) becomes number (i + shift) of the row."""
        if len(buffer) <= self._length:
            # In one step: what lies between two samples should be short, for threads that wait fall asleep.
            start = shift % self._length
            buffer.copy_(self._values[start : start + len(buffer)])
            return
        tile, tiled, rest = self._cut(buffer, shift)
        tiled.copy_(tile.expand_as(tiled))
        rest.copy_(tile[: len(rest)])

    def wrong(self, buffer: Tensor, shift: int = 0) -> int:
        """How many elements of `buffer` (1-D) are not what `fill` would make them."""
        tile, tiled, rest = self._cut(buffer, shift)
        return int((tiled != tile).sum()) + int((rest != tile[: len(rest)]).sum())

    def _cut(self, buffer: Tensor, shift: int) -> tuple[Tensor, Tensor, Tensor]:
        """The tile, and views of `buffer`: as many whole tiles as fit, [tiles, tile], and the remainder."""
        start = shift % self._length
        whole = len(buffer) // self._length * self._length
        return self._values[start : start + self._length], buffer[:whole].view(-1, self._length), buffer[whole:]


class Pattern:
    """What `rank` of `ranks` puts into a buffer: `own` if it is to be summed, which gives `total`; else `moved`.

    `place` says how far a rank's row of `moved`, or a part of it, is shifted.
    """

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
        total = np.zeros(_TILE, np.int64)
        for other in range(ranks):
            values = summands(other, ranks)
            total += values
            if other == rank:
                own = values
        self.own = Tile(torch.from_numpy(own), dtype, device)
        self.total = Tile(torch.from_numpy(total), dtype, device)
        self.moved = Tile(torch.from_numpy((_hash(0, 1) % np.uint64(_WIDE)).astype(np.int64)), dtype, device)

    @staticmethod
    def place(rank: int, begin: int = 0) -> int:
        """The shift of `moved` for what `rank` has from its element `begin` on."""
        return _STRIDE * rank + begin


def summands(rank: int, ranks: int) -> npt.NDArray[np.int64]:
    """What `rank` of `ranks` adds to a sum, one number per position of a tile.

    From 0 to 4 while the sum of all ranks stays exact in every type; beyond 64 ranks 1 at some positions and 0 at the
    others, so many that the sum stays near 128.
    """
    is_small = (_LARGEST - 1) * ranks <= _EXACT
    rest: Words = _hash(rank) % np.uint64(_LARGEST if is_small else -(-2 * ranks // _EXACT))
    values: npt.NDArray[np.int64] = (rest if is_small else rest == 0).astype(np.int64)
    return values


def _hash(rank: int, stream: int = 0) -> Words:
    """A tile of well-mixed 64-bit words (splitmix64 of rank, stream and position): the same on every machine."""
    start = np.uint64((rank * 2 + stream) * _TILE + 1)
    with np.errstate(over="ignore"):
        words = (start + np.arange(_TILE, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int32": torch.int32}
IN_PLACE, OUT_OF_PLACE = "in_place", "out_of_place"
PLACES = (IN_PLACE, OUT_OF_PLACE)
_NOTHING = -1  # what no pattern holds: in a buffer before something arrives there


@dataclass(frozen=True)
class Call:
    """One collective on buffers of one size. `fill` makes them ready, `call` is what is timed, `wrong` counts elements.

    counts   whether this rank's clock counts; False if it only answers another
    trips    how often the buffer travels within a call, one after the other
    """

    fill: Callable[[], None]
    call: Callable[[], object]
    wrong: Callable[[], int]
    counts: bool = True
    trips: int = 1


@dataclass(frozen=True)
class Buffers:
    """Makes the buffers that calls are made on: of this rank among all, with data of one type."""

    world: World
    dtype: torch.dtype
    pattern: Pattern

    @classmethod
    def of(cls, world: World, dtype: str) -> "Buffers":
        """The buffers of a rank for a data type by its name."""
        return cls(world, DTYPES[dtype], Pattern(world.rank, world.size, DTYPES[dtype], world.device))

    @property
    def element_size(self) -> int:
        """Bytes of one number."""
        return self.dtype.itemsize

    def allocate(self, elements: int) -> Tensor:
        """A buffer that holds nothing yet."""
        return torch.full((elements,), _NOTHING, dtype=self.dtype, device=self.world.device)


class Content(NamedTuple):
    """What a rank sends and receives in a collective, whatever library moves it: how many numbers, what puts them into
    a buffer, and what counts the wrong ones that arrived."""

    sent: int
    received: int
    fill: Callable[[Tensor], object]
    wrong: Callable[[Tensor], int]


def describe(collective: str, buffers: Buffers, elements: int) -> Content:
    """The content of a collective with a larger side of `elements` numbers."""
    pattern, rank = buffers.pattern, buffers.world.rank
    part = elements // buffers.world.size
    if collective == "all_reduce" or (collective == "reduce" and rank == 0):
        return Content(elements, elements, pattern.own.fill, pattern.total.wrong)
    if collective == "reduce":
        return Content(elements, elements, pattern.own.fill, lambda _: 0)
    if collective == "reduce_scatter":
        return Content(elements, part, pattern.own.fill, lambda result: pattern.total.wrong(result, rank * part))

    def fill(send: Tensor) -> None:
        pattern.moved.fill(send, pattern.place(rank))

    if collective == "broadcast":
        return Content(elements, elements, fill, lambda result: pattern.moved.wrong(result, pattern.place(0)))
    begin = rank * part if collective == "all_to_all" else 0

    def wrong(result: Tensor) -> int:
        rows = enumerate(torch.split(result, part))
        return sum(pattern.moved.wrong(row, pattern.place(source, begin)) for source, row in rows)

    return Content(elements if collective == "all_to_all" else part, elements, fill, wrong)


def make_call(collective: str, buffers: Buffers, elements: int, place: str) -> Call:
    """A collective on `elements` numbers, which are of its larger side."""
    if COLLECTIVES[collective].is_pair:
        return ping_pong(buffers, elements) if collective == "ping_pong" else bidirectional(buffers, elements)
    content, rank = describe(collective, buffers, elements), buffers.world.rank
    changes: dict[str, Callable[[Tensor], object]] = {
        "all_reduce": dist.all_reduce,
        "broadcast": lambda result: dist.broadcast(result, 0),
        "reduce": lambda result: dist.reduce(result, 0),
    }
    if collective in changes:
        send = buffers.allocate(elements)
        result = send if place == IN_PLACE else buffers.allocate(elements)

        def fill() -> None:
            content.fill(send)
            if result is not send:
                result.copy_(send)

        change = changes[collective]
        return Call(fill, lambda: change(result), lambda: content.wrong(result))
    transfers: dict[str, Callable[[Tensor, Tensor], object]] = {
        "all_gather": dist.all_gather_into_tensor,
        "reduce_scatter": dist.reduce_scatter_tensor,
        "all_to_all": dist.all_to_all_single,
    }
    if place == OUT_OF_PLACE:
        send, result = buffers.allocate(content.sent), buffers.allocate(content.received)
    else:  # the smaller one is this rank's part of the larger
        larger = buffers.allocate(max(content.sent, content.received))
        part = min(content.sent, content.received)
        own = larger[rank * part : (rank + 1) * part]
        send, result = (own, larger) if content.sent < content.received else (larger, own)

    def fill_both() -> None:
        result.fill_(_NOTHING)
        content.fill(send)

    transfer = transfers[collective]
    return Call(fill_both, lambda: transfer(result, send), lambda: content.wrong(result))


def make_tensorflow_call(collective: str, buffers: Buffers, elements: int, place: str) -> Call:
    """A collective as TensorFlow has it, on the same numbers and with the same check. Raises NotImplementedError for
    what TensorFlow does not have."""
    ranks = tensorflow_ranks.open_tensorflow(buffers.world)
    if collective not in tensorflow_ranks.COLLECTIVES:
        raise NotImplementedError("TensorFlow does not support it, or it is not measured")
    if place == IN_PLACE:
        raise NotImplementedError("TensorFlow supports it only out of place: --set places=out_of_place")
    content = describe(collective, buffers, elements)
    host = buffers.allocate(content.sent)
    compiled = ranks.collective(collective)
    arrays: dict[str, Any] = {}

    def fill() -> None:
        content.fill(host)
        arrays["send"] = ranks.put(host)

    def call() -> None:
        arrays["result"] = compiled(arrays["send"])

    return Call(fill, call, lambda: content.wrong(ranks.get(arrays["result"])))


def ping_pong(buffers: Buffers, elements: int) -> Call:
    """`elements` numbers there and back between partners; a rank without a partner is idle."""
    partner, is_first = _partner(buffers.world)
    if partner is None:
        return _idle()
    send, result = buffers.allocate(elements), buffers.allocate(elements)

    def serve() -> None:
        dist.send(send, partner)
        dist.recv(result, partner)

    def answer() -> None:
        dist.recv(result, partner)
        dist.send(send, partner)

    call = serve if is_first else answer
    return _exchange(buffers, partner, send, result, call, counts=is_first, trips=2)


def bidirectional(buffers: Buffers, elements: int) -> Call:
    """`elements` numbers both ways at once between partners; a rank without a partner is idle."""
    partner, _ = _partner(buffers.world)
    if partner is None:
        return _idle()
    send, result = buffers.allocate(elements), buffers.allocate(elements)
    both = [dist.P2POp(dist.isend, send, partner), dist.P2POp(dist.irecv, result, partner)]
    return _exchange(buffers, partner, send, result, lambda: exchange_messages(both))


@dataclass(frozen=True)
class Collective:
    """How figures of a collective are to be read.

    size      what S is
    formula   of busbw from algbw, computed by `factor(k)`
    """

    size: str
    formula: str
    factor: Callable[[int], float]
    places: tuple[str, ...] = PLACES
    divided: bool = False  # S is k equal parts
    is_pair: bool = False  # a rank exchanges with one other only


def _share(k: int) -> float:
    return (k - 1) / k


def _one(k: int) -> float:
    return 1.0


_PARTS = "algbw * (k - 1) / k"
_OUT = (OUT_OF_PLACE,)
COLLECTIVES = {
    "all_reduce": Collective("the buffer", "algbw * 2 (k - 1) / k", lambda k: 2 * _share(k)),
    "broadcast": Collective("the buffer", "algbw", _one),
    "reduce": Collective("the buffer", "algbw", _one),
    "all_gather": Collective("the gathered data, k parts", _PARTS, _share, divided=True),
    "reduce_scatter": Collective("the reduced data, k parts", _PARTS, _share, divided=True),
    "all_to_all": Collective("data sent by a rank, k parts", _PARTS, _share, _OUT, divided=True),
    "ping_pong": Collective("one message; time is half the round trip", "algbw", _one, _OUT, is_pair=True),
    "bidirectional": Collective(
        "the message of each side, both at once", "algbw * 2", lambda k: 2.0, _OUT, is_pair=True
    ),
}


def _partner(world: World) -> tuple[int | None, bool]:
    """The other rank of this rank's pair (None for the odd one out), and whether this is the pair's first."""
    half = world.size // 2
    if world.rank >= 2 * half:
        return None, False
    return (world.rank + half, True) if world.rank < half else (world.rank - half, False)


def _exchange(
    buffers: Buffers, partner: int, send: Tensor, result: Tensor, call: Callable[[], None], **more: Any
) -> Call:
    pattern = buffers.pattern

    def fill() -> None:
        pattern.moved.fill(send, pattern.place(buffers.world.rank))
        result.fill_(_NOTHING)

    return Call(fill, call, lambda: pattern.moved.wrong(result, pattern.place(partner)), **more)


def exchange_messages(messages: list[Any]) -> None:
    """Start all messages at once, and wait for them."""
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def _idle() -> Call:
    return Call(lambda: None, lambda: None, lambda: 0, counts=False)
