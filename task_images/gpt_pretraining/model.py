"""A decoder of language: blocks of causal attention and feed-forward layers, as Llama 3 or as GPT-2 has them.

Read `Decoder.forward` first. Rotary positions turn *halves* of a head, as in `transformers`; the original Llama code
turns pairs, and the same weights give other results there without any error.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from task_images.gpt_pretraining.shapes import Shape
from task_images.harness.language.chunked_loss import sum_in_chunks

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [T, head size], or [B, 1, T, head size] with own positions
Run = Callable[..., Tensor]


class Decoder(nn.Module):
    """tokens [B, T] -> logits [B, T, padded vocabulary], or the sum of losses.

    Initial values: see `harness.language.parallel.fill_parameters`.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.padded_vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width) if shape.form == "gpt2" else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = make_norm(shape)
        self.head = nn.Linear(shape.width, shape.padded_vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        self.run_block: Run = run_directly
        self._rotation: Rotation | None = None

    def forward(
        self,
        tokens: Tensor,
        places: Tensor | None = None,
        mask: Tensor | None = None,
        targets: Tensor | None = None,
        loss_chunk: int = 0,
    ) -> Tensor:
        """`places` [B, T]: position of each token in its document; `mask` [B, 1, T, T]: True = attend. Without them a
        sequence is one document. With `targets` [B, T] the result is the sum of cross-entropies in nats, for which
        there are logits of `loss_chunk` tokens at a time."""
        x = self.embedding(tokens)
        rotation = None
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device) if places is None else places)
        else:
            rotation = self._rotate_by(tokens, places)
        for block in self.blocks:
            x = self.run_block(block, x, rotation, mask)
        features = self.norm(x)
        if targets is not None:
            return sum_in_chunks(self.compute_logits, features, targets, loss_chunk)
        return self.compute_logits(features)

    def compute_logits(self, features: Tensor) -> Tensor:
        """[..., D] to [..., padded vocabulary]; -inf for words that only pad it, so that losses and gradients are those
        without them."""
        logits: Tensor = self.head(features)
        if self.shape.padded_vocabulary > self.shape.vocabulary:
            # Exact without autograd's knowledge: the softmax has no gradient there, and a product does not need its
            # own result.
            logits.data[..., self.shape.vocabulary :] = -torch.inf
        return logits

    def _rotate_by(self, tokens: Tensor, places: Tensor | None) -> Rotation:
        length = tokens.shape[1]
        known = self._rotation
        if known is None or len(known[0]) < length or known[0].device != tokens.device:
            # Not buffers: they would have to be restored whenever parameters are made on the meta device first.
            known = self._rotation = make_rotation(
                max(length, self.shape.context), self.shape.head_size, self.shape.theta, tokens.device
            )
        if places is None:
            return known[0][:length], known[1][:length]
        return known[0][places].unsqueeze(1), known[1][places].unsqueeze(1)


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape)
        self.feed_forward_norm = make_norm(shape)
        self.feed_forward = GatedFeedForward(shape) if shape.form == "llama" else FeedForward(shape)

    def forward(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None) -> Tensor:
        """[B, T, D] to [B, T, D]; `mask` None is causal."""
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal attention; several query heads share one head of keys and values. The number of heads here follows from
    the tensors, since tensor-parallel ranks have a part of them each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        biased, inner = shape.form == "gpt2", shape.kv_heads * shape.head_size
        self.head_size = shape.head_size
        self.is_grouped = shape.kv_heads != shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=biased)
        self.key = nn.Linear(shape.width, inner, bias=biased)
        self.value = nn.Linear(shape.width, inner, bias=biased)
        self.output = nn.Linear(shape.width, shape.width, bias=biased)

    def forward(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None) -> Tensor:
        """[B, T, D] to [B, T, D]; `rotation` turns queries and keys, `mask` None is causal."""
        query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        mixed = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=self.is_grouped
        )
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, heads x size] -> [B, heads, T, size]"""
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)


class GatedFeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.down(silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """GPT-2's: down(gelu(up(x))), with biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.down(gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


def make_norm(shape: Shape) -> nn.Module:
    """LayerNorm for the form gpt2, RMSNorm for llama."""
    kind = nn.LayerNorm if shape.form == "gpt2" else nn.RMSNorm
    return kind(shape.width, eps=shape.eps)


def make_rotation(length: int, size: int, theta: float, device: torch.device) -> Rotation:
    """Cosines and sines of position x frequency, [length, size]; the two halves of a head share their frequencies."""
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn pairs (i, i + size/2) of the last dimension, in x's own number format."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines.to(x.dtype) + torch.cat((-second, first), dim=-1) * sines.to(x.dtype)


def run_directly(block: nn.Module, *inputs: object) -> Tensor:
    """Call a block; the place at which activation checkpoints step in."""
    return block(*inputs)  # type: ignore[no-any-return]


def count_unused_rows(shape: Shape) -> dict[str, int]:
    """Rows at the end of a tensor, by its name, that only pad the vocabulary."""
    unused = shape.padded_vocabulary - shape.vocabulary
    return {"embedding.weight": unused, "head.weight": unused} if unused else {}


def initial_deviation(name: str, shape: Shape) -> float:
    """Standard deviation of a matrix's initial values: 0.02; 0.02 / sqrt(2 layers) for what is added to the stream."""
    adds = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
    return 0.02 / (2 * shape.layers) ** 0.5 if adds else 0.02
