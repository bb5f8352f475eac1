"""What the translation tasks give the training loop: passes of sentence pairs, and beam search with corpus BLEU."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from task_images.comm.allreduce import GradientAllReduce
from task_images.comm.base import MakeOptimizer
from task_images.comm.prepare import prepare_strategy
from task_images.harness.buffers import pin
from task_images.harness.distributed import World
from task_images.harness.goals import GoalWatch
from task_images.harness.loop import Plan, Unit, Values
from task_images.harness.metrics import Mean, collect
from task_images.harness.models.counting import count_parameters
from task_images.harness.partition import Indices
from task_images.harness.precision import LossScale, Precision
from task_images.harness.report import Reporter
from task_images.harness.schedules import PerUpdate
from task_images.harness.settings import TranslationSettings
from task_images.harness.training import PassLoss, Trainer
from task_images.harness.translation.batches import Batches
from task_images.harness.translation.beam import Search, beam_search
from task_images.harness.translation.bleu import corpus_bleu
from task_images.harness.translation.pairs import Pairs
from task_images.harness.updates import Update


class TranslationModel(nn.Module):
    """What the loop asks of a model, besides being a `beam.Decoder`. Shapes: B sentences, S, T positions, V words."""

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """source (B, S), lengths (B) on the CPU, target (B, T) from its start mark on -> features (B, T, width)."""
        raise NotImplementedError

    def scores(self, features: Tensor) -> Tensor:
        """features (..., width) -> scores of the next word (..., V) before softmax."""
        raise NotImplementedError

    def begin(self, source: Tensor, lengths: Tensor) -> Any:
        """The decoder's state before the first word, for source [B, S] with lengths [B]."""
        raise NotImplementedError

    def step(self, words: Tensor, state: Any) -> tuple[Tensor, Tensor | None]:
        """Scores [B, K, V] of the next word after words [B, K], and attention weights [B, K, S] or None."""
        raise NotImplementedError

    def select(self, state: Any, sentences: Tensor, beams: Tensor) -> Any:
        """The state of chosen hypotheses: sentences [B'] of the B, and beams [B', K] of each."""
        raise NotImplementedError


@dataclass
class TranslationTask:
    """All in which one task differs from another.

    learning_rate   of the n-th update that was not skipped, n from 0
    divide_by       what the summed gradient is divided by: tokens or sentences of all ranks, or own_sentences, those of
                    one rank (which makes it `ranks` times the mean, as the original GNMT has it)
    limit           greatest length of a translation, its end included, by source length
    text            word numbers of a translation, without marks -> the text that is scored
    references      of the test pairs, in their order, as texts; `reference` says where they are from
    legacy_bleu     the original's figure for translations, in the order of the test pairs
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
    """One pass: source (B, S), its lengths (B) on the CPU, and target from its start mark (B, T); the words to come (W)
    row by row, without padding, and the place of each in (B T), which a device then need not count first."""

    source: Tensor
    lengths: Tensor
    target: Tensor
    expected: Tensor
    places: Tensor

    @property
    def words(self) -> int:
        """How many words are to come."""
        return len(self.expected)


def make_plan(settings: TranslationSettings, updates: int) -> Plan:
    """How long to train, and what to do on the way, if an epoch has so many updates."""
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
    # As the reference implementations have it, gradients in fp16 travel as such; the loss scale keeps them in range.
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
        strategy=prepare_strategy(world, lambda: GradientAllReduce(wire=wire)),
        precision=precision,
        arithmetic=task.settings,
        unit=Unit("sentences"),
        # Without a limit the norm is still measured: a gradient that is not finite ends the training.
        clip=math.inf if task.clip is None else task.clip,
    ).run()


@dataclass(frozen=True)
class PairBatches:
    """The task's batches as updates; a pass is put together when it is asked for."""

    task: TranslationTask

    def count(self, epoch: int) -> int:
        """How many updates an epoch has."""
        return self.task.batches.steps

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Batch]]:
        """The updates of an epoch from number `begin` on; loss is divided by what the task says."""
        task = self.task
        for update in task.batches.updates(epoch, begin):
            passes = (collate(task.train, indices, task.padding, task.search.start) for indices in update.passes)
            terms = {"tokens": update.tokens, "sentences": update.sentences, "own_sentences": max(1, update.own)}
            yield Update(passes, len(update.passes), 1.0, terms[task.divide_by], update.sentences, update.first)


@dataclass(frozen=True)
class TranslationWork:
    """Cross-entropy with label smoothing, summed over the words that are not padding."""

    world: World
    task: TranslationTask

    def prepare(self, part: Batch) -> Batch:
        """The pass on the device."""
        return move_batch(part, self.world.device)

    def forward(self, model: nn.Module, data: Batch) -> Tensor:
        """The decoder's features [B, T, D], before they become scores."""
        features: Tensor = model(data.source, data.lengths, data.target)
        return features

    def loss(self, outputs: Tensor, data: Batch) -> PassLoss:
        """The smoothed sum of losses over the words, with their number."""
        value = sum_loss(self.task, outputs, data, self.task.settings.label_smoothing)
        return PassLoss(value, value.detach() / max(1, data.words), data.words)


@dataclass
class TranslationValidator:
    """Translates the whole test set, each rank its share, and scores all translations at once on rank 0."""

    world: World
    task: TranslationTask
    precision: Precision
    latest: dict[str, object] = field(default_factory=dict)

    def __call__(self, epoch: int) -> Values:
        task = self.task
        # Similar lengths together save padding; every k-th sentence keeps the shares alike.
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
        """What the result says of the last translations."""
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
    """features (B, T, width) of the batch -> cross-entropy summed over words that are not padding."""
    scores = task.model.scores(features.flatten(0, 1).index_select(0, batch.places))
    return F.cross_entropy(scores.float(), batch.expected, reduction="sum", label_smoothing=smoothing)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`, but for the lengths, which packing wants on the CPU. The host does not wait for it."""
    there = {
        name: pin(tensor, device).to(device, non_blocking=True)
        for name, tensor in batch._asdict().items()
        if name != "lengths"
    }
    return batch._replace(**there)


def collate(pairs: Pairs, indices: Indices, padding: int, start: int) -> Batch:
    """The pairs `indices` as tensors on the CPU, filled up with `padding` on the right."""
    lengths = pairs.source.lengths[indices]
    source = pairs.source.rows(indices, int(lengths.max()), padding)
    expected = pairs.target.rows(indices, int(pairs.target.lengths[indices].max()), padding)
    target = np.empty_like(expected)
    target[:, 0], target[:, 1:] = start, expected[:, :-1]
    # An end is no input; where it was, and behind it, is padding.
    ends = pairs.target.lengths[indices, None] <= np.arange(expected.shape[1])
    target[ends] = padding
    places = np.flatnonzero(expected != padding)
    arrays = (source, lengths.copy(), target, expected.reshape(-1)[places], places)
    return Batch(*map(torch.from_numpy, arrays))


def gather_sentences(world: World, own: dict[int, list[int]], count: int) -> list[list[int]]:
    """Sentences of all ranks by their number in range(count), on every rank. Every number is on exactly one rank."""
    longest = int(world.max([max(map(len, own.values()), default=0)])[0])
    table = torch.zeros(count, longest + 1, dtype=torch.int64)  # length first
    for number, words in own.items():
        table[number, : len(words) + 1] = torch.tensor([len(words), *words])
    rows = world.all_reduce(table.to(world.device)).tolist()
    return [row[1 : 1 + row[0]] for row in rows]
