"""The output layer: its loss over a large vocabulary, in chunks or split by words over ranks, and 8-bit products.

With 8,192 tokens and 128,256 words, logits, their fp32 copy and its gradient take 10 GB. With chunks, only one chunk's
logits exist at a time. The backward pass recomputes them: one more product of features and words than the usual three.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from task_images.contract import TaskUsageError
from task_images.language.tokens import IGNORED


def sum_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of cross-entropies in nats, computed in fp32; logits [N, words], targets [N], which may include
    IGNORED."""
    return cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def sum_in_chunks(head: Callable[[Tensor], Tensor], features: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """The sum of cross-entropies of `head(features)`, computed for `tokens` tokens at a time.

    features [..., width], targets [...]; `head` computes the logits. Equal to `sum_cross_entropy` except for the order
    of additions.
    """

    def sum_chunk(part: Tensor, wanted: Tensor) -> Tensor:
        return sum_cross_entropy(head(part), wanted)

    chunks = zip(torch.split(features.flatten(0, -2), tokens), torch.split(targets.flatten(), tokens), strict=True)
    return torch.stack([checkpoint(sum_chunk, *chunk, use_reentrant=False) for chunk in chunks]).sum()


def sum_over_ranks(logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """The sum of cross-entropies in nats, on every rank of `group`; each rank has the logits of some words.

    logits [N, words of this rank] in fp32, starting with the word `first`; targets [N], the same on all ranks, may
    include IGNORED. Two all-reduces: the largest logits, [N]; the sums of exponentials and the targets' logits, [2 N]
    (vocabulary parallel: Shoeybi et al. 2019, section 3).
    """
    found: Tensor = _SumOverRanks.apply(logits, targets, first, group)
    return found


class _SumOverRanks(torch.autograd.Function):
    """The backward pass does not communicate: the gradient of a rank's logits is its probabilities, minus 1 at the
    target."""

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        places, context.words = targets - first, logits.shape[-1]
        own, counted = (places >= 0) & (places < logits.shape[-1]), targets != IGNORED
        if not logits.shape[-1]:  # fewer words than ranks
            logits = logits.new_full((len(targets), 1), -torch.inf)
        places = places.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        greatest = logits.amax(-1, keepdim=True)
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group)
        shifted = logits - greatest
        wanted = torch.where(own, shifted.gather(-1, places).squeeze(-1), 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), wanted])
        dist.all_reduce(sums, group=group)
        context.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), places, own, counted)
        return ((sums[0].log() - sums[1]) * counted).sum()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, places, own, counted = context.saved_tensors
        found = probabilities * (gradient * counted).unsqueeze(-1)
        found.scatter_add_(-1, places, (-gradient * own).unsqueeze(-1))
        return found[:, : context.words], None, None, None


# --- 8-bit products, whose results differ from bf16, so this is an option with its own label ------------------------
# Forward pass: features and weights in e4m3. Backward pass: gradients in e5m2, which has more range. Each tensor has
# one scale, from its largest absolute value, so nothing overflows. The hardware accumulates in higher precision, and
# results have the format of the features. Weights, their gradients and the optimizer stay in fp32.

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
TILE = 16  # torch._scaled_mm requires multiples in both dimensions of the second factor


class Float8Linear(nn.Linear):
    """A linear layer with 8-bit products. Parameters, names and initial values are those of nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        flat = input.flatten(0, -2)
        rows = flat.shape[0]
        if rows % TILE:  # the product of gradients and features sums over rows
            flat = nn.functional.pad(flat, (0, 0, 0, TILE - rows % TILE))
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        result: Tensor = _Product.apply(flat.to(dtype), self.weight)
        result = result[:rows].view(*input.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias.to(result.dtype)


class _Product(torch.autograd.Function):
    """features @ weight^T."""

    @staticmethod
    def forward(context: Any, features: Tensor, weight: Tensor) -> Tensor:
        left, left_scale = _round(features, FORWARD)
        right, right_scale = _round(weight, FORWARD)
        context.save_for_backward(left, left_scale, right, right_scale)
        context.dtype = features.dtype
        return torch._scaled_mm(left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=features.dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        left, left_scale, right, right_scale = context.saved_tensors
        rounded, scale = _round(gradient, BACKWARD)
        # The second factor must be column-major.
        of_features = torch._scaled_mm(
            rounded, right.t().contiguous().t(), scale_a=scale, scale_b=right_scale, out_dtype=context.dtype
        )
        of_weight = torch._scaled_mm(
            rounded.t().contiguous(),
            left.t().contiguous().t(),
            scale_a=scale,
            scale_b=left_scale,
            out_dtype=torch.float32,
        )
        return of_features, of_weight


def _round(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`tensor` divided by its scale in 8 bits, and the scale."""
    largest = torch.finfo(dtype).max
    scale = (tensor.abs().amax().float() / largest).clamp(min=1e-12)
    return (tensor.float() / scale).clamp(-largest, largest).to(dtype), scale


def use_float8(modules: list[nn.Module]) -> None:
    """Make the linear layers among `modules` compute in 8 bits, with the same parameters."""
    for module in modules:
        if type(module) is nn.Linear and not (module.in_features % TILE or module.out_features % TILE):
            module.__class__ = Float8Linear


def require_float8(device: torch.device) -> None:
    """Raises TaskUsageError unless the device can multiply 8-bit matrices, which is tried."""
    try:
        one = torch.ones((), device=device)
        square = torch.ones(TILE, TILE, device=device).to(FORWARD)
        torch._scaled_mm(square, square.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise TaskUsageError(
            f"this device cannot multiply 8-bit floating-point numbers: {' '.join(str(error).split())[:200]}",
            "--set float8=none, or NVIDIA GPUs of compute capability 8.9 or later (L4, L40S, H100).",
        ) from None
