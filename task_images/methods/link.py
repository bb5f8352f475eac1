"""The collectives of a method, which count what they send and add the artificial delay of `comm.delay`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from task_images.methods import dist, torch

if TYPE_CHECKING:
    from task_images.world import World


class Booked(NamedTuple):
    """When a message was given to the link, and when it may arrive at the earliest (`time.perf_counter`)."""

    begun: float
    due: float


class Pending:
    """A message under way. `wait` returns when it has arrived, and, on a GPU, when later kernels may use it."""

    def __init__(self, link: Link, work: dist.Work, booked: Booked, is_watched: bool = False) -> None:
        """`is_watched`: the backend says when the message has arrived, which may be before it is waited for."""
        self._link, self._work = link, work
        self._begun, self._due = booked
        self._arrived: float | None = None
        if is_watched:
            work.get_future().add_done_callback(self._note)

    def _note(self, _: object) -> None:
        self._arrived = time.perf_counter()

    def wait(self) -> None:
        """Wait, and count how long."""
        begin = time.perf_counter()
        self._work.wait()
        if self._due > (now := time.perf_counter()):
            time.sleep(self._due - now)
        end = time.perf_counter()
        if not self._link.has_thread:
            self._link.exposed += end - begin
        arrived = min(end, max(self._due, end if self._arrived is None else self._arrived))
        self._link.busy += max(0.0, arrived - max(self._begun, self._link.last))
        self._link.last = max(arrived, self._link.last)


class Link:
    """All ranks, as a method sees them. Every rank makes the same calls in the same order.

    delay            seconds of each message, and of each of its bytes
    messages, bytes  given to collectives by this rank; `wire_bytes`: sent by the ring or tree algorithm in use
    exposed          seconds in which the training waited for messages; `has_thread`: another thread waits for them
    busy             seconds in which at least one was under way
    """

    def __init__(self, world: World, delay: tuple[float, float] | None) -> None:
        self.size, self.rank, self.device = world.size, world.rank, world.device
        self._delay = delay
        # gloo says when an all-reduce has arrived, but not when other collectives have.
        self._is_watched = world.backend == "gloo" and world.device.type == "cpu"
        self.has_thread = False
        self._free = 0.0  # when the delayed link has delivered all messages
        # torch implements reduce-scatter over gloo by an all-reduce, of which each rank keeps its part.
        self._scatter_share = (2 if world.backend == "gloo" else 1) * (world.size - 1) / world.size
        self._host_pairs = world.is_gloo_on_gpu  # gloo does not send GPU tensors between two ranks
        self.messages = self.bytes = 0
        self.wire_bytes = self.exposed = self.busy = self.last = 0.0

    def stats(self) -> dict[str, float]:
        """Counters for the result. No seconds on GPUs, where the host only launches communication."""
        counted = {"messages": float(self.messages), "bytes": float(self.bytes), "wire_bytes": self.wire_bytes}
        if self.device.type == "cuda":
            return counted
        return {
            **counted,
            "communication_seconds": self.busy,
            "exposed_seconds": self.exposed,
            "hidden_seconds": max(0.0, self.busy - self.exposed),
        }

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over ranks, in place."""
        self.start_all_reduce(tensor).wait()
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing `tensor` over ranks, in place."""
        booked = self.book(tensor, 2 * (self.size - 1) / self.size)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return Pending(self, work, booked, self._is_watched)

    def start_reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> Pending:
        """whole [P n] -> this rank's part `own` [n] of the sum over ranks."""
        booked = self.book(whole, self._scatter_share)
        return self._follow(dist.reduce_scatter_tensor(own, whole, async_op=True), booked)

    def start_all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Pending:
        """own [n] of each rank -> whole [P n]."""
        booked = self.book(whole, (self.size - 1) / self.size)
        return self._follow(dist.all_gather_into_tensor(whole, own, async_op=True), booked)

    def all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's `own`, of the same size on all ranks, by rank."""
        whole = own.new_empty(self.size * own.numel())
        booked = self.book(own, self.size - 1)
        self._follow(dist.all_gather_into_tensor(whole, own, async_op=True), booked).wait()
        return list(whole.chunk(self.size))

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite `tensor` with rank 0's, and return it. Uses a binomial tree: a rank sends once in each round after
        the one in which it received the tensor."""
        rounds = range(self.rank.bit_length(), (self.size - 1).bit_length())
        if count := sum(self.rank + 2**number < self.size for number in rounds):
            self.book(tensor, count)
        dist.broadcast(tensor, 0)
        return tensor

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send `tensor` to the rank `peer`; returns when the tensor may be changed."""
        self.book(tensor, 1)
        dist.send(tensor.cpu() if self._host_pairs else tensor, peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Receive `tensor` from the rank `peer`, and return it."""
        place = tensor.cpu() if self._host_pairs else tensor
        dist.recv(place, peer)
        return tensor.copy_(place)

    def start_swap(self, tensor: torch.Tensor, peers: Sequence[int]) -> Callable[[], list[torch.Tensor]]:
        """Start sending `tensor`, which must not change, to all `peers`. Returns a function that waits for theirs and
        returns them in the order of `peers`."""
        sent = tensor.cpu() if self._host_pairs else tensor
        received = [torch.empty_like(sent) for _ in peers]
        # Receives first: gloo sends data only after the peer's "ready", on the same connection. If that queues behind
        # data, the two directions take turns.
        operations = [dist.P2POp(dist.irecv, place, peer) for peer, place in zip(peers, received, strict=True)]
        operations += [dist.P2POp(dist.isend, sent, peer) for peer in peers]
        booked = [self.book(tensor, 1) for _ in peers]
        last = Booked(booked[0].begun, booked[-1].due)
        pending = [Pending(self, work, last) for work in dist.batch_isend_irecv(operations)]

        def finish() -> list[torch.Tensor]:
            for each in pending:
                each.wait()
            return [place.to(tensor.device) for place in received]

        return finish

    def _follow(self, work: dist.Work | None, booked: Booked) -> Pending:
        assert work is not None
        return Pending(self, work, booked)

    def book(self, tensor: torch.Tensor, factor: float) -> Booked:
        """Count a message that is about to be sent, of which this rank sends `factor` times the size. The delayed link
        carries one message after another."""
        size = tensor.numel() * tensor.element_size()
        self.messages += 1
        self.bytes += size
        self.wire_bytes += factor * size
        now = time.perf_counter()
        if self._delay is None:
            return Booked(now, 0.0)
        self._free = max(self._free, now) + self._delay[0] + self._delay[1] * size
        return Booked(now, self._free)
