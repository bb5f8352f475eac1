"""The lines of text files that people made anywhere, and what all byte pair encodings do: merge neighbors."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from task_images.contract import EnvironmentUnfitError

Pair = tuple[str, str]


def join_pair(symbols: Sequence[str], pair: Pair, joined: str) -> list[str]:
    """`symbols` with every occurrence of `pair`, from left to right, replaced by `joined`."""
    found: list[str] = []
    place = 0
    while place < len(symbols):
        is_pair = place + 1 < len(symbols) and (symbols[place], symbols[place + 1]) == pair
        found.append(joined if is_pair else symbols[place])
        place += 2 if is_pair else 1
    return found


def merge_pairs(symbols: list[str], ranks: Mapping[Pair, int]) -> list[str]:
    """`symbols` after all merges that apply, each time the one with the lowest rank."""
    while len(symbols) > 1:
        best = min(pairwise(symbols), key=lambda pair: ranks.get(pair, sys.maxsize))
        if best not in ranks:
            break
        symbols = join_pair(symbols, best, best[0] + best[1])
    return symbols


MARK = "\ufeff"  # of the byte order, which Windows' editors write first


def decode_line(raw: bytes, number: int, name: str, hint: str) -> str:
    """A line of UTF-8 without its end and, if it is the first, without a byte order mark. Raises EnvironmentUnfitError
    that names the line and the byte."""
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EnvironmentUnfitError(
            f"line {number} of {name} is not UTF-8: {error.reason} at byte {error.start}", hint
        ) from None
    return (line.removeprefix(MARK) if number == 1 else line).removesuffix("\n").removesuffix("\r")


def read_lines(path: Path, hint: str) -> Iterator[str]:
    """The lines of a text file, as `decode_line`. Raises EnvironmentUnfitError also if the file cannot be read."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                yield decode_line(raw, number, str(path), hint)
    except OSError as error:
        raise EnvironmentUnfitError(f"{path} cannot be read: {error.strerror}", hint) from None
