"""The AWD-LSTM language model: tied embedding, three weight-dropped LSTM layers, four kinds of dropout.

Shapes: T time steps, B streams, V words, E embedding width, H hidden width. Everything is time-major.
Source: Merity, Keskar, Socher 2017 (arXiv 1708.02182), sections 2, 4.1-4.5.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_WEIGHTS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")

State = list[tuple[Tensor, Tensor]]  # per layer: hidden and cell state, each (1, B, width)

# cuDNN wants a layer's weights in one buffer and copies them together otherwise: once per call and layer, which is
# cheap beside the layer itself. A dropped matrix is new at every call, so it can never lie in that buffer.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")


@dataclass(frozen=True)
class Dropout:
    """Shares of what is dropped, each in [0, 1)."""

    embedding: float = 0.1  # whole rows of the embedding: every occurrence of a word
    input: float = 0.65  # locked, on the embedded words
    hidden: float = 0.2  # locked, between LSTM layers
    output: float = 0.4  # locked, behind the last layer
    weight: float = 0.5  # entries of the hidden-to-hidden matrices


class WeightDroppedLstm(nn.LSTM):
    """One layer; `share` of the entries of its hidden-to-hidden matrix are zero, others at every call in training.

    forward: x (T, B, before) and a state -> output (T, B, after) and the state behind it, in one fused call.
    """

    def __init__(self, before: int, after: int, share: float) -> None:
        super().__init__(before, after)
        self.share = share

    def forward(  # type: ignore[override]
        self, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[T, B, before] to [T, B, after], and the state behind it, with another mask of weights at each call."""
        weight_ih, weight_hh, bias_ih, bias_hh = (getattr(self, name) for name in _WEIGHTS)
        dropped = F.dropout(weight_hh, self.share, self.training)
        weights = [weight_ih, dropped, bias_ih, bias_hh]
        output, hidden, cell = torch.lstm(x, state, weights, True, 1, 0.0, self.training, False, False)
        return output, (hidden, cell)


class AwdLstm(nn.Module):
    """Word-level language model. `forward` gives logits-to-be, the loss is taken by `score`.

    With V = 33 278, E = 400, H = 1150 and 3 layers it has 33 556 078 parameters.
    """

    def __init__(
        self, vocabulary: int, embedding: int = 400, hidden: int = 1150, layers: int = 3, dropout: Dropout | None = None
    ) -> None:
        super().__init__()
        self.dropout = dropout or Dropout()
        self.embedding = nn.Parameter(torch.empty(vocabulary, embedding))  # also the weight of the decoder
        self.bias = nn.Parameter(torch.empty(vocabulary))
        self.widths = [hidden] * (layers - 1) + [embedding]
        inputs = [embedding, *self.widths]
        self.layers = nn.ModuleList(
            WeightDroppedLstm(before, after, self.dropout.weight)
            for before, after in zip(inputs, self.widths, strict=False)
        )
        if not self.embedding.is_meta:
            nn.init.uniform_(self.embedding, -0.1, 0.1)
            nn.init.zeros_(self.bias)

    def initial_state(self, streams: int) -> State:
        """Zeros for `streams` streams, on the parameters' device."""
        zeros = [self.embedding.new_zeros(1, streams, width) for width in self.widths]
        return [(zero, zero) for zero in zeros]

    def forward(self, words: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """words (T, B) integers -> last layer's raw output (T, B, E), the same dropped, the next state (detached)."""
        x = F.embedding(words, self.embedding)
        x = drop_words(x, words, len(self.embedding), self.dropout.embedding, self.training)
        x = drop_locked(x, self.dropout.input, self.training)
        after: State = []
        last = len(self.layers) - 1
        for index, (layer, before) in enumerate(zip(self.layers, state, strict=True)):
            raw, (hidden, cell) = layer(x, before)
            after.append((hidden.detach(), cell.detach()))
            x = drop_locked(raw, self.dropout.output if index == last else self.dropout.hidden, self.training)
        return raw, x, after

    def score(self, output: Tensor, targets: Tensor) -> Tensor:
        """output (T, B, E), targets (T, B) -> mean cross-entropy per word in nats, a scalar."""
        logits = F.linear(output.flatten(0, 1), self.embedding, self.bias)
        return F.cross_entropy(logits.float(), targets.flatten())


def regularization(raw: Tensor, dropped: Tensor, alpha: float, beta: float) -> Tensor:
    """Activation (alpha, on the dropped output) and temporal activation (beta, on the raw one) penalty, a scalar."""
    penalty = alpha * dropped.float().square().mean()
    if len(raw) > 1:
        penalty = penalty + beta * (raw[1:] - raw[:-1]).float().square().mean()
    return penalty


def drop_locked(x: Tensor, share: float, training: bool) -> Tensor:
    """x (T, B, W) with one mask (1, B, W) for all time steps, the rest rescaled to keep the mean."""
    if not training or not share:
        return x
    return x * F.dropout(torch.ones_like(x[:1]), share)


def drop_words(x: Tensor, words: Tensor, vocabulary: int, share: float, training: bool) -> Tensor:
    """x (T, B, E), the embedded `words` (T, B): every occurrence of a dropped word is zero, the rest is rescaled."""
    if not training or not share:
        return x
    keep = F.dropout(x.new_ones(vocabulary, 1), share)
    return x * F.embedding(words, keep)
