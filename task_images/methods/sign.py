"""One bit per number: EF-SignSGD (Karimireddy et al. 2019) and the majority vote (Bernstein et al. 2019). Zero counts
as positive."""

from __future__ import annotations

from collections.abc import Sequence

from task_images.methods import torch
from task_images.methods.compressed import Compressed, pack_bits, unpack_signs


class EfSignSgd(Compressed):
    """Signs times the mean magnitude of each tensor."""

    name = "ef-signsgd"
    summary = "one sign bit per element and one scale per tensor, with error feedback"
    source = "Karimireddy et al. 2019, arXiv:1901.09847"
    formula = "(P-1) (ceil(d/8) + 4 per tensor)"

    def exchange(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], seed: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Gather bits and scales."""
        sizes, flat = [tensor.numel() for tensor in tensors], torch.cat(list(tensors))
        scales = torch.stack([tensor.abs().mean(dtype=torch.float32) for tensor in tensors])
        everyone = []
        for bits, scale in self.link.gather([pack_bits(flat < 0), scales]):
            parts = torch.split(unpack_signs(bits, flat), sizes)
            everyone.append([part.mul_(one) for part, one in zip(parts, scale.to(flat.dtype), strict=True)])
        own = everyone[self.world.rank]
        return [torch.stack(column).sum(0) for column in zip(*everyone, strict=True)], own


class SignSgd(Compressed):
    """The sign of the majority. Random bits decide ties, which are frequent (half of all votes of two ranks): counting
    them as positive would move every weight downwards by noise alone."""

    name = "signsgd-mv"
    summary = "one sign bit per element; the majority wins, and ties are broken at random"
    source = "Bernstein et al. 2019, arXiv:1810.05291"
    formula = "(P-1) ceil(d/8)"
    note = (
        "Every element of an update is +1 or -1, so the learning rate must be far below that of SGD: 0.0001 to 0.0003 "
        "for digits_resnet. The task's optimizer applies its momentum after the vote (Signum)."
    )
    reaches_goals = False
    feeds_back = False

    def exchange(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], seed: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Gather bits and count them."""
        flat = torch.cat(list(tensors))
        votes = torch.zeros_like(flat)
        for [bits] in self.link.gather([pack_bits(flat < 0)]):
            votes += unpack_signs(bits, flat)
        coins = torch.Generator(flat.device).manual_seed(seed)
        lost = torch.randint(2, flat.shape, generator=coins, device=flat.device, dtype=torch.uint8) > 0
        signs = torch.where((votes < 0) | ((votes == 0) & lost), -1.0, 1.0).to(flat.dtype)
        return list(torch.split(signs, [tensor.numel() for tensor in tensors])), list(tensors)
