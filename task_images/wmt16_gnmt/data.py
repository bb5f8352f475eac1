"""WMT16 English-German as GNMT wants it, in the data folder or in its sub-folder wmt16:

    vocab.bpe.32000                      the joint vocabulary
    train.tok.clean.bpe.32000.{en,de}    training pairs, tokenized and cut into subwords; or the prepacked file of them,
                                         train.tok.clean.bpe.32000.bin
    newstest2014.tok.bpe.32000.{en,de}   test pairs, likewise
    newstest2014.de                      the references as written, if there; otherwise put together from the test pairs

`prepare.py` makes them from raw text. Text is encoded once and kept in the cache.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from task_images.cache import cached_folder
from task_images.contract import EnvironmentUnfitError
from task_images.published import WMT16, fetch_published
from task_images.report import DataIdentity, compare_data
from task_images.translation.corpora import Part, join_parts
from task_images.translation.pairs import Pairs, digest_pairs, encode_text, lines, read_encoded, read_prepacked
from task_images.wmt16_gnmt.bpe import undo
from task_images.wmt16_gnmt.prepare import LANGUAGES, REFERENCE, TEST, TRAIN, VOCABULARY
from task_images.wmt16_gnmt.prepare import prepare as prepare_text

MARKS = ("<pad>", "<unk>", "<s>", "</s>")
PADDING, UNKNOWN, START, END = range(4)
MULTIPLE = 8  # the vocabulary's size, for the sake of tensor cores


class Vocabulary:
    """The subwords of a vocabulary file, one a line, behind four marks. `size` is rounded up to a multiple of 8."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = [*MARKS, *words]
        self._numbers = {word: number for number, word in enumerate(self._words)}
        if len(self._numbers) != len(self._words):
            raise EnvironmentUnfitError("the vocabulary contains a word twice", "Prepare the data again.")
        self.size = -(-len(self._words) // MULTIPLE) * MULTIPLE

    def encode(self, line: str) -> list[int]:
        """The numbers of subwords parted by blanks, between START and END."""
        return [START, *(self._numbers.get(word, UNKNOWN) for word in line.split()), END]

    def text(self, numbers: Iterable[int]) -> str:
        """The sentence of `numbers`: subwords joined, punctuation back in its place; marks count as nothing."""
        words = (self._words[number] for number in numbers if number < len(self._words) and number not in (0, 2, 3))
        text: str = self._detokenizer.detokenize(undo(" ".join(words)).split())
        return text

    @cached_property
    def _detokenizer(self) -> Any:
        from sacremoses import MosesDetokenizer

        return MosesDetokenizer("de")


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary in `path`. Raises EnvironmentUnfitError if a line is not exactly one word."""
    words = list(lines(path))
    for number, word in enumerate(words, start=1):
        if len(word.split()) != 1:
            raise EnvironmentUnfitError(
                f"line {number} of {path} is not one word: {word[:40]!r}", "Prepare the data again."
            )
    return Vocabulary(words)


FOLDER = "wmt16"
FORM = 1
# Training pairs after cleaning, before the limit of length (as the MLPerf reference logs them); newstest2014, complete.
OFFICIAL = {"training pairs": 4_068_191, "test pairs": 3003}


@dataclass(frozen=True)
class Corpus:
    """Sources have start and end marks, targets the end mark only. `texts` are the test targets put together."""

    vocabulary: Vocabulary
    train: Pairs
    test: Pairs
    texts: list[str]
    references: list[str]
    reference: str
    read: Mapping[str, int]  # pairs before any was left out for its length
    is_prepacked: bool

    def identify(self) -> DataIdentity:
        """Whether these are the published pairs. A prepacked file does not say how many were left out of it."""
        digest = digest_pairs(self.train, self.test)
        found = compare_data(
            self.read, {"test pairs": OFFICIAL["test pairs"]} if self.is_prepacked else OFFICIAL, digest
        )
        if self.is_prepacked and found.official:
            return replace(found, official=None, reason="a prepacked file does not say what was left out of it")
        return found


def read_corpus(folder: Path, cache: Path, longest: int, longest_test: int) -> Corpus:
    """The corpus in `folder`; training pairs with more than `longest` numbers on a side, marks included, are left out.

    `longest_test` does the same to the test pairs; 0 leaves none out. Raises EnvironmentUnfitError naming the file that
    is missing or wrong.
    """
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    vocabulary = read_vocabulary(folder / VOCABULARY)
    train = _read_pairs(folder, cache, TRAIN, vocabulary, longest).within(longest)
    train.check(vocabulary.size, f"the training data in {folder}")
    test = _read_pairs(folder, cache, TEST, vocabulary, 0)
    test.check(vocabulary.size, f"the test data in {folder}")
    read = {"training pairs": len(train) + sum(train.left_out.values()), "test pairs": len(test)}
    texts = [vocabulary.text(test.target.sentence(index)) for index in range(len(test))]
    references, reference = texts, "put together from the test pairs"
    if (folder / REFERENCE).is_file():
        references, reference = list(lines(folder / REFERENCE)), REFERENCE
        if len(references) != len(test):
            raise EnvironmentUnfitError(
                f"{REFERENCE} has {len(references)} lines, but there are {len(test)} test pairs"
            )
    if longest_test:
        kept = [max(pair) <= longest_test for pair in zip(test.source.lengths, test.target.lengths, strict=True)]
        texts = [text for text, keep in zip(texts, kept, strict=True) if keep]
        references = [text for text, keep in zip(references, kept, strict=True) if keep]
        test = test.within(longest_test)
    return Corpus(
        vocabulary, _without_starts(train), _without_starts(test), texts, references, reference, read,
        is_prepacked=(folder / f"{TRAIN}.bin").is_file(),
    )  # fmt: skip


def _read_pairs(folder: Path, cache: Path, name: str, vocabulary: Vocabulary, longest: int) -> Pairs:
    if (folder / f"{name}.bin").is_file():
        return read_prepacked(folder / f"{name}.bin", vocabulary.size)
    texts = (folder / f"{name}.{LANGUAGES[0]}", folder / f"{name}.{LANGUAGES[1]}")
    if not texts[0].is_file():
        raise EnvironmentUnfitError(
            f"there is neither {name}.bin nor {texts[0].name} in {folder}",
            "mlbench data prepare wmt16_gnmt fetches and makes it; the preset tiny generates data.",
        )

    def build(place: Path) -> None:
        encode_text(texts, vocabulary.encode, place, vocabulary.size, longest)

    inputs = [*texts, folder / VOCABULARY]
    entry = cached_folder(cache, f"wmt16-{name}-{longest}", FORM, lambda: inputs, build)
    return read_encoded(entry.folder)


def _without_starts(pairs: Pairs) -> Pairs:
    return Pairs(pairs.source, pairs.target.without_first(), pairs.left_out)


RAW = "raw"
PARTS = (
    Part("de-en.tgz", ("europarl-v7.de-en.en", "europarl-v7.de-en.de")),
    Part("training-parallel-commoncrawl.tgz", ("commoncrawl.de-en.en", "commoncrawl.de-en.de")),
    Part("training-parallel-nc-v11.tgz", ("news-commentary-v11.de-en.en", "news-commentary-v11.de-en.de")),
)
TEST_PART = Part("dev.tgz", ("newstest2014-deen-ref.en.sgm", "newstest2014-deen-src.de.sgm"))


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Fetch the text and cut it into subwords if the folder has neither, and encode the pairs, once for all runs with
    the same limit of length."""
    place = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    if not (place / VOCABULARY).is_file():
        raw = place / RAW
        if not all(
            (raw / f"{name}.{language}").is_file() for name in ("train", "newstest2014") for language in LANGUAGES
        ):
            fetch_published(WMT16, place, print)
            join_parts(place, PARTS, raw, "train", print)
            join_parts(place, [TEST_PART], raw, "newstest2014", print)
        print(f"{raw}: tokenizing, and learning 32,000 merges; this takes hours for the whole corpus", flush=True)
        prepare_text(raw, place, 32_000)
    longest, longest_test = (int(str(parameters[name])) for name in ("longest", "longest_test"))
    return read_corpus(folder, folder, longest, longest_test).identify()


def validation_arrays(folder: Path) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
    """Sentences [3003] of newstest2014 in English, and their German references, as text: for `corpus_bleu`."""
    place = (folder / FOLDER if (folder / FOLDER).is_dir() else folder) / RAW
    source, target = (np.array(list(lines(place / f"newstest2014.{language}"))) for language in LANGUAGES)
    return source, target
