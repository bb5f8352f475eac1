"""The Transformer's parameters and how the shared translation loop is put together from them."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from task_images.contract import Contract
from task_images.errors import need
from task_images.loop import plan_passes
from task_images.parameters import read_parameters
from task_images.precision import LossScale
from task_images.schedules import WarmupInverseSqrt
from task_images.translation.batches import TokenBatches
from task_images.translation.beam import Search
from task_images.translation.bleu import mean_of_batches, split_punctuation, tokenized_bleu
from task_images.translation.sample import write_sample
from task_images.translation.training import Source, Translation, train
from task_images.wmt17_transformer import Settings
from task_images.wmt17_transformer.data import Corpus, read_corpus, write_dictionary
from task_images.wmt17_transformer.model import Size, Transformer
from task_images.wmt17_transformer.subtokens import END, PADDING
from task_images.world import World

NAME = "wmt17_transformer"


def main(contract: Contract) -> None:
    """Read the corpus and train the Transformer to the BLEU goal."""
    need("sacrebleu")
    p = read_parameters(Settings, contract.parameters)

    def write(folder: Path, seed: int) -> Path:
        write_sample(folder, train=4000, test=100, seed=seed)
        write_dictionary(folder, p.vocabulary - 1)
        return folder

    def read(folder: Path, cache: Path) -> Corpus:
        return read_corpus(folder, cache, p.vocabulary, p.longest, p.longest_test)

    train(contract, p, Source("WMT17", write, read, Corpus.identify), make_task)


def make_task(p: Settings, world: World, corpus: Corpus) -> Translation:
    """The model, batches and search of this rank for the shared translation loop."""
    size = Size(p.width, p.inner, p.layers, p.heads, p.dropout, p.attention_dropout, p.inner_dropout)
    model = Transformer(p.vocabulary, size, PADDING).to(world.device)
    passes = plan_passes(p.global_batch, p.largest_pass, world.size)
    batches = TokenBatches(corpus.train, passes, world.size, world.rank, world.contract.seed, p.reshuffle)

    def legacy_text(numbers: list[int]) -> str:
        return split_punctuation(corpus.subtokens.decode_as_original(numbers).lower())

    def legacy_bleu(found: Sequence[list[int]]) -> float:
        hypotheses = [legacy_text(numbers) for numbers in found]
        references = [legacy_text(corpus.test.target.sentence(index)) for index in range(len(corpus.test))]
        return mean_of_batches(tokenized_bleu, hypotheses, references, p.evaluation_batch)

    def limit(lengths: Tensor) -> Tensor:
        """Words of a translation, its end included. The source's length counts its end too."""
        most = lengths + p.translation_extra
        return most.clamp(max=p.longest_translation) if p.longest_translation else most

    return Translation(
        world,
        name=NAME,
        settings=p,
        model=model,
        make_optimizer=lambda model: torch.optim.Adam(
            model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True
        ),
        train=corpus.train,
        test=corpus.test,
        batches=batches,
        padding=PADDING,
        search=Search(p.beam, END, END, p.length_power, early_stop=True, never=(0, PADDING)),
        learning_rate=WarmupInverseSqrt(p.learning_rate, p.warmup_updates),
        divide_by="tokens",
        limit=limit,
        text=corpus.subtokens.decode,
        references=corpus.references,
        reference=corpus.reference,
        legacy_bleu=legacy_bleu,
        clip=None,
        loss_scale=LossScale(p.loss_scale, window=p.loss_scale_window),
        identity={
            "vocabulary": p.vocabulary,
            "network": list(asdict(size).values())[:4],
        },
    )
