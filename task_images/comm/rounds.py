"""What an update of each method costs on a link: rounds that wait for each other, and bytes. No torch."""

import math
from typing import NamedTuple

from task_images.comm.door import read_options
from task_images.comm.methods import Method
from task_images.comm.presets import find_registered


class Cost(NamedTuple):
    """`rounds` one after the other, and the `volume` in bytes that crosses the busiest link."""

    rounds: float
    volume: float


def transport_cost(transport: str, ranks: int, servers: int = 0) -> Cost:
    """The cost of one message among `ranks`, per byte that a rank hands over.

    all-reduce            ring: 2 (k - 1) rounds, 2 (k - 1) / k bytes (Patarasuk and Yuan 2009)
    rsag                  the same, as a reduce-scatter and an all-gather
    all-gather            ring: k - 1 rounds, k - 1 bytes
    a2a                   two exchanges with all others at once: 2 rounds, 2 (k - 1) / k bytes
    gtopk                 a tree up and down: 2 log2 k rounds (Shi et al. 2019)
    parameter servers     push and pull: 2 rounds; the link of each of s servers carries k / s messages each way
    gossip                one exchange with the neighbors of a ring
    """
    k = ranks
    if k < 2 or transport == "noop":
        return Cost(0, 0)
    if transport in ("allreduce", "rsag"):
        return Cost(2 * (k - 1), 2 * (k - 1) / k)
    if transport == "allgather":
        return Cost(k - 1, k - 1)
    if transport == "a2a":
        return Cost(2, 2 * (k - 1) / k)
    if transport == "gtopk":
        levels = math.ceil(math.log2(k))
        return Cost(2 * levels, 2 * levels)
    if transport == "ps":
        return Cost(2, 2 * max(1.0, k / max(1, servers)))
    return Cost(1, min(2, k - 1))  # gossip


def update_cost(method: Method, messages: float, size: float, parameters: int, ranks: int) -> Cost:
    """The cost of an update with `messages` of `size` bytes in all, as a run counted them.

    A registered method states its own collectives for the number of `parameters`; it must be registered here, since a
    file that an archive names is never loaded. Raises MethodError otherwise.
    """
    if method.engine == "registered":
        rounds = find_registered(method).rounds(parameters, read_options(method.options))
        costs = [(transport_cost(each.kind, ranks), each) for each in rounds]
        return Cost(
            sum(cost.rounds / each.every for cost, each in costs),
            sum(cost.volume * each.size / each.every for cost, each in costs),
        )
    cost = transport_cost(method.transport, ranks, method.server_count)
    return Cost(messages * cost.rounds, size * cost.volume)
