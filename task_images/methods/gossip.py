"""Neighbors on a ring average their weights: D-PSGD (Lian et al. 2017) and CHOCO-SGD (Koloskova et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from task_images.methods import torch
from task_images.methods.base import LossScale, Option
from task_images.methods.local import Drifting
from task_images.methods.topk import find_largest

# Consensus step size of CHOCO: its upper limit, and its value per density. Of the values tried on 2, 4 and 8 ranks
# these gave the smallest distance after 60 exchanges; larger ones diverge at small densities.
MOST_STEP, STEP_PER_DENSITY = 0.5, 2.0


def find_neighbors(rank: int, size: int) -> list[int]:
    """The next and the previous rank on a ring: none for 1 rank, one for 2."""
    return list(dict.fromkeys(peer for peer in ((rank + 1) % size, (rank - 1) % size) if peer != rank))


class Gossip(Drifting):
    """Ranks on a ring, each of which hears of both neighbors."""

    collective = "gossip"

    def start(self) -> None:
        """Find the neighbors."""
        super().start()
        self.peers = find_neighbors(self.world.rank, self.world.size)
        self.mixing = 1 / (1 + len(self.peers))


class DPsgd(Gossip):
    """Weights are sent before the forward pass, and each rank adds its own step to their mean (algorithm 1)."""

    name = "dpsgd"
    summary = "averages weights with both neighbors on a ring while gradients are computed"
    source = "Lian et al. 2017, arXiv:1705.09056"
    formula = "2 M (M with two ranks)"

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Begin an update, and send the weights."""
        super().begin(weight, total, passes, scale)
        if self.world.size > 1:
            self._sent = self.read_weights()
            self._receive: Callable[[], list[list[torch.Tensor]]] = self.link.start_swap([self._sent], self.peers)

    def mix(self, rate: float) -> None:
        """The neighbors' mean, and this rank's step."""
        step = self.read_weights().sub_(self._sent)
        received = [theirs for [theirs] in self._receive()]
        self.write_weights(torch.stack([self._sent, *received]).sum(0).mul_(self.mixing).add_(step))


class Choco(Gossip):
    """Neighbors keep an estimate of this rank's weights, and after every update hear of its largest errors."""

    name = "choco"
    summary = "averages weights with both neighbors on a ring after each step; sends the largest 10 % of changes"
    source = "Koloskova et al. 2019, arXiv:1902.00340"
    formula = "16 k, k = sum over tensors of max(1, floor(n/10))"
    options = {  # noqa: RUF012
        # With less, a tenth of the distance remains after 60 exchanges with any step size.
        "density": Option(0.1, 0.05, 1, "share of the entries of each tensor that is sent")
    }

    def start(self) -> None:
        """All ranks start with the same weights, which all estimates are."""
        super().start()
        self._believed = self.read_weights()
        self._mixed = self._believed.clone()  # sum over neighbors and self: mixing weight x estimate

    def mix(self, rate: float) -> None:
        """Send the largest errors of the estimate, and move towards those of the neighbors."""
        own, density = self.read_weights(), self.values["density"]
        error, places, start = own - self._believed, [], 0
        for part in torch.split(error, [parameter.numel() for parameter in self.parameters]):
            places.append(find_largest(part, density) + start)
            start += part.numel()
        entries = [torch.cat(places), error[torch.cat(places).long()]]
        others = self.link.start_swap(entries, self.peers)()
        self._believed.index_add_(0, entries[0].long(), entries[1])
        for place, change in (entries, *others):
            self._mixed.index_add_(0, place.long(), change * self.mixing)
        step = min(MOST_STEP, STEP_PER_DENSITY * density)
        self.write_weights(own + step * (self._mixed - self._believed))

    def own_state(self) -> dict[str, Any]:
        """The estimates, too."""
        return {**super().own_state(), "believed": self._believed.cpu(), "mixed": self._mixed.cpu()}

    def take_model(self) -> None:
        """All estimates are the common weights."""
        self._believed.copy_(self.read_weights())
        self._mixed.copy_(self._believed)

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        super().load_own_state(state)
        self._believed.copy_(state["believed"])
        self._mixed.copy_(state["mixed"])
