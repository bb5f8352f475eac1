"""The communication thread: takes messages in a fixed order, waits until each is ready, and runs its transport.

On a GPU the thread has its own stream. Kernels are launched asynchronously, so events order the two streams: the
thread's waits for the gradients, and the training's waits for the sums.
"""

import contextlib
import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from task_images.comm.exchange import Message, ScatterGather, Transport, UnderWay
from task_images.comm.link import Leader
from task_images.harness.timeline import MessageSpan, Timeline


@dataclass
class Slot:
    """One parameter: its place in a group's buffer."""

    index: int
    name: str
    parameter: nn.Parameter
    group: "Group"
    view: Tensor
    start: int
    arrived: bool = False


@dataclass
class Group:
    """Parameters whose gradients share a buffer, and the messages that it is cut into."""

    flat: Tensor
    slots: list[Slot] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    missing: int = 0
    ready: bool = False
    ready_at: float = 0.0
    pending: int = 0  # messages not yet summed
    written: "torch.cuda.Event | None" = None  # on a GPU: recorded after the gradients were written
    summed: "torch.cuda.Event | None" = None  # on a GPU: recorded after the last message


def mark_stream(flat: Tensor) -> "torch.cuda.Event | None":
    """Record an event after all work in this thread's stream; None on a CPU, where the work is done."""
    if not flat.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(flat.device))
    return event


def wait_for_event(event: "torch.cuda.Event | None", flat: Tensor) -> None:
    """Make this thread's stream, but not the thread, wait for the event."""
    if event is not None:
        torch.cuda.current_stream(flat.device).wait_event(event)


class Sender:
    """The thread that sends all messages of a strategy. Its figures are sums since the start, in seconds.

    queue_seconds           ready messages waited for others
    communication_seconds   this thread sent, received, or waited for other ranks
    exposed_seconds         the training thread waited for this one
    """

    def __init__(
        self, transport: Transport, credit: int, timeline: Timeline | None = None, leader: Leader | None = None
    ) -> None:
        """`timeline` records each message's span. With a `leader` the order is dynamic: rank 0 chooses each next
        message, the first in the arranged order that is ready there."""
        self._timeline = timeline
        self._leader = leader
        self._transport = transport
        self._credit = credit
        self._order: list[tuple[Group, Message]] = []
        self._forward: list[tuple[Group, Message]] = []
        self._changed = threading.Condition()
        self._updates: deque[int] = deque()
        self._failure: BaseException | None = None
        self._stopping = False
        self._stream: torch.cuda.Stream | None = None
        self.queue_seconds = self.communication_seconds = self.exposed_seconds = 0.0
        self._thread = threading.Thread(target=self._serve, name="communication", daemon=True)
        self._thread.start()

    def arrange(self, order: list[tuple[Group, Message]], forward: list[tuple[Group, Message]]) -> None:
        """Set the order of sending, and of the second halves. No messages may be in flight."""
        self._order, self._forward = order, forward

    def begin(self, seed: int) -> None:
        """Begin an update, with no group ready. `seed` differs for each update."""
        with self._changed:
            self._updates.append(seed)
            self._changed.notify_all()

    def release(self, groups: list[Group]) -> None:
        """Mark groups ready: their gradients are in their buffers."""
        now = time.perf_counter()
        with self._changed:
            for group in groups:
                group.written = mark_stream(group.flat)
                group.ready, group.ready_at = True, now
            self._changed.notify_all()

    def wait(self, groups: list[Group]) -> None:
        """Wait until the messages of `groups` are summed. Re-raises errors of the communication thread."""
        begin = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._failure or all(group.pending == 0 for group in groups))
        self.exposed_seconds += time.perf_counter() - begin
        if self._failure is not None:
            raise self._failure
        for group in groups:
            wait_for_event(group.summed, group.flat)

    def close(self) -> None:
        """End the thread. No messages may be in flight."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=60)

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._updates or self._stopping)
                    if not self._updates:
                        return
                    update = self._updates.popleft()
                with self._own_stream():
                    self._send_all(update)
        except BaseException as error:  # raised again in the training thread
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _own_stream(self) -> AbstractContextManager[object]:
        """A context with this thread's own stream."""
        flat = self._order[0][0].flat if self._order else None
        if flat is None or not flat.is_cuda:
            return contextlib.nullcontext()
        self._stream = self._stream or torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)

    def _send_all(self, update: int) -> None:
        under_way: deque[tuple[Group, Message, UnderWay, float]] = deque()
        flying = 0

        def land() -> int:
            group, message, sent, started = under_way.popleft()
            begin = time.perf_counter()
            sent.finish()
            self.communication_seconds += time.perf_counter() - begin
            self._mark_done(group, message, started)
            return message.size

        def choose(left: list[tuple[Group, Message]]) -> int:
            nonlocal flying
            assert self._leader is not None
            while under_way and not (self._leader.is_here and self._find_ready(left) is not None):
                flying -= land()
            return self._leader.announce(self._await_ready(left) if self._leader.is_here else -1)

        left = list(self._order)
        while left:
            group, message = left.pop(choose(left) if self._leader else 0)
            with self._changed:
                self._changed.wait_for(lambda group=group: group.ready or self._stopping)  # type: ignore[misc]
                if self._stopping:
                    return
            while under_way and flying + message.size > self._credit:
                flying -= land()
            wait_for_event(group.written, group.flat)
            begin = time.perf_counter()
            self.queue_seconds += begin - group.ready_at
            sent = self._transport.start(message, self._message_seed(update, message))
            self.communication_seconds += time.perf_counter() - begin
            if sent is not None:
                under_way.append((group, message, sent, begin))
                flying += message.size
            elif message.shard is None:
                self._mark_done(group, message, begin)
            while under_way and under_way[0][2].is_done():  # a forward pass may be waiting for it
                flying -= land()
        while under_way:
            land()
        if isinstance(self._transport, ScatterGather):
            self._gather_all(self._transport)

    @staticmethod
    def _find_ready(left: list[tuple[Group, Message]]) -> int | None:
        """The index of the first ready message, or None."""
        return next((number for number, (group, _) in enumerate(left) if group.ready), None)

    def _await_ready(self, left: list[tuple[Group, Message]]) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._find_ready(left) is not None or self._stopping)
        return self._find_ready(left) or 0

    def _gather_all(self, transport: ScatterGather) -> None:
        """Run the second halves, those of the first layers first, because these are needed first."""
        for group, message in self._forward:
            if message.shard is not None:
                begin = time.perf_counter()
                transport.gather(message)
                self.communication_seconds += time.perf_counter() - begin
                self._mark_done(group, message, begin)

    def _mark_done(self, group: Group, message: Message, begin: float) -> None:
        if self._timeline is not None:
            self._timeline.add_message(
                MessageSpan(message.number, message.size, group.ready_at, begin, time.perf_counter())
            )
        summed = mark_stream(group.flat)
        with self._changed:
            group.summed = summed
            group.pending -= 1
            self._changed.notify_all()

    @staticmethod
    def _message_seed(seed: int, message: Message) -> int:
        """A seed that differs for each message and update, but not between ranks or after resuming."""
        return (seed * 100_003 + message.number) % 2**40
