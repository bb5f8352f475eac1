"""Buffers whose content is known on every rank, so that a wrong sum or a part in the wrong place cannot hide.

All values are whole numbers that every data type holds exactly, bfloat16 (up to 256) included, and none is negative.
"""

import torch
from torch import Tensor

_EXACT = 256
_PERIOD = 7  # of what is summed
_WIDE = 251  # of what is moved: a prime, so that ranks and positions do not fall into step
_STRIDE = 37  # between ranks in what is moved
_TILE = 57344


class Tile:
    """A row of numbers that repeats. Filling and checking cost the memory of one tile, whatever the buffer's size."""

    def __init__(self, values: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self._period = len(values)
        self._length = max(1, _TILE // self._period) * self._period
        self._values = values.repeat(self._length // self._period + 1).to(device, dtype)

    def fill(self, buffer: Tensor, shift: int = 0) -> None:
        """Element i of `buffer` (1-D) becomes number (i + shift) of the row."""
        if len(buffer) <= self._length:
            # In one step: what lies between two samples should be short, for threads that wait fall asleep.
            start = shift % self._period
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
        """The tile, and views of `buffer`: as many whole tiles as fit, [tiles, tile], and what is left."""
        start = shift % self._period
        whole = len(buffer) // self._length * self._length
        return self._values[start : start + self._length], buffer[:whole].view(-1, self._length), buffer[whole:]


class Pattern:
    """What `rank` of `ranks` puts into a buffer: `own` where it is to be summed, which gives `total`; else `moved`.

    Element i of rank r is (i + 3r) mod 7 in `own` while the sums stay exact, else 1 on one rank in so many and 0 on
    the others. In `moved` it is (i + 37r) mod 251: `place` says how far a rank's row, or a part of it, is shifted.
    """

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
        place, everyone = torch.arange(_PERIOD), torch.arange(ranks).unsqueeze(1)
        if (_PERIOD - 1) * ranks <= _EXACT:
            values = (place + 3 * everyone) % _PERIOD
        else:
            values = ((place + everyone) % max(_PERIOD, -(-ranks // _EXACT)) == 0).long()
        self.own = Tile(values[rank], dtype, device)
        self.total = Tile(values.sum(0), dtype, device)
        self.moved = Tile(torch.arange(_WIDE), dtype, device)

    @staticmethod
    def place(rank: int, begin: int = 0) -> int:
        """The shift of `moved` for what `rank` has from its element `begin` on."""
        return _STRIDE * rank + begin
