"""WMT16 English-German as GNMT wants it, in the data folder or in its sub-folder wmt16:

    vocab.bpe.32000                      the joint vocabulary
    train.tok.clean.bpe.32000.{en,de}    training pairs, tokenized and cut into subwords; or the prepacked file of them,
                                         train.tok.clean.bpe.32000.bin
    newstest2014.tok.bpe.32000.{en,de}   test pairs, likewise
    newstest2014.de                      the references as written, if there; otherwise put together from the test pairs

`prepare.py` makes them from raw text. Text is encoded once and kept in the cache.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from task_images.contract import EnvironmentUnfitError
from task_images.published import WMT16
from task_images.report import DataIdentity
from task_images.translation import corpora
from task_images.translation.corpora import LANGUAGES, Part, encode_once, fetch_text, find_folder, read_sentences
from task_images.translation.pairs import Pairs, lines, read_prepacked
from task_images.wmt16_gnmt.bpe import undo
from task_images.wmt16_gnmt.prepare import REFERENCE, TEST, TRAIN, VOCABULARY
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

    def encode(self, text: str) -> list[int]:
        """The numbers of subwords parted by blanks, between START and END."""
        return [START, *(self._numbers.get(word, UNKNOWN) for word in text.split()), END]

    def decode(self, numbers: Iterable[int]) -> str:
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


Corpus = corpora.Corpus[Vocabulary]


def read_corpus(folder: Path, cache: Path, longest: int, longest_test: int) -> Corpus:
    """The corpus in `folder`; training pairs with more than `longest` numbers on a side, marks included, are left out.
    Sources have start and end marks, targets the end mark only.

    `longest_test` does the same to the test pairs; 0 leaves none out. Raises EnvironmentUnfitError naming the file that
    is missing or wrong.
    """
    place = find_folder(folder, FOLDER)
    vocabulary = read_vocabulary(place / VOCABULARY)

    def read_pairs(part: str, longest: int) -> Pairs:
        name = TRAIN if part == "train" else TEST
        if (place / f"{name}.bin").is_file():
            return read_prepacked(place / f"{name}.bin", vocabulary.size)
        texts = (place / f"{name}.{LANGUAGES[0]}", place / f"{name}.{LANGUAGES[1]}")
        if not texts[0].is_file():
            raise EnvironmentUnfitError(
                f"there is neither {name}.bin nor {texts[0].name} in {place}",
                "mlbench data prepare wmt16_gnmt fetches and makes it; the preset tiny generates data.",
            )
        return encode_once(cache, f"wmt16-{name}", FORM, texts, place / VOCABULARY, vocabulary, longest)

    found = corpora.read_corpus(place, vocabulary, read_pairs, REFERENCE, OFFICIAL, longest, longest_test)
    return replace(
        found,
        train=_without_starts(found.train),
        test=_without_starts(found.test),
        is_partial=(place / f"{TRAIN}.bin").is_file(),
    )


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
    place = find_folder(folder, FOLDER)
    if not (place / VOCABULARY).is_file():
        raw = place / RAW
        fetch_text(WMT16, place, raw, {"train": PARTS, "newstest2014": [TEST_PART]})
        print(f"{raw}: tokenizing, and learning 32,000 merges; this takes hours for the whole corpus", flush=True)
        prepare_text(raw, place, 32_000)
    longest, longest_test = (int(str(parameters[name])) for name in ("longest", "longest_test"))
    return read_corpus(folder, folder, longest, longest_test).identify()


def validation_arrays(folder: Path) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
    """Sentences [3003] of newstest2014 in English, and their German references, as text: for `corpus_bleu`."""
    return read_sentences(find_folder(folder, FOLDER) / RAW, "newstest2014")
