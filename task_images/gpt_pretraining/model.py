"""A decoder of language: blocks of causal attention and feed-forward layers, as `Shape` describes them.

Read `Decoder.forward` first. Rotary positions turn *halves* of a head, as in `transformers`; the original Llama code
turns pairs, and the same weights give other results there without any error.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu

from task_images.gpt_pretraining.plan import Shape
from task_images.language.tokens import IGNORED

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [T, head size]
Run = Callable[..., Tensor]


class Decoder(nn.Module):
    """tokens [B, T] -> logits [B, T, vocabulary], or the sum of losses.

    Initial values: see `language.model.fill_parameters`.

    stream   number format of what the blocks add to; None: that of the embedding (fp32)
    """

    def __init__(self, shape: Shape, stream: torch.dtype | None = None) -> None:
        super().__init__()
        self.shape, self._stream = shape, stream
        self.embedding = nn.Embedding(shape.padded_vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width) if shape.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output = Output(shape)
        if shape.tied:
            self.output.head.weight = self.embedding.weight
        self.run_block: Run = run_directly
        self._rotation: Rotation | None = None

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """With `targets` [B, T] the result is the sum of cross-entropies in nats."""
        x = self.embedding(tokens)
        rotation = None
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        else:
            rotation = self._rotate_by(tokens)
        if self._stream is not None:
            x = x.to(self._stream)
        for block in self.blocks:
            x = self.run_block(block, x, rotation)
        return self.output(x, targets)  # type: ignore[no-any-return]

    def _rotate_by(self, tokens: Tensor) -> Rotation:
        length = tokens.shape[1]
        known = None if torch.compiler.is_compiling() else self._rotation
        if known is None or len(known[0]) < length or known[0].device != tokens.device:
            # Not buffers: they would have to be restored whenever parameters are made on the meta device first.
            # Compiled code makes them in every pass, which costs less than a guard on a changing attribute.
            known = make_rotation(self.shape, length, tokens.device)
            if not torch.compiler.is_compiling():
                self._rotation = known
        return known[0][:length], known[1][:length]


class Output(nn.Module):
    """The last norm, the output layer and the loss. One module, so that torch.compile can join them: otherwise fp32
    logits (12 GB for 64 x 1 024 tokens and 50 304 words) are written and read several times."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.vocabulary = shape.vocabulary
        self.norm = make_norm(shape)
        self.head = nn.Linear(shape.width, shape.padded_vocabulary, bias=shape.bias and not shape.tied)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """[B, T, D] to logits [B, T, vocabulary] in fp32; with `targets` [B, T] to the sum of cross-entropies. Words
        that only pad the output layer are left out, so losses and gradients are those without them."""
        logits: Tensor = self.head(self.norm(x))[..., : self.vocabulary].float()
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape)
        self.feed_forward_norm = make_norm(shape)
        self.feed_forward = GatedFeedForward(shape) if shape.activation == "swiglu" else FeedForward(shape)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal attention; several query heads share one head of keys and values.

    One matrix makes queries, keys and values. Its rows are in groups, one for each head of keys: the query heads that
    share it, the key, the value.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size, self.shared = shape.head_size, shape.heads // shape.kv_heads
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_size
        self.qkv = nn.Linear(shape.width, rows, bias=shape.bias)
        self.output = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """[B, T, D] to [B, T, D]; `rotation` turns queries and keys."""
        groups = self.qkv(x).view(*x.shape[:-1], -1, self.shared + 2, self.head_size)
        query, key, value = groups.split((self.shared, 1, 1), dim=3)
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        mixed = scaled_dot_product_attention(
            query,
            key.to(query.dtype),
            value.to(query.dtype),
            is_causal=True,
            enable_gqa=self.shared > 1,
        )
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class GatedFeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=shape.bias)
        self.up = nn.Linear(shape.width, shape.hidden, bias=shape.bias)
        self.down = nn.Linear(shape.hidden, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.down(silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """down(gelu(up(x))), as GPT-2 has it, with gelu's approximation by tanh."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden, bias=shape.bias)
        self.down = nn.Linear(shape.hidden, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.down(gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


def make_norm(shape: Shape) -> nn.Module:
    """The norm of all channels that the shape names."""
    kind = nn.LayerNorm if shape.norm == "layer" else nn.RMSNorm
    return kind(shape.width, eps=shape.eps)


def make_rotation(shape: Shape, length: int, device: torch.device) -> Rotation:
    """Cosines and sines of position x frequency theta^(-2i / size), [length, head size]; both halves of a head have the
    same frequencies."""
    size, theta = shape.head_size, shape.theta
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
    names = ("embedding.weight", "output.head.weight", "output.head.bias")
    return dict.fromkeys(names, unused) if unused else {}


def initial_deviation(name: str, shape: Shape) -> float:
    """Standard deviation of a matrix's initial values, as GPT-2 has them: less for what is added to the stream."""
    adds = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
    return 0.02 / (2 * shape.layers) ** 0.5 if adds else 0.02
