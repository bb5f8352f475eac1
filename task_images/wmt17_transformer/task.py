"""Benchmark 4b: the big Transformer on WMT17 English-German, pre-norm, with one embedding for source, target and
output, put into the shared translation loop.

Shapes: B sentences, K hypotheses of each, S source and T target positions, V words, D width, H heads.
Sources: Vaswani et al. 2017 (arXiv 1706.03762); pre-norm and packed projections as in the fairseq/MLPerf variant.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from task_images.contract import Contract, TaskUsageError, need
from task_images.methods.base import LossScale
from task_images.parameters import Task, parameter, read_parameters
from task_images.translation.batches import TokenBatches, plan_passes
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
from task_images.wmt17_transformer.data import END, PADDING, Corpus, read_corpus, write_dictionary
from task_images.world import World


@dataclass(frozen=True)
class Settings(TranslationSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    data: str = parameter("wmt17", "what to train on; sample is generated", choices=("wmt17", "sample"))
    vocabulary: int = parameter(33712, "number of embeddings; the dictionary must fit", min=16, max=1000000)
    longest: int = parameter(80, "maximum subtokens of a training sentence", min=2, max=1024)
    longest_test: int = parameter(80, "maximum subtokens of a test sentence; 0: no limit", min=0, max=1024)
    global_batch: int = parameter(131072, "positions per update, over all ranks", min=1, max=100000000)
    largest_pass: int = parameter(8192, "maximum positions per pass of one rank", min=1, max=100000000)
    reshuffle: bool = parameter(True, "rebuild batches every epoch")
    epochs: int = 10
    width: int = parameter(1024, "width of embedding and residual stream", min=4, max=65536)
    inner: int = parameter(4096, "width of the feed-forward layers", min=1, max=1000000)
    layers: int = parameter(6, "layers of encoder and decoder each", min=1, max=128)
    heads: int = parameter(16, "attention heads; must divide the width", min=1, max=1024)
    dropout: float = parameter(0.1, "dropout of embeddings and of branches before the residual sum", min=0, max=0.99)
    attention_dropout: float = parameter(0.1, "dropout of attention weights", min=0, max=0.99)
    inner_dropout: float = parameter(0.1, "dropout within feed-forward layers", min=0, max=0.99)
    learning_rate: float = 0.001976
    warmup_updates: int = parameter(1000, "updates until the maximum rate", min=1, max=10000000)
    loss_scale: float = 128.0
    loss_scale_window: int = 2000
    beam: int = 4
    translation_extra: int = parameter(
        50, "maximum extra subtokens of a translation over its source", min=1, max=100000
    )
    longest_translation: int = parameter(0, "maximum subtokens of a translation; 0: no limit", min=0, max=100000)
    goal_full: float = 25.0


TASK = Task(
    settings=Settings,
    number="4b",
    title="Transformer translation model on WMT17 English-German",
    legacy_name="PyTorch Machine Translation Transformer",
    packages=["sacrebleu>=2.4,<3"],
    measured_on=["CPU", "1 x H100"],
    method={
        "own": "bsp",
        "refuses": {"wraps": "it calls parts of its model", "gates": "it clips gradients by their norm"},
    },
    goal={"metric": "BLEU-Score", "comparison": ">=", "wording": "Validation BLEU-Score of {threshold}"},
    data=(
        "WMT17 English-German in the data folder: dict.en.txt, train.en-de.{en,de}.{bin,idx} and "
        "test.en-de.{en,de}.{bin,idx}, or plain text train.{en,de} and test.{en,de}. The preset tiny "
        "generates a small language pair."
    ),
    files={
        "when": {"data": "wmt17"},
        "folders": [".", "wmt17"],
        "wanted": [["dict.en.txt"], ["train.en-de.en.idx", "train.en"]],
        "imports": [
            "training-parallel-nc-v12.tgz",
            "training-parallel-commoncrawl.tgz",
            "training-parallel-europarl-v7.tgz",
            "test-full.tgz",
            "train.de",
            "test.en",
            "test.de",
            "*.en-de.*",
        ],
        "instead": "--preset tiny",
    },
    notes=[
        BLEU_NOTE,
        "With precision=fp16 on GPUs, gradients are sent in fp16, 422 MB per update as specified (tested on "
        "CPUs, not run on a GPU).",
        WIRE_NOTE,
    ],
    workers={"sensible": 32, "reason": "the global batch of 131072 tokens leaves each of 32 ranks 4096"},
    presets={
        "legacy": {
            "longest_test": 80,
            "longest_translation": 80,
            "reshuffle": False,
        },
        # The protocol of all throughput presets, on generated sentences with a small vocabulary; no goal.
        "throughput": {
            "data": "sample",
            "vocabulary": 512,
            "blocks": 10,
            "block_updates": 5,
            "blocks_after": 5,
        },
        "tiny": {
            "data": "sample",
            "vocabulary": 512,
            "longest": 60,
            "global_batch": 1024,
            "largest_pass": 512,
            "width": 64,
            "inner": 128,
            "layers": 2,
            "heads": 2,
            "attention_dropout": 0.0,
            "inner_dropout": 0.0,
            "learning_rate": 0.005,
            "warmup_updates": 60,
            "precision": "fp32",
            "validation_share": 1.0,
            "goal_full": 45,
            "goal_light": 10,
        },
    },
)


@dataclass
class SearchState:
    """The search's state. Keys and values of the target grow by one position per step; those of the source stay."""

    mask: Tensor  # (B, 1, 1, S), true where a source word is
    source: list[tuple[Tensor, Tensor]]  # per layer (B, H, S, D / H)
    target: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # per layer (B, K, H, T, D / H), none at first
    length: int = 0


class Transformer(TranslationModel):
    """Encoder and decoder. With V = 33 712 and the default parameters it has 210 808 832 numbers."""

    def __init__(self, p: Settings, padding: int = PADDING) -> None:
        super().__init__()
        self.width, self.dropout, self.padding = p.width, p.dropout, padding
        self.embedding = nn.Parameter(torch.empty(p.vocabulary, p.width))
        self.encoder = nn.ModuleList(EncoderLayer(p) for _ in range(p.layers))
        self.encoder_norm = nn.LayerNorm(p.width)
        self.decoder = nn.ModuleList(DecoderLayer(p) for _ in range(p.layers))
        self.decoder_norm = nn.LayerNorm(p.width)
        nn.init.normal_(self.embedding, 0.0, p.width**-0.5)
        with torch.no_grad():
            self.embedding[padding].zero_()

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Features [B, T, D] of target [B, T], given source [B, S]."""
        mask = self._mask(source)
        memory = self._encode(source, mask)
        x = self._embed(target, range(target.shape[1]))
        for layer in self.decoder:
            x = layer(x, memory, mask)
        features: Tensor = self.decoder_norm(x)
        return features

    def scores(self, features: Tensor) -> Tensor:
        """Scores of all words, [..., V], from features [..., D]."""
        return F.linear(features, self.embedding)

    def begin(self, source: Tensor, lengths: Tensor) -> SearchState:
        """The decoder's state before the first word, for source [B, S]."""
        mask = self._mask(source)
        memory = self._encode(source, mask)
        return SearchState(mask, [layer.source_memory(memory) for layer in self._decoder_layers()])

    def step(self, words: Tensor, state: SearchState) -> tuple[Tensor, None]:
        """Scores [B, K, V] after words [B, K]; no attention weights."""
        x = self._embed(words, range(state.length, state.length + 1))
        for index, layer in enumerate(self._decoder_layers()):
            before = state.target[index] if state.length else None
            x, grown = layer.step(x, state.source[index], state.mask, before)
            state.target[index : index + 1] = [grown]
        state.length += 1
        return self.scores(self.decoder_norm(x)), None

    def select(self, state: SearchState, sentences: Tensor, beams: Tensor) -> SearchState:
        """The state of chosen hypotheses: sentences [B'] of the B, and beams [B', K] of each."""
        rows = sentences[:, None]
        target = [(keys[rows, beams], values[rows, beams]) for keys, values in state.target]
        if len(sentences) == len(state.mask):
            return SearchState(state.mask, state.source, target, state.length)
        source = [(keys[sentences], values[sentences]) for keys, values in state.source]
        return SearchState(state.mask[sentences], source, target, state.length)

    def _decoder_layers(self) -> Iterator["DecoderLayer"]:
        for layer in self.decoder:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def _mask(self, source: Tensor) -> Tensor:
        return (source != self.padding)[:, None, None, :]

    def _encode(self, source: Tensor, mask: Tensor) -> Tensor:
        """source (B, S), mask (B, 1, 1, S) -> (B, S, D)."""
        x = self._embed(source, range(source.shape[1]))
        for layer in self.encoder:
            x = layer(x, mask)
        memory: Tensor = self.encoder_norm(x)
        return memory

    def _embed(self, words: Tensor, places: range) -> Tensor:
        """words (B, T) at `places`, or (B, K) hypotheses that are all at one place -> (B, T or K, D)."""
        x = F.embedding(words, self.embedding, self.padding) * math.sqrt(self.width)
        # Padding is on the right, so a word's place among the words is its place in the row.
        marks = sinusoids(places, self.width, self.padding + 1, x.device)
        return F.dropout(x + marks.to(x.dtype), self.dropout, self.training)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, p: Settings) -> None:
        super().__init__()
        self.own_norm = nn.LayerNorm(p.width)
        self.own = Attention(p)
        self.inner = FeedForward(p)
        self.dropout = p.dropout

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]; `mask` hides padding."""
        y = self.own_norm(x)
        x = x + F.dropout(self.own(y, self.own.keys_and_values(y), mask=mask), self.dropout, self.training)
        return x + F.dropout(self.inner(x), self.dropout, self.training)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source and feed-forward, each after a norm and added to its input."""

    def __init__(self, p: Settings) -> None:
        super().__init__()
        self.own_norm = nn.LayerNorm(p.width)
        self.own = Attention(p)
        self.attention_norm = nn.LayerNorm(p.width)
        self.attention = Attention(p)
        self.inner = FeedForward(p)
        self.dropout = p.dropout

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D], given the encoder's `memory` [B, S, D]."""
        y = self.own_norm(x)
        x = x + F.dropout(self.own(y, self.own.keys_and_values(y), causal=True), self.dropout, self.training)
        return self._after_own(x, self.attention.keys_and_values(memory), mask)

    def source_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """memory (B, S, D) -> keys and values that stay the same during a search."""
        return self.attention.keys_and_values(memory)

    def step(
        self, x: Tensor, source: tuple[Tensor, Tensor], mask: Tensor, target: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x (B, K, D), the newest position of every hypothesis -> the same behind this layer, and the grown cache."""
        y = self.own_norm(x).flatten(0, 1)[:, None]
        keys, values = (half.view(*x.shape[:2], *half.shape[1:]) for half in self.own.keys_and_values(y))
        if target is not None:
            keys, values = torch.cat([target[0], keys], 3), torch.cat([target[1], values], 3)
        x = x + self.own(y, (keys.flatten(0, 1), values.flatten(0, 1))).view_as(x)
        # To the source, the hypotheses of a sentence are like so many positions: its keys are not copied for each.
        return self._after_own(x, source, mask), (keys, values)

    def _after_own(self, x: Tensor, source: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        y = self.attention(self.attention_norm(x), source, mask=mask)
        x = x + F.dropout(y, self.dropout, self.training)
        return x + F.dropout(self.inner(x), self.dropout, self.training)


class FeedForward(nn.Module):
    """Norm, then two linear layers with a ReLU between."""

    def __init__(self, p: Settings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(p.width)
        self.up = nn.Linear(p.width, p.inner)
        self.down = nn.Linear(p.inner, p.width)
        self.dropout = p.inner_dropout
        for layer in (self.up, self.down):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        y: Tensor = self.down(F.dropout(F.relu(self.up(self.norm(x))), self.dropout, self.training))
        return y


class Attention(nn.Module):
    """Multi-head attention without biases. Queries, keys and values share a matrix, whose size sets Xavier's bound."""

    def __init__(self, p: Settings) -> None:
        super().__init__()
        self.heads = p.heads
        self.dropout = p.attention_dropout
        self.packed = nn.Parameter(torch.empty(3 * p.width, p.width))
        self.out = nn.Linear(p.width, p.width, bias=False)
        nn.init.xavier_uniform_(self.packed)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(
        self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """x (B, T, D), memory as `keys_and_values` gives it, mask (B, 1, 1, S) -> (B, T, D)."""
        width = x.shape[-1]
        queries = self._split(F.linear(x, self.packed[:width]))
        y = F.scaled_dot_product_attention(
            queries, *memory, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, is_causal=causal
        )
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """memory (B, S, D) -> two of (B, H, S, D / H)."""
        keys, values = F.linear(memory, self.packed[memory.shape[-1] :]).chunk(2, dim=-1)
        return self._split(keys), self._split(values)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


def sinusoids(places: range, width: int, first: int, device: torch.device) -> Tensor:
    """(len(places), width): sines, then cosines, of (first + place) x 10000^(-i / (width / 2 - 1)), i < width / 2."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=device) * (-math.log(10000.0) / (half - 1)))
    angles = torch.arange(first + places.start, first + places.stop, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


NAME = "wmt17_transformer"


def main(contract: Contract) -> None:
    """Read the corpus and train the Transformer to the BLEU goal."""
    need("sacrebleu")
    p = read_parameters(Settings, contract.parameters)
    if p.width % 2 or p.width % p.heads:
        raise TaskUsageError(
            f"a width of {p.width} is odd, or cannot be divided among {p.heads} heads",
            "--set width=1024 --set heads=16",
        )

    def write(folder: Path, seed: int) -> Path:
        write_sample(folder, train=4000, test=100, seed=seed)
        write_dictionary(folder, p.vocabulary - 1)
        return folder

    def read(folder: Path, cache: Path) -> Corpus:
        return read_corpus(folder, cache, p.vocabulary, p.longest, p.longest_test)

    with translation_session(contract, p, "WMT17", write, read) as (world, report, corpus):
        make_task(p, world, corpus).run(report)


@dataclass(frozen=True)
class WarmupInverseSqrt:
    """Linear from 0 to `target` at t = warmup, then target sqrt(warmup / t)."""

    target: float
    warmup: float

    def __call__(self, t: float) -> float:
        return self.target * t / self.warmup if t <= self.warmup else self.target * math.sqrt(self.warmup / t)


def make_task(p: Settings, world: World, corpus: Corpus) -> Translation:
    """The model, batches and search of this rank for the shared translation loop."""
    model = Transformer(p).to(world.device)
    passes = plan_passes(p.global_batch, p.largest_pass, world.size)
    batches = TokenBatches(corpus.train, passes, world.size, world.rank, world.contract.seed, p.reshuffle)

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
        text=corpus.words.decode,
        references=corpus.references,
        reference=corpus.reference,
        clip=None,
        loss_scale=LossScale(p.loss_scale, window=p.loss_scale_window),
        identity={
            "vocabulary": p.vocabulary,
            "network": [p.width, p.inner, p.layers, p.heads],
        },
    )
