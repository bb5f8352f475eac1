"""Merging neighbors, which all byte pair encodings do, whatever their symbols and files."""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise

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
