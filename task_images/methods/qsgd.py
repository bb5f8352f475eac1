"""QSGD (Alistarh et al. 2017): each number becomes one of a few fractions of its bucket's norm, rounded at random."""

from __future__ import annotations

from collections.abc import Sequence

from task_images.methods import nn, torch
from task_images.methods.base import Option
from task_images.methods.compressed import Compressed

NUMBERS = 512  # that share a norm


class Qsgd(Compressed):
    """Unbiased, so there is no error feedback. Errors are independent across ranks."""

    name = "qsgd"
    summary = "quantizes to 127 levels by unbiased random rounding"
    source = "Alistarh et al. 2017, arXiv:1610.02132"
    formula = "(P-1) (d + 4 ceil(d/512))"
    options = {**Compressed.options, "levels": Option(127, 1, 127, "fractions of the norm")}  # noqa: RUF012
    feeds_back = False

    def exchange(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], seed: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Gather signed levels as int8, and the norms."""
        flat, levels = torch.cat(list(tensors)), self.values["levels"]
        generator = torch.Generator(flat.device).manual_seed(seed * 65_537 + self.world.rank)
        padded = nn.functional.pad(flat, (0, -flat.numel() % NUMBERS)).view(-1, NUMBERS)
        norms = padded.norm(dim=1).float()
        scale = torch.where(norms > 0, levels / norms, 0).repeat_interleave(NUMBERS)[: flat.numel()]
        noise = torch.rand(flat.shape, generator=generator, device=flat.device)
        steps = (flat.abs() * scale + noise).floor().clamp_(max=levels)
        total = torch.zeros_like(flat)
        for signed, norm in self.link.gather([(steps * flat.sign()).to(torch.int8), norms]):
            total += (signed * (norm / levels).repeat_interleave(NUMBERS)[: flat.numel()]).to(flat.dtype)
        return list(torch.split(total, [tensor.numel() for tensor in tensors])), list(tensors)
