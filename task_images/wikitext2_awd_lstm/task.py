"""Benchmark 3a: the language model AWD-LSTM on WikiText-2. Tied embedding, three weight-dropped LSTM layers, four kinds
of dropout; truncated backpropagation through time over parallel streams, SGD, then averaged SGD.

Shapes: T time steps, B streams, V words, E embedding width, H hidden width. Everything is time-major.
Source: Merity, Keskar, Socher 2017 (arXiv 1708.02182), Regularizing and Optimizing LSTM Language Models, sections 2,
4.1-4.5.
"""

import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from task_images.cache import require_data_dir
from task_images.contract import Contract
from task_images.data import seed_all, shard
from task_images.methods.base import Bsp, prepare_method
from task_images.metrics import Mean, Perplexity, Values, collect
from task_images.parameters import CheckpointSettings, CudaSettings, Task, TrainingSettings, parameter, read_parameters
from task_images.report import GoalWatch, Reporter, training_session
from task_images.schedules import Constant, LinearWarmup, PerUpdate
from task_images.train import (
    PassLoss,
    Plan,
    Precision,
    Trainer,
    Unit,
    Update,
    count_parameters,
    refuse_bf16_lstm,
)
from task_images.wikitext2_awd_lstm.data import Corpus, read_corpus, sequence_lengths, streams, write_sample
from task_images.world import World


@dataclass(frozen=True)
class Settings(TrainingSettings, CheckpointSettings, CudaSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    data: str = parameter("wikitext-2", "text to train on", choices=("wikitext-2", "python-topics"))
    batch_size: int = parameter(80, "streams per rank and pass", min=1, max=65536)
    accumulation: int = parameter(1, "passes per rank and update; each counts like a rank", min=1, max=4096)
    sequence_length: int = parameter(70, "base length of a sequence in words", min=2, max=65536)
    short_sequence_share: float = parameter(0.05, "probability that the base length is halved", min=0, max=1)
    least_sequence_length: int = parameter(5, "minimum length of a sequence in words", min=1, max=65536)
    epochs: int = parameter(750, "maximum number of epochs", min=1, max=100000)
    embedding: int = parameter(400, "width of the embedding and the last layer", min=1, max=65536)
    hidden: int = parameter(1150, "width of the hidden layers", min=1, max=65536)
    layers: int = parameter(3, "number of LSTM layers", min=1, max=64)
    dropout_embedding: float = parameter(0.1, "share of words whose embedding is dropped", min=0, max=0.99)
    dropout_input: float = parameter(0.65, "locked dropout of the embedded words", min=0, max=0.99)
    dropout_hidden: float = parameter(0.2, "locked dropout between layers", min=0, max=0.99)
    dropout_output: float = parameter(0.4, "locked dropout after the last layer", min=0, max=0.99)
    weight_drop: float = parameter(0.5, "dropout of the entries of hidden-to-hidden matrices", min=0, max=0.99)
    activation_penalty: float = parameter(2.0, "alpha of activation regularization", min=0, max=1000)
    temporal_penalty: float = parameter(1.0, "beta of temporal activation regularization", min=0, max=1000)
    learning_rate: float = parameter(30.0, "base rate of SGD for a sequence of the base length", min=0, max=10000)
    warmup_epochs_per_rank: float = parameter(
        3.0, "epochs per rank until the rate is base x sqrt(ranks)", min=0, max=1000
    )
    averaged_learning_rate: float = parameter(0.0, "rate of averaged SGD; 0: that of plain SGD", min=0, max=10000)
    switch_rule: str = parameter(
        "stalled",
        "switch to averaged SGD when the last epochs brought no new minimum, or when the last one is above the "
        "earlier minimum",
        choices=("stalled", "non_monotone"),
    )
    switch_patience: int = parameter(5, "epochs that the switch rule looks back", min=1, max=1000)
    weight_decay: float = parameter(1.2e-06, "weight decay of SGD", min=0, max=1)
    clip: float = parameter(0.25, "maximum norm of the mean gradient", min=1e-06, max=1000000)
    precision: str = parameter("fp32", "number format of training", choices=("fp32", "bf16"))
    validation_streams: int = parameter(10, "streams of the validation and test text", min=1, max=65536)
    goal_full: float = parameter(70.0, "validation perplexity of the full goal", min=1, max=1000000)
    goal_light: float = parameter(90.0, "validation perplexity of the light goal", min=1, max=1000000)


TASK = Task(
    settings=Settings,
    number="3a",
    title="AWD-LSTM language model on WikiText-2",
    legacy_name="PyTorch Language Modeling (AWD-LSTM)",
    measured_on=["CPU", "1 x H100"],
    method={
        "own": "bsp",
        "refuses": {"wraps": "it calls parts of its model", "gates": "it clips gradients by their norm"},
    },
    goal={"metric": "Perplexity", "comparison": "<=", "wording": "Validation Perplexity of {threshold}"},
    data=(
        "WikiText-2, word level: wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or "
        "wikitext-2-v1.zip, in the data folder. The preset tiny uses the language reference that "
        "comes with Python."
    ),
    files={
        "when": {"data": "wikitext-2"},
        "folders": [".", "wikitext-2", "wikitext-2-v1", "wikitext-2-v1/wikitext-2"],
        "wanted": [["wiki.train.tokens", "wikitext-2-v1.zip", "wikitext2.cache"]],
        "imports": ["wiki.valid.tokens", "wiki.test.tokens"],
        "instead": "--preset tiny",
    },
    workers={
        "sensible": 32,
        "reason": ("each of 32 ranks has 12 updates an epoch; 256 have 2, and a warm-up longer than the training"),
    },
    notes=[
        "Validation reads 10 streams in parallel, each in pieces of 70 words: MLBench's text says sequence "
        "length 10, its code 10 streams.",
    ],
    presets={
        "legacy": {
            "batch_size": 20,
            "learning_rate": 15.0,
            "warmup_epochs_per_rank": 0.0,
            "averaged_learning_rate": 15.0,
            "switch_rule": "non_monotone",
        },
        # The protocol of all throughput presets, on a text with fewer words; no goal.
        "throughput": {
            "data": "python-topics",
            "blocks": 10,
        },
        "tiny": {
            "data": "python-topics",
            "batch_size": 8,
            "epochs": 12,
            "embedding": 64,
            "hidden": 128,
            "layers": 2,
            "dropout_input": 0.2,
            "dropout_hidden": 0.1,
            "dropout_output": 0.2,
            "weight_drop": 0.2,
            "learning_rate": 20.0,
            "warmup_epochs_per_rank": 0.5,
            "goal_full": 90,
            "goal_light": 150,
        },
    },
)


_WEIGHTS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")

State = list[tuple[Tensor, Tensor]]  # per layer: hidden and cell state, each (1, B, width)

# cuDNN wants a layer's weights in one buffer and copies them together otherwise: once per call and layer, which is
# cheap beside the layer itself. A dropped matrix is new at every call, so it can never lie in that buffer.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")


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

    With V = 33 278 and the default parameters it has 33 556 078 numbers.
    """

    def __init__(self, vocabulary: int, p: Settings) -> None:
        super().__init__()
        self.p = p
        self.embedding = nn.Parameter(torch.empty(vocabulary, p.embedding))  # also the weight of the decoder
        self.bias = nn.Parameter(torch.empty(vocabulary))
        self.widths = [p.hidden] * (p.layers - 1) + [p.embedding]
        inputs = [p.embedding, *self.widths]
        self.layers = nn.ModuleList(
            WeightDroppedLstm(before, after, p.weight_drop) for before, after in zip(inputs, self.widths, strict=False)
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
        x = drop_words(x, words, len(self.embedding), self.p.dropout_embedding, self.training)
        x = drop_locked(x, self.p.dropout_input, self.training)
        after: State = []
        last = len(self.layers) - 1
        for index, (layer, before) in enumerate(zip(self.layers, state, strict=True)):
            raw, (hidden, cell) = layer(x, before)
            after.append((hidden.detach(), cell.detach()))
            x = drop_locked(raw, self.p.dropout_output if index == last else self.p.dropout_hidden, self.training)
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


def should_switch(losses: Sequence[float], patience: int, rule: str) -> bool:
    """Whether the validation losses so far (oldest first) end the plain SGD.

    `stalled`: the last `patience` epochs brought no new minimum. `non_monotone` (Merity et al., algorithm 1, with
    one validation per epoch): the last loss is above the minimum of all but the last `patience`.
    """
    if len(losses) <= patience:
        return False
    earlier = min(losses[:-patience])
    return min(losses[-patience:]) >= earlier if rule == "stalled" else losses[-1] > earlier


class Average:
    """Averaged SGD with λ = 0 and t0 = 0 (Polyak, Ruppert): when it begins, and the mean of the parameters after each
    update since then."""

    def __init__(self, model: nn.Module, patience: int, rule: str, report: Reporter) -> None:
        self.model = model
        self.mean: AveragedModel | None = None
        self.switched: int | None = None
        self._patience, self._rule, self._report = patience, rule, report
        self._losses: list[float] = []

    @property
    def best(self) -> Any:
        """The model with the means, if averaging has begun."""
        return self.model if self.mean is None else self.mean.module

    def update(self) -> None:
        """Take in the parameters as they are after an update."""
        if self.mean is not None:
            self.mean.update_parameters(self.model)

    def observe(self, epoch: int, values: Values) -> None:
        """Take note of a validation; begin averaging when its loss no longer falls."""
        self._losses.append(values["loss"])
        if self.mean is not None or not should_switch(self._losses, self._patience, self._rule):
            return
        self.mean, self.switched = AveragedModel(self.model), epoch
        self._report.say(f"epoch {epoch}: the validation loss no longer falls; switching to averaged SGD")

    def state_dict(self) -> dict[str, object]:
        """Mean, switch and losses, for a checkpoint."""
        mean = None if self.mean is None else dict(self.mean.state_dict())
        return {"mean": mean, "switched": self.switched, "losses": self._losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.switched, self._losses = state["switched"], list(state["losses"])
        if state["mean"] is not None:
            self.mean = AveragedModel(self.model)
            self.mean.load_state_dict(state["mean"])


class Part(NamedTuple):
    """One pass: the group of streams, its words (T, B) and those that follow them (T, B)."""

    group: int
    words: Tensor
    targets: Tensor


class Streams:
    """Truncated backpropagation through time over parallel streams. Global batches have batch_size x accumulation x
    ranks streams side by side; this rank's `accumulation` groups of batch_size streams follow each other as passes,
    each with its own hidden state, which a checkpoint saves for all streams."""

    def __init__(self, world: World, p: Settings, model: AwdLstm, text: Tensor, average: Average) -> None:
        self._world, self._p, self.model, self._average = world, p, model, average
        self._shares = world.size * p.accumulation
        self.number = p.batch_size * self._shares
        words = streams(text, self.number)
        self._length = len(words)
        self.words_per_epoch = (self._length - 1) * self.number
        self._first = world.rank * p.accumulation
        self._groups = [
            words[:, share * p.batch_size : (share + 1) * p.batch_size].to(world.device, torch.int64)
            for share in range(self._first, self._first + p.accumulation)
        ]
        self._states: list[State] = []
        self._warmup = LinearWarmup(
            p.learning_rate, p.learning_rate * math.sqrt(self._shares), p.warmup_epochs_per_rank * self._shares
        )

    def count(self, epoch: int) -> int:
        """How many updates an epoch has."""
        return len(self._lengths(epoch))

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Part]]:
        """The updates of an epoch from number `begin` on; rates are scaled by the sequence's length."""
        p, lengths = self._p, self._lengths(epoch)
        if not begin:
            self._states = [self.model.initial_state(p.batch_size) for _ in self._groups]
        start = sum(lengths[:begin])
        for step, length in enumerate(lengths[begin:], begin):
            stop = start + length
            parts = [Part(n, words[start:stop], words[start + 1 : stop + 1]) for n, words in enumerate(self._groups)]
            rate = self._rate(epoch - 1 + step / len(lengths)) * length / p.sequence_length
            yield Update(parts, len(parts), 1.0, self._shares, length * self.number, self._first, rate)
            start = stop

    def prepare(self, part: Part) -> Part:
        """The part as it is: it is on the device already."""
        return part  # on the device since the beginning

    def forward(self, model: nn.Module, data: Part) -> tuple[Tensor, Tensor]:
        """Outputs of the last layer before and after dropout, [T, B, E] each; keeps the hidden state."""
        raw, dropped, self._states[data.group] = model(data.words, self._states[data.group])
        return raw, dropped

    def loss(self, outputs: tuple[Tensor, Tensor], data: Part) -> PassLoss:
        """Cross-entropy with the penalties of activations; the report has the cross-entropy alone."""
        raw, dropped = outputs
        entropy = self.model.score(dropped, data.targets)
        penalty = regularization(raw, dropped, self._p.activation_penalty, self._p.temporal_penalty)
        return PassLoss(entropy + penalty, entropy.detach(), len(data.words))

    def state_dict(self) -> dict[str, object]:
        """The hidden states of all streams, layer by layer. Collective."""
        cells = [(layer, part) for layer in range(self._p.layers) for part in (0, 1)]
        return {
            "cells": [self._gather(torch.cat([own[layer][part] for own in self._states], 1)) for layer, part in cells]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's hidden states out of those of all streams."""
        self._states = []
        for group in range(self._p.accumulation):
            start = (self._first + group) * self._p.batch_size
            own = [
                cell[:, start : start + self._p.batch_size].to(self._world.device).contiguous()
                for cell in state["cells"]
            ]
            self._states.append(list(zip(own[::2], own[1::2], strict=True)))

    def _gather(self, own: Tensor) -> Tensor:
        """own (1, streams of this rank, W) -> (1, streams of all ranks, W), so that a checkpoint fits any number."""
        whole = own.new_zeros(1, self.number, own.shape[2])
        start = self._first * self._p.batch_size
        whole[:, start : start + own.shape[1]] = own.detach()
        return self._world.all_reduce(whole)

    def _lengths(self, epoch: int) -> list[int]:
        p = self._p
        return sequence_lengths(
            self._length,
            p.sequence_length,
            p.least_sequence_length,
            p.short_sequence_share,
            self._world.contract.seed,
            epoch,
        )

    def _rate(self, epochs: float) -> float:
        """Learning rate after `epochs` epochs, for a batch of the base length."""
        if self._average.mean is not None and self._p.averaged_learning_rate:
            return self._p.averaged_learning_rate
        return self._warmup(epochs)


@dataclass(frozen=True)
class Evaluation:
    """Loss and perplexity of a text by the averaged parameters, if averaging has begun. The text is cut into streams of
    which every rank takes its share."""

    world: World
    p: Settings
    precision: Precision
    average: Average

    def __call__(self, ids: Tensor) -> Values:
        p, model = self.p, self.average.best
        model.eval()
        words = streams(ids, p.validation_streams)
        own = shard(p.validation_streams, self.world.size, self.world.rank)
        mean, perplexity = Mean("loss"), Perplexity()
        if own:
            words = words[:, own.start : own.stop].to(self.world.device, torch.int64)
            with torch.inference_mode(), self.precision.autocast():
                state = model.initial_state(len(own))
                for start in range(0, len(words) - 1, p.sequence_length):
                    targets = words[start + 1 : start + 1 + p.sequence_length]
                    _, output, state = model(words[start : start + len(targets)], state)
                    loss = model.score(output, targets)
                    mean.add_mean(loss, targets.numel())
                    perplexity.add_mean(loss, targets.numel())
        return collect(self.world, [mean, perplexity])


NAME = "wikitext2_awd_lstm"
OWN_TEXT = "Python language reference (pydoc_data.topics)"


def main(contract: Contract) -> None:
    """Load the text, cut it into streams, and train AWD-LSTM to the perplexity goal."""
    parameters = read_parameters(Settings, contract.parameters)
    own_text = parameters.data == "python-topics"
    with training_session(contract, OWN_TEXT if own_text else "WikiText-2") as (world, report):
        corpus = load(parameters, contract)
        identity = corpus.identify()
        report.data_identity(
            replace(identity, official=False, reason=f"another text: {OWN_TEXT}") if own_text else identity
        )
        seed_all(contract.seed)
        train(world, report, parameters, corpus)


def load(parameters: Settings, contract: Contract) -> Corpus:
    """The corpus chosen by the parameters. Raises EnvironmentUnfitError if it is missing."""
    if parameters.data == "python-topics":
        with tempfile.TemporaryDirectory() as folder:
            write_sample(Path(folder))
            return read_corpus(Path(folder))
    return read_corpus(require_data_dir(contract, "WikiText-2"))


def train(world: World, report: Reporter, p: Settings, corpus: Corpus) -> AwdLstm:
    """Train to the goal and report the result; returns the model."""
    model = AwdLstm(len(corpus.words), p).to(world.device)
    refuse_bf16_lstm(p.precision, world.device)
    precision = Precision(p.precision, world.device)
    average = Average(model, p.switch_patience, p.switch_rule, report)
    streams = Streams(world, p, model, corpus.train, average)
    evaluate = Evaluation(world, p, precision, average)
    Trainer(
        world,
        report,
        streams,
        PerUpdate(Constant(1.0)),  # the batches have the rate
        Plan.of(p),
        name=NAME,
        validate=lambda epoch: evaluate(corpus.valid),
        goal=GoalWatch("Perplexity", "<=", p.goal_full, p.goal_light, world.contract.goal),
        details={
            "parameters": count_parameters(model.parameters()),
            "vocabulary": len(corpus.words),
            "words_per_epoch": streams.words_per_epoch,
        },
        closing=lambda: {
            "test_perplexity": evaluate(corpus.test)["Perplexity"],
            "averaged_from_epoch": average.switched,
        },
        states={"average": average, "streams": streams},
        identity={
            "vocabulary": len(corpus.words),
            "network": [p.embedding, p.hidden, p.layers],
            "global_batch": streams.number,
            "seed": world.contract.seed,
        },
        after_update=average.update,
        after_validation=average.observe,
        make_optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.0, weight_decay=p.weight_decay, fused=True
        ),
        method=prepare_method(world, Bsp),
        precision=precision,
        arithmetic=p,
        unit=Unit("words"),
        clip=p.clip,
    ).run()
    return model
