"""A decoder of language: blocks of causal attention and feed-forward layers, as `Shape` describes them.

Read `Decoder.forward` first. Rotary positions turn *halves* of a head, as in `transformers`; the original Llama code
turns pairs, and the same weights give other results there without any error.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import gelu, relu, rms_norm, scaled_dot_product_attention, silu

from task_images.gpt_pretraining.head import sum_cross_entropy, sum_in_chunks, sum_over_ranks
from task_images.gpt_pretraining.plan import Shape

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [T, head size], or [B, 1, T, head size] with own positions
Run = Callable[..., Tensor]


class Decoder(nn.Module):
    """tokens [B, T] -> logits [B, T, vocabulary], or the sum of losses.

    Initial values: see `language.parallel.fill_parameters`.

    stream   number format of what the blocks add to; None: that of the embedding (fp32)
    """

    def __init__(self, shape: Shape, stream: torch.dtype | None = None) -> None:
        super().__init__()
        self.shape, self._stream = shape, stream
        self.embedding = nn.Embedding(shape.padded_vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width) if shape.positions == "learned" else None
        self.embedding_norm = make_norm(shape) if shape.embedding_norm else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output = Output(shape)
        if shape.tied:
            self.output.head.weight = self.embedding.weight
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
        sequence is one document. With `targets` [B, T] the result is the sum of cross-entropies in nats; with
        `loss_chunk` there are logits of so many tokens at a time."""
        x = self.embedding(tokens)
        rotation = None
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device) if places is None else places)
        else:
            rotation = self._rotate_by(tokens, places)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self._stream is not None:
            x = x.to(self._stream)
        for block in self.blocks:
            x = self.run_block(block, x, rotation, mask)
        return self.output(x, targets, loss_chunk)  # type: ignore[no-any-return]

    def _rotate_by(self, tokens: Tensor, places: Tensor | None) -> Rotation:
        length = tokens.shape[1]
        known = None if torch.compiler.is_compiling() else self._rotation
        if known is None or len(known[0]) < length or known[0].device != tokens.device:
            # Not buffers: they would have to be restored whenever parameters are made on the meta device first.
            # Compiled code makes them in every pass, which costs less than a guard on a changing attribute.
            reach = length if places is None else max(length, self.shape.context)
            known = make_rotation(self.shape, reach, tokens.device)
            if not torch.compiler.is_compiling():
                self._rotation = known
        if places is None:
            return known[0][:length], known[1][:length]
        return known[0][places].unsqueeze(1), known[1][places].unsqueeze(1)


class Output(nn.Module):
    """The last norm, the output layer and the loss. One module, so that torch.compile can join them: otherwise fp32
    logits (12 GB for 64 x 1 024 tokens and 50 304 words) are written and read several times."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.vocabulary, self.softcap = shape.vocabulary, shape.softcap
        self.norm = make_norm(shape)
        self.head = nn.Linear(shape.width, shape.padded_vocabulary, bias=shape.bias and not shape.tied)
        self.first_word = 0
        self.mesh: DeviceMesh | None = None

    def split_over(self, mesh: DeviceMesh) -> None:
        """The head gives each rank of `mesh` its part of the words, and the loss needs no more."""
        self.mesh = mesh
        self.first_word = mesh.get_local_rank() * -(-self.head.out_features // mesh.size())  # as torch.chunk cuts rows

    def forward(self, x: Tensor, targets: Tensor | None = None, loss_chunk: int = 0) -> Tensor:
        """[B, T, D] to logits [B, T, vocabulary]; with `targets` [B, T] to the sum of cross-entropies. If the head is
        split, the logits are those of this rank's words."""
        features = self.norm(x)
        if targets is None:
            return self.compute_logits(features)
        if self.mesh is not None:
            logits = self.compute_logits(features).flatten(0, 1)
            return sum_over_ranks(logits, targets.flatten(), self.first_word, self.mesh.get_group())
        if loss_chunk:
            return sum_in_chunks(self.compute_logits, features, targets, loss_chunk)
        return sum_cross_entropy(self.compute_logits(features).flatten(0, 1), targets.flatten())

    def compute_logits(self, features: Tensor) -> Tensor:
        """[..., D] to [..., vocabulary], in fp32. Words that only pad the output layer are left out here, so losses and
        gradients are those without them."""
        logits: Tensor = self.head(features)[..., : max(0, self.vocabulary - self.first_word)].float()
        if self.softcap:
            logits = self.softcap * logits * (logits.square() + self.softcap**2).rsqrt()
        return logits


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape)
        self.feed_forward_norm = make_norm(shape)
        self.feed_forward = GatedFeedForward(shape) if shape.activation == "swiglu" else FeedForward(shape)

    def forward(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None) -> Tensor:
        """[B, T, D] to [B, T, D]; `mask` None is causal."""
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal attention; several query heads share one head of keys and values.

    One matrix makes queries, keys and values. Its rows are in groups, one for each head of keys: the query heads that
    share it, the key, the value. So tensor-parallel ranks, which have some of the rows each, have whole groups; how
    many follows from the tensors.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size, self.shared = shape.head_size, shape.heads // shape.kv_heads
        self.qk_norm, self.eps, self.scale = shape.qk_norm, shape.eps, shape.scale or None
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_size
        self.qkv = nn.Linear(shape.width, rows, bias=shape.bias)
        self.output = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None) -> Tensor:
        """[B, T, D] to [B, T, D]; `rotation` turns queries and keys, `mask` None is causal."""
        groups = self.qkv(x).view(*x.shape[:-1], -1, self.shared + 2, self.head_size)
        query, key, value = groups.split((self.shared, 1, 1), dim=3)
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))
        if self.qk_norm:
            query, key = (rms_norm(part, (self.head_size,), eps=self.eps) for part in (query, key))
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        mixed = scaled_dot_product_attention(
            query,
            key.to(query.dtype),
            value.to(query.dtype),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
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
    """down(gelu(up(x))), as GPT-2 has it, or down(relu(up(x))^2)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.squares = shape.activation == "relu2"
        self.up = nn.Linear(shape.width, shape.hidden, bias=shape.bias)
        self.down = nn.Linear(shape.hidden, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        inner = self.up(x)
        return self.down(relu(inner).square() if self.squares else gelu(inner, approximate="tanh"))  # type: ignore[no-any-return]


def make_norm(shape: Shape) -> nn.Module:
    """The norm of all channels that the shape names."""
    kind = nn.LayerNorm if shape.norm == "layer" else nn.RMSNorm
    return kind(shape.width, eps=shape.eps)


def make_rotation(shape: Shape, length: int, device: torch.device) -> Rotation:
    """Cosines and sines of position x frequency, [length, head size]; both halves of a head have the same frequencies.

    rotary: theta^(-2i / size). half-rotary: from 1 to 1/theta in equal ratios over a quarter of the channels, and 0 for
    another quarter (modded-nanogpt), so that half of each head says nothing of positions.
    """
    size, theta = shape.head_size, shape.theta
    if shape.positions == "half-rotary":
        turning = theta ** -torch.linspace(0, 1, size // 4, dtype=torch.float32, device=device)
        frequencies = torch.cat((turning, torch.zeros(size // 2 - size // 4, device=device)))
    else:
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


def split_qkv(matrix: Tensor, shape: Shape) -> list[Tensor]:
    """The rows of `Attention.qkv` that make queries, keys and values, each a matrix (or a bias)."""
    rest = matrix.shape[1:]
    groups = matrix.view(shape.kv_heads, shape.heads // shape.kv_heads + 2, shape.head_size, *rest)
    parts = torch.split(groups, [shape.heads // shape.kv_heads, 1, 1], dim=1)
    return [part.reshape(-1, *rest) for part in parts]


def join_qkv(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """The inverse of `split_qkv`."""
    rest = query.shape[1:]
    parts = (part.reshape(shape.kv_heads, -1, shape.head_size, *rest) for part in (query, key, value))
    return torch.cat(tuple(parts), dim=1).reshape(-1, *rest)


def count_unused_rows(shape: Shape) -> dict[str, int]:
    """Rows at the end of a tensor, by its name, that only pad the vocabulary."""
    unused = shape.padded_vocabulary - shape.vocabulary
    names = ("embedding.weight", "output.head.weight", "output.head.bias")
    return dict.fromkeys(names, unused) if unused else {}


def initial_deviation(name: str, shape: Shape) -> float:
    """Standard deviation of a matrix's initial values.

    gpt2: 0.02; 0.02 / sqrt(2 layers) for what is added to the stream. zero: 0 for what is added to the stream and for
    the output layer, 1 for the embedding, sqrt(1/3) / sqrt(inputs) for the rest: torch's own deviation.
    """
    adds = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
    if shape.initial == "gpt2":
        return 0.02 / (2 * shape.layers) ** 0.5 if adds else 0.02
    if name.startswith("embedding."):
        return 1.0
    return 0.0 if adds or name.startswith("output.head.") else (0.33 / shape.width) ** 0.5


def split_decoder(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor parallel with sequence parallel: matrices are split by heads and channels; what lies between them (norms,
    the residual stream) by positions; output layer and loss by words. Tied embeddings have to be tied again: splitting
    makes two tensors of them."""
    whole, by_position = Replicate(), Shard(1)
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=by_position),
        "output.norm": SequenceParallel(),
        "output.head": ColwiseParallel(input_layouts=by_position),
    }
    for number in range(len(model.blocks)):
        block = f"blocks.{number}"
        plan |= {
            f"{block}.attention_norm": SequenceParallel(),
            f"{block}.attention": PrepareModuleInput(
                input_layouts=(by_position, None, None), desired_input_layouts=(whole, None, None)
            ),
            f"{block}.attention.qkv": ColwiseParallel(),  # whole groups of heads, see Attention
            f"{block}.attention.output": RowwiseParallel(output_layouts=by_position),
            f"{block}.feed_forward_norm": SequenceParallel(),
            f"{block}.feed_forward": PrepareModuleInput(input_layouts=by_position, desired_input_layouts=whole),
            **{f"{block}.feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
            f"{block}.feed_forward.down": RowwiseParallel(output_layouts=by_position),
        }
    parallelize_module(model, mesh, plan)
    model.output.split_over(mesh)
    if model.shape.tied:
        model.output.head.weight = model.embedding.weight
