"""Words of many streams side by side: truncated backpropagation through time over them, and validation."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from task_images.arrays import shard
from task_images.loop import Update, Values
from task_images.metrics import Mean, Perplexity, collect
from task_images.precision import Precision
from task_images.schedules import LinearWarmup
from task_images.train import PassLoss
from task_images.wikitext2_awd_lstm import Settings
from task_images.wikitext2_awd_lstm.averaging import Average
from task_images.wikitext2_awd_lstm.data import sequence_lengths, streams
from task_images.wikitext2_awd_lstm.model import AwdLstm, State, regularization
from task_images.world import World


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
    p: Settings
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
