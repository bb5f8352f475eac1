"""From text to BERT's two questions: which tokens were hidden, and does the second half follow the first?

A sample is [CLS] a [SEP] b [SEP], padding behind it. a and b are neighbors in the text, or, in half of the samples, b
comes from somewhere else. 15 % of the positions are asked for: 80 % of these show [MASK], 10 % a random token, 10 % the
token itself. One in ten samples is shorter. All of that follows from the seed, the epoch and the sample's number, so it
is the same on any number of ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from task_images.bert_pretraining.texts import (
    BEGIN,
    END,
    MASK,
    PADDING,
    SPECIAL,
    TEXT,
    WIKITEXT,
    fetch_texts,
    read_text,
)
from task_images.contract import EnvironmentUnfitError, TaskUsageError
from task_images.data import numpy_generator
from task_images.language.tokens import BYTES, Corpus, Part, python_text, synthetic_tokens
from task_images.report import DataIdentity

Numbers = npt.NDArray[Any]
SHARE = 0.15
SHORT_SHARE = 0.1


@dataclass(frozen=True)
class Specials:
    """Numbers of the special tokens; ordinary ones are those from `low` to below `high`, besides these."""

    padding: int
    begin: int
    end: int
    mask: int
    low: int
    high: int


@dataclass(frozen=True)
class Batch:
    """One pass. tokens, types [B, T]; mask [B, T], None: no padding anywhere; positions, labels [B, K]; follows [B] is
    0 if b follows a, else 1; weights [B]: 0 for samples that only fill a validation batch."""

    tokens: Tensor
    types: Tensor
    mask: Tensor | None
    positions: Tensor
    labels: Tensor
    follows: Tensor
    weights: Tensor
    terms: float


def load_bytes() -> tuple[Corpus, Specials]:
    """Bytes of the text that comes with Python, and five special tokens behind the 256 bytes."""
    return python_text(), Specials(BYTES, BYTES + 1, BYTES + 2, BYTES + 3, 1, BYTES)


def load_synthetic(vocabulary: int, tokens: int, seed: int) -> tuple[Corpus, Specials]:
    """Uniform random tokens; the special ones are the first five."""
    return synthetic_tokens(vocabulary, tokens, seed), Specials(0, 2, 3, 4, len(SPECIAL), vocabulary)


def load_text(folder: Path, vocabulary: int, source: str = TEXT) -> tuple[Corpus, Specials]:
    """The tokens of a text in `folder` (see `texts`) and its special pieces. Raises what `read_text` raises."""
    corpus, pieces = read_text(folder, source, vocabulary)
    padding, begin, end, mask = (pieces.index(piece) for piece in (PADDING, BEGIN, END, MASK))
    return corpus, Specials(padding, begin, end, mask, 0, len(pieces))


class Samples:
    """Samples of `length` tokens from one split; `asked` positions each."""

    def __init__(self, corpus: Corpus, split: str, length: int, specials: Specials, seed: int) -> None:
        self._tokens = getattr(corpus, split)
        self._text = length - 3
        self.count = len(self._tokens) // self._text
        if self.count < 2:
            raise EnvironmentUnfitError(
                f"{len(self._tokens)} tokens are too few for samples of {length}", "Use a smaller sequence_length."
            )
        self.length, self.asked = length, max(1, round(SHARE * length))
        self._specials, self._seed = specials, seed
        self._key = np.uint64(numpy_generator(seed, "sample").integers(1 << 62))

    def numbers(self, first: int, count: int) -> tuple[Numbers, Numbers]:
        """Epochs and numbers of the samples `first` ... in the endless stream of shuffled epochs."""
        epochs, inside = np.divmod(np.arange(first, first + count), self.count)
        found = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            found[epochs == epoch] = self._order(int(epoch))[inside[epochs == epoch]]
        return epochs, found

    def _order(self, epoch: int) -> Numbers:
        if getattr(self, "_cached", (None, None))[0] != epoch:
            order = numpy_generator(self._seed, "samples", epoch).permutation(self.count)
            self._cached = (epoch, order)
        return self._cached[1]

    def sizes(self, epochs: Numbers, numbers: Numbers) -> Numbers:
        """How many tokens of text these samples have."""
        draws = self._draw(epochs, numbers, 2)
        least = max(2 + self.asked, self._text // 2)
        short = least + (draws[:, 1] * (self._text + 1 - least)).astype(np.int64)
        return np.where(draws[:, 0] < SHORT_SHARE, short, self._text)

    def make(self, epochs: Numbers, numbers: Numbers) -> Mapping[str, Numbers]:
        """Samples at once: tokens, types and mask [B, T], positions and labels [B, K], follows [B]."""
        special, asked, length = self._specials, self.asked, self.length
        draws = self._draw(epochs, numbers, 4 + length + 2 * asked)[:, 2:]
        keys, kinds, random = np.split(draws[:, 2:], [length, length + asked], axis=1)
        size = self.sizes(epochs, numbers)
        half = size // 2
        follows = draws[:, 0] < 0.5
        other = np.where(
            follows, numbers, (numbers + 1 + (draws[:, 1] * (self.count - 1)).astype(np.int64)) % self.count
        )
        place, half, size = np.arange(length), half[:, None], size[:, None]
        is_first, is_second = (place >= 1) & (place <= half), (place >= half + 2) & (place <= size + 1)
        # [CLS] a [SEP] b [SEP]: the text of a begins at place 1; that of b, whose own half it is, at half + 2.
        source = np.where(is_first, numbers[:, None] * self._text + place - 1, other[:, None] * self._text + place - 2)
        rows = self._tokens[np.clip(source, 0, len(self._tokens) - 1)].astype(np.int64)
        rows = np.where(is_first | is_second, rows, special.padding)
        rows[:, 0] = special.begin
        rows[(place == half + 1) | (place == size + 2)] = special.end
        mask = place <= size + 2
        types = (mask & (place >= half + 2)).astype(np.int64)
        # The places with the least keys: without repetition, all equally likely.
        keys = np.where(is_first | is_second, keys, 2.0)
        positions = np.sort(np.argpartition(keys, asked - 1, axis=1)[:, :asked], axis=1)
        labels = np.take_along_axis(rows, positions, axis=1)
        others = special.low + (random * (special.high - special.low)).astype(np.int64)
        shown = np.where(kinds < 0.8, special.mask, np.where(kinds >= 0.9, others, labels))
        np.put_along_axis(rows, positions, shown, axis=1)
        found = {"tokens": rows, "types": types, "mask": mask, "positions": positions, "labels": labels}
        return {**found, "follows": np.where(follows, 0, 1)}

    def _draw(self, epochs: Numbers, numbers: Numbers, count: int) -> npt.NDArray[np.float64]:
        """Uniform numbers from 0 to below 1, `count` for each sample, that follow from seed, epoch and number alone:
        splitmix64 (Steele et al. 2014) of all samples at once."""
        with np.errstate(over="ignore"):
            own = _mix(_mix(self._key + epochs.astype(np.uint64) * _ODD) + numbers.astype(np.uint64) * _ODD)
            bits = _mix(own[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _ODD)
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's function: every bit of the result depends on every bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def make_batch(samples: Samples, epochs: Numbers, numbers: Numbers, counted: Numbers, terms: float) -> Batch:
    """Samples as tensors: tokens, types and mask [B, T], positions and labels [B, K], follows [B].

    `counted` says which samples count; `terms` is what the whole update's sum of losses is divided by.
    """
    columns = {name: torch.from_numpy(column) for name, column in samples.make(epochs, numbers).items()}
    mask = columns["mask"]
    return Batch(
        columns["tokens"],
        columns["types"],
        None if bool(mask.all()) else mask,
        columns["positions"],
        columns["labels"],
        columns["follows"],
        torch.from_numpy(counted.astype(np.float32)),
        terms,
    )


def training_batches(samples: Samples, update: int, global_batch: int, part: Part) -> Iterator[Batch]:
    """This rank's passes of one update; the terms are the positions asked for in the whole update.

    Short samples come last, so that the passes before them have no padding, and attention no mask.
    """
    share = global_batch // part.ranks
    epochs, numbers = samples.numbers(update * global_batch + part.rank * share, share)
    order = np.argsort(-samples.sizes(epochs, numbers), kind="stable")
    epochs, numbers = epochs[order], numbers[order]
    for first in range(0, share, part.micro_batch):
        chosen = slice(first, first + part.micro_batch)
        counted = np.ones(len(numbers[chosen]))
        yield make_batch(samples, epochs[chosen], numbers[chosen], counted, float(global_batch * samples.asked))


def validation_batches(samples: Samples, most: int, part: Part) -> Iterator[Batch]:
    """The first `most` samples, always with the same positions hidden, in equally many passes on every rank."""
    count = min(most, samples.count)
    for number in range(-(-count // (part.micro_batch * part.ranks))):
        first = (number * part.ranks + part.rank) * part.micro_batch
        wanted = np.arange(first, first + part.micro_batch)
        counted = wanted < count
        numbers = np.minimum(wanted, count - 1)
        yield make_batch(samples, np.zeros_like(wanted), numbers, counted, float(counted.sum()))


def legacy_batch(vocabulary: int, length: int, size: int, seed: int, terms: float) -> Batch:
    """The batch of the benchmark of 2020: random tokens; types, labels and answers are all 0, every position is asked
    for, and nothing is masked."""
    stream = numpy_generator(seed, "legacy batch")
    tokens = torch.from_numpy(stream.integers(0, vocabulary, (size, length)))
    zeros = torch.zeros_like(tokens)
    positions = torch.arange(length).repeat(size, 1)
    return Batch(tokens, zeros, None, positions, zeros, zeros[:, 0], torch.ones(size), terms)


DEFAULT_VOCABULARY = 30_528  # BERT's 30,522, padded


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Fetch the text that the parameters name, unless it is there, and encode it once for all runs."""
    source = str(parameters.get("data", WIKITEXT))
    if source not in (WIKITEXT, TEXT):
        raise TaskUsageError(f"data={source} needs no files", "Runs generate this data themselves.")
    fetch_texts(folder, source)
    return load_text(folder, int(str(parameters.get("vocabulary") or DEFAULT_VOCABULARY)), source)[0].identify()
