"""The training loop of the translation tasks: accumulated passes, exact means, beam search and corpus BLEU.

Read it from top to bottom: `TranslationTraining.run` is an epoch after another, `_train_epoch` an update after another.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from task_images.comm.allreduce import GradientAllReduce
from task_images.comm.base import MakeOptimizer, Placement
from task_images.comm.prepare import prepare_strategy
from task_images.contract import Contract
from task_images.harness.accumulation import GradientUpdate, count_parameters
from task_images.harness.checkpoint import load_checkpoint, save_checkpoint
from task_images.harness.distributed import World
from task_images.harness.goals import GoalWatch
from task_images.harness.metrics import Mean, TrainingLoss, collect
from task_images.harness.partition import Indices
from task_images.harness.precision import LossScale, Precision
from task_images.harness.report import Reporter
from task_images.harness.seeds import derive
from task_images.harness.tracker import Tracker
from task_images.harness.translation.batches import Batches, Update
from task_images.harness.translation.beam import Search, beam_search
from task_images.harness.translation.bleu import corpus_bleu
from task_images.harness.translation.pairs import Pairs


class TranslationModel(nn.Module):
    """What the loop asks of a model, besides being a `beam.Decoder`. Shapes: B sentences, S, T positions, V words."""

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """source (B, S), lengths (B) on the CPU, target (B, T) from its start mark on -> features (B, T, width)."""
        raise NotImplementedError

    def scores(self, features: Tensor) -> Tensor:
        """features (..., width) -> scores of the next word (..., V) before softmax."""
        raise NotImplementedError

    def begin(self, source: Tensor, lengths: Tensor) -> Any:
        raise NotImplementedError

    def step(self, words: Tensor, state: Any) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def select(self, state: Any, sentences: Tensor, beams: Tensor) -> Any:
        raise NotImplementedError


@dataclass
class TranslationTask:
    """All in which one task differs from another.

    rate            learning rate of the n-th update that was not skipped, n from 0
    divide_by       what the summed gradient is divided by: tokens or sentences of all ranks, or own_sentences, those of
                    one rank (which makes it `ranks` times the mean, as the original GNMT has it)
    limit           greatest length of a translation, its end included, by source length
    text            word numbers of a translation, without marks -> the text that is scored
    references      of the test pairs, in their order, as texts; `reference` says where they are from
    legacy_bleu     the original's figure for translations, in the order of the test pairs
    """

    name: str
    model: TranslationModel
    make_optimizer: MakeOptimizer
    train: Pairs
    test: Pairs
    batches: Batches
    padding: int
    search: Search
    rate: Callable[[int], float]
    divide_by: str
    limit: Callable[[Tensor], Tensor]
    text: Callable[[list[int]], str]
    references: Sequence[str]
    reference: str
    legacy_bleu: Callable[[Sequence[list[int]]], float]
    epochs: int
    label_smoothing: float
    clip: float | None
    precision: str
    loss_scale: LossScale
    validation_share: float
    evaluation_batch: int
    report_every: int
    checkpoint_every: int
    resume: str
    identity: dict[str, Any]


class Batch(NamedTuple):
    """One pass: source (B, S), its lengths (B) on the CPU, target from its start mark (B, T), what is to come."""

    source: Tensor
    lengths: Tensor
    target: Tensor
    expected: Tensor


class Done(NamedTuple):
    """What came of an update: this rank's smoothed loss, summed over its target words; their number; and whether the
    model was updated, which fp16 may have prevented on all ranks."""

    loss: Tensor
    words: int
    applied: bool


@dataclass
class Position:
    """Where training is: epoch from 1, updates done in this epoch and in all, and how many of all were skipped."""

    epoch: int = 1
    in_epoch: int = 0
    total: int = 0
    skipped: int = 0


@dataclass
class Validation:
    """What came of translating the test set."""

    bleu: float
    loss: float
    signature: str = ""
    legacy_bleu: float = 0.0
    samples: list[dict[str, str]] = field(default_factory=list)


class TranslationTraining:
    """One rank's training of `task` to the goal."""

    def __init__(
        self, contract: Contract, world: World, report: Reporter, task: TranslationTask, goal: GoalWatch
    ) -> None:
        self.contract, self.world, self.report, self.task, self.goal = contract, world, report, task, goal
        self.tracker = Tracker(world.synchronize if world.device.type == "cuda" else None)
        self.precision = Precision(task.precision, world.device, task.loss_scale)
        self.strategy = prepare_strategy(world, GradientAllReduce)
        self.model = self.strategy.attach(Placement(world), task.model, task.make_optimizer, tracker=self.tracker)
        self.update = GradientUpdate(self.strategy, self.tracker, self.precision, task.clip)
        self.position = Position()
        self.resumed: int | None = None
        self.latest: Validation | None = None

    def run(self) -> None:
        """Train until the goal or the last epoch and report the result. Raises DivergedError on NaN."""
        task = self.task
        if task.resume:
            self._resume(Path(task.resume))
        self.world.barrier()
        self.tracker.restart()
        curve: list[dict[str, float]] = []
        while self.position.epoch <= task.epochs and not self.goal.reached:
            epoch = self.tracker.epoch = self.position.epoch
            for training_loss in self._train_epoch(epoch):
                with self.strategy.consensus():
                    self.strategy.check_replicas()
                    with self.tracker.section("validation"):
                        self.latest = self._validate(epoch)
                curve.append(self._report_validation(epoch, training_loss, self.latest))
                if self.goal.observe(self.latest.bleu, epoch, self.tracker):
                    break
            self.position.epoch, self.position.in_epoch = epoch + 1, 0
        self.report.phase("finished")
        self.report.result(self.tracker, self.goal, self._details(curve))
        self.strategy.close()

    def _train_epoch(self, epoch: int) -> Iterator[float]:
        """One epoch, or the rest of it. Pauses where a validation is due, with the loss per word since the last one."""
        task, tracker, steps = self.task, self.tracker, self.task.batches.steps
        between = max(1, round(task.validation_share * steps))
        recent, whole = TrainingLoss(), Mean("loss")
        self._begin_training(epoch)
        for step, update in enumerate(task.batches.updates(epoch, self.position.in_epoch), self.position.in_epoch + 1):
            with tracker.step(samples=update.sentences):
                done = self._step(update)
            self.position.in_epoch, self.position.total = step, self.position.total + 1
            with tracker.section("metrics"):
                if done.applied:
                    mean = done.loss / max(1, done.words)
                    recent.add(mean, done.words)
                    whole.add_mean(mean, done.words)
                if done.applied and (step % task.report_every == 0 or step == steps):
                    value = recent.collect(self.world, epoch, step)
                    self.report.metric("train_loss", value, epoch=epoch, step=self.position.total)
            self.report.step(step, steps, epoch=epoch, epochs=task.epochs)
            if task.checkpoint_every and self.position.total % task.checkpoint_every == 0:
                with self.strategy.consensus():
                    self._save()
            if step == steps or (step % between == 0 and steps - step >= between / 2):
                yield collect(self.world, [whole])["loss"]
                self._begin_training(epoch)

    def _begin_training(self, epoch: int) -> None:
        self.task.model.train()
        self.report.phase("training", epoch=epoch, epochs=self.task.epochs)

    def _step(self, update: Update) -> Done:
        """One update, or an attempt at it."""
        task, section = self.task, self.tracker.section
        total, words = torch.zeros((), device=self.world.device), 0
        terms = {"tokens": update.tokens, "sentences": update.sentences, "own_sentences": max(1, update.own)}
        self.update.begin(terms[task.divide_by], len(update.passes))
        for number, indices in enumerate(update.passes):
            with section("data_wait"):
                batch = collate(task.train, indices, task.padding, task.search.start)
            with section("preprocessing"):
                batch = self._moved(batch)
            # Masks depend on the pass's place among those of all ranks, not on the rank that happens to do it.
            torch.manual_seed(derive(self.contract.seed, "dropout", self.position.total, update.first + number))
            with self.update.in_pass(last=number == len(update.passes) - 1):
                with section("forward"), self.precision.autocast():
                    features = self.model(batch.source, batch.lengths, batch.target)
                with section("loss"), self.precision.autocast():
                    loss = self._loss(features, batch.expected, task.label_smoothing)
                self.update.backward(loss)
            total += loss.detach()
            words += int(task.train.target.lengths[indices].sum())
        rate = task.rate(self.position.total - self.position.skipped)
        applied = self.update.apply(rate)
        self.position.skipped += not applied
        return Done(total, words, applied)

    def _loss(self, features: Tensor, expected: Tensor, smoothing: float) -> Tensor:
        """features (B, T, width), expected (B, T) -> cross-entropy summed over words that are not padding."""
        real = expected != self.task.padding
        scores = self.task.model.scores(features[real])
        return F.cross_entropy(scores.float(), expected[real], reduction="sum", label_smoothing=smoothing)

    def _moved(self, batch: Batch) -> Batch:
        device = self.world.device
        return Batch(batch.source.to(device), batch.lengths, batch.target.to(device), batch.expected.to(device))

    def _validate(self, epoch: int) -> Validation:
        """Translate the whole test set, each rank its share, and score all translations at once on rank 0."""
        task = self.task
        self.report.phase("validation", epoch=epoch, epochs=task.epochs)
        task.model.eval()
        # Similar lengths together save padding; every k-th sentence keeps the shares alike.
        own = np.argsort(-task.test.source.lengths, kind="stable")[self.world.rank :: self.world.size]
        found: dict[int, list[int]] = {}
        mean = Mean("loss")
        for start in range(0, len(own), task.evaluation_batch):
            indices = own[start : start + task.evaluation_batch]
            batch = self._moved(collate(task.test, indices, task.padding, task.search.start))
            with torch.inference_mode(), self.precision.autocast():
                features = task.model(batch.source, batch.lengths, batch.target)
                words = int(task.test.target.lengths[indices].sum())
                mean.add_mean(self._loss(features, batch.expected, 0.0) / words, words)
                best = beam_search(task.model, batch.source, batch.lengths, task.limit(batch.lengths), task.search)
            found.update(zip(indices.tolist(), (hypothesis.words for hypothesis in best), strict=True))
        loss = collect(self.world, [mean])["loss"]
        everything = gather_sentences(self.world, found, len(task.test))
        result = self._score(everything, loss) if self.world.is_first else Validation(0.0, loss)
        result.bleu = self.world.agree(result.bleu)
        return result

    def _score(self, found: list[list[int]], loss: float) -> Validation:
        task = self.task
        texts = [task.text(words) for words in found]
        bleu = corpus_bleu(texts, task.references)
        samples = [
            {"translation": text, "reference": reference}
            for text, reference in zip(texts[:5], task.references[:5], strict=True)
        ]
        return Validation(bleu.score, loss, bleu.signature, task.legacy_bleu(found), samples)

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that goes on from it."""
        return {**self.task.identity, "seed": self.contract.seed}

    def _save(self) -> None:
        state = {
            **self._identity(),
            **self.strategy.state_dict(),
            "loss_scale": asdict(self.precision.scale) if self.precision.scale else None,
            "position": asdict(self.position),
        }
        save_checkpoint(self.world, Path(self.contract.output_dir) / "checkpoint.pt", self.task.name, state)

    def _resume(self, path: Path) -> None:
        state = load_checkpoint(self.world, path, self.task.name, self._identity())
        self.strategy.load_state_dict(state)
        if self.precision.scale and state["loss_scale"]:
            self.precision.scale.value = state["loss_scale"]["value"]
            self.precision.scale.good = state["loss_scale"]["good"]
        self.position = Position(**state["position"])
        self.resumed = self.position.total

    def _report_validation(self, epoch: int, training_loss: float, found: Validation) -> dict[str, float]:
        seconds = self.tracker.snapshot().wall
        self.report.metric("val_global_loss", found.loss, epoch=epoch, seconds=seconds)
        self.report.metric("val_global_BLEU-Score", found.bleu, epoch=epoch, seconds=seconds)
        self.report.metric("val_global_legacy_bleu", found.legacy_bleu, epoch=epoch, seconds=seconds)
        self.report.say(
            f"epoch {epoch}/{self.task.epochs} update {self.position.total}  loss {training_loss:.4f}"
            f"  validation loss {found.loss:.4f}  BLEU {found.bleu:.2f}  {seconds:.1f} s"
        )
        figures = {
            "train_loss": training_loss,
            "loss": found.loss,
            "BLEU-Score": found.bleu,
            "legacy_bleu": found.legacy_bleu,
        }
        return {"epoch": epoch, "update": self.position.total, "seconds": seconds, **figures}

    def _details(self, curve: list[dict[str, float]]) -> dict[str, Any]:
        task, latest = self.task, self.latest
        return {
            "parameters": count_parameters(task.model.parameters()),
            "pairs": len(task.train),
            "left_out": task.train.left_out,
            "test_pairs": len(task.test),
            "test_left_out": task.test.left_out,
            "updates_per_epoch": task.batches.steps,
            "padding_share": task.batches.padding(1),
            "bleu_signature": latest.signature if latest else None,
            "legacy_bleu": latest.legacy_bleu if latest else None,
            "reference": task.reference,
            "samples": latest.samples if latest else [],
            "precision": self.precision.used,
            "loss_scale": self.precision.factor,
            "updates_skipped": self.position.skipped,
            "resumed_at_update": self.resumed,
            "curve": curve,
            "communication": self.strategy.stats(),
        }


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
    return Batch(*map(torch.from_numpy, (source, lengths.copy(), target, expected)))


def gather_sentences(world: World, own: dict[int, list[int]], count: int) -> list[list[int]]:
    """Sentences of all ranks by their number in range(count), on every rank. Every number is on exactly one rank."""
    longest = int(world.max([max(map(len, own.values()), default=0)])[0])
    table = torch.zeros(count, longest + 1, dtype=torch.int64)  # length first
    for number, words in own.items():
        table[number, : len(words) + 1] = torch.tensor([len(words), *words])
    rows = world.all_reduce(table.to(world.device)).tolist()
    return [row[1 : 1 + row[0]] for row in rows]
