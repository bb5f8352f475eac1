"""Costs of collectives: closed forms by hand, and how they grow."""

import pytest

from mlbench_cli.simulator.collectives import (
    GlooCollectives,
    NcclCollectives,
    RingCollectives,
    Topology,
    finish_in_turn,
)
from mlbench_cli.simulator.gloo import Link, Message

NETWORK, INSIDE = Link(1e-5, 8 / 1e11), Link(2e-6, 8 / 2.4e12)


def nccl(nodes: int, per_node: int, oversubscription: float = 1.0) -> NcclCollectives:
    return NcclCollectives(Topology(nodes, per_node, INSIDE, NETWORK, "nvlink", oversubscription))


def test_messages_take_turns_on_one_link() -> None:
    assert finish_in_turn([Message(1.0, 0), Message(2.0, 0), Message(9.0, 0)], [3.0, 2.0, 1.0]) == [4.0, 6.0, 10.0]


def test_the_textbooks_ring() -> None:
    ring = RingCollectives(4, 0.5, 0.01)
    assert ring.all_reduce(800) == pytest.approx(2 * 3 * (0.5 + 2.0))
    assert ring.reduce_scatter(800) + ring.all_gather(800) == pytest.approx(ring.all_reduce(800))


def test_nccl_changes_its_algorithm_with_the_size() -> None:
    """A tree with LL for few bytes among many nodes, a ring with Simple or LL128 for many."""
    cluster = nccl(64, 8)
    choose = [min(cluster.choices(size), key=lambda choice: cluster.choices(size)[choice]) for size in (64, 1 << 30)]
    assert choose[0] == ("tree", "LL")
    assert choose[1][1] in ("Simple", "LL128")


def test_nccls_bandwidth_is_that_of_the_slowest_link() -> None:
    size = 1 << 30
    assert nccl(1, 8).all_reduce(size) == pytest.approx(2 * 7 / 8 * size * INSIDE.beta, rel=0.1)
    assert nccl(4, 8).all_reduce(size) == pytest.approx(2 * 31 / 32 * size * NETWORK.beta, rel=0.1)
    assert nccl(4, 8, oversubscription=2).all_reduce(size) == pytest.approx(2 * nccl(4, 8).all_reduce(size), rel=0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda ranks: GlooCollectives(ranks, NETWORK),
        lambda ranks: RingCollectives(ranks, NETWORK.alpha, NETWORK.beta),
        lambda ranks: nccl(ranks, 1),
    ],
)
def test_more_ranks_and_more_bytes_never_cost_less(make) -> None:  # type: ignore[no-untyped-def]
    assert make(1).all_reduce(1e6) == 0
    by_ranks = [make(ranks).all_reduce(1e8) for ranks in (2, 4, 8, 64, 1024)]
    by_bytes = [make(8).all_reduce(size) for size in (1e3, 1e5, 1e7, 1e9)]
    assert (by_ranks, by_bytes) == (sorted(by_ranks), sorted(by_bytes))


# --- by hand, from the tables in NCCL's src/graph/tuning.cc ----------------------------------------------------------
