"""The entries of greatest magnitude of each tensor: values, and places as 32-bit integers."""

from __future__ import annotations

from collections.abc import Sequence

from task_images.methods import torch
from task_images.methods.base import Option
from task_images.methods.compressed import Compressed

DENSITY = Option(0.01, 1e-6, 1, "share of the entries of each tensor that is sent")


class EfTopK(Compressed):
    """Top-k with error feedback."""

    name = "eftopk"
    summary = "sends the largest 1 % of each tensor and adds the rest to the next gradient (error feedback)"
    source = "Stich et al. 2018, arXiv:1809.07599"
    formula = "8 k (P-1), k = sum over tensors of max(1, floor(n/100))"
    options = {**Compressed.options, "density": DENSITY}  # noqa: RUF012

    @property
    def density(self) -> float:
        """The share of the entries that is sent in this update."""
        return float(self.values["density"])

    def exchange(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], seed: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Gather places and values, and add them up sparsely."""
        places = [find_largest(tensor, self.density) for tensor in tensors]
        values = [tensor[place.long()] for tensor, place in zip(tensors, places, strict=True)]
        sums, own = [torch.zeros_like(tensor) for tensor in tensors], [torch.zeros_like(tensor) for tensor in tensors]
        for row in self.link.gather([*places, *values]):
            for total, place, value in zip(sums, row[: len(places)], row[len(places) :], strict=True):
                total.index_add_(0, place.long(), value)
        for sent, place, value in zip(own, places, values, strict=True):
            sent.index_copy_(0, place.long(), value)
        return sums, own


class TopK(EfTopK):
    """Top-k without error feedback."""

    name = "topk"
    summary = "sends the largest 1 % of each tensor and drops the rest"
    source = "Aji and Heafield 2017, arXiv:1704.05021"
    note = "Without error feedback, most elements are never updated."
    reaches_goals = False
    feeds_back = False


class Dgc(EfTopK):
    """Deep gradient compression: what is not sent is the sum of velocities, not of gradients, and entries that are sent
    lose their velocity, too. The momentum of the task's optimizer is taken over."""

    name = "dgc"
    summary = "eftopk with momentum correction"
    source = "Lin et al. 2018, arXiv:1712.01887"
    options = {  # noqa: RUF012
        **EfTopK.options,
        "momentum": Option(0.9, 0, 0.999, "momentum, instead of that of the task's optimizer, which is set to 0"),
        "warmup": Option(0, 0, 10**6, "first updates, in which the density falls from 25 %"),
    }
    late_options = ("warmup",)
    optimizers = ("SGD",)

    @property
    def density(self) -> float:
        """During the warm-up it starts at 25 % and is divided by 4 after each fifth (section 3.3)."""
        final, warmup = super().density, self.values["warmup"]
        return final if self.update > warmup else max(final, 0.25 ** (1 + 5 * (self.update - 1) // warmup))

    def start(self) -> None:
        """Take over the momentum."""
        super().start()
        self.state["velocity"] = {name: torch.zeros_like(kept) for name, kept in self.state["residual"].items()}
        for group in self.optimizer.param_groups:
            group["momentum"], group["nesterov"] = 0.0, False

    def accumulate(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Momentum correction (section 3.1)."""
        velocity = self.state["velocity"][name].mul_(self.values["momentum"]).add_(gradient)
        return super().accumulate(name, velocity)

    def exchange(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], seed: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Factor masking (section 3.2)."""
        sums, own = super().exchange(names, tensors, seed)
        for name, sent in zip(names, own, strict=True):
            self.state["velocity"][name].masked_fill_(sent != 0, 0)
        return sums, own


def find_largest(flat: torch.Tensor, density: float) -> torch.Tensor:
    """Places of the max(1, floor(density n)) entries of greatest magnitude, as int32."""
    count = max(1, int(density * flat.numel()))
    return flat.abs().topk(count, sorted=False).indices.to(torch.int32)
