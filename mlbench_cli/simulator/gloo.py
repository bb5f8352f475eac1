"""gloo's rings as events (structure: allreduce.cc, allgather.cc and transport/tcp/pair.cc of pytorch/gloo).

A buffer is cut into segments of at most 1 MiB, at least two for each rank. Each rank passes them to its left neighbor,
two in flight, first reduced (reduce-scatter), then complete (all-gather). An all-gather alone is the second phase, with
two segments for each rank. A send waits for the receiver's "ready"
message, so a hop costs two latencies and not one: the textbook's 2 (n-1) alpha is 30 % off on real networks.

All ranks run the same program at the same time on equal links, so one rank stands for all: what it sends arrives from
its neighbor at the same moment. That makes 10 000 ranks as cheap as their number of messages.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

MAX_SEGMENT = 1 << 20
PREAMBLE = 56  # bytes of a gloo message's head on the wire
SOCKET_BUFFER = 2 << 20
WORKER_THREADS = 2  # of a gloo process group
LAUNCH_SECONDS = 1e-4
MAX_EXACT_SEGMENTS = 192  # of a phase; beyond it the time grows by the same amount with each further segment


@dataclass(frozen=True)
class Link:
    """A rank's link: one-way latency in seconds, seconds per byte and direction, the host's seconds per message."""

    alpha: float
    beta: float
    overhead: float = 5e-5


@dataclass(frozen=True)
class Message:
    """One all-reduce: ready at so many seconds, of so many bytes."""

    ready: float
    size: float


@dataclass
class _Collective:
    """The state of one collective on the rank that stands for all."""

    program: Iterator[tuple[str, float]]
    wanted: str = ""
    received: int = 0
    written: int = 0
    ready: int = 0
    pending: deque[float] = field(default_factory=deque)


def split(ranks: int, size: float) -> tuple[int, float]:
    """Segments that a rank sends in each of the two phases, and the bytes of one."""
    segments = max(-(-int(size) // MAX_SEGMENT), 2 * ranks)
    segments = -(-segments // ranks) * ranks
    return segments - segments // ranks, size / segments


def simulate(messages: Sequence[Message], ranks: int, link: Link, threads: int = WORKER_THREADS) -> list[float]:
    """When each all-reduce ends, in seconds. They start in their order, at most `threads` at a time."""
    if ranks == 1:
        return [message.ready for message in messages]
    return _Ring(messages, [split(ranks, message.size) for message in messages], ranks, link, threads).run()


@lru_cache(maxsize=4096)
def ring_seconds(ranks: int, size: float, link: Link) -> float:
    """Seconds of one all-reduce of `size` bytes among `ranks`, without the launch."""
    return _take(2, *split(ranks, size), ranks, link) if ranks > 1 else 0.0


@lru_cache(maxsize=4096)
def gather_seconds(ranks: int, size: float, link: Link) -> float:
    """Seconds of one all-gather of `size` bytes in all among `ranks`, without the launch."""
    return _take(1, 2 * (ranks - 1), size / (2 * ranks), ranks, link) if ranks > 1 else 0.0


def _take(phases: int, count: int, segment: float, ranks: int, link: Link) -> float:
    """Seconds of a collective that sends `count` segments in each of its phases, with nothing else on the link."""
    if count <= MAX_EXACT_SEGMENTS:
        return _alone(phases, count, segment, ranks, link)
    half = MAX_EXACT_SEGMENTS // 2
    few, many = (_alone(phases, number, segment, ranks, link) for number in (half, MAX_EXACT_SEGMENTS))
    return many + (count - MAX_EXACT_SEGMENTS) * (many - few) / (MAX_EXACT_SEGMENTS - half)


def _alone(phases: int, count: int, segment: float, ranks: int, link: Link) -> float:
    (end,) = _Ring([Message(0.0, segment * count)], [(count, segment)], ranks, link, 1, phases).run()
    return end - LAUNCH_SECONDS


class _Ring:
    def __init__(
        self,
        messages: Sequence[Message],
        shapes: Sequence[tuple[int, float]],
        ranks: int,
        link: Link,
        threads: int,
        phases: int = 2,
    ) -> None:
        self._messages = messages
        self._link = link
        # Two ranks have one connection between them: "ready" messages wait for data that left before.
        self._shares_connection = ranks == 2
        self._free_threads = threads
        self._collectives = [_Collective(_program(*shape, phases)) for shape in shapes]
        self._queue: list[tuple[float, int, Callable[[float, int], None], int]] = []
        self._number = 0
        self._next = 0  # message to launch
        self._up = 0.0  # when the link is free
        self._last_arrival = 0.0
        self._sent: deque[tuple[float, float]] = deque()  # bytes so far, when acknowledged
        self._sent_bytes = 0.0
        self._ends = [0.0] * len(messages)

    def run(self) -> list[float]:
        for number, message in enumerate(self._messages):
            self._push(message.ready, self._launch, number)
        while self._queue:
            seconds, _, handle, number = heapq.heappop(self._queue)
            handle(seconds, number)
        return self._ends

    def _push(self, seconds: float, handle: Callable[[float, int], None], number: int) -> None:
        self._number += 1
        heapq.heappush(self._queue, (seconds, self._number, handle, number))

    def _launch(self, now: float, _: int) -> None:
        while self._free_threads and self._next < len(self._messages):
            if self._messages[self._next].ready > now + 1e-12:
                return
            number, self._next = self._next, self._next + 1
            self._free_threads -= 1
            self._push(now + LAUNCH_SECONDS, self._advance, number)

    def _advance(self, now: float, number: int) -> None:
        """Run a collective's program until it has to wait."""
        state = self._collectives[number]
        while True:
            if state.wanted == "receive":
                if not state.received:
                    return
                state.received -= 1
            elif state.wanted == "written":
                if not state.written:
                    return
                state.written -= 1
            state.wanted = ""
            what, size = next(state.program, ("end", 0.0))
            if what == "end":
                self._ends[number] = now
                self._free_threads += 1
                self._launch(now, number)
                return
            if what == "announce":
                self._push(self._announce(now) + self._link.overhead, self._on_ready, number)
            elif what == "send":
                if state.ready:
                    state.ready -= 1
                    self._send(now, number, size)
                else:
                    state.pending.append(size)
            else:
                state.wanted = what

    def _announce(self, now: float) -> float:
        """When a "ready" message arrives: it passes other connections' data, but not its own."""
        arrival = now + self._link.overhead + PREAMBLE * self._link.beta
        if self._shares_connection:
            arrival = max(arrival, self._last_arrival)
        return arrival + self._link.alpha

    def _send(self, now: float, number: int, size: float) -> None:
        link = self._link
        start = max(now + link.overhead, self._up)
        self._up = start + (size + PREAMBLE) * link.beta
        self._last_arrival = self._up
        arrival = self._up + link.alpha
        self._sent_bytes += size
        written = now
        while self._sent and self._sent_bytes - self._sent[0][0] > SOCKET_BUFFER:
            written = max(written, self._sent.popleft()[1])
        self._sent.append((self._sent_bytes, arrival + link.alpha))
        self._push(arrival + link.overhead, self._on_data, number)
        self._push(written, self._on_written, number)

    def _on_ready(self, now: float, number: int) -> None:
        state = self._collectives[number]
        if state.pending:
            self._send(now, number, state.pending.popleft())
        else:
            state.ready += 1

    def _on_data(self, now: float, number: int) -> None:
        self._collectives[number].received += 1
        self._advance(now, number)

    def _on_written(self, now: float, number: int) -> None:
        self._collectives[number].written += 1
        self._advance(now, number)


def _program(count: int, segment: float, phases: int) -> Iterator[tuple[str, float]]:
    """What a rank does in all phases, with two segments in flight."""
    for _ in range(phases):
        for number in range(count + 2):
            if number >= 2:
                yield "receive", 0.0
                yield "written", 0.0
            if number < count:
                yield "announce", 0.0
                yield "send", segment
