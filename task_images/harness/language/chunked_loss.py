"""Cross-entropy over a large vocabulary without the logits of all tokens at once.

At 8192 tokens and 128 256 words, logits, their fp32 copy and its gradient take 10 GB. In chunks only one
chunk's logits exist at a time. The backward pass computes them again, which is one product of features and words more
than the usual three.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from task_images.harness.language.tokens import IGNORED


def sum_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of cross-entropies in nats, computed in fp32; logits [N, words], targets [N], IGNORED among them."""
    return cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def sum_in_chunks(head: Callable[[Tensor], Tensor], features: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """The sum of cross-entropies of `head(features)`, for `tokens` of them at a time.

    features [..., width], targets [...] as many; `head` gives the logits. Equal to `sum_cross_entropy` of all but for
    the order of additions.
    """

    def sum_chunk(part: Tensor, wanted: Tensor) -> Tensor:
        return sum_cross_entropy(head(part), wanted)

    chunks = zip(torch.split(features.flatten(0, -2), tokens), torch.split(targets.flatten(), tokens), strict=True)
    return torch.stack([checkpoint(sum_chunk, *chunk, use_reentrant=False) for chunk in chunks]).sum()
