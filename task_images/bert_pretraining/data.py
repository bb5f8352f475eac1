"""From text to BERT's two questions: which tokens were hidden, and does the second half follow the first?

A sample is [CLS] a [SEP] b [SEP], padding behind it. a and b are neighbours in the text, or, in half of the samples, b
comes from somewhere else. 15 % of the positions are asked for: 80 % of these show [MASK], 10 % a random token, 10 % the
token itself. One in ten samples is shorter. All of that follows from the seed, the epoch and the sample's number, so it
is the same on any number of ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from task_images.bert_pretraining.wordpiece import BEGIN, END, MASK, PADDING, SPECIAL, WordPiece, build_vocabulary
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError
from task_images.harness.language.tokens import BYTES, Corpus, Part, move_tensors, python_text, synthetic_tokens
from task_images.harness.seeds import numpy_generator

SHARE = 0.15
SHORT_SHARE = 0.1
SPLITS = {"train": "train.txt", "valid": "valid.txt"}
VOCABULARY = "vocab.txt"


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

    def to(self, device: torch.device) -> "Batch":
        """The same on `device`, without waiting for the transfer."""
        return move_tensors(self, device)


def load_bytes() -> tuple[Corpus, Specials]:
    """Bytes of the text that comes with Python, and five special tokens behind the 256 bytes."""
    return python_text(), Specials(BYTES, BYTES + 1, BYTES + 2, BYTES + 3, 1, BYTES)


def load_synthetic(vocabulary: int, tokens: int, seed: int) -> tuple[Corpus, Specials]:
    """Uniform random tokens; the special ones are the first five."""
    return synthetic_tokens(vocabulary, tokens, seed), Specials(0, 2, 3, 4, len(SPECIAL), vocabulary)


def load_text(folder: Path, vocabulary: int) -> tuple[Corpus, Specials]:
    """train.txt and valid.txt in `folder`, by the WordPiece vocabulary in vocab.txt, or by one built from train.txt.

    Raises EnvironmentUnfitError if a file is missing, TaskUsageError if the vocabulary is larger than the model's.
    """
    texts = {split: _read(folder / name) for split, name in SPLITS.items()}
    pieces = _find_vocabulary(folder, texts["train"], vocabulary)
    if len(pieces.pieces) > vocabulary:
        raise TaskUsageError(
            f"{folder / VOCABULARY} has {len(pieces.pieces)} pieces, the model's vocabulary {vocabulary}",
            f"--set vocabulary={-(-len(pieces.pieces) // 8) * 8}",
        )
    numbers = {split: np.asarray(pieces.encode(text), np.uint32) for split, text in texts.items()}
    size = len(texts["train"].encode()) / max(1, len(numbers["train"]))
    corpus = Corpus(
        numbers["train"], numbers["valid"], len(pieces.pieces), None, "text, WordPiece", bytes_per_token=size
    )
    padding, begin, end, mask = (pieces.numbers[piece] for piece in (PADDING, BEGIN, END, MASK))
    return corpus, Specials(padding, begin, end, mask, 0, len(pieces.pieces))


def _find_vocabulary(folder: Path, text: str, size: int) -> WordPiece:
    path = folder / VOCABULARY
    if path.is_file():
        try:
            return WordPiece(_read(path).splitlines())
        except ValueError as error:
            raise EnvironmentUnfitError(f"{path}: {error}", "One piece a line, as BERT's vocab.txt.") from None
    return WordPiece(build_vocabulary(text.splitlines(), size))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise EnvironmentUnfitError(
            f"there is no {path}", "Put train.txt and valid.txt there, or --preset tiny, or --set data=synthetic."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentUnfitError(f"{path} cannot be read: {error}", "It must be UTF-8.") from None


class Samples:
    """Samples of `length` tokens from one split; `asked` positions each."""

    def __init__(self, corpus: Corpus, split: str, length: int, specials: Specials, seed: int) -> None:
        self._tokens = getattr(corpus, split)
        self._text = length - 3
        self.count = len(self._tokens) // self._text
        if self.count < 2:
            raise EnvironmentUnfitError(
                f"{len(self._tokens)} tokens are too few for samples of {length}", "Take a smaller sequence_length."
            )
        self.length, self.asked = length, max(1, round(SHARE * length))
        self._specials, self._seed = specials, seed

    def numbers(self, first: int, count: int) -> list[tuple[int, int]]:
        """(epoch, number) of the samples `first` ... in the endless stream of shuffled epochs."""
        found = []
        for place in range(first, first + count):
            epoch, inside = divmod(place, self.count)
            found.append((epoch, int(self._order(epoch)[inside])))
        return found

    def _order(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if getattr(self, "_cached", (None, None))[0] != epoch:
            order = numpy_generator(self._seed, "samples", epoch).permutation(self.count)
            self._cached = (epoch, order)
        return self._cached[1]

    def make(self, epoch: int, number: int) -> Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
        """One sample: tokens, types, mask, positions, labels, follows."""
        special, stream = self._specials, numpy_generator(self._seed, "sample", epoch, number)
        size = self._text
        if stream.random() < SHORT_SHARE:
            size = int(stream.integers(max(2 + self.asked, self._text // 2), self._text + 1))
        half = size // 2
        follows = stream.random() < 0.5
        other = number if follows else int((number + stream.integers(1, self.count)) % self.count)
        first = self._tokens[number * self._text :][:half]
        second = self._tokens[other * self._text + half :][: size - half]
        row = np.full(self.length, special.padding, np.int64)
        row[: size + 3] = [special.begin, *first, special.end, *second, special.end]
        types, mask = np.zeros(self.length, np.int64), np.zeros(self.length, np.int64)
        types[half + 2 : size + 3] = 1
        mask[: size + 3] = 1
        places = np.concatenate([np.arange(1, half + 1), np.arange(half + 2, size + 2)])
        positions = np.sort(stream.choice(places, self.asked, replace=False))
        labels = row[positions].copy()
        draw = stream.random(self.asked)
        row[positions[draw < 0.8]] = special.mask
        random = stream.integers(special.low, special.high, self.asked)
        row[positions[draw >= 0.9]] = random[draw >= 0.9]
        found = {"tokens": row, "types": types, "mask": mask, "positions": positions, "labels": labels}
        return {**found, "follows": np.asarray(0 if follows else 1)}


def make_batch(samples: Samples, wanted: list[tuple[int, int]], counted: list[bool], terms: float) -> Batch:
    """Samples as tensors: tokens, types and mask [B, T], positions and labels [B, K], follows [B].

    `counted` says which samples count; `terms` is what the whole update's sum of losses is divided by.
    """
    rows = [samples.make(*one) for one in wanted]
    columns = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    mask = columns["mask"].bool()
    return Batch(
        columns["tokens"],
        columns["types"],
        None if bool(mask.all()) else mask,
        columns["positions"],
        columns["labels"],
        columns["follows"],
        torch.tensor(counted, dtype=torch.float32),
        terms,
    )


def training_batches(samples: Samples, update: int, global_batch: int, part: Part) -> Iterator[Batch]:
    """This rank's passes of one update; the terms are the positions asked for in the whole update."""
    share = global_batch // part.ranks
    own = samples.numbers(update * global_batch + part.rank * share, share)
    for first in range(0, share, part.micro_batch):
        wanted = own[first : first + part.micro_batch]
        yield make_batch(samples, wanted, [True] * len(wanted), float(global_batch * samples.asked))


def validation_batches(samples: Samples, most: int, part: Part) -> Iterator[Batch]:
    """The first `most` samples, always with the same positions hidden, in equally many passes on every rank."""
    count = min(most, samples.count)
    for number in range(-(-count // (part.micro_batch * part.ranks))):
        first = (number * part.ranks + part.rank) * part.micro_batch
        wanted = range(first, first + part.micro_batch)
        counted = [at < count for at in wanted]
        yield make_batch(samples, [(0, min(at, count - 1)) for at in wanted], counted, float(sum(counted)))


def legacy_batch(vocabulary: int, length: int, size: int, seed: int, terms: float) -> Batch:
    """The batch of the benchmark of 2020: random tokens; types, labels and answers are all 0, every position is asked
    for, and nothing is masked."""
    stream = numpy_generator(seed, "legacy batch")
    tokens = torch.from_numpy(stream.integers(0, vocabulary, (size, length)))
    zeros = torch.zeros_like(tokens)
    positions = torch.arange(length).repeat(size, 1)
    return Batch(tokens, zeros, None, positions, zeros, zeros[:, 0], torch.ones(size), terms)
