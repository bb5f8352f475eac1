"""The search for slow nodes and links: each pair of ranks is measured separately, in n - 1 rounds.

Rounds are a 1-factorization (the circle method, as in SuperBench): in each of them every rank exchanges with another
one, and after all of them every two ranks have met once. An odd number of ranks leaves one out in each round.

A pair is slow if it takes more than SLOW times the median of all pairs. Of the slow pairs follows the verdict:

    node R      all pairs of rank R are slow, and no others: R's machine, or its link to the network
    link A-B    only the pair of A and B is slow: the way between them
    several     the fewest ranks whose pairs explain all slow ones
    none        no pair is slow

A busy moment of a machine makes a good pair look slow, and not twice in a row. So whatever looks slow is measured
again until chance explains it no more (`is_certain`), or until it does not look slow.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SLOW = 1.5  # times the median
ALPHA = 0.001  # probability of a false alarm in a search, if busy moments come independently in each pass
LEAST_RANKS = 3  # with two there is nothing to compare with

Pair = tuple[int, int]


@dataclass(frozen=True)
class Verdict:
    """`kind` is none, node, link, several or cannot_tell; `ranks` are those that it names."""

    kind: str
    ranks: tuple[int, ...]
    slow: tuple[Pair, ...]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """The verdict as the result event has it."""
        return {"kind": self.kind, "ranks": list(self.ranks), "slow": [list(pair) for pair in self.slow]}


def make_rounds(ranks: int) -> list[list[Pair]]:
    """The pairs of each round, smaller number first: n - 1 rounds for an even number of ranks, n for an odd one."""
    places = [*range(ranks), *([] if ranks % 2 == 0 else [-1])]
    size = len(places)
    rounds = []
    for _ in range(size - 1):
        pairs = [(places[index], places[size - 1 - index]) for index in range(size // 2)]
        rounds.append(sorted((min(pair), max(pair)) for pair in pairs if -1 not in pair))
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def judge_pairs(seconds: Mapping[Pair, float], ranks: int) -> Verdict:
    """Who is slow, by the seconds that each pair took."""
    if ranks < LEAST_RANKS or len(seconds) < ranks:
        return Verdict("cannot_tell", (), (), f"{ranks} ranks have too few pairs to compare")
    usual = _usual(seconds, ranks)
    slow = tuple(pair for pair, value in sorted(seconds.items()) if value > SLOW * usual)
    if not slow:
        return Verdict("none", (), (), f"no pair takes more than {SLOW:g} times the usual time")
    if len(slow) == 1:
        a, b = slow[0]
        return Verdict("link", (a, b), slow, f"only the pair of {a} and {b} is slow")
    culprits = _cover(slow)
    if len(culprits) == 1 and sum(culprits[0] in pair for pair in seconds) == len(slow):
        return Verdict("node", culprits, slow, f"all pairs of rank {culprits[0]} are slow, and no others")
    if len(slow) > len(seconds) / 2 and len(culprits) > ranks / 2:
        return Verdict("cannot_tell", (), slow, "most pairs are slow: nothing is usual here")
    return Verdict("several", culprits, slow, f"{len(slow)} of {len(seconds)} pairs are slow")


def is_certain(passes: Sequence[Mapping[Pair, float]], slow: Sequence[Pair], ranks: int) -> bool:
    """Whether chance does not explain that the pairs `slow` were slow in all of these passes over all pairs.

    The other pairs tell how often a good one looks slow: in a share q of their measurements. One of P pairs then looks
    slow in all of n passes with a probability of at most P q^n.
    """
    others = busy = 0
    for seconds in passes:
        usual = _usual(seconds, ranks)
        good = [value for pair, value in seconds.items() if pair not in slow]
        others += len(good)
        busy += sum(value > SLOW * usual for value in good)
    share = (busy + 1) / (others + 2)  # Laplace's rule: nothing is impossible because it was not seen yet
    return len(passes[0]) * share ** len(passes) <= ALPHA


def _usual(seconds: Mapping[Pair, float], ranks: int) -> float:
    """What a good pair takes."""
    median = statistics.median(seconds.values())
    # With few ranks one bad node spoils half of all pairs, and the median with them.
    return median if ranks > 4 else min(median, sorted(seconds.values())[(len(seconds) - 1) // 4])


def _cover(slow: Sequence[Pair]) -> tuple[int, ...]:
    """A small set of ranks that covers all slow pairs: greedily, the rank in most of the remaining pairs."""
    left, chosen = list(slow), []
    while left:
        counts: dict[int, int] = {}
        for pair in left:
            for rank in pair:
                counts[rank] = counts.get(rank, 0) + 1
        worst = max(sorted(counts), key=lambda rank: counts[rank])
        chosen.append(worst)
        left = [pair for pair in left if worst not in pair]
    return tuple(sorted(chosen))
