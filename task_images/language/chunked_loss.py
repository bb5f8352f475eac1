"""Cross-entropy over a large vocabulary without storing all logits: in chunks of tokens, or split by words over ranks.

With 8,192 tokens and 128,256 words, logits, their fp32 copy and its gradient take 10 GB. With chunks, only one chunk's
logits exist at a time. The backward pass recomputes them: one more product of features and words than the usual three.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

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
