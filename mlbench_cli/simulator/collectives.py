"""What a collective costs: gloo's ring, the textbook's ring, and NCCL's published model on two levels of links.

Sizes are bytes of the whole buffer of a rank, times seconds. `Collectives` is what a step is simulated with.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlbench_cli.simulator.gloo import Link, Message, gather_seconds, ring_seconds, simulate

# NCCL 2.19, src/graph/tuning.cc: latencies in microseconds by algorithm and protocol, for NVLink, PCIe and network.
NCCL_PROTOCOLS = ("LL", "LL128", "Simple")
_NCCL_BASE = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_NCCL_HOP = {
    "nvlink": {"tree": (0.6, 1.25, 28.0), "ring": (0.6, 1.9, 3.4)},
    "pcie": {"tree": (1.0, 1.9, 28.0), "ring": (1.0, 2.5, 5.7)},
    "network": {"tree": (5.0, 8.5, 28.0), "ring": (2.7, 4.0, 14.0)},
}
_NCCL_LL_SHARE, _NCCL_LL128_SHARE = 0.5, 120 / 128
_NCCL_TREE_SHARE, _NCCL_TREE_LL_SHARE = 0.92, 1 / 3.8


class Collectives(Protocol):
    """Seconds of collectives among `ranks`. A value: equal ones answer alike."""

    def __hash__(self) -> int: ...

    @property
    def ranks(self) -> int:
        """How many ranks take part."""

    @property
    def scatter_share(self) -> float:
        """What a rank sends in a reduce-scatter, relative to the buffer."""

    def all_reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes."""

    def reduce_scatter(self, size: float) -> float:
        """Seconds of a reduce-scatter of `size` bytes."""

    def all_gather(self, size: float) -> float:
        """Seconds of an all-gather of `size` bytes in all."""

    def transfer(self, size: float) -> float:
        """One message from a rank to another, over the slowest link."""
        ...

    def stream(self, size: float) -> tuple[float, float]:
        """Seconds for which `size` bytes of a connection occupy the slowest link, and its one-way latency."""
        ...

    def finish(self, messages: Sequence[Message], threads: int) -> list[float]:
        """When each of several all-reduces ends, started in their order, at most `threads` at a time."""
        ...


def finish_in_turn(messages: Sequence[Message], seconds: Sequence[float]) -> list[float]:
    """When each message ends if one link carries them one at a time, in their order."""
    ends, free = [], 0.0
    for message, taken in zip(messages, seconds, strict=True):
        free = max(free, message.ready) + taken
        ends.append(free)
    return ends


@dataclass(frozen=True)
class GlooCollectives:
    """gloo over equal links: all-reduce and all-gather by events; reduce-scatter is an all-reduce there."""

    ranks: int
    link: Link
    max_exact_ranks: int = 16  # beyond it, messages that overlap are taken one at a time

    @property
    def scatter_share(self) -> float:
        """As an all-reduce."""
        return 2 * (self.ranks - 1) / self.ranks

    def all_reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes, by the events of gloo's segmented ring."""
        return ring_seconds(self.ranks, size, self.link)

    def reduce_scatter(self, size: float) -> float:
        """Seconds of a reduce-scatter of `size` bytes: torch's gloo does an all-reduce."""
        return self.all_reduce(size)

    def all_gather(self, size: float) -> float:
        """Seconds of an all-gather of `size` bytes in all, by the events of gloo's ring."""
        return gather_seconds(self.ranks, size, self.link)

    def transfer(self, size: float) -> float:
        """Seconds of a message of `size` bytes from one rank to another."""
        return 2 * self.link.alpha + 2 * self.link.overhead + size * self.link.beta if self.ranks > 1 else 0.0

    def stream(self, size: float) -> tuple[float, float]:
        """Seconds that `size` bytes take of a link, and its latency; nothing waits for a "ready" as gloo does."""
        return size * self.link.beta, self.link.alpha + self.link.overhead

    def finish(self, messages: Sequence[Message], threads: int) -> list[float]:
        """When each message ends, in seconds: by events up to `max_exact_ranks`, above that one after the other."""
        if self.ranks <= self.max_exact_ranks:
            return simulate(messages, self.ranks, self.link, threads)
        return finish_in_turn(messages, [self.all_reduce(message.size) for message in messages])


class _InTurn:
    """Collectives of which one is under way at a time, and whose reduce-scatter sends no more than it must."""

    @property
    def scatter_share(self: Collectives) -> float:
        """All parts but its own."""
        return (self.ranks - 1) / self.ranks

    def finish(self: Collectives, messages: Sequence[Message], threads: int) -> list[float]:
        """When each message ends, in seconds, one after the other."""
        return finish_in_turn(messages, [self.all_reduce(message.size) for message in messages])


@dataclass(frozen=True)
class RingCollectives(_InTurn):
    """The textbook's ring: `alpha` seconds per hop, `beta` per byte. For tables that give no more than that."""

    ranks: int
    alpha: float
    beta: float

    def all_reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes: 2 (n - 1) steps of size / n."""
        return 2 * self._part(size)

    def reduce_scatter(self, size: float) -> float:
        """Seconds of a reduce-scatter of `size` bytes: n - 1 steps of size / n."""
        return self._part(size)

    def all_gather(self, size: float) -> float:
        """Seconds of an all-gather of `size` bytes in all: n - 1 steps of size / n."""
        return self._part(size)

    def transfer(self, size: float) -> float:
        """Seconds of a message of `size` bytes from one rank to another."""
        return self.alpha + size * self.beta if self.ranks > 1 else 0.0

    def stream(self, size: float) -> tuple[float, float]:
        """Seconds that `size` bytes take of a link, and its latency."""
        return size * self.beta, self.alpha

    def _part(self, size: float) -> float:
        return (self.ranks - 1) * (self.alpha + size / self.ranks * self.beta)


@dataclass(frozen=True)
class Topology:
    """`nodes` of `per_node` ranks each. Links: inside a node, and a node's share of the network per rank's neighbor.

    `oversubscription` divides the network's rate when all nodes use it: 2 for a core with half of the edge's capacity.
    """

    nodes: int
    per_node: int
    inside: Link
    network: Link
    inside_kind: str = "pcie"
    oversubscription: float = 1.0

    @property
    def ranks(self) -> int:
        """How many ranks all nodes have."""
        return self.nodes * self.per_node

    @property
    def network_beta(self) -> float:
        """Seconds per byte between nodes, oversubscription included."""
        return self.network.beta * (self.oversubscription if self.nodes > 2 else 1.0)


@dataclass(frozen=True)
class NcclCollectives(_InTurn):
    """NCCL as its tuner models it: the faster of ring and tree, each by its best protocol.

    Time = base + hops + bytes / bandwidth; the bandwidth is that of the slowest link that the ring passes.
    """

    topology: Topology

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return self.topology.ranks

    def all_reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes: the best of all algorithms and protocols."""
        return min(self.choices(size).values()) if self.ranks > 1 else 0.0

    def choices(self, size: float) -> Mapping[tuple[str, str], float]:
        """Seconds of an all-reduce by algorithm and protocol."""
        return {
            (algorithm, protocol): self._seconds(algorithm, number, size, 2)
            for algorithm in ("ring", "tree")
            for number, protocol in enumerate(NCCL_PROTOCOLS)
        }

    def reduce_scatter(self, size: float) -> float:
        """Seconds of a reduce-scatter of `size` bytes: a ring with its best protocol."""
        if self.ranks == 1:
            return 0.0
        return min(self._seconds("ring", number, size, 1) for number in range(len(NCCL_PROTOCOLS)))

    def all_gather(self, size: float) -> float:
        """Seconds of an all-gather of `size` bytes in all: as long as the reduce-scatter."""
        return self.reduce_scatter(size)

    def transfer(self, size: float) -> float:
        """Seconds of a message of `size` bytes between two nodes."""
        return self.topology.network.alpha + size * self._beta() if self.ranks > 1 else 0.0

    def stream(self, size: float) -> tuple[float, float]:
        """Seconds that `size` bytes take of a node's link, and its latency."""
        return size * self._beta(), self.topology.network.alpha

    def _seconds(self, algorithm: str, number: int, size: float, passes: int) -> float:
        top = self.topology
        inside = _NCCL_HOP[top.inside_kind][algorithm][number]
        between = _NCCL_HOP["network"][algorithm][number] + 1e6 * top.network.alpha
        if algorithm == "ring":
            network_hops = passes * (top.nodes - 1) if top.nodes > 1 else 0
            hops = (passes * (self.ranks - 1) - network_hops) * inside + network_hops * between
            volume = passes * (self.ranks - 1) / self.ranks * size
            share = (_NCCL_LL_SHARE, _NCCL_LL128_SHARE, 1.0)[number]
        else:
            hops = 2 * ((top.per_node - 1) * inside + math.ceil(math.log2(top.nodes)) * between)
            volume = 2 * size
            share = (_NCCL_TREE_LL_SHARE, _NCCL_LL128_SHARE * _NCCL_TREE_SHARE, _NCCL_TREE_SHARE)[number]
        return (_NCCL_BASE[algorithm][number] + hops) * 1e-6 + volume * self._beta() / share

    def _beta(self) -> float:
        return max(self.topology.inside.beta, self.topology.network_beta if self.topology.nodes > 1 else 0.0)
