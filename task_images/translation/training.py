"""Translation with the common training loop: passes of sentence pairs, and beam search with corpus BLEU.

A task reads its corpus within `translation_session`, and makes its `Translation`, which runs.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from task_images.cache import require_data_dir
from task_images.contract import Contract
from task_images.data import Indices, pin, seed_all
from task_images.methods.base import Bsp, LossScale, MakeOptimizer, prepare_method
from task_images.metrics import Mean, Values, collect
from task_images.parameters import CheckpointSettings, CudaSettings, TrainingSettings, parameter
from task_images.report import GoalWatch, Reporter, made_up, training_session
from task_images.schedules import PerUpdate
from task_images.train import PassLoss, Plan, Precision, Trainer, Unit, Update, count_parameters
from task_images.translation.batches import Batches
from task_images.translation.beam import Decoder, Search, beam_search
from task_images.translation.bleu import corpus_bleu
from task_images.translation.corpora import Corpus, Pairs, Words
from task_images.world import World

# Notes of both tasks.
BLEU_NOTE = (
    "Goal: corpus BLEU (sacrebleu, 13a) of lowercased text, because the thresholds were set on lowercased BLEU; "
    "the original averaged the BLEU of batches. goal_bleu=cased uses cased BLEU instead. The result contains both."
)
WIRE_NOTE = (
    "Deviations: parameters stay in fp32 and are sent once, at the start. On CPUs, gradients are fp32, so twice as "
    "large."
)


@dataclass(frozen=True)
class TranslationSettings(TrainingSettings, CheckpointSettings, CudaSettings):
    """Parameters of both translation tasks."""

    longest_test: int = parameter(150, "maximum subwords of a test sentence; 0: no limit", min=0, max=1024)
    epochs: int = parameter(8, "maximum number of epochs", min=1, max=100000)
    label_smoothing: float = parameter(
        0.1, "share of the target spread over the vocabulary (label smoothing)", min=0, max=0.99
    )
    learning_rate: float = parameter(0.002, "maximum rate of Adam", min=0, max=10)
    precision: str = parameter(
        "fp16", "number format; fp16 on GPUs only, replaced by fp32 on CPUs", choices=("fp32", "bf16", "fp16")
    )
    loss_scale: float = parameter(1024.0, "initial loss scale of fp16", min=1, max=16777216)
    loss_scale_window: int = parameter(
        128, "updates without overflow until the loss scale doubles", min=1, max=10000000
    )
    beam: int = parameter(5, "hypotheses of the beam search", min=1, max=1000)
    length_power: float = parameter(0.6, "power of the length penalty", min=0, max=10)
    validation_share: float = parameter(0.3, "share of an epoch between validations", min=0.01, max=1)
    evaluation_batch: int = parameter(64, "sentences per batch of the test set", min=1, max=100000)
    goal_bleu: str = parameter(
        "lowercased",
        "BLEU on which the goal is measured; the goals were set on lowercased text",
        choices=("lowercased", "cased"),
    )
    goal_full: float = parameter(24.0, "corpus BLEU of the full goal", min=0, max=100)
    goal_light: float = parameter(20.0, "corpus BLEU of the light goal", min=0, max=100)

    # Set by each task.
    data: str = "sample"
    longest: int = 75
    global_batch: int = 2048
    largest_pass: int = 128
    reshuffle: bool = True
    longest_translation: int = 150


W = TypeVar("W", bound=Words)


@contextmanager
def translation_session(
    contract: Contract,
    p: TranslationSettings,
    name: str,
    write_sample: Callable[[Path, int], Path],
    read: Callable[[Path, Path], Corpus[W]],
) -> Iterator[tuple[World, Reporter, Corpus[W]]]:
    """The ranks, and the corpus `name`, or generated sentences if the parameter `data` is "sample".

    write_sample  (folder, seed) -> folder: writes generated sentences, and returns the folder to read
    read          (folder of the files, folder of cache entries) -> corpus
    """
    is_sample = p.data == "sample"
    with training_session(contract, f"{'made-up' if is_sample else name} English-German", is_sample) as (world, report):
        if is_sample:
            with tempfile.TemporaryDirectory() as own:
                corpus = read(write_sample(Path(own), contract.seed), Path(own))
        else:
            folder = require_data_dir(contract, name)
            corpus = read(folder, folder)
        report.data_identity(made_up(corpus.identify().counts) if is_sample else corpus.identify())
        seed_all(contract.seed)
        yield world, report, corpus


class TranslationModel(nn.Module, Decoder):
    """The interface of models. Shapes: B sentences, S, T positions, V words."""

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """source [B, S], lengths [B] on the CPU, target [B, T] including its start mark -> features [B, T, width]."""
        raise NotImplementedError

    def scores(self, features: Tensor) -> Tensor:
        """features [..., width] -> scores of the next word [..., V] before softmax."""
        raise NotImplementedError


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


@dataclass
class Translation:
    """A translation training of one rank, as the training loop sees it (`train.Work` and the validator): cross-entropy
    with label smoothing, summed over words; validation translates the test set.

    learning_rate   learning rate of the n-th update that was not skipped, from 0
    divide_by       divisor of the summed gradient: tokens or sentences of all ranks, or own_sentences, those of one
                    rank (`ranks` times the mean, as in the original GNMT)
    limit           maximum length of a translation, including its end, by source length
    text            word numbers of a translation, without marks -> the text to score
    references      reference translations of the test pairs, in order; `reference` names their source
    """

    world: World
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
    clip: float | None
    loss_scale: LossScale
    identity: Mapping[str, object]
    precision: Precision = field(init=False)
    latest: dict[str, object] = field(default_factory=dict, init=False)  # about the last translations, for the result

    def __post_init__(self) -> None:
        self.precision = Precision(self.settings.precision, self.world.device, self.loss_scale)

    def run(self, report: Reporter) -> None:
        """Train to the goal and report the result."""
        p = self.settings
        # As in the reference implementations, fp16 gradients are sent in fp16; the loss scale keeps them in range.
        wire = torch.float16 if self.precision.used == "fp16" else None
        Trainer(
            self.world,
            report,
            self,
            PerUpdate(self.learning_rate),
            Plan.of(p, validate_every=max(1, round(p.validation_share * self.batches.steps))),
            name=self.name,
            validate=self.validate,
            goal=GoalWatch("BLEU-Score", ">=", p.goal_full, p.goal_light, self.world.contract.goal),
            details={
                "parameters": count_parameters(self.model.parameters()),
                "pairs": len(self.train),
                "left_out": self.train.left_out,
                "test_pairs": len(self.test),
                "test_left_out": self.test.left_out,
                "updates_per_epoch": self.batches.steps,
                "padding_share": self.batches.padding(1),
                "reference": self.reference,
                "goal_bleu": p.goal_bleu,
                "wire": "fp32" if wire is None else "fp16",
            },
            closing=lambda: self.latest,
            identity={**self.identity, "global_batch": p.global_batch, "seed": self.world.contract.seed},
            make_optimizer=self.make_optimizer,
            method=prepare_method(self.world, lambda: Bsp(wire=wire)),
            precision=self.precision,
            arithmetic=p,
            unit=Unit("sentences"),
            # The norm is measured even without a limit, because a non-finite gradient ends the training.
            clip=math.inf if self.clip is None else self.clip,
        ).run()

    def count(self, epoch: int) -> int:
        """Number of updates in an epoch."""
        return self.batches.steps

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Batch]]:
        """The updates of an epoch, starting with number `begin`, their passes assembled on demand."""
        for update in self.batches.updates(epoch, begin):
            passes = (collate(self.train, indices, self.padding, self.search.start) for indices in update.passes)
            terms = {"tokens": update.tokens, "sentences": update.sentences, "own_sentences": max(1, update.own)}
            yield Update(passes, len(update.passes), 1.0, terms[self.divide_by], update.sentences, update.first)

    def prepare(self, part: Batch) -> Batch:
        """The pass on the device."""
        return move_batch(part, self.world.device)

    def forward(self, model: nn.Module, data: Batch) -> Tensor:
        """The decoder's features [B, T, D], before the output layer."""
        features: Tensor = model(data.source, data.lengths, data.target)
        return features

    def loss(self, outputs: Tensor, data: Batch) -> PassLoss:
        """The smoothed sum of losses over the words, with their number."""
        value = self._sum_loss(outputs, data, self.settings.label_smoothing)
        return PassLoss(value, value.detach() / max(1, data.words), data.words)

    def validate(self, epoch: int) -> Values:
        """Translate the test set, each rank a share, and score all translations together on rank 0."""
        # Sorting by length saves padding; taking every k-th sentence balances the shares.
        own = np.argsort(-self.test.source.lengths, kind="stable")[self.world.rank :: self.world.size]
        found: dict[int, list[int]] = {}
        mean = Mean("loss")
        for start in range(0, len(own), self.settings.evaluation_batch):
            indices = own[start : start + self.settings.evaluation_batch]
            batch = move_batch(collate(self.test, indices, self.padding, self.search.start), self.world.device)
            with torch.inference_mode(), self.precision.autocast():
                features = self.model(batch.source, batch.lengths, batch.target)
                mean.add_mean(self._sum_loss(features, batch, 0.0) / batch.words, batch.words)
                best = beam_search(self.model, batch.source, batch.lengths, self.limit(batch.lengths), self.search)
            found.update(zip(indices.tolist(), (hypothesis.words for hypothesis in best), strict=True))
        loss = collect(self.world, [mean])["loss"]
        everything = gather_sentences(self.world, found, len(self.test))
        scores = self.score(everything) if self.world.is_first else {}
        names = ("BLEU-Score", "bleu_cased", "bleu_lowercased")
        return {"loss": loss, **{name: self.world.agree(scores.get(name, 0.0)) for name in names}}

    def score(self, found: list[list[int]]) -> Values:
        """The BLEU of the translations of all test pairs, in their order."""
        texts = [self.text(words) for words in found]
        scores = {kind: corpus_bleu(texts, self.references, kind == "lowercased") for kind in ("cased", "lowercased")}
        gated = scores[self.settings.goal_bleu]
        self.latest = {
            "bleu_signature": gated.signature,
            "bleu_cased": scores["cased"].score,
            "bleu_lowercased": scores["lowercased"].score,
            "samples": [
                {"translation": text, "reference": reference}
                for text, reference in zip(texts[:5], self.references[:5], strict=True)
            ],
        }
        values = {f"bleu_{kind}": score.score for kind, score in scores.items()}
        return {"BLEU-Score": gated.score, **values}

    def _sum_loss(self, features: Tensor, batch: Batch, smoothing: float) -> Tensor:
        """features [B, T, width] of the batch -> cross-entropy summed over non-padding words."""
        scores = self.model.scores(features.flatten(0, 1).index_select(0, batch.places))
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
