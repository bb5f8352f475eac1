"""Buffers whose sum over ranks is known exactly in every data type, so that a wrong result cannot hide."""

import torch
from torch import Tensor

# Whole numbers up to here are exact in bfloat16, the coarsest of the types.
_EXACT = 256
_PERIOD = 7
_TILE = _PERIOD * 8192


class Pattern:
    """What rank `rank` of `ranks` puts into a buffer, and what must be there after the sum.

    Element i of rank r is (i + 3r) mod 7 while the sums stay exact, else 1 on one rank in so many and 0 on the others.
    Costs the memory of one tile, whatever the buffer's size.
    """

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
        place, everyone = torch.arange(_PERIOD), torch.arange(ranks).unsqueeze(1)
        if (_PERIOD - 1) * ranks <= _EXACT:
            values = (place + 3 * everyone) % _PERIOD
        else:
            values = ((place + everyone) % max(_PERIOD, -(-ranks // _EXACT)) == 0).long()
        self._own = values[rank].repeat(_TILE // _PERIOD).to(device, dtype)
        self._total = values.sum(0).repeat(_TILE // _PERIOD).to(device, dtype)

    def fill(self, buffer: Tensor) -> None:
        """Write this rank's values into `buffer` (1-D)."""
        tiled, rest = _cut(buffer)
        tiled.copy_(self._own.expand_as(tiled))
        rest.copy_(self._own[: len(rest)])

    def wrong(self, buffer: Tensor) -> int:
        """How many elements of `buffer` (1-D) are not the sum over ranks."""
        tiled, rest = _cut(buffer)
        return int((tiled != self._total).sum()) + int((rest != self._total[: len(rest)]).sum())


def _cut(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Views of `buffer`: as many whole tiles as fit, [tiles, tile], and what is left."""
    whole = len(buffer) // _TILE * _TILE
    return buffer[:whole].view(-1, _TILE), buffer[whole:]
