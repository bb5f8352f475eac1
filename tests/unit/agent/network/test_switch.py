"""The times of the user-space switch: rate, delay, queueing and bursts, by its virtual clocks alone."""

import math
from collections import Counter

import pytest

from mlbench_cli.agent.network.hub import NETEM, PACKET, choose_mtu
from mlbench_cli.agent.network.switch import CREDIT_SECONDS, Packet, Scheduler

RATE, DELAY = 1e8, 0.005  # 100 Mbit/s: 80 ns for a byte
BYTE = 8 / RATE
FLOW, OTHER = b"\0\1\0\2", b"\0\3\0\4"


def scheduler(links: int = 4, credit: float = 0.0) -> Scheduler:
    return Scheduler(links, RATE, DELAY, credit)


def send(links: Scheduler, now: float, source: int, target: int, length: int, flow: bytes = FLOW) -> None:
    links.admit(now, Packet(source, target, flow, length))


def arrivals(links: Scheduler) -> list[tuple[float, Packet]]:
    """All packets that are on their way, and when they arrive."""
    return list(links.take_arrived(math.inf))


def times(links: Scheduler) -> list[float]:
    return [due for due, _ in arrivals(links)]


def test_packets_of_one_link_wait_for_each_other() -> None:
    links = scheduler()
    for _ in range(50):
        send(links, 1.0, 0, 1, 10_000)
    assert times(links) == pytest.approx([1.0 + (n + 1) * 10_000 * BYTE + DELAY for n in range(50)])


def test_both_directions_are_independent() -> None:
    links = scheduler()
    send(links, 1.0, 0, 1, 10_000)
    send(links, 1.0, 1, 0, 10_000)
    assert times(links) == pytest.approx([1.0 + 10_000 * BYTE + DELAY] * 2)


def test_senders_to_one_receiver_share_its_link() -> None:
    """One that hands over all it has at once would have the link for itself: parameter servers were slower by a fifth
    than a network lets them be."""
    links = scheduler()
    for source in (1, 2, 3):
        for _ in range(10):
            send(links, 1.0, source, 0, 10_000)
    found = arrivals(links)
    assert found[-1][0] == pytest.approx(1.0 + 30 * 10_000 * BYTE + DELAY)
    for count in (3, 15, 27):
        assert set(Counter(packet.source for _, packet in found[:count]).values()) == {count // 3}


def test_nothing_arrives_before_the_moment_that_is_named_next() -> None:
    links = scheduler()
    assert links.find_next() == math.inf
    send(links, 1.0, 0, 1, 10_000)
    following = links.find_next()
    assert not list(links.take_arrived(following - 1e-9))
    assert len(list(links.take_arrived(following))) == 1


def test_an_acknowledgement_does_not_wait_behind_other_flows_data() -> None:
    """With one queue for all, the "ready" messages of a ring wait for megabytes."""
    links = scheduler()
    for _ in range(100):
        send(links, 1.0, 0, 1, 65_000)
    send(links, 1.0, 0, 1, 60, OTHER)
    due, packet = arrivals(links)[0]
    assert packet.flow == OTHER
    assert due == pytest.approx(1.0 + 60 * BYTE + DELAY)


def test_a_small_packet_never_overtakes_its_own_flow() -> None:
    links = scheduler()
    send(links, 1.0, 2, 1, 65_000, OTHER)
    send(links, 1.0, 0, 1, 65_000)
    send(links, 1.0, 0, 1, 60)
    own = [packet.length for _, packet in arrivals(links) if packet.flow == FLOW]
    assert own == [65_000, 60]


def test_a_pause_earns_no_burst() -> None:
    """A token bucket would let the first MiB after a pause pass faster than the rate."""
    links = scheduler(credit=CREDIT_SECONDS)
    send(links, 1.0, 0, 1, 10_000)
    assert len(arrivals(links)) == 1
    for _ in range(105):
        send(links, 60.0, 0, 1, 10_000)
    took = times(links)[-1] - DELAY - 60.0
    assert took >= 105 * 10_000 * BYTE - CREDIT_SECONDS - 1e-9
    assert took <= 105 * 10_000 * BYTE


def test_packets_are_large_for_python_and_small_for_slow_links() -> None:
    assert choose_mtu(1e9, PACKET) == 65_535
    assert choose_mtu(1e8, PACKET) == 8333
    assert choose_mtu(1e7, PACKET) == 1500
    assert (choose_mtu(1e10, NETEM), choose_mtu(1e8, NETEM)) == (9000, 1500)
