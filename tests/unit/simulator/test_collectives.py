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

# Two nodes of two GPUs; a ring of four has 6 hops in two passes, 2 of them between nodes; a tree has 2 of each.
LATENCIES = {  # microseconds of an all-reduce without bytes, over a network of 10 µs
    ("nvlink", "ring"): {"LL": 34.4, "LL128": 49.6, "Simple": 70.0},
    ("nvlink", "tree"): {"LL": 38.0, "LL128": 53.5, "Simple": 140.4},
    ("pcie", "ring"): {"LL": 36.0, "LL128": 52.0, "Simple": 79.2},
    ("pcie", "tree"): {"LL": 38.8, "LL128": 54.8, "Simple": 140.4},
}
# Bytes that pass the slowest link per byte of the buffer, as each protocol uses it.
VOLUMES = {
    "ring": {"LL": 3.0, "LL128": 1.6, "Simple": 1.5},
    "tree": {"LL": 7.6, "LL128": 2 * 128 / 120 / 0.92, "Simple": 2 / 0.92},
}


@pytest.mark.parametrize("kind", ["nvlink", "pcie"])
def test_nccls_latencies_are_those_of_its_tables(kind: str) -> None:
    choices = NcclCollectives(Topology(2, 2, INSIDE, NETWORK, kind)).choices(0)
    for algorithm in ("ring", "tree"):
        expected = {protocol: value * 1e-6 for protocol, value in LATENCIES[kind, algorithm].items()}
        assert {key[1]: value for key, value in choices.items() if key[0] == algorithm} == pytest.approx(expected)


def test_each_protocol_of_nccl_uses_its_share_of_the_slowest_link() -> None:
    few, many = nccl(2, 2).choices(0), nccl(2, 2).choices(1e9)
    for algorithm, volumes in VOLUMES.items():
        for protocol, volume in volumes.items():
            seconds = many[algorithm, protocol] - few[algorithm, protocol]
            assert seconds == pytest.approx(volume * 1e9 * NETWORK.beta)


def test_nccl_in_one_node_has_no_hop_between_nodes() -> None:
    choices = NcclCollectives(Topology(1, 4, INSIDE, NETWORK, "nvlink")).choices(0)
    assert choices["ring", "LL"] == pytest.approx((6.6 + 6 * 0.6) * 1e-6)
    assert choices["tree", "LL"] == pytest.approx((6.8 + 2 * 3 * 0.6) * 1e-6)


def test_nccls_reduce_scatter_passes_the_ring_once_and_an_all_gather_costs_the_same() -> None:
    cluster = nccl(2, 2)
    assert cluster.reduce_scatter(0) == pytest.approx((6.6 + 2 * 0.6 + 12.7) * 1e-6)
    assert cluster.all_gather(1e9) == cluster.reduce_scatter(1e9)
    assert cluster.reduce_scatter(1e9) == pytest.approx(0.75 * 1e9 * NETWORK.beta, rel=0.01)


def test_a_core_is_oversubscribed_only_if_more_than_two_nodes_share_it() -> None:
    slow = [Topology(nodes, 1, INSIDE, NETWORK, oversubscription=3.0).network_beta for nodes in (1, 2, 3)]
    assert slow == pytest.approx([NETWORK.beta, NETWORK.beta, 3 * NETWORK.beta])


def test_one_rank_sends_nothing() -> None:
    link = Link(1e-3, 1e-9, 1e-4)
    for alone in (GlooCollectives(1, link), RingCollectives(1, 0.5, 0.01), nccl(1, 1)):
        costs = [cost(1e6) for cost in (alone.all_reduce, alone.reduce_scatter, alone.all_gather, alone.transfer)]
        assert costs == [0.0] * 4
        assert alone.scatter_share == 0.0


def test_messages_between_two_ranks_cost_latency_and_bytes() -> None:
    link = Link(1e-3, 1e-9, 1e-4)
    # gloo waits for the receiver to say that it is ready, which costs a second latency and overhead.
    assert GlooCollectives(2, link).transfer(1e6) == pytest.approx(2e-3 + 2e-4 + 1e-3)
    assert RingCollectives(2, 0.5, 0.01).transfer(800) == pytest.approx(8.5)
    assert nccl(2, 1).transfer(1e9) == pytest.approx(1e-5 + 0.08)
    assert nccl(1, 2).transfer(8e9) == pytest.approx(1e-5 + 8e9 * INSIDE.beta)


def test_a_stream_occupies_its_link_for_its_bytes() -> None:
    assert GlooCollectives(2, Link(1e-3, 1e-9, 1e-4)).stream(1e6) == pytest.approx((1e-3, 1.1e-3))
    assert RingCollectives(2, 0.5, 0.01).stream(800) == pytest.approx((8.0, 0.5))
    assert nccl(2, 1).stream(1e9) == pytest.approx((0.08, 1e-5))


@pytest.mark.parametrize(("ranks", "share"), [(2, 1 / 2), (4, 3 / 4)])
def test_a_reduce_scatter_sends_all_parts_but_one_and_with_gloo_twice_as_much(ranks: int, share: float) -> None:
    gloo = GlooCollectives(ranks, NETWORK)
    assert RingCollectives(ranks, 1.0, 1.0).scatter_share == nccl(ranks, 1).scatter_share == pytest.approx(share)
    assert gloo.scatter_share == pytest.approx(2 * share)
    assert gloo.reduce_scatter(1e7) == gloo.all_reduce(1e7)


def test_gloos_messages_are_simulated_exactly_up_to_a_number_of_ranks() -> None:
    messages = [Message(0.0, 1e7), Message(0.0, 1e7)]
    rough = GlooCollectives(4, NETWORK, max_exact_ranks=3)
    each = rough.all_reduce(1e7)
    assert rough.finish(messages, threads=2) == pytest.approx([each, 2 * each])
    exact = [GlooCollectives(4, NETWORK, max_exact_ranks=limit).finish(messages, threads=2) for limit in (4, 5)]
    assert exact[0] == exact[1]
    assert exact[0][0] > each * 1.01  # they share the links
