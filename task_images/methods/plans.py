"""Plans: which tensors share a message. Pure functions, no torch. Tensors are numbered in the order in which their
gradients become ready; a plan is a list of groups of consecutive numbers, in the same order."""

import heapq
import statistics
from collections.abc import Sequence
from typing import NamedTuple

Groups = list[list[int]]


class Cost(NamedTuple):
    """Seconds of a message: alpha + beta x bytes."""

    alpha: float
    beta: float

    def time(self, size: float) -> float:
        """Seconds of a message of `size` bytes."""
        return self.alpha + self.beta * size


def threshold(sizes: Sequence[int], limit: float) -> Groups:
    """Fill each group until it has `limit` bytes or more."""
    groups: Groups = []
    filled = limit
    for number, size in enumerate(sizes):
        if filled >= limit:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += size
    return groups


def merge_greedily(sizes: Sequence[int], ready: Sequence[float], cost: Cost) -> Groups:
    """MG-WFBP: merge the next tensor into a group if the link is busy until that tensor is ready, or if waiting for it
    is shorter than the start-up time that merging saves (Shi et al. 2019, arXiv:1811.11141, algorithm 1)."""
    groups: Groups = []
    free = 0.0  # when the messages before the open group are sent
    for number, size in enumerate(sizes):
        if not groups:
            groups, total = [[0]], float(size)
            continue
        start = max(free, ready[number - 1])
        if ready[number] < start + cost.time(total) and ready[number] - start < cost.alpha:
            groups[-1].append(number)
            total += size
            continue
        free = start + cost.time(total)
        groups.append([number])
        total = float(size)
    return groups


def find_optimum(sizes: Sequence[int], ready: Sequence[float], cost: Cost) -> Groups:
    """The grouping whose last message ends earliest under the same model. O(n^2) time, O(n) space."""
    count = len(sizes)
    ends = [0.0] * (count + 1)  # ends[n]: earliest time at which the first n tensors are sent
    cuts = [0] * (count + 1)
    for stop in range(1, count + 1):
        best, total = float("inf"), 0
        for start in range(stop - 1, -1, -1):
            total += sizes[start]
            end = max(ends[start], ready[stop - 1]) + cost.time(total)
            if end < best:
                best, cuts[stop] = end, start
        ends[stop] = best
    groups: Groups = []
    stop = count
    while stop:
        groups.insert(0, list(range(cuts[stop], stop)))
        stop = cuts[stop]
    return groups


def fit(samples: Sequence[tuple[float, float]]) -> Cost:
    """Least-squares fit of alpha and beta, both non-negative, to samples of (bytes, seconds)."""
    sizes, times = zip(*samples, strict=True)
    beta = max(0.0, statistics.linear_regression(sizes, times).slope)
    return Cost(max(0.0, statistics.fmean(times) - beta * statistics.fmean(sizes)), beta)


def simulate_order(sizes: Sequence[int], ready: Sequence[float], priorities: Sequence[int], cost: Cost) -> list[int]:
    """The order in which one link sends messages if the ready message with the lowest priority number goes first.

    All ranks compute the same order from rank 0's measurements, without communication.
    """
    arriving = sorted(range(len(sizes)), key=ready.__getitem__, reverse=True)
    able: list[tuple[int, int]] = []
    now, order = 0.0, []
    while arriving or able:
        if not able:
            now = max(now, ready[arriving[-1]])
        while arriving and ready[arriving[-1]] <= now:
            number = arriving.pop()
            heapq.heappush(able, (priorities[number], number))
        chosen = heapq.heappop(able)[1]
        order.append(chosen)
        now += cost.time(sizes[chosen])
    return order
