"""A switch in user space: every packet between workers waits as long as links of a given rate and delay would take.

Each worker has one link to the switch, of the same rate in both directions. A packet is stored and forwarded at the
sender's link and cut through at the receiver's; then the delay is added. Links are virtual clocks: a moment from which
on they are free. They have no token bucket, so a pause earns no burst beyond `CREDIT_SECONDS`. Packets of several
senders take the receiver's link in the order in which they left their own, so that none of them has it for itself.

Small packets (acknowledgments, gloo's "ready" messages) do not wait behind the data of other flows, only behind their
own flow's: what `fq_codel`, the default of current systems, does on a real host. With one queue per link an all-reduce
among 4 ranks at 100 Mbit/s takes half as long again.
"""

import heapq
import math
import os
import random
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

SPARSE_BYTES = 320
# How far a switch that was scheduled late may catch up; otherwise each delay of the scheduler would lower the rate.
CREDIT_SECONDS = 0.001
LATE_SECONDS = 0.0005
# How early the switch wakes up, because a process takes about this long to wake on an idle machine.
LEAD_SECONDS = 0.0001
MAX_HELD_BYTES = 64 << 20
MAX_FRAME = 70_000
_BATCH = 16
_ETHERNET, _IP = 14, 20
_PROTOCOL_IP = 0x0800


@dataclass
class SwitchCounters:
    """What a switch has done so far. `late_packets` were handed over more than LATE_SECONDS after their time."""

    packets: int = 0
    bytes: int = 0
    dropped_packets: int = 0
    late_packets: int = 0
    worst_late_seconds: float = 0.0
    cpu_seconds: float = 0.0


class Packet(NamedTuple):
    """A packet on its way. `flow` names its connection; `length` is what counts at the rate, in bytes."""

    source: int
    target: int
    flow: bytes
    length: int
    frame: bytes = b""

    @property
    def route(self) -> tuple[int, int, bytes]:
        """The fields that all packets of its flow share."""
        return self[:3]


class Scheduler:
    """When packets arrive: the virtual clocks of all links. Pure; times are seconds of one clock."""

    def __init__(self, links: int, rate: float, delay: float, credit: float = CREDIT_SECONDS) -> None:
        """`rate` in bits per second, `delay` one way in seconds."""
        self._seconds_per_byte = [8 / rate] * links
        self._delay = delay
        self._credit = credit
        self._up = [0.0] * links
        self._down = [0.0] * links
        self._flows_up: dict[tuple[int, int, bytes], float] = {}
        self._flows_down: dict[tuple[int, int, bytes], float] = {}
        self._number = 0
        self._leaving: list[tuple[float, int, Packet]] = []  # when a packet has left its sender's link, its number
        self._arriving: list[tuple[float, int, Packet]] = []

    def admit(self, now: float, packet: Packet) -> None:
        """Take in a packet that came at `now`."""
        cost, route = packet.length * self._seconds_per_byte[packet.source], packet.route
        if packet.length < SPARSE_BYTES:
            left = max(now + cost, self._flows_up.get(route, 0.0))
        else:
            left = max(now - self._credit, self._up[packet.source]) + cost
            self._up[packet.source] = self._flows_up[route] = left
        self._number += 1
        heapq.heappush(self._leaving, (left, self._number, packet))

    def change_rate(self, link: int, rate: float) -> None:
        """Give a link another rate (bits per second) for packets that come from now on."""
        self._seconds_per_byte[link] = 8 / rate

    def take_arrived(self, now: float) -> Iterator[tuple[float, Packet]]:
        """Every packet that has arrived by `now`, and when, in the order of arrival."""
        while self._leaving and self._leaving[0][0] <= now:
            left, number, packet = heapq.heappop(self._leaving)
            heapq.heappush(self._arriving, (self._pass_down(left, packet) + self._delay, number, packet))
        while self._arriving and self._arriving[0][0] <= now:
            due, _, packet = heapq.heappop(self._arriving)
            yield due, packet

    def find_next(self) -> float:
        """A moment before which nothing arrives of what was taken in."""
        leaving = self._leaving[0][0] + self._delay if self._leaving else math.inf
        return min(leaving, self._arriving[0][0] if self._arriving else math.inf)

    def _pass_down(self, left: float, packet: Packet) -> float:
        """When a packet that left its sender's link at `left` has passed its receiver's."""
        if packet.length < SPARSE_BYTES:
            return max(left, self._flows_down.get(packet.route, 0.0))
        passed = max(left, self._down[packet.target] + packet.length * self._seconds_per_byte[packet.target])
        self._down[packet.target] = self._flows_down[packet.route] = passed
        return passed


class PacketSwitch:
    """Moves packets between raw sockets, one for each worker's link, by the times of a Scheduler."""

    def __init__(self, sockets: Sequence[socket.socket], rate: float, delay: float) -> None:
        self.counters = SwitchCounters()
        self.sent_bytes = [0] * len(sockets)
        self._sockets = {link.fileno(): (number, link) for number, link in enumerate(sockets)}
        self._outputs = [link.fileno() for link in sockets]
        self._scheduler = Scheduler(len(sockets), rate, delay)
        self._held = 0
        self._loss = [0.0] * len(sockets)  # share of packets that each link drops
        self._random = random.Random(0)

    def change_link(self, link: int, rate: float, loss: float) -> None:
        """Give a link another rate (bits per second; 0: it is down) and loss, in both directions."""
        self._loss[link] = loss if rate else 1.0
        if rate:
            self._scheduler.change_rate(link, rate)

    def _is_lost(self, source: int, target: int) -> bool:
        return any(share and self._random.random() < share for share in (self._loss[source], self._loss[target]))

    def run(self, control: int, answer: Callable[[], bool]) -> None:
        """Move packets until `answer`, called when `control` is readable, returns False."""
        descriptors = [*self._sockets, control]
        while True:
            self._deliver()
            following = self._scheduler.find_next()
            wait = None if math.isinf(following) else max(0.0, following - LEAD_SECONDS - time.monotonic())
            for descriptor in select.select(descriptors, (), (), wait)[0]:
                if descriptor != control:
                    self._take(descriptor)
                elif not answer():
                    return

    def totals(self) -> dict[str, float]:
        """The counters, by name."""
        used = os.times()
        self.counters.cpu_seconds = round(used.user + used.system, 3)
        return asdict(self.counters)

    def _take(self, descriptor: int) -> None:
        """Take in what has come on one link."""
        source = self._sockets[descriptor][0]
        for _ in range(_BATCH):
            try:
                frame = os.read(descriptor, MAX_FRAME)
            except OSError:  # nothing more, or the link is gone with its worker
                return
            target = frame[5] - 1  # the last byte of the address says whose it is
            if not 0 <= target < len(self._outputs) or target == source:
                continue
            length = len(frame) - _ETHERNET
            self.counters.packets += 1
            self.counters.bytes += length
            self.sent_bytes[source] += length
            if self._held > MAX_HELD_BYTES or self._is_lost(source, target):
                self.counters.dropped_packets += 1
                continue
            ports = frame[_ETHERNET + _IP : _ETHERNET + _IP + 4]
            self._scheduler.admit(time.monotonic(), Packet(source, target, ports, length, frame))
            self._held += length

    def _deliver(self) -> None:
        """Hand over every packet whose time has come."""
        now = time.monotonic()
        for due, packet in self._scheduler.take_arrived(now + LEAD_SECONDS):
            self._held -= packet.length
            late = now - due
            if late > LATE_SECONDS + CREDIT_SECONDS:
                self.counters.late_packets += 1
                self.counters.worst_late_seconds = max(self.counters.worst_late_seconds, round(late, 6))
            try:
                os.write(self._outputs[packet.target], packet.frame)
            except OSError:
                self.counters.dropped_packets += 1


def open_link(interface: str) -> socket.socket:
    """A raw socket on the switch's end of a worker's link. Raises OSError."""
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_PROTOCOL_IP))
    link.bind((interface, _PROTOCOL_IP))
    link.setblocking(False)
    for option in (33, socket.SO_RCVBUF):  # SO_RCVBUFFORCE, if this process may
        try:
            link.setsockopt(socket.SOL_SOCKET, option, MAX_HELD_BYTES)
            break
        except OSError:
            continue
    return link
