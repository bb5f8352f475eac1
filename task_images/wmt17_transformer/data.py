"""WMT17 English-German as the Transformer wants it: the official binary form, or plain text beside the dictionary.

In the data folder, or in its sub-folder wmt17:

    dict.en.txt                                 the reference dictionary (of both languages)
    train.en-de.en.{bin,idx}, train.en-de.de.*  the training pairs, encoded; or train.en and train.de, plain text
    test.en-de.en.*, test.en-de.de.*            the test pairs, encoded; or test.en and test.de, plain text
    test.de                                     the references as text, if there; otherwise decoded from the test pairs

Plain text is encoded once and kept in the cache.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from task_images.contract import EnvironmentUnfitError
from task_images.published import WMT17
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
    read_indexed,
    read_sentences,
)

# --- subtokens --------------------------------------------------------------------------------------------------------
# The tokenizer of WMT17's reference dictionary (that of Tensor2Tensor), exact in both directions. Text is cut where
# letters and digits meet anything else; a single blank between two words is implied. In each piece `\` becomes `\\`,
# `_` becomes `\u`, an unknown character `\CODE;`, and `_` marks its end. Then the longest known subtoken is taken, from
# left to right.
#
# The dictionary has one subtoken a line in single quotes, first '<pad>_' and '<EOS>_'. The number of a subtoken is its
# line, from 1; 0 is unused, and unused numbers follow until there are 33 712.

PADDING, END = 1, 2
VOCABULARY = 33_712
_RESERVED = ("<pad>_", "<EOS>_")
_ESCAPES = "\\_u;0123456789"
_ESCAPED = re.compile(r"\\u|\\\\|\\([0-9]+);")


class Subtokens:
    """Encodes texts as numbers and back. `size` counts the unused numbers too."""

    def __init__(self, subtokens: Iterable[str], size: int) -> None:
        self._subtokens = ["", *subtokens]
        if tuple(self._subtokens[1:3]) != _RESERVED:
            raise EnvironmentUnfitError(f"the dictionary does not begin with {' and '.join(_RESERVED)}")
        if len(self._subtokens) > size:
            raise EnvironmentUnfitError(
                f"the dictionary holds {len(self._subtokens) - 1} subtokens, the model has room for {size - 1}",
                f"Run with --set vocabulary={-(-len(self._subtokens) // 8) * 8}.",
            )
        self.size = size
        # A text that says "<pad>_" must not become padding.
        ordinary = (
            (text, number) for number, text in enumerate(self._subtokens) if text and number not in (PADDING, END)
        )
        self._numbers = dict(ordinary)
        self._alphabet = set("".join(self._numbers)) | set(_ESCAPES)
        self._longest = max(map(len, self._numbers), default=1)
        self._encode_piece = lru_cache(maxsize=1 << 18)(self._encode_new_piece)

    def encode(self, text: str) -> list[int]:
        """The numbers of `text`, END last. Raises EnvironmentUnfitError if the dictionary lacks a needed character."""
        numbers = [number for piece in _cut(text) for number in self._encode_piece(piece)]
        return [*numbers, END]

    def decode(self, numbers: Iterable[int]) -> str:
        """The text of `numbers` without marks; unused numbers count as nothing."""
        text = "".join(self._subtokens[number] for number in numbers if 2 < number < len(self._subtokens))
        return _join([_unescape(piece) for piece in text.split("_") if piece])

    def _encode_new_piece(self, piece: str) -> tuple[int, ...]:
        text = piece.replace("\\", "\\\\").replace("_", "\\u")
        text = "".join(char if char in self._alphabet else f"\\{ord(char)};" for char in text) + "_"
        found = []
        start = 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                if (number := self._numbers.get(text[start:end])) is not None:
                    break
            else:
                raise EnvironmentUnfitError(
                    f"the dictionary cannot represent {text[start]!r}, which {piece!r} needs",
                    "Use the official dictionary.",
                )
            found.append(number)
            start = end
        return tuple(found)


def read_dictionary(path: Path, size: int = VOCABULARY) -> Subtokens:
    """The tokenizer of the dictionary file `path`. Raises EnvironmentUnfitError naming what is wrong."""
    subtokens = []
    for number, line in enumerate(lines(path), start=1):
        if len(line) < 3 or line[0] != "'" or line[-1] != "'":
            raise EnvironmentUnfitError(f"line {number} of {path} is not a subtoken in single quotes: {line[:40]!r}")
        subtokens.append(line[1:-1])
    return Subtokens(subtokens, size)


def make_dictionary(texts: Iterable[str], size: int) -> list[str]:
    """At most `size` subtokens that can write any text: all characters of `texts`, then their most frequent pieces."""
    counts = Counter(piece for text in texts for piece in _cut(text))
    characters = sorted(set("".join(counts)) | set(_ESCAPES))
    whole = [f"{piece}_" for piece, _ in counts.most_common() if piece.isalnum() or len(piece) == 1]
    wanted = [piece for piece in whole if "\\" not in piece and piece.count("_") == 1]
    return [*_RESERVED, *characters, *wanted][:size]


def _cut(text: str) -> list[str]:
    """Pieces of letters and digits, and of anything else; single blanks between two of the former left out."""
    if not text:
        return []
    kinds = [_is_word(char) for char in text]
    borders = [0, *(place for place in range(1, len(text)) if kinds[place] != kinds[place - 1]), len(text)]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    return [piece for place, piece in enumerate(pieces) if piece != " " or place == 0 or place == len(pieces) - 1]


def _join(pieces: list[str]) -> str:
    text = ""
    for place, piece in enumerate(pieces):
        if place and _is_word(piece[0]) and _is_word(pieces[place - 1][0]):
            text += " "
        text += piece
    return text


def _unescape(text: str) -> str:
    def original(found: re.Match[str]) -> str:
        if found.group(1) is None:
            return "_" if found.group(0) == "\\u" else "\\"
        code = int(found.group(1)) if len(found.group(1)) < 8 else -1
        return chr(code) if 0 <= code < 0x110000 else "\u3013"

    return _ESCAPED.sub(original, text)


@lru_cache(maxsize=1 << 16)
def _is_word(char: str) -> bool:
    return unicodedata.category(char)[0] in "LN"


# --- the data folder --------------------------------------------------------------------------------------------------


DICTIONARY = "dict.en.txt"
FOLDER = "wmt17"
FORM = 1
# Europarl 7, Common Crawl and News Commentary 12 together, as the benchmark of 2020 reports them; newstest2014, whole.
OFFICIAL = {"training pairs": 4_590_101, "test pairs": 3003}


Corpus = corpora.Corpus[Subtokens]


def read_corpus(folder: Path, cache: Path, vocabulary: int, longest: int, longest_test: int) -> Corpus:
    """The corpus in `folder`; pairs with more than `longest` subtokens on a side are left out of training.

    `longest_test` does the same to the test pairs; 0 leaves none out. Raises EnvironmentUnfitError naming the file that
    is missing or wrong.
    """
    place = find_folder(folder, FOLDER)
    subtokens = read_dictionary(place / DICTIONARY, vocabulary)

    def read_pairs(name: str, longest: int) -> Pairs:
        prefixes = [place / f"{name}.en-de.{language}" for language in LANGUAGES]
        if prefixes[0].with_name(f"{prefixes[0].name}.idx").is_file():
            return Pairs(read_indexed(prefixes[0]), read_indexed(prefixes[1]))
        key = [FORM, subtokens.size]
        return encode_once(cache, "wmt17_transformer", name, key, place, place / DICTIONARY, subtokens, longest)

    return corpora.read_corpus(place, subtokens, read_pairs, "test.de", OFFICIAL, longest, longest_test)


def write_dictionary(folder: Path, size: int) -> None:
    """Make dict.en.txt for the plain text in `folder`, for corpora that the official dictionary was not made for."""
    texts = [text for language in LANGUAGES for text in lines(folder / f"train.{language}")]
    subtokens = make_dictionary(texts, size)
    (folder / DICTIONARY).write_text("".join(f"'{subtoken}'\n" for subtoken in subtokens), encoding="utf-8")


PARTS = (
    Part("training-parallel-nc-v12.tgz", ("news-commentary-v12.de-en.en", "news-commentary-v12.de-en.de")),
    Part("training-parallel-commoncrawl.tgz", ("commoncrawl.de-en.en", "commoncrawl.de-en.de")),
    Part("training-parallel-europarl-v7.tgz", ("europarl-v7.de-en.en", "europarl-v7.de-en.de")),
)
TEST_PART = Part("test-full.tgz", ("newstest2014-deen-src.en.sgm", "newstest2014-deen-ref.de.sgm"))


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Fetch the text and make the dictionary if the folder has neither, and encode the pairs, once for all runs with
    the same dictionary and limit of length."""
    place = find_folder(folder, FOLDER)
    if not (place / DICTIONARY).is_file():
        fetch_text(WMT17, place, place, {"train": PARTS, "test": [TEST_PART]})
        print(f"{place}: making a dictionary of about {parameters['vocabulary']} subtokens", flush=True)
        write_dictionary(place, int(str(parameters["vocabulary"])))
    vocabulary, longest, longest_test = (
        int(str(parameters[name])) for name in ("vocabulary", "longest", "longest_test")
    )
    return read_corpus(folder, folder, vocabulary, longest, longest_test).identify()


def validation_arrays(folder: Path) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
    """Sentences [3003] of newstest2014 in English, and their German references, as text: for `corpus_bleu`."""
    return read_sentences(find_folder(folder, FOLDER), "test")
