"""GNMT's parameters and how the shared translation loop is put together from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from task_images.contract import Contract
from task_images.errors import need
from task_images.loop import plan_passes
from task_images.parameters import read_parameters
from task_images.precision import LossScale, refuse_bf16_lstm
from task_images.schedules import ExponentialWarmupMultiStep
from task_images.translation.batches import SentenceBatches
from task_images.translation.beam import Search
from task_images.translation.bleu import international_bleu, mean_of_batches
from task_images.translation.sample import write_sample
from task_images.translation.training import Source, Translation, train
from task_images.wmt16_gnmt import Settings
from task_images.wmt16_gnmt.data import Corpus, read_corpus
from task_images.wmt16_gnmt.model import Gnmt, Size
from task_images.wmt16_gnmt.prepare import prepare
from task_images.wmt16_gnmt.text import END, PADDING, START
from task_images.world import World

NAME = "wmt16_gnmt"
SAMPLE_MERGES = 600


def main(contract: Contract) -> None:
    """Read the corpus and train GNMT to the BLEU goal."""
    need("sacrebleu", "sacremoses")
    p = read_parameters(Settings, contract.parameters)

    def read(folder: Path, cache: Path) -> Corpus:
        return read_corpus(folder, cache, p.longest, p.longest_test)

    train(contract, p, Source("WMT16", write_prepared_sample, read, Corpus.identify), make_task)


def write_prepared_sample(folder: Path, seed: int) -> Path:
    """Made-up sentences in the files of WMT16, prepared as those are."""
    write_sample(folder, train=4000, test=100, seed=seed)
    for language in ("en", "de"):
        (folder / f"test.{language}").rename(folder / f"newstest2014.{language}")
    prepare(folder, folder / "prepared", SAMPLE_MERGES)
    return folder / "prepared"


@dataclass(frozen=True)
class Rate:
    """Exponential warm-up from `start` (a share of the target; 0: from nothing, along 100^t), then stepped decay."""

    steps: ExponentialWarmupMultiStep
    warmup: int
    start: float

    def __call__(self, update: float) -> float:
        if update >= self.warmup:
            return self.steps(update)
        share = update / self.warmup
        grown: float = self.start ** (1 - share) if self.start else (100**share - 1) / 99
        return self.steps.target * grown


def make_rate(p: Settings, updates: int) -> Rate:
    """The rate of a training of `updates` updates."""
    warmup = min(p.warmup_updates, int(p.decay_from * updates))
    steps = ExponentialWarmupMultiStep(
        p.learning_rate, updates, warmup, p.decay_from, p.decays, p.decay_factor, p.decay_every
    )
    return Rate(steps, warmup, p.warmup_start)


def make_task(p: Settings, world: World, corpus: Corpus) -> Translation:
    """The model, batches and search of this rank for the shared translation loop."""
    vocabulary = corpus.vocabulary
    refuse_bf16_lstm(p.precision, world.device)
    model = Gnmt(vocabulary.size, Size(p.width, p.layers, p.dropout, p.initial_range), PADDING).to(world.device)
    passes = plan_passes(p.global_batch, p.largest_pass, world.size)
    batches = SentenceBatches(corpus.train, passes, world.size, world.rank, world.contract.seed, p.reshuffle)

    def legacy_bleu(found: Sequence[list[int]]) -> float:
        return mean_of_batches(
            international_bleu, [vocabulary.text(words) for words in found], corpus.texts, p.evaluation_batch
        )

    def limit(lengths: Tensor) -> Tensor:
        return torch.full_like(lengths, p.longest_translation)

    return Translation(
        world,
        name=NAME,
        settings=p,
        model=model,
        make_optimizer=lambda model: torch.optim.Adam(
            model.parameters(), lr=0.0, betas=(0.9, 0.999), eps=1e-8, fused=True
        ),
        train=corpus.train,
        test=corpus.test,
        batches=batches,
        padding=PADDING,
        search=Search(p.beam, START, END, p.length_power, p.coverage, never=(PADDING, START)),
        learning_rate=make_rate(p, batches.steps * p.epochs),
        divide_by="sentences" if p.gradient_mean == "global" else "own_sentences",
        limit=limit,
        text=vocabulary.text,
        references=corpus.references,
        reference=corpus.reference,
        legacy_bleu=legacy_bleu,
        clip=p.clip,
        loss_scale=LossScale(p.loss_scale, window=p.loss_scale_window, largest=p.largest_loss_scale),
        identity={"vocabulary": vocabulary.size, "network": [p.width, p.layers]},
    )
