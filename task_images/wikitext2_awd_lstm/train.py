"""Training of AWD-LSTM: truncated backpropagation through time over parallel streams, SGD, then averaged SGD."""

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from task_images.comm.allreduce import GradientAllReduce
from task_images.comm.prepare import prepare_strategy
from task_images.contract import Contract
from task_images.harness.distributed import World, open_world
from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.goals import GoalWatch
from task_images.harness.loop import Plan, Unit, Values
from task_images.harness.metrics import Mean, Perplexity, collect
from task_images.harness.models.counting import count_parameters
from task_images.harness.parameters import read_parameters
from task_images.harness.partition import shard
from task_images.harness.precision import Precision, refuse_bf16_lstm
from task_images.harness.report import Reporter
from task_images.harness.schedules import Constant, LinearWarmup, PerUpdate
from task_images.harness.seeds import seed_all
from task_images.harness.settings import CudaSettings, TrainingSettings, UpdateSettings
from task_images.harness.training import PassLoss, Trainer, check_finite
from task_images.harness.updates import Update
from task_images.wikitext2_awd_lstm.averaging import RunningAverage, should_switch
from task_images.wikitext2_awd_lstm.data import Corpus, read_corpus, sequence_lengths, streams
from task_images.wikitext2_awd_lstm.model import AwdLstm, Dropout, State, regularization
from task_images.wikitext2_awd_lstm.sample import write_sample

NAME = "wikitext2_awd_lstm"
OWN_TEXT = "Python language reference (pydoc_data.topics)"


@dataclass(frozen=True)
class Parameters(TrainingSettings, UpdateSettings, CudaSettings):
    """As in task.yaml, with the preset `spec` as defaults."""

    data: str = "wikitext-2"
    batch_size: int = 80
    accumulation: int = 1
    sequence_length: int = 70
    short_sequence_share: float = 0.05
    least_sequence_length: int = 5
    epochs: int = 750
    embedding: int = 400
    hidden: int = 1150
    layers: int = 3
    dropout_embedding: float = 0.1
    dropout_input: float = 0.65
    dropout_hidden: float = 0.2
    dropout_output: float = 0.4
    weight_drop: float = 0.5
    activation_penalty: float = 2.0
    temporal_penalty: float = 1.0
    learning_rate: float = 30.0
    warmup_epochs_per_rank: float = 3.0
    averaged_learning_rate: float = 0.0
    switch_rule: str = "stalled"
    switch_patience: int = 5
    weight_decay: float = 1.2e-6
    clip: float = 0.25
    precision: str = "fp32"
    validation_streams: int = 10
    goal_full: float = 70.0
    goal_light: float = 90.0


def main(contract: Contract) -> None:
    """Load the text, cut it into streams, and train AWD-LSTM to the perplexity goal."""
    parameters = read_parameters(Parameters, contract.parameters)
    world = open_world(contract)
    own_text = parameters.data == "python-topics"
    report = Reporter(world, OWN_TEXT if own_text else "WikiText-2")
    report.environment()
    report.phase("loading")
    corpus = load(parameters, contract)
    identity = corpus.identify()
    report.data_identity(
        replace(identity, official=False, reason=f"another text: {OWN_TEXT}") if own_text else identity
    )
    seed_all(contract.seed)
    train(world, report, parameters, corpus)
    world.close()


def load(parameters: Parameters, contract: Contract) -> Corpus:
    """The corpus that the parameters ask for. Raises EnvironmentUnfitError if it is not to be had."""
    if parameters.data == "python-topics":
        with tempfile.TemporaryDirectory() as folder:
            write_sample(Path(folder))
            return read_corpus(Path(folder))
    if contract.data_dir is None:
        raise EnvironmentUnfitError(
            "no folder with WikiText-2 was given",
            "Run with --data-dir FOLDER, or choose the preset tiny, which brings its own text.",
        )
    return read_corpus(Path(contract.data_dir))


def train(world: World, report: Reporter, p: Parameters, corpus: Corpus) -> AwdLstm:
    """Train to the goal and report the result; returns the model."""
    dropout = Dropout(p.dropout_embedding, p.dropout_input, p.dropout_hidden, p.dropout_output, p.weight_drop)
    model = AwdLstm(len(corpus.words), p.embedding, p.hidden, p.layers, dropout).to(world.device)
    refuse_bf16_lstm(p.precision, world.device)
    precision = Precision(p.precision, world.device)
    average = Average(model, p.switch_patience, p.switch_rule, report)
    streams = Streams(world, p, model, corpus.train, average)
    evaluate = Evaluation(world, p, model, precision, average)
    Trainer(
        world,
        report,
        streams,
        PerUpdate(Constant(1.0)),  # the batches have the rate
        Plan(
            p.epochs,
            p.budget_seconds,
            loss_every=p.report_every,
            checkpoint_every=p.checkpoint_every,
            resume=p.resume,
            protocol=p.protocol,
        ),
        name=NAME,
        validate=lambda epoch: check_finite(evaluate(corpus.valid), epoch),
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
        after_update=average.mean.update,
        after_validation=average.observe,
        work=streams,
        model=model,
        make_optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.0, weight_decay=p.weight_decay, fused=True
        ),
        strategy=prepare_strategy(world, GradientAllReduce),
        precision=precision,
        arithmetic=p,
        unit=Unit("words"),
        clip=p.clip,
    ).run()
    return model


class Average:
    """Averaged SGD: when it begins, and the means of the parameters since then."""

    def __init__(self, model: AwdLstm, patience: int, rule: str, report: Reporter) -> None:
        self.mean = RunningAverage(model.parameters())
        self.switched: int | None = None
        self._patience, self._rule, self._report = patience, rule, report
        self._losses: list[float] = []

    def observe(self, epoch: int, values: Values) -> None:
        """Take note of a validation; begin averaging when its loss no longer falls."""
        self._losses.append(values["loss"])
        if self.mean.active or not should_switch(self._losses, self._patience, self._rule):
            return
        self.mean.start()
        self.switched = epoch
        self._report.say(f"epoch {epoch}: the validation loss no longer falls; averaged SGD from here on")

    def state_dict(self) -> dict[str, object]:
        """Mean, switch and losses, for a checkpoint."""
        return {"mean": self.mean.state_dict(), "switched": self.switched, "losses": self._losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.mean.load_state_dict(state["mean"])
        self.switched, self._losses = state["switched"], list(state["losses"])


class Part(NamedTuple):
    """One pass: the group of streams, its words (T, B) and those that follow them (T, B)."""

    group: int
    words: Tensor
    targets: Tensor


class Streams:
    """Truncated backpropagation through time over parallel streams. Global batches have batch_size x accumulation x
    ranks streams side by side; this rank's `accumulation` groups of batch_size streams follow each other as passes,
    each with a hidden state of its own, which a checkpoint holds for all streams."""

    def __init__(self, world: World, p: Parameters, model: AwdLstm, text: Tensor, average: Average) -> None:
        self._world, self._p, self._model, self._average = world, p, model, average
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
            self._states = [self._model.initial_state(p.batch_size) for _ in self._groups]
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
        entropy = self._model.score(dropped, data.targets)
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
        if self._average.mean.active and self._p.averaged_learning_rate:
            return self._p.averaged_learning_rate
        return self._warmup(epochs)


@dataclass(frozen=True)
class Evaluation:
    """Loss and perplexity of a text by the averaged parameters, if averaging has begun. The text is cut into streams of
    which every rank takes its share."""

    world: World
    p: Parameters
    model: AwdLstm
    precision: Precision
    average: Average

    def __call__(self, ids: Tensor) -> Values:
        p, model = self.p, self.model
        model.eval()
        words = streams(ids, p.validation_streams)
        own = shard(p.validation_streams, self.world.size, self.world.rank)
        mean, perplexity = Mean("loss"), Perplexity()
        if own:
            words = words[:, own.start : own.stop].to(self.world.device, torch.int64)
            with self.average.mean.use_average(), torch.inference_mode(), self.precision.autocast():
                state = model.initial_state(len(own))
                for start in range(0, len(words) - 1, p.sequence_length):
                    targets = words[start + 1 : start + 1 + p.sequence_length]
                    _, output, state = model(words[start : start + len(targets)], state)
                    loss = model.score(output, targets)
                    mean.add_mean(loss, targets.numel())
                    perplexity.add_mean(loss, targets.numel())
        return collect(self.world, [mean, perplexity])
