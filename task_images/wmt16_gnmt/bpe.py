"""Byte pair encoding in subword-nmt's file format: learning merges, applying them, undoing them.

Source: Sennrich, Haddow, Birch 2016 (arXiv 1508.07909). A codes file has one merge a line, best first, behind the line
`#version: 0.2`; `</w>` marks the end of a word. Applied, every subword but the last of a word ends in `@@`.
"""

import heapq
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

Pair = tuple[str, str]

HEADER = "#version: 0.2"
SEPARATOR = "@@"
_END = "</w>"


class BytePairs:
    """Cuts words into subwords by `merges`, best first."""

    def __init__(self, merges: Iterable[Pair]) -> None:
        self._ranks = {merge: rank for rank, merge in reversed(list(enumerate(merges)))}
        self._cut = lru_cache(maxsize=1 << 18)(self._cut_new_word)

    def apply(self, line: str) -> str:
        """`line`, words parted by blanks, as subwords parted by blanks."""
        return " ".join(subword for word in line.split() for subword in self._cut(word))

    def _cut_new_word(self, word: str) -> tuple[str, ...]:
        symbols = merge_pairs(_symbols(word), self._ranks)
        symbols[-1] = symbols[-1].removesuffix(_END)
        return (*(f"{symbol}{SEPARATOR}" for symbol in symbols[:-1]), symbols[-1])


def undo(line: str) -> str:
    """Subwords parted by blanks back to words."""
    return f"{line} ".replace(f"{SEPARATOR} ", "").rstrip()


def write_codes(path: Path, merges: Iterable[Pair]) -> None:
    """Write a codes file: one merge per line, best first."""
    path.write_text("".join(f"{line}\n" for line in [HEADER, *map(" ".join, merges)]), encoding="utf-8")


def learn(counts: Mapping[str, int], number: int, least: int = 2) -> list[Pair]:
    """At most `number` merges of the most frequent neighbors in the words of `counts`, none rarer than `least`.

    Of equally frequent pairs the greatest one in the order of characters goes first, as in subword-nmt.
    """
    words = [(_symbols(word), count) for word, count in counts.items()]
    pairs: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for place, (symbols, count) in enumerate(words):
        for pair in pairwise(symbols):
            pairs[pair] += count
            places[pair].add(place)
    queue = [_Candidate(count, pair) for pair, count in pairs.items()]
    heapq.heapify(queue)
    merges: list[Pair] = []
    while queue and len(merges) < number:
        best = heapq.heappop(queue)
        if best.count != pairs[best.pair]:
            continue  # an entry from before the count changed; the newer one is in the queue
        if best.count < least:
            break
        merges.append(best.pair)
        changed: set[Pair] = set()
        for place in places.pop(best.pair):
            symbols, count = words[place]
            after = join_pair(symbols, best.pair)
            words[place] = (after, count)
            for pair in pairwise(symbols):
                pairs[pair] -= count
            for pair in pairwise(after):
                pairs[pair] += count
                places[pair].add(place)
            changed.update(pairwise(symbols), pairwise(after))
        for pair in changed:
            heapq.heappush(queue, _Candidate(pairs[pair], pair))
    return merges


class _Candidate:
    """Orders pairs for a heap: the most frequent first, then the greatest."""

    __slots__ = ("count", "pair")

    def __init__(self, count: int, pair: Pair) -> None:
        self.count = count
        self.pair = pair

    def __lt__(self, other: "_Candidate") -> bool:
        return (self.count, self.pair) > (other.count, other.pair)


def _symbols(word: str) -> list[str]:
    return [*word[:-1], word[-1] + _END]


def join_pair(symbols: Sequence[str], pair: Pair) -> list[str]:
    """`symbols` with every occurrence of `pair`, from left to right, joined."""
    found: list[str] = []
    place = 0
    while place < len(symbols):
        is_pair = place + 1 < len(symbols) and (symbols[place], symbols[place + 1]) == pair
        found.append(pair[0] + pair[1] if is_pair else symbols[place])
        place += 2 if is_pair else 1
    return found


def merge_pairs(symbols: list[str], ranks: Mapping[Pair, int]) -> list[str]:
    """`symbols` after all merges that apply, each time the one with the lowest rank."""
    while len(symbols) > 1:
        best = min(pairwise(symbols), key=lambda pair: ranks.get(pair, sys.maxsize))
        if best not in ranks:
            break
        symbols = join_pair(symbols, best)
    return symbols
