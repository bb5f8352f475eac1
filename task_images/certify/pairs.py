"""Which nodes, links or boundaries explain the rates of pairs: -log r_ij = m + a_i + a_j + l_ij. Standard library only.

Up to ENUMERATED nodes, explanations by at most two causes are enumerated, each cause at a price; median polish alone
errs in two thirds of cases with two slow nodes of six. With more nodes, few causes stand out after median polish.
"""

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from task_images.certify.rules import CROWD, SCREEN_SHARE, logarithm, spread

ENUMERATED = 8
LINK_DEVIATIONS = 4.0

Pair = tuple[int, int]
Cause = tuple[int, ...]  # (node,) or (node, node)


class Explanation(NamedTuple):
    """Suspected causes, worst first, with what each takes from the logarithm of a rate. `islands`: groups of nodes that
    are fast inside and slow between; then no cause is named."""

    causes: dict[Cause, float]
    levels: dict[int, float]  # node -> what it takes
    typical: float  # logarithm of the rate that nothing slows down
    islands: tuple[frozenset[int], ...] = ()

    @property
    def is_crowd(self) -> bool:
        """Whether the causes are too many to be outliers; up to two are told apart in any fleet."""
        return len(self.causes) > max(2.0, CROWD * len(self.levels))


def make_rounds(nodes: Sequence[int], most: int | None = None, seed: int = 0) -> list[list[Pair]]:
    """Rounds in which each node has one partner: all of them (circle method), or `most` random ones."""
    ring: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        matched = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in matched if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    if most is not None and most < len(rounds):
        rounds = random.Random(seed).sample(rounds, most)
    return rounds


def explain(rates: Mapping[Pair, float], margin: float) -> Explanation:
    """What explains the logarithms of `rates`, with the fail margin as a share."""
    logs = {pair: -math.log(rate) for pair, rate in rates.items()}  # of times, to which causes add
    nodes = sorted({node for pair in logs for node in pair})
    limit = logarithm(margin)
    islands = _find_islands(logs, nodes, limit)
    if islands:
        return Explanation({}, {}, -statistics.median(logs.values()), islands)
    if len(nodes) <= ENUMERATED:
        return _enumerate(logs, nodes, limit)
    return _stand_out(logs, nodes, limit)


# --- few nodes ------------------------------------------------------------------------------------------------------


def _enumerate(logs: Mapping[Pair, float], nodes: Sequence[int], limit: float) -> Explanation:
    options: list[Cause] = [*((node,) for node in nodes), *logs]
    typical = statistics.median(logs.values())
    best_cost, best = sum(abs(log - typical) for log in logs.values()), Explanation({}, {}, -typical)
    # A cause must touch a pair that is slow.
    slow = {pair for pair, log in logs.items() if log - min(logs.values()) >= SCREEN_SHARE * limit}
    options = [cause for cause in options if any(set(cause) <= set(pair) for pair in slow)]
    for count in (1, 2):
        for causes in itertools.combinations(options, count):
            cost, effects, middle = _fit(logs, causes)
            cost += limit * count
            if cost < best_cost and min(effects.values()) >= SCREEN_SHARE * limit:
                best_cost, best = cost, Explanation(effects, {}, -middle)
    levels = {node: best.causes.get((node,), 0.0) for node in nodes}
    worst_first = dict(sorted(best.causes.items(), key=lambda item: -item[1]))
    return Explanation(worst_first, levels, best.typical)


def _fit(logs: Mapping[Pair, float], causes: Sequence[Cause]) -> tuple[float, dict[Cause, float], float]:
    """The absolute residual, what each cause adds, and the time without any."""
    touched = {pair: [cause for cause in causes if set(cause) <= set(pair)] for pair in logs}
    free = [log for pair, log in logs.items() if not touched[pair]]
    typical = statistics.median(free) if free else min(logs.values())
    effects = dict.fromkeys(causes, 0.0)
    for _ in range(6 if len(causes) > 1 else 2):
        for cause in causes:
            left = [
                log - typical - sum(effects[other] for other in touched[pair] if other != cause)
                for pair, log in logs.items()
                if cause in touched[pair]
            ]
            effects[cause] = max(0.0, statistics.median(left))
        typical = statistics.median(log - sum(effects[c] for c in touched[pair]) for pair, log in logs.items())
    residual = sum(abs(log - typical - sum(effects[c] for c in touched[pair])) for pair, log in logs.items())
    return residual, effects, typical


# --- many nodes -----------------------------------------------------------------------------------------------------


def _stand_out(logs: Mapping[Pair, float], nodes: Sequence[int], limit: float) -> Explanation:
    partners: dict[int, list[tuple[int, float]]] = {node: [] for node in nodes}
    for (a, b), log in logs.items():
        partners[a].append((b, log))
        partners[b].append((a, log))
    typical, levels = statistics.median(logs.values()), dict.fromkeys(nodes, 0.0)
    for _ in range(10):
        for node in nodes:
            levels[node] = statistics.median(log - typical - levels[other] for other, log in partners[node])
        middle = statistics.median(levels.values())
        levels = {node: level - middle for node, level in levels.items()}
        typical = statistics.median(log - levels[a] - levels[b] for (a, b), log in logs.items())
    rest = {pair: log - typical - levels[pair[0]] - levels[pair[1]] for pair, log in logs.items()}
    scale, link_scale = spread(levels.values()), spread(rest.values())
    least = SCREEN_SHARE * limit
    slow = {node for node in nodes if levels[node] >= max(least, 3 * scale)}
    causes: dict[Cause, float] = {(node,): levels[node] for node in slow}
    causes |= {
        pair: value
        for pair, value in rest.items()
        if value >= max(least, LINK_DEVIATIONS * link_scale) and not slow & set(pair)
    }
    return Explanation(dict(sorted(causes.items(), key=lambda item: -item[1])), levels, -typical)


# --- boundaries -----------------------------------------------------------------------------------------------------


def _find_islands(logs: Mapping[Pair, float], nodes: Sequence[int], limit: float) -> tuple[frozenset[int], ...]:
    """Groups of at least two nodes such that every pair between groups is slower than every pair inside one, by the
    margin. Needs pairs between most nodes: matchings of many nodes do not show it."""
    if len(nodes) < 4 or len(logs) < len(nodes) * (len(nodes) - 1) // 2:
        return ()
    ordered = sorted(logs.values())
    gaps = [(after - before, before) for before, after in itertools.pairwise(ordered)]
    widest, edge = max(gaps)
    if widest < limit:
        return ()
    groups: list[set[int]] = []
    for pair in (pair for pair, log in logs.items() if log <= edge):
        joined = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in joined]
        groups.append(set(pair).union(*joined))
    if len(groups) < 2 or sum(map(len, groups)) < len(nodes) or min(map(len, groups)) < 2:
        return ()
    home = {node: number for number, group in enumerate(groups) for node in group}
    if any((log <= edge) != (home[a] == home[b]) for (a, b), log in logs.items()):
        return ()
    return tuple(sorted(map(frozenset, groups), key=min))
