"""WMT16 English-German as GNMT wants it, in the data folder or in its sub-folder wmt16:

    vocab.bpe.32000                      the joint vocabulary
    train.tok.clean.bpe.32000.{en,de}    training pairs, tokenized and cut into subwords
    newstest2014.tok.bpe.32000.{en,de}   test pairs, likewise
    newstest2014.de                      the references as written, if there; otherwise put together from the test pairs

`prepare` makes them from raw text. Text is encoded once and kept in the cache.
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, redirect_stderr
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from task_images.contract import EnvironmentUnfitError, need
from task_images.published import WMT16
from task_images.report import DataIdentity
from task_images.translation import corpora
from task_images.translation.corpora import (
    LANGUAGES,
    Pairs,
    Part,
    encode_once,
    fetch_text,
    find_folder,
    lines,
    parallel_lines,
    read_sentences,
)

SEPARATOR = "@@"  # ends every subword but the last of a word


def undo(line: str) -> str:
    """Subwords parted by blanks back to words."""
    return f"{line} ".replace(f"{SEPARATOR} ", "").rstrip()


# --- from raw text ----------------------------------------------------------------------------------------------------
# Moses tokenization, cleaning, joint byte pair encoding with subword-nmt (Sennrich, Haddow, Birch 2016,
# arXiv:1508.07909), vocabulary. The raw folder has train.en, train.de,
# newstest2014.en, newstest2014.de: one sentence a line on both sides. Made are train.tok.clean.bpe.32000.{en,de},
# newstest2014.tok.bpe.32000.{en,de}, newstest2014.de, bpe.32000 and vocab.bpe.32000. Nothing but counts of words and
# the line at hand is in memory.

TRAIN, TEST = "train.tok.clean.bpe.32000", "newstest2014.tok.bpe.32000"
CODES, VOCABULARY, REFERENCE = "bpe.32000", "vocab.bpe.32000", "newstest2014.de"
LONGEST = 80  # words of a training sentence, before they are cut into subwords


def prepare(raw: Path, out: Path, merges: int) -> dict[str, int]:
    """Make the files in `out` from those in `raw`; returns how many training pairs were kept and left out.

    A training pair is left out if a side is empty, has more than 80 words, or holds a character beyond latin-1. The
    test set keeps every line.
    """
    need("sacremoses", "subword_nmt")
    from subword_nmt.apply_bpe import BPE
    from subword_nmt.learn_bpe import learn_bpe

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as name:
        work = Path(name)
        kept = _tokenize(raw, "train", work, clean=True)
        test = _tokenize(raw, "newstest2014", work, clean=False)
        with (out / CODES).open("w", encoding="utf-8") as codes, ExitStack() as stack:
            if not sys.stderr.isatty():  # a progress bar of hours would fill a log
                stack.enter_context(redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
            learn_bpe(chain(*(lines(work / f"train.{language}") for language in LANGUAGES)), codes, merges)
        with (out / CODES).open(encoding="utf-8") as codes:
            pairs = BPE(codes, separator=SEPARATOR)
        vocabulary: Counter[str] = Counter()
        for language in LANGUAGES:
            vocabulary.update(_encode(pairs, work / f"train.{language}", out / f"{TRAIN}.{language}"))
            _encode(pairs, work / f"newstest2014.{language}", out / f"{TEST}.{language}")
    words = sorted(vocabulary, key=lambda word: (-vocabulary[word], word))
    (out / VOCABULARY).write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    (out / REFERENCE).write_text("".join(f"{line}\n" for line in lines(raw / REFERENCE)), encoding="utf-8")
    return {**kept, "test pairs": test["kept"], "vocabulary": len(words)}


def _tokenize(raw: Path, name: str, work: Path, clean: bool) -> dict[str, int]:
    from sacremoses import MosesTokenizer

    tokenizers = [MosesTokenizer(language) for language in LANGUAGES]
    counts = {"kept": 0, "left out": 0}
    with ExitStack() as stack:
        files = [
            stack.enter_context((work / f"{name}.{language}").open("w", encoding="utf-8")) for language in LANGUAGES
        ]
        for pair in parallel_lines(*(raw / f"{name}.{language}" for language in LANGUAGES)):
            texts = [
                tokenizer.tokenize(line, return_str=True) for tokenizer, line in zip(tokenizers, pair, strict=True)
            ]
            if clean and not all(_is_clean(text) for text in texts):
                counts["left out"] += 1
                continue
            counts["kept"] += 1
            for file, text in zip(files, texts, strict=True):
                file.write(f"{text}\n")
    return counts


def _is_clean(text: str) -> bool:
    return 1 <= len(text.split()) <= LONGEST and all(ord(char) < 256 for char in text)


def _encode(pairs: Any, source: Path, target: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    with target.open("w", encoding="utf-8") as file:
        for line in lines(source):
            encoded = pairs.process_line(line)
            counts.update(encoded.split())
            file.write(f"{encoded}\n")
    return counts


# --- the data folder --------------------------------------------------------------------------------------------------


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
    """The vocabulary in `path`. Raises EnvironmentUnfitError if a line is not exactly one word, or there is none."""
    words = list(lines(path))
    if not words:
        raise EnvironmentUnfitError(f"{path} is empty", "Delete it and prepare the data again.")
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
        return encode_once(cache, "wmt16_gnmt", name, FORM, place, place / VOCABULARY, vocabulary, longest)

    found = corpora.read_corpus(place, vocabulary, read_pairs, REFERENCE, OFFICIAL, longest, longest_test)
    return replace(
        found,
        train=_without_starts(found.train),
        test=_without_starts(found.test),
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
        prepare(raw, place, 32_000)
    longest, longest_test = (int(str(parameters[name])) for name in ("longest", "longest_test"))
    return read_corpus(folder, folder, longest, longest_test).identify()


def validation_arrays(folder: Path) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
    """Sentences [3003] of newstest2014 in English, and their German references, as text: for `corpus_bleu`."""
    return read_sentences(find_folder(folder, FOLDER) / RAW, "newstest2014")
