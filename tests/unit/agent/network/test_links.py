"""Links of the switch that change while packets travel: rate, loss, and a link that is down."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from mlbench_cli.agent.network.switch import Packet, PacketSwitch, Scheduler

HEAD = bytes(5)


def frame(target: int, length: int = 1000) -> bytes:
    """An Ethernet frame to a worker, whose address ends with its number from 1."""
    return HEAD + bytes([target + 1]) + bytes(length)


@pytest.fixture
def switch() -> Iterator[tuple[PacketSwitch, list[socket.socket]]]:
    """A running switch of two links, and the workers' ends of them."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for ours, _ in pairs:
        ours.setblocking(False)
    made = PacketSwitch([ours for ours, _ in pairs], 1e8, 0.001)
    control, stop = socket.socketpair()
    runner = threading.Thread(target=made.run, args=(control.fileno(), lambda: False))
    runner.start()
    yield made, [theirs for _, theirs in pairs]
    stop.close()
    runner.join()
    for pair in pairs:
        for end in pair:
            end.close()


def count_arrived(ends: list[socket.socket], packets: int, patience: float = 0.1) -> int:
    """How many of so many packets come through, each of them sent when the one before has come or been given up."""
    ends[1].settimeout(patience)
    arrived = 0
    for _ in range(packets):
        ends[0].send(frame(1))
        with contextlib.suppress(TimeoutError):
            ends[1].recv(2000)
            arrived += 1
    return arrived


def test_a_link_that_is_down_passes_nothing_until_it_is_up_again(
    switch: tuple[PacketSwitch, list[socket.socket]],
) -> None:
    made, ends = switch
    assert count_arrived(ends, 10, patience=60.0) == 10
    made.change_link(1, 0.0, 0.0)
    assert count_arrived(ends, 10) == 0
    made.change_link(1, 1e8, 0.0)
    assert count_arrived(ends, 10, patience=60.0) == 10
    assert made.counters.dropped_packets == 10


def test_a_lossy_link_loses_its_share(switch: tuple[PacketSwitch, list[socket.socket]]) -> None:
    made, ends = switch
    made.change_link(0, 1e8, 0.3)
    assert 20 <= count_arrived(ends, 50) <= 48  # 35 expected, deviation 3.2


def test_a_slowed_link_takes_its_time_and_others_keep_theirs() -> None:
    scheduler = Scheduler(3, 1e8, 0.0, credit=0.0)

    def arrival(now: float, source: int, target: int) -> float:
        """Seconds until the second of two packets of 0.1 Mbit has arrived."""
        for _ in range(2):
            scheduler.admit(now, Packet(source, target, b"", 12500))
        *_, (due, _) = scheduler.take_arrived(now + 100)
        return due - now

    assert arrival(0.0, 0, 1) == pytest.approx(0.002)
    scheduler.change_rate(1, 1e7)
    assert arrival(1.0, 0, 1) == pytest.approx(0.011)  # the receiver passes the second one while 10 ms go by
    assert arrival(2.0, 1, 2) == pytest.approx(0.02)
    assert arrival(3.0, 0, 2) == pytest.approx(0.002)
