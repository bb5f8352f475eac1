"""Benchmark 4a: GNMT on WMT16 English-German. LSTM encoder and decoder with residual layers and normalized additive
attention, put into the shared translation loop.

Shapes: B sentences, K hypotheses of each, S source and T target positions, V words, D width. Sentences come first
outside, time first inside the LSTM layers. Sources: Wu et al. 2016 (arXiv 1609.08144); attention: Bahdanau et al. 2014
(arXiv 1409.0473), normalized as in Luong, Brevdo, Zhao 2017; the layers' wiring is that of the MLPerf reference.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from task_images.contract import Contract, need
from task_images.data import pin
from task_images.methods.base import LossScale
from task_images.parameters import Task, parameter, read_parameters
from task_images.train import refuse_bf16_lstm
from task_images.translation.batches import SentenceBatches, plan_passes
from task_images.translation.beam import Search
from task_images.translation.sample import write_sample
from task_images.translation.training import (
    BLEU_NOTE,
    WIRE_NOTE,
    Translation,
    TranslationModel,
    TranslationSettings,
    translation_session,
)
from task_images.wmt16_gnmt.data import END, PADDING, START, Corpus, prepare, read_corpus
from task_images.world import World


@dataclass(frozen=True)
class Settings(TranslationSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    data: str = parameter("wmt16", "what to train on; sample is generated", choices=("wmt16", "sample"))
    longest: int = parameter(75, "maximum subwords of a training sentence, including start and end", min=3, max=1024)
    global_batch: int = parameter(2048, "sentences per update, over all ranks", min=1, max=10000000)
    largest_pass: int = parameter(128, "maximum sentences per pass of one rank", min=1, max=10000000)
    reshuffle: bool = parameter(True, "true: every epoch shuffles all pairs; false: every rank keeps its part")
    epochs: int = parameter(8, "maximum number of epochs; the rate's decay depends on it", min=1, max=100000)
    width: int = parameter(1024, "width of embedding and LSTM layers", min=1, max=65536)
    layers: int = parameter(4, "layers of encoder and decoder each", min=2, max=64)
    dropout: float = parameter(0.2, "dropout of the input of every LSTM layer", min=0, max=0.99)
    initial_range: float = parameter(0.1, "initial parameters are between minus and plus this", min=0, max=10)
    warmup_updates: int = parameter(200, "updates of the exponential warm-up", min=0, max=10000000)
    warmup_start: float = parameter(0.0, "fraction of the rate at which the warm-up starts; 0: from zero", min=0, max=1)
    decay_from: float = parameter(0.4, "share of all updates before the first decay of the rate", min=0, max=1)
    decay_every: float = parameter(0.05, "share of all updates between decays", min=0, max=1)
    decays: int = parameter(4, "number of decays", min=0, max=1000)
    decay_factor: float = parameter(0.5, "factor of the rate per decay", min=0, max=1)
    gradient_mean: str = parameter(
        "global",
        "global: per sentence of all ranks; local: per sentence of one rank, so that clipping depends on their number",
        choices=("global", "local"),
    )
    clip: float = parameter(5.0, "maximum norm of the gradient", min=1e-06, max=1000000)
    largest_loss_scale: float = parameter(8192.0, "maximum loss scale of fp16", min=1, max=16777216)
    coverage: float = parameter(0.1, "weight of the coverage penalty", min=0, max=10)
    longest_translation: int = parameter(150, "maximum subwords of a translation", min=1, max=100000)


TASK = Task(
    settings=Settings,
    number="4a",
    title="GNMT translation model on WMT16 English-German",
    legacy_name="PyTorch Machine Translation GNMT",
    packages=["sacrebleu>=2.4,<3", "sacremoses>=0.1.1,<1", "subword-nmt>=0.3.8,<0.4"],
    measured_on=["CPU", "1 x H100"],
    method={
        "own": "bsp",
        "refuses": {"wraps": "it calls parts of its model", "gates": "it clips gradients by their norm"},
    },
    goal={"metric": "BLEU-Score", "comparison": ">=", "wording": "Validation BLEU-Score of {threshold}"},
    data=(
        "WMT16 English-German in the data folder, as written by mlbench data prepare: vocab.bpe.32000, "
        "train.tok.clean.bpe.32000.{en,de}, newstest2014.tok.bpe.32000.{en,de}, newstest2014.de. The preset "
        "tiny generates a small language pair."
    ),
    files={
        "when": {"data": "wmt16"},
        "folders": [".", "wmt16"],
        "wanted": [["vocab.bpe.32000"], ["train.tok.clean.bpe.32000.en"]],
        "imports": [
            "de-en.tgz",
            "training-parallel-commoncrawl.tgz",
            "training-parallel-nc-v11.tgz",
            "dev.tgz",
            "newstest2014.de",
            "*.bpe.32000.*",
        ],
        "instead": "--preset tiny",
    },
    notes=[
        BLEU_NOTE,
        "Deviation: gradients are averaged over ranks, so clipping at 5 means the same for any number of ranks;"
        " the specification sums them (gradient_mean=local does, up to the loss scale).",
        "With precision=fp16 on GPUs, gradients are sent in fp16, 321 MB per update as specified (tested on "
        "CPUs, not run on a GPU).",
        WIRE_NOTE,
    ],
    workers={"sensible": 32, "reason": "the global batch of 2048 sentences leaves each of 32 ranks 64"},
    presets={
        "legacy": {
            "longest_test": 150,
            "reshuffle": False,
            "warmup_start": 0.01,
            "gradient_mean": "local",
        },
        # The protocol of all throughput presets, on generated sentences with a small vocabulary; no goal.
        "throughput": {
            "data": "sample",
            "blocks": 10,
            "block_updates": 5,
            "blocks_after": 5,
        },
        "tiny": {
            "data": "sample",
            "longest": 60,
            "global_batch": 32,
            "largest_pass": 16,
            "width": 64,
            "layers": 3,
            "dropout": 0.1,
            "initial_range": 0.4,
            "learning_rate": 0.01,
            "warmup_updates": 40,
            "decay_from": 0.9,
            "precision": "fp32",
            "longest_translation": 60,
            "validation_share": 1.0,
            "goal_full": 45,
            "goal_light": 8,
        },
    },
)


State = tuple[Tensor, Tensor]  # hidden and cell state, each (1, B x K, D)


@dataclass
class SearchState:
    """The search's state."""

    memory: Tensor  # the encoder's output (B, S, D)
    keys: Tensor  # (B, S, D)
    mask: Tensor  # (B, 1, S), true where a source word is
    states: list[State]  # per layer


class Gnmt(TranslationModel):
    """Encoder, decoder and classifier. With V = 32 320 and the default parameters it has 160 671 297 numbers."""

    def __init__(self, vocabulary: int, p: Settings, padding: int = PADDING) -> None:
        super().__init__()
        self.width, self.dropout, self.padding = p.width, p.dropout, padding
        width = p.width
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=padding)
        self.both_ways = nn.LSTM(width, width, bidirectional=True)
        inputs = [2 * width] + [width] * (p.layers - 2)
        self.encoder = nn.ModuleList(nn.LSTM(before, width) for before in inputs)
        self.attention_lstm = nn.LSTM(width, width)
        self.attention = Attention(width)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width) for _ in range(p.layers - 1))
        self.classifier = nn.Linear(width, vocabulary)
        if not self.embedding.weight.is_meta:
            self._initialize(p.initial_range)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Features [B, T, D] of target [B, T], given source [B, S] with lengths [B]."""
        memory = self._encode(source, lengths)
        y, _ = self.attention_lstm(self._embed(target))
        context = self.attention(y.transpose(0, 1), memory, self.attention.keys(memory), self._mask(source))
        context = context.transpose(0, 1)
        x = y
        for index, layer in enumerate(self.decoder):
            y, _ = layer(self._drop(torch.cat([x, context], 2)))
            x = y + x if index else y
        features: Tensor = x.transpose(0, 1)
        return features

    def scores(self, features: Tensor) -> Tensor:
        """Scores of all words, [..., V], from features [..., D]."""
        scores: Tensor = self.classifier(features)
        return scores

    def begin(self, source: Tensor, lengths: Tensor) -> SearchState:
        """The decoder's state before the first word, for source [B, S] with lengths [B]."""
        memory = self._encode(source, lengths)
        zero = memory.new_zeros(1, len(source), self.width)
        states = [(zero, zero)] * (1 + len(self.decoder))
        return SearchState(memory, self.attention.keys(memory), self._mask(source), states)

    def step(self, words: Tensor, state: SearchState) -> tuple[Tensor, Tensor]:
        """Scores [B, K, V] after words [B, K], and attention weights [B, K, S]."""
        shape = words.shape
        x, state.states[0] = self.attention_lstm(self._embed(words.reshape(-1, 1)), state.states[0])
        weights = self.attention.weights(x.view(*shape, -1), state.keys, state.mask)
        context = (weights.to(state.memory.dtype) @ state.memory).view_as(x)
        for index, layer in enumerate(self.decoder):
            y, state.states[index + 1] = layer(torch.cat([x, context], 2), state.states[index + 1])
            x = y + x if index else y
        return self.scores(x.view(*shape, -1)), weights

    def select(self, state: SearchState, sentences: Tensor, beams: Tensor) -> SearchState:
        """The state of chosen hypotheses: sentences [B'] of the B, and beams [B', K] of each."""
        before = len(state.memory)
        width = state.states[0][0].shape[1] // before
        rows = (sentences[:, None] * width + beams).flatten()
        states = [(hidden[:, rows], cell[:, rows]) for hidden, cell in state.states]
        if len(sentences) == before:
            return SearchState(state.memory, state.keys, state.mask, states)
        return SearchState(state.memory[sentences], state.keys[sentences], state.mask[sentences], states)

    def _mask(self, source: Tensor) -> Tensor:
        return (source != self.padding)[:, None, :]

    def _encode(self, source: Tensor, lengths: Tensor) -> Tensor:
        """source (B, S), lengths (B) on the CPU -> (B, S, D). Behind a sentence's end the output means nothing."""
        # Sorted here and not by torch, which lets the host wait for a GPU to get the order.
        lengths, order = lengths.cpu().sort(descending=True)
        order, back = (pin(one, source.device).to(source.device, non_blocking=True) for one in (order, order.argsort()))
        packed = pack_padded_sequence(self._embed(source).index_select(1, order), lengths)
        x, _ = pad_packed_sequence(self.both_ways(packed)[0], total_length=source.shape[1])
        x = x.index_select(1, back)
        for index, layer in enumerate(self.encoder):
            y, _ = layer(self._drop(x))
            x = y + x if index else y
        return x.transpose(0, 1)

    def _embed(self, words: Tensor) -> Tensor:
        """words (B, T) -> (T, B, D), ready for the first layer."""
        return self._drop(self.embedding(words.t()))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    @torch.no_grad()
    def _initialize(self, most: float) -> None:
        for name, weights in self.named_parameters():
            if "bias_hh" in name:
                weights.zero_()
            elif not name.startswith("attention.") or weights.dim() == 2:
                weights.uniform_(-most, most)


class Attention(nn.Module):
    """score(q, k) = (g v / |v|) . tanh(Wq q + Wk k + b), softmax over the source, mean of the memory under it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Sums of query and key per pair of positions and unit: above this many numbers they are made in parts, and
        # again in the backward pass instead of being kept.
        self.at_once = 1 << 25
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.direction = nn.Parameter(torch.empty(width).uniform_(-0.1, 0.1))
        self.scale = nn.Parameter(torch.full((1,), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, memory: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, D), memory and keys (B, S, D), mask (B, 1, S) -> contexts (B, T, D)."""
        return self.weights(x, keys, mask).to(memory.dtype) @ memory

    def keys(self, memory: Tensor) -> Tensor:
        """Wk k for the memory [B, S, D], which is the same for all steps."""
        keys: Tensor = self.key(memory)
        return keys

    def weights(self, x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, S), summing up to 1 over the source words."""
        direction = self.scale * self.direction / self.direction.norm()
        queries = self.query(x) + self.bias
        at_once = max(1, self.at_once // keys.numel())
        if queries.shape[1] <= at_once or not torch.is_grad_enabled():
            parts = [additive_scores(part, keys, direction) for part in queries.split(at_once, 1)]
        else:
            parts = [
                checkpoint(additive_scores, part, keys, direction, use_reentrant=False, preserve_rng_state=False)
                for part in queries.split(at_once, 1)
            ]
        return torch.cat(parts, 1).float().masked_fill(~mask, -torch.inf).softmax(2)


def additive_scores(queries: Tensor, keys: Tensor, direction: Tensor) -> Tensor:
    """queries (B, T, D), keys (B, S, D), direction (D) -> (B, T, S)."""
    return torch.tanh(queries[:, :, None] + keys[:, None]) @ direction


NAME = "wmt16_gnmt"
SAMPLE_MERGES = 600


def main(contract: Contract) -> None:
    """Read the corpus and train GNMT to the BLEU goal."""
    need("sacrebleu", "sacremoses")
    p = read_parameters(Settings, contract.parameters)

    def read(folder: Path, cache: Path) -> Corpus:
        return read_corpus(folder, cache, p.longest, p.longest_test)

    with translation_session(contract, p, "WMT16", write_prepared_sample, read) as (world, report, corpus):
        make_task(p, world, corpus).run(report)


def write_prepared_sample(folder: Path, seed: int) -> Path:
    """Made-up sentences in the files of WMT16, prepared as those are."""
    write_sample(folder, train=4000, test=100, seed=seed)
    for language in ("en", "de"):
        (folder / f"test.{language}").rename(folder / f"newstest2014.{language}")
    prepare(folder, folder / "prepared", SAMPLE_MERGES)
    return folder / "prepared"


@dataclass(frozen=True)
class Rate:
    """Exponential warm-up of `warmup` updates from `start` (a share of the target; 0: from nothing, along 100^t). At
    update `first`, and then every `interval` updates, up to `decays` times, the rate is multiplied by `factor`."""

    target: float
    warmup: int
    start: float
    first: int
    interval: int
    decays: int
    factor: float

    def __call__(self, update: float) -> float:
        if update < self.warmup:
            share = update / self.warmup
            grown: float = self.start ** (1 - share) if self.start else (100**share - 1) / 99
            return self.target * grown
        if update < self.first or update == self.warmup:
            return self.target
        return self.target * self.factor ** min(self.decays, int((update - self.first) // self.interval) + 1)


def make_rate(p: Settings, updates: int) -> Rate:
    """The rate of a training of `updates` updates, whose warm-up ends at the first decay at the latest."""
    first, interval = int(p.decay_from * updates), max(1, int(p.decay_every * updates))
    warmup = min(p.warmup_updates, first)
    return Rate(p.learning_rate, warmup, p.warmup_start, first, interval, p.decays, p.decay_factor)


def make_task(p: Settings, world: World, corpus: Corpus) -> Translation:
    """The model, batches and search of this rank for the shared translation loop."""
    vocabulary = corpus.words
    refuse_bf16_lstm(p.precision, world.device)
    model = Gnmt(vocabulary.size, p).to(world.device)
    passes = plan_passes(p.global_batch, p.largest_pass, world.size)
    batches = SentenceBatches(corpus.train, passes, world.size, world.rank, world.contract.seed, p.reshuffle)

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
        text=vocabulary.decode,
        references=corpus.references,
        reference=corpus.reference,
        clip=p.clip,
        loss_scale=LossScale(p.loss_scale, window=p.loss_scale_window, largest=p.largest_loss_scale),
        identity={"vocabulary": vocabulary.size, "network": [p.width, p.layers]},
    )
