"""Global top-k (Shi et al. 2019): the largest entries of the sum, merged along a tree of ranks, then broadcast."""

from __future__ import annotations

from collections.abc import Sequence

from task_images.methods import torch
from task_images.methods.compressed import Compressed
from task_images.methods.topk import DENSITY, find_largest


class GTopK(Compressed):
    """All tensors share a message. A node that drops an entry while merging keeps it in its residual, so no gradient is
    lost with any number of ranks."""

    name = "gtopk"
    summary = "the largest 1 % of the summed gradients, merged along a tree"
    source = "Shi et al. 2019, arXiv:1901.04359"
    formula = "at most 16 k ceil(log2 P), k = max(1, floor(d/100))"
    options = {"density": DENSITY}  # noqa: RUF012
    collective = "gtopk"

    def exchange(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], seed: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Merge up the tree, and broadcast what remains at its root."""
        flat = torch.cat(list(tensors))
        places = find_largest(flat, self.values["density"])
        own = torch.zeros_like(flat)
        entries = [places, flat[places.long()]]
        own.index_copy_(0, places.long(), entries[1])
        rank, distance = self.world.rank, 1
        while distance < self.world.size:
            if rank % (2 * distance) == distance:
                self.link.send(entries, rank - distance)
                break
            if rank + distance < self.world.size:
                entries = self._merge(entries, self.link.receive(entries, rank + distance), own)
            distance *= 2
        final = self.link.broadcast(entries)
        total = torch.zeros_like(flat).index_add_(0, final[0].long(), final[1])
        sizes = [tensor.numel() for tensor in tensors]
        return list(torch.split(total, sizes)), list(torch.split(own, sizes))

    def _merge(self, entries: list[torch.Tensor], other: list[torch.Tensor], own: torch.Tensor) -> list[torch.Tensor]:
        """The largest entries of a sum. Those that are dropped count as not sent by this rank."""
        places, inverse = torch.unique(torch.cat([entries[0], other[0]]), return_inverse=True)
        values = entries[1].new_zeros(len(places)).index_add_(0, inverse, torch.cat([entries[1], other[1]]))
        kept = values.abs().topk(entries[0].numel(), sorted=False).indices
        dropped = torch.ones(len(places), dtype=torch.bool, device=values.device).index_fill_(0, kept, False)
        own.index_add_(0, places[dropped].long(), -values[dropped])
        return [places[kept], values[kept]]
