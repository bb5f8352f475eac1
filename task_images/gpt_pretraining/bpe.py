"""Byte-level byte pair encoding of GPT-2 (Radford et al. 2019), with its published files vocab.json and merges.txt.

A text is cut into words with the blank before them; the bytes of a word become letters; neighbors are merged in the
order of merges.txt. Every text can be encoded, and decodes to itself.
"""

import itertools
import json
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from task_images.contract import EnvironmentUnfitError
from task_images.text import Pair, merge_pairs, read_lines

END = "<|endoftext|>"
VOCABULARY, MERGES = "vocab.json", "merges.txt"


class BytePairs:
    """The encoding with these merges, best first; `numbers` has every piece that merges can make."""

    def __init__(self, numbers: Mapping[str, int], merges: Sequence[Pair]) -> None:
        self.numbers = numbers
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._known: dict[str, list[int]] = {}
        self.size = max(numbers.values()) + 1
        self.end = numbers[END]

    def encode(self, text: str) -> Iterator[int]:
        """Numbers of the pieces. Special pieces in the text are ordinary text."""
        for word in _word_pattern().findall(text):
            found = self._known.get(word)
            if found is None:
                pieces = merge_pairs([byte_letters()[byte] for byte in word.encode()], self._ranks)
                found = self._known[word] = [self.numbers[piece] for piece in pieces]
            yield from found


@cache
def byte_letters() -> tuple[str, ...]:
    """A visible letter for each of the 256 bytes: its own in Latin-1 if that can be seen, else one from U+0100 on."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = itertools.count(256)
    return tuple(chr(byte if byte in own else next(others)) for byte in range(256))


@cache
def _word_pattern() -> re.Pattern[str]:
    letters, digits = _character_class("L"), _character_class("N")
    ends = "'s|'t|'re|'ve|'m|'ll|'d"
    rest = rf"[^\s{letters}{digits}]"
    return re.compile(rf"{ends}| ?[{letters}]+| ?[{digits}]+| ?{rest}+|\s+(?!\S)|\s+")


def _character_class(category: str) -> str:
    """The inside of a character class for all of Unicode's categories that begin with `category`."""
    ranges, start = [], None
    for number in range(sys.maxunicode + 2):
        is_in = number <= sys.maxunicode and unicodedata.category(chr(number)).startswith(category)
        if is_in and start is None:
            start = number
        elif not is_in and start is not None:
            ranges.append(f"\\U{start:08x}-\\U{number - 1:08x}")
            start = None
    return "".join(ranges)


def read_byte_pairs(folder: Path) -> BytePairs | None:
    """The encoding of the two files in `folder`; None if there are none. Raises EnvironmentUnfitError."""
    vocabulary, merges = folder / VOCABULARY, folder / MERGES
    if not vocabulary.is_file() and not merges.is_file():
        return None
    try:
        numbers = json.loads(vocabulary.read_text("utf-8-sig"))
        lines = list(read_lines(merges, "It must be UTF-8."))
        pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        found = BytePairs(numbers, [(left, right) for left, right in pairs])
        missing = [piece for piece in (*byte_letters(), *map("".join, pairs)) if piece not in numbers]
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise EnvironmentUnfitError(
            f"{vocabulary} and {merges} are not an encoding: {type(error).__name__} {error}",
            f"Both files are needed as GPT-2 published them, with {END} in {VOCABULARY}.",
        ) from None
    if missing:
        raise EnvironmentUnfitError(
            f"{vocabulary} lacks {len(missing)} pieces of {merges}, for example {missing[0]!r}",
            "Use both files of the same model.",
        )
    return found
