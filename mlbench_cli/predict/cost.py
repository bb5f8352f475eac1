"""What an update of each method costs on a link: rounds that wait for each other, and bytes."""

import math
from typing import NamedTuple

from task_images.methods.base import Method, Sent


class Cost(NamedTuple):
    """`rounds` one after the other, and the `volume` in bytes that crosses the busiest link."""

    rounds: float
    volume: float


def collective_cost(kind: str, ranks: int, servers: int = 0) -> Cost:
    """The cost of one message among `ranks`, per byte that a rank hands over.

    allreduce     ring: 2 (k - 1) rounds, 2 (k - 1) / k bytes (Patarasuk and Yuan 2009)
    rsag          the same, as a reduce-scatter and an all-gather
    allgather     ring: k - 1 rounds, k - 1 bytes
    gtopk         a tree up and down: 2 log2 k rounds (Shi et al. 2019)
    ps            push and pull: 2 rounds; the link of each of s servers carries k / s messages each way
    gossip        one exchange with the neighbors of a ring
    """
    k = ranks
    if k < 2 or kind == "none":
        return Cost(0, 0)
    if kind in ("allreduce", "rsag"):
        return Cost(2 * (k - 1), 2 * (k - 1) / k)
    if kind == "allgather":
        return Cost(k - 1, k - 1)
    if kind == "gtopk":
        levels = math.ceil(math.log2(k))
        return Cost(2 * levels, 2 * levels)
    if kind == "ps":
        return Cost(2, 2 * max(1.0, k / max(1, servers)))
    return Cost(1, min(2, k - 1))  # gossip


def update_cost(method: Method, sent: Sent, ranks: int) -> Cost:
    """The cost of an update among `ranks` for which a run counted `sent`."""
    rounds = method.rounds(sent, ranks)
    costs = [(collective_cost(each.kind, ranks, method.values.get("servers", 0)), each) for each in rounds]
    return Cost(
        sum(cost.rounds * each.times for cost, each in costs),
        sum(cost.volume * each.size * each.times for cost, each in costs),
    )
