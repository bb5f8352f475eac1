"""Buffers whose content is known on every rank, so that a wrong sum or a part in the wrong place cannot hide.

Values are pseudo-random small whole numbers, different on every rank, as nccl-tests seeds its buffers by rank: a rank
whose share is lost or counted twice changes the sum, whatever the distance between the ranks, and so does a result that
is reversed or rotated. Every data type holds values and sums exactly, bfloat16 (up to 256) included; none is negative.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
