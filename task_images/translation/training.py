"""Translation with the common training loop: passes of sentence pairs, and beam search with corpus BLEU."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from task_images.arrays import Indices
from task_images.data import pin
from task_images.goals import GoalWatch
from task_images.loop import Plan, Unit, Update, Values
from task_images.methods.allreduce import Bsp
from task_images.methods.base import MakeOptimizer
from task_images.methods.check import prepare_method
from task_images.metrics import Mean, collect
from task_images.parameters import TranslationSettings
from task_images.precision import LossScale, Precision
from task_images.report import Reporter
from task_images.schedules import PerUpdate
from task_images.train import PassLoss, Trainer, count_parameters
from task_images.translation.batches import Batches
from task_images.translation.beam import Search, beam_search
from task_images.translation.bleu import corpus_bleu
from task_images.translation.pairs import Pairs
from task_images.world import World


class TranslationModel(nn.Module):
    """The interface of models, in addition to `beam.Decoder`. Shapes: B sentences, S, T positions, V words."""

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """source [B, S], lengths [B] on the CPU, target [B, T] including its start mark -> features [B, T, width]."""
        raise NotImplementedError

    def scores(self, features: Tensor) -> Tensor:
        """features [..., width] -> scores of the next word [..., V] before softmax."""
        raise NotImplementedError

    def begin(self, source: Tensor, lengths: Tensor) -> Any:
        """The decoder's state before the first word, for source [B, S] with lengths [B]."""
        raise NotImplementedError

    def step(self, words: Tensor, state: Any) -> tuple[Tensor, Tensor | None]:
        """Scores [B, K, V] of the next word after words [B, K], and attention weights [B, K, S] or None."""
        raise NotImplementedError

    def select(self, state: Any, sentences: Tensor, beams: Tensor) -> Any:
        """The state of selected hypotheses: sentences [B'] out of B, and beams [B', K] of each."""
        raise NotImplementedError


@dataclass
class TranslationTask:
    """The task-specific part of a translation training.

    learning_rate   learning rate of the n-th update that was not skipped, from 0
    divide_by       divisor of the summed gradient: tokens or sentences of all ranks, or own_sentences, those of one
                    rank (`ranks` times the mean, as in the original GNMT)
    limit           maximum length of a translation, including its end, by source length
    text            word numbers of a translation, without marks -> the text to score
    references      reference translations of the test pairs, in order; `reference` names their source
    legacy_bleu     the original's score of translations, in the order of the test pairs
    """

    name: str
    settings: TranslationSettings
    model: TranslationModel
    make_optimizer: MakeOptimizer
    train: Pairs
    test: Pairs
    batches: Batches
    padding: int
    search: Search
    learning_rate: Callable[[float], float]
    divide_by: str
    limit: Callable[[Tensor], Tensor]
    text: Callable[[list[int]], str]
    references: Sequence[str]
    reference: str
    legacy_bleu: Callable[[Sequence[list[int]]], float]
    clip: float | None
    loss_scale: LossScale
    identity: Mapping[str, object]


class Batch(NamedTuple):
    """One pass: source [B, S], its lengths [B] on the CPU, and target [B, T] including its start mark; the words to
    predict [W], row by row, without padding, and the index of each in [B T], precomputed to avoid a device
    synchronization."""

    source: Tensor
    lengths: Tensor
    target: Tensor
    expected: Tensor
    places: Tensor

    @property
    def words(self) -> int:
        """Number of words to predict."""
        return len(self.expected)


def make_plan(settings: TranslationSettings, updates: int) -> Plan:
    """The training plan for epochs of `updates` updates."""
    return Plan(
        settings.epochs,
        settings.budget_seconds,
        validate_every=max(1, round(settings.validation_share * updates)),
        loss_every=settings.report_every,
        checkpoint_every=settings.checkpoint_every,
        resume=settings.resume,
        protocol=settings.protocol,
    )


def train_translation(world: World, report: Reporter, task: TranslationTask, goal: GoalWatch) -> None:
    """Train to the goal and report the result."""
    precision = Precision(task.settings.precision, world.device, task.loss_scale)
    validator = TranslationValidator(world, task, precision)
    # As in the reference implementations, fp16 gradients are sent in fp16; the loss scale keeps them in range.
    wire = torch.float16 if precision.used == "fp16" else None
    Trainer(
        world,
        report,
        PairBatches(task),
        PerUpdate(task.learning_rate),
        make_plan(task.settings, task.batches.steps),
        name=task.name,
        validate=validator,
        goal=goal,
        details={
            "parameters": count_parameters(task.model.parameters()),
            "pairs": len(task.train),
            "left_out": task.train.left_out,
            "test_pairs": len(task.test),
            "test_left_out": task.test.left_out,
            "updates_per_epoch": task.batches.steps,
            "padding_share": task.batches.padding(1),
            "reference": task.reference,
            "goal_bleu": task.settings.goal_bleu,
            "wire": "fp32" if wire is None else "fp16",
        },
        closing=validator.facts,
        identity={**task.identity, "global_batch": task.settings.global_batch, "seed": world.contract.seed},
        work=TranslationWork(world, task),
        model=task.model,
        make_optimizer=task.make_optimizer,
        method=prepare_method(world, lambda: Bsp(wire=wire)),
        precision=precision,
        arithmetic=task.settings,
        unit=Unit("sentences"),
        # The norm is measured even without a limit, because a non-finite gradient ends the training.
        clip=math.inf if task.clip is None else task.clip,
    ).run()


@dataclass(frozen=True)
class PairBatches:
    """The task's batches as updates; passes are assembled on demand."""

    task: TranslationTask

    def count(self, epoch: int) -> int:
        """Number of updates in an epoch."""
        return self.task.batches.steps

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Batch]]:
        """The updates of an epoch, starting with number `begin`; the loss is divided as defined by the task."""
        task = self.task
        for update in task.batches.updates(epoch, begin):
            passes = (collate(task.train, indices, task.padding, task.search.start) for indices in update.passes)
            terms = {"tokens": update.tokens, "sentences": update.sentences, "own_sentences": max(1, update.own)}
            yield Update(passes, len(update.passes), 1.0, terms[task.divide_by], update.sentences, update.first)


@dataclass(frozen=True)
class TranslationWork:
    """Cross-entropy with label smoothing, summed over non-padding words."""

    world: World
    task: TranslationTask

    def prepare(self, part: Batch) -> Batch:
        """The pass on the device."""
        return move_batch(part, self.world.device)

    def forward(self, model: nn.Module, data: Batch) -> Tensor:
        """The decoder's features [B, T, D], before the output layer."""
        features: Tensor = model(data.source, data.lengths, data.target)
        return features

    def loss(self, outputs: Tensor, data: Batch) -> PassLoss:
        """The smoothed sum of losses over the words, with their number."""
        value = sum_loss(self.task, outputs, data, self.task.settings.label_smoothing)
        return PassLoss(value, value.detach() / max(1, data.words), data.words)


@dataclass
class TranslationValidator:
    """Translates the test set, each rank a share, and scores all translations together on rank 0."""

    world: World
    task: TranslationTask
    precision: Precision
    latest: dict[str, object] = field(default_factory=dict)

    def __call__(self, epoch: int) -> Values:
        task = self.task
        # Sorting by length saves padding; taking every k-th sentence balances the shares.
        own = np.argsort(-task.test.source.lengths, kind="stable")[self.world.rank :: self.world.size]
        found: dict[int, list[int]] = {}
        mean = Mean("loss")
        for start in range(0, len(own), task.settings.evaluation_batch):
            indices = own[start : start + task.settings.evaluation_batch]
            batch = move_batch(collate(task.test, indices, task.padding, task.search.start), self.world.device)
            with torch.inference_mode(), self.precision.autocast():
                features = task.model(batch.source, batch.lengths, batch.target)
                mean.add_mean(sum_loss(task, features, batch, 0.0) / batch.words, batch.words)
                best = beam_search(task.model, batch.source, batch.lengths, task.limit(batch.lengths), task.search)
            found.update(zip(indices.tolist(), (hypothesis.words for hypothesis in best), strict=True))
        loss = collect(self.world, [mean])["loss"]
        everything = gather_sentences(self.world, found, len(task.test))
        scores = self._score(everything) if self.world.is_first else {}
        names = ("BLEU-Score", "bleu_cased", "bleu_lowercased", "legacy_bleu")
        return {"loss": loss, **{name: self.world.agree(scores.get(name, 0.0)) for name in names}}

    def facts(self) -> Mapping[str, Any]:
        """Facts about the last translations for the result."""
        return self.latest

    def _score(self, found: list[list[int]]) -> Values:
        task = self.task
        texts = [task.text(words) for words in found]
        scores = {kind: corpus_bleu(texts, task.references, kind == "lowercased") for kind in ("cased", "lowercased")}
        gated = scores[task.settings.goal_bleu]
        legacy = task.legacy_bleu(found)
        self.latest = {
            "bleu_signature": gated.signature,
            "bleu_cased": scores["cased"].score,
            "bleu_lowercased": scores["lowercased"].score,
            "legacy_bleu": legacy,
            "samples": [
                {"translation": text, "reference": reference}
                for text, reference in zip(texts[:5], task.references[:5], strict=True)
            ],
        }
        values = {f"bleu_{kind}": score.score for kind, score in scores.items()}
        return {"BLEU-Score": gated.score, **values, "legacy_bleu": legacy}


def sum_loss(task: TranslationTask, features: Tensor, batch: Batch, smoothing: float) -> Tensor:
    """features [B, T, width] of the batch -> cross-entropy summed over non-padding words."""
    scores = task.model.scores(features.flatten(0, 1).index_select(0, batch.places))
    return F.cross_entropy(scores.float(), batch.expected, reduction="sum", label_smoothing=smoothing)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`, transferred asynchronously, except the lengths, which packing needs on the CPU."""
    there = {
        name: pin(tensor, device).to(device, non_blocking=True)
        for name, tensor in batch._asdict().items()
        if name != "lengths"
    }
    return batch._replace(**there)


def collate(pairs: Pairs, indices: Indices, padding: int, start: int) -> Batch:
    """The pairs `indices` as tensors on the CPU, padded with `padding` on the right."""
    lengths = pairs.source.lengths[indices]
    source = pairs.source.rows(indices, int(lengths.max()), padding)
    expected = pairs.target.rows(indices, int(pairs.target.lengths[indices].max()), padding)
    target = np.empty_like(expected)
    target[:, 0], target[:, 1:] = start, expected[:, :-1]
    # The end mark is not an input: replace it, and everything after it, by padding.
    ends = pairs.target.lengths[indices, None] <= np.arange(expected.shape[1])
    target[ends] = padding
    places = np.flatnonzero(expected != padding)
    arrays = (source, lengths.copy(), target, expected.reshape(-1)[places], places)
    return Batch(*map(torch.from_numpy, arrays))


def gather_sentences(world: World, own: dict[int, list[int]], count: int) -> list[list[int]]:
    """Sentences of all ranks, by number in range(count), on every rank. Each number must be on exactly one rank."""
    longest = int(world.max([max(map(len, own.values()), default=0)])[0])
    table = torch.zeros(count, longest + 1, dtype=torch.int64)  # length first
    for number, words in own.items():
        table[number, : len(words) + 1] = torch.tensor([len(words), *words])
    rows = world.all_reduce(table.to(world.device)).tolist()
    return [row[1 : 1 + row[0]] for row in rows]
