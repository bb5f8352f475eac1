"""Ranks as threads of one process: links, bookkeeping and parameter servers in memory, for tests of many small cases.

`run_ranks(size, body)` calls `body(world)` on `size` threads, and returns what each gave. The strategies, messages,
codecs and the communication threads are those of a run; what a backend does is added up here in the order of ranks.
"""

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from task_images.comm.client import ServerClient
from task_images.comm.link import Delay, Link, LinkPool
from task_images.comm.methods import Method
from task_images.comm.served_codecs import make_adder
from task_images.comm.server import ParameterServer
from task_images.comm.wire import Frame
from task_images.contract import Contract
from task_images.harness.distributed import World

R = TypeVar("R")
SECONDS = 120.0


class Meeting:
    """A place where all ranks meet: each brings something, and gets what all have brought."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._brought: list[Any] = [None] * size
        # Made at once: a sender and its receiver, each making the queue that it misses, would use two.
        pairs = itertools.product(range(size), range(size))
        self.queues: dict[tuple[int, int], SimpleQueue[Tensor]] = {pair: SimpleQueue() for pair in pairs}

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._brought[rank] = value
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class Shared:
    """What the threads of one start have in common. `collectives` counts those of the training thread of rank 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meetings: dict[int, Meeting] = {}
        self.servers: list[ParameterServer] = []
        self.collectives = 0
        self._lock = threading.Lock()

    def meeting(self, number: int) -> Meeting:
        with self._lock:
            return self.meetings.setdefault(number, Meeting(self.size))

    def abort(self) -> None:
        with self._lock:
            for meeting in self.meetings.values():
                meeting.abort()
        for server in self.servers:
            server.fail("a rank failed")


class DoneWork:
    """A collective that was made at once."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class ThreadLink(Link):
    """A link over a meeting. Its sums are made in the order of ranks."""

    def __init__(self, world: World, meeting: Meeting, delay: Delay | None, pool: LinkPool) -> None:
        super().__init__(world, meeting, delay, pool)  # type: ignore[arg-type]
        self._meeting = meeting

    def start_all_reduce(self, tensor: Tensor) -> Any:
        self.book(tensor, 2 * (self.size - 1) / self.size)
        tensor.copy_(add_up(self._meeting.gather(self.rank, tensor.clone())))
        return DoneWork()

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        self.book(tensor, self._scatter_share)
        return add_up(self._meeting.gather(self.rank, tensor.clone())).chunk(self.size)[self.rank].clone()

    def all_gather_into(self, whole: Tensor, own: Tensor) -> None:
        self.book(whole, (self.size - 1) / self.size)
        whole.copy_(torch.cat(self._meeting.gather(self.rank, own.clone())))

    def all_gather(self, own: Tensor) -> list[Tensor]:
        self.book(own, self.size - 1)
        return [part.clone() for part in self._meeting.gather(self.rank, own.clone())]

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        self.book(tensor, (self.size - 1) / self.size)
        return [part.chunk(self.size)[self.rank].clone() for part in self._meeting.gather(self.rank, tensor.clone())]

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        return tensor.copy_(self._meeting.gather(self.rank, tensor.clone())[root])

    def send(self, tensor: Tensor, peer: int) -> None:
        self.book(tensor, 1)
        self._meeting.queues[self.rank, peer].put(tensor.clone())

    def receive(self, tensor: Tensor, peer: int) -> Tensor:
        return tensor.copy_(self._meeting.queues[peer, self.rank].get(timeout=SECONDS))

    def start_swap(self, tensor: Tensor, peers: Sequence[int]) -> Callable[[], list[Tensor]]:
        for peer in peers:
            self.send(tensor, peer)
        return lambda: [self.receive(torch.empty_like(tensor), peer) for peer in peers]


class ThreadPool(LinkPool):
    """Links of one rank: the n-th one in use is the n-th of every rank."""

    def __init__(self, world: World, shared: Shared) -> None:
        super().__init__(world)
        self._shared, self._count = shared, 0

    def take(self, delay: Delay | None) -> Link:
        if self._free:
            meeting: Any = self._free.pop()
        else:
            self._count += 1
            meeting = self._shared.meeting(self._count)
        return ThreadLink(self._world, meeting, delay, self)


class ThreadClient(ServerClient):
    """Connections to servers that are objects of the same process."""

    def __init__(self, rank: int, servers: Sequence[ParameterServer]) -> None:
        self._rank, self._servers = rank, servers
        self._asked: dict[int, deque[Frame]] = defaultdict(deque)

    def send(self, server: int, frame: Frame) -> None:
        self._asked[server].append(frame._replace(tensor=frame.tensor.clone()))

    def receive(self, server: int) -> Frame:
        return self._servers[server].answer(self._rank, self._asked[server].popleft())

    def has_answer(self, server: int) -> bool:
        return False

    def close(self) -> None:
        """The servers end with the threads."""


class ThreadWorld(World):
    """One of several threads."""

    def __init__(self, rank: int, shared: Shared) -> None:
        contract = Contract({"RANK": str(rank), "WORLD_SIZE": str(shared.size), "MLBENCH_BACKEND": "gloo"})
        super().__init__(contract, torch.device("cpu"), 1, grouped=False)
        self.shared, self._meeting = shared, shared.meeting(0)
        self.companions = [ThreadPool(self, shared)]

    def all_reduce(self, tensor: Tensor, op: Any = None) -> Tensor:
        found = self._gather(tensor.clone())
        if op is None or op == torch.distributed.ReduceOp.SUM:
            return tensor.copy_(add_up(found))
        return tensor.copy_(torch.stack(found).amax(0))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return self._gather(list(values))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor.copy_(self._gather(tensor.clone())[source])

    def barrier(self) -> None:
        self._gather(None)

    def _gather(self, value: Any) -> list[Any]:
        if self.rank == 0:
            self.shared.collectives += 1
        return self._meeting.gather(self.rank, value)


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def run_ranks(size: int, body: Callable[[ThreadWorld], R], method: Method | None = None) -> list[R]:
    """`body` on `size` ranks, with parameter servers if `method` has some. Raises what a rank raised first."""
    shared = Shared(size)
    if method is not None and method.server_count:
        word, _, bound = method.staleness.partition(":")
        shared.servers = [
            ParameterServer(size, int(bound) if word == "ssp" else None, SECONDS, make_adder(method))
            for _ in range(method.server_count)
        ]
    results: dict[int, R] = {}
    failures: list[Exception] = []

    def run(rank: int) -> None:
        world = ThreadWorld(rank, shared)
        if shared.servers:
            world.companions.append(ThreadClient(rank, shared.servers))
        try:
            results[rank] = body(world)
        except Exception as error:
            failures.append(error)
            shared.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, threading.BrokenBarrierError)), failures[0])
    return [results[rank] for rank in range(size)]
