"""GNMT: LSTM encoder and decoder with residual layers and normalized additive attention.

Shapes: B sentences, K hypotheses of each, S source and T target positions, V words, D width. Sentences come first
outside, time first inside the LSTM layers. Sources: Wu et al. 2016 (arXiv 1609.08144); attention: Bahdanau et al. 2014
(arXiv 1409.0473), normalized as in Luong, Brevdo, Zhao 2017; the layers' wiring is that of the MLPerf reference.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from task_images.data import pin
from task_images.translation.training import TranslationModel

State = tuple[Tensor, Tensor]  # hidden and cell state, each (1, B x K, D)


@dataclass(frozen=True)
class Size:
    """Width, layers and dropout of the model."""

    width: int = 1024
    layers: int = 4  # of encoder and decoder each
    dropout: float = 0.2  # of the input of every LSTM layer
    initial: float = 0.1  # parameters begin in the range +- this, right for the default width


@dataclass
class SearchState:
    """The search's state."""

    memory: Tensor  # the encoder's output (B, S, D)
    keys: Tensor  # (B, S, D)
    mask: Tensor  # (B, 1, S), true where a source word is
    states: list[State]  # per layer


class Gnmt(TranslationModel):
    """Encoder, decoder and classifier. With V = 32 320 and the default size it has 160 671 297 parameters."""

    def __init__(self, vocabulary: int, size: Size | None = None, padding: int = 0) -> None:
        super().__init__()
        self.size = size or Size()
        self.padding = padding
        width = self.size.width
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=padding)
        self.both_ways = nn.LSTM(width, width, bidirectional=True)
        inputs = [2 * width] + [width] * (self.size.layers - 2)
        self.encoder = nn.ModuleList(nn.LSTM(before, width) for before in inputs)
        self.attention_lstm = nn.LSTM(width, width)
        self.attention = Attention(width)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width) for _ in range(self.size.layers - 1))
        self.classifier = nn.Linear(width, vocabulary)
        if not self.embedding.weight.is_meta:
            self._initialize()

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Features [B, T, D] of target [B, T], given source [B, S] with lengths [B]."""
        memory = self._encode(source, lengths)
        y, _ = self.attention_lstm(self._embed(target))
        context = self.attention(y.transpose(0, 1), memory, self.attention.keys(memory), self._mask(source))
        context = context.transpose(0, 1)
        x = y
        for index, layer in enumerate(self.decoder):
            y, _ = layer(self._drop(torch.cat([x, context], 2)))
            x = y + x if index else y
        features: Tensor = x.transpose(0, 1)
        return features

    def scores(self, features: Tensor) -> Tensor:
        """Scores of all words, [..., V], from features [..., D]."""
        scores: Tensor = self.classifier(features)
        return scores

    def begin(self, source: Tensor, lengths: Tensor) -> SearchState:
        """The decoder's state before the first word, for source [B, S] with lengths [B]."""
        memory = self._encode(source, lengths)
        zero = memory.new_zeros(1, len(source), self.size.width)
        return SearchState(memory, self.attention.keys(memory), self._mask(source), [(zero, zero)] * self.size.layers)

    def step(self, words: Tensor, state: SearchState) -> tuple[Tensor, Tensor]:
        """Scores [B, K, V] after words [B, K], and attention weights [B, K, S]."""
        shape = words.shape
        x, state.states[0] = self.attention_lstm(self._embed(words.reshape(-1, 1)), state.states[0])
        weights = self.attention.weights(x.view(*shape, -1), state.keys, state.mask)
        context = (weights.to(state.memory.dtype) @ state.memory).view_as(x)
        for index, layer in enumerate(self.decoder):
            y, state.states[index + 1] = layer(torch.cat([x, context], 2), state.states[index + 1])
            x = y + x if index else y
        return self.scores(x.view(*shape, -1)), weights

    def select(self, state: SearchState, sentences: Tensor, beams: Tensor) -> SearchState:
        """The state of chosen hypotheses: sentences [B'] of the B, and beams [B', K] of each."""
        before = len(state.memory)
        width = state.states[0][0].shape[1] // before
        rows = (sentences[:, None] * width + beams).flatten()
        states = [(hidden[:, rows], cell[:, rows]) for hidden, cell in state.states]
        if len(sentences) == before:
            return SearchState(state.memory, state.keys, state.mask, states)
        return SearchState(state.memory[sentences], state.keys[sentences], state.mask[sentences], states)

    def _mask(self, source: Tensor) -> Tensor:
        return (source != self.padding)[:, None, :]

    def _encode(self, source: Tensor, lengths: Tensor) -> Tensor:
        """source (B, S), lengths (B) on the CPU -> (B, S, D). Behind a sentence's end the output means nothing."""
        # Sorted here and not by torch, which lets the host wait for a GPU to get the order.
        lengths, order = lengths.cpu().sort(descending=True)
        order, back = (pin(one, source.device).to(source.device, non_blocking=True) for one in (order, order.argsort()))
        packed = pack_padded_sequence(self._embed(source).index_select(1, order), lengths)
        x, _ = pad_packed_sequence(self.both_ways(packed)[0], total_length=source.shape[1])
        x = x.index_select(1, back)
        for index, layer in enumerate(self.encoder):
            y, _ = layer(self._drop(x))
            x = y + x if index else y
        return x.transpose(0, 1)

    def _embed(self, words: Tensor) -> Tensor:
        """words (B, T) -> (T, B, D), ready for the first layer."""
        return self._drop(self.embedding(words.t()))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.size.dropout, self.training)

    @torch.no_grad()
    def _initialize(self) -> None:
        for name, parameter in self.named_parameters():
            if "bias_hh" in name:
                parameter.zero_()
            elif not name.startswith("attention.") or parameter.dim() == 2:
                parameter.uniform_(-self.size.initial, self.size.initial)


class Attention(nn.Module):
    """score(q, k) = (g v / |v|) . tanh(Wq q + Wk k + b), softmax over the source, mean of the memory under it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Sums of query and key per pair of positions and unit: above this many numbers they are made in parts, and
        # again in the backward pass instead of being kept.
        self.at_once = 1 << 25
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.direction = nn.Parameter(torch.empty(width).uniform_(-0.1, 0.1))
        self.scale = nn.Parameter(torch.full((1,), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, memory: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, D), memory and keys (B, S, D), mask (B, 1, S) -> contexts (B, T, D)."""
        return self.weights(x, keys, mask).to(memory.dtype) @ memory

    def keys(self, memory: Tensor) -> Tensor:
        """Wk k for the memory [B, S, D], which is the same for all steps."""
        keys: Tensor = self.key(memory)
        return keys

    def weights(self, x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, S), summing up to 1 over the source words."""
        direction = self.scale * self.direction / self.direction.norm()
        queries = self.query(x) + self.bias
        at_once = max(1, self.at_once // keys.numel())
        if queries.shape[1] <= at_once or not torch.is_grad_enabled():
            parts = [additive_scores(part, keys, direction) for part in queries.split(at_once, 1)]
        else:
            parts = [
                checkpoint(additive_scores, part, keys, direction, use_reentrant=False, preserve_rng_state=False)
                for part in queries.split(at_once, 1)
            ]
        return torch.cat(parts, 1).float().masked_fill(~mask, -torch.inf).softmax(2)


def additive_scores(queries: Tensor, keys: Tensor, direction: Tensor) -> Tensor:
    """queries (B, T, D), keys (B, S, D), direction (D) -> (B, T, S)."""
    return torch.tanh(queries[:, :, None] + keys[:, None]) @ direction
