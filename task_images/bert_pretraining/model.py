"""BERT with its two heads (Devlin et al. 2018): layer norms after the sums, exact GELU, output embedding tied.

The head of the masked tokens is computed at the positions that are asked for only: 15 % of a sequence.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from task_images.bert_pretraining.plan import Shape

EPS = 1e-12


class Bert(nn.Module):
    """tokens, types [B, T], mask [B, T] (True: a token, not padding; None: all are), positions [B, K]
    -> logits of the tokens at these positions [B, K, V], logits of the next sentence [B, 2] (0: it follows)."""

    def __init__(self, shape: Shape, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.types = nn.Embedding(2, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=EPS)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.pooler = nn.Linear(shape.width, shape.width)
        self.following = nn.Linear(shape.width, 2)
        self.transform = nn.Linear(shape.width, shape.width)
        self.transform_norm = nn.LayerNorm(shape.width, eps=EPS)
        self.output_bias = nn.Parameter(torch.zeros(shape.vocabulary))
        self.run_block = run_directly

    def forward(self, tokens: Tensor, types: Tensor, mask: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Logits at the masked positions [B, K, V], and of the next sentence [B, 2]."""
        x = self.embedding(tokens) + self.types(types)
        x = self.dropout(self.norm(x + self.places(torch.arange(tokens.shape[1], device=tokens.device))))
        attended = None if mask is None else mask[:, None, None, :]
        for layer in self.layers:
            x = self.run_block(layer, x, attended)
        masked = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        masked = self.transform_norm(gelu(self.transform(masked)))
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return linear(masked, self.embedding.weight, self.output_bias), self.following(pooled)


class Layer(nn.Module):
    """One layer: attention, then two linear layers, each with a sum and a norm after it."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.width, shape.width)
        self.key = nn.Linear(shape.width, shape.width)
        self.value = nn.Linear(shape.width, shape.width)
        self.output = nn.Linear(shape.width, shape.width)
        self.attention_norm = nn.LayerNorm(shape.width, eps=EPS)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, attended: Tensor | None) -> Tensor:
        """[B, T, D] to [B, T, D]; `attended` [B, 1, 1, T] is True for tokens, None if all are."""
        x = self.attention_norm(x + self.dropout(self.output(self._mix(x, attended))))
        return self.norm(x + self.dropout(self.down(gelu(self.up(x)))))  # type: ignore[no-any-return]

    def _mix(self, x: Tensor, attended: Tensor | None) -> Tensor:
        query, key, value = (
            part(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        rate = self.dropout.p if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=attended, dropout_p=rate)
        return mixed.transpose(1, 2).flatten(2)


def run_directly(block: nn.Module, *inputs: object) -> Tensor:
    """Call a block; the place at which activation checkpoints step in."""
    return block(*inputs)  # type: ignore[no-any-return]
