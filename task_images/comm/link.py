"""A link: the collectives of one communication thread, with its own process group and a count of bytes."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from task_images.harness.distributed import World

Delay = tuple[float, float]


class LinkPool:
    """The process groups of a world's links. Creating one is a collective, and NCCL's take GPU memory, so the training
    reuses the group of the self-check. All ranks must take and return groups in the same order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._free: list[dist.ProcessGroup] = []

    def take(self, delay: Delay | None) -> "Link":
        """A link on an unused group."""
        group = (
            self._free.pop() if self._free else dist.new_group(list(range(self._world.size)), group_desc="gradients")
        )
        assert isinstance(group, dist.ProcessGroup)
        return Link(self._world, group, delay, self)

    def give_back(self, group: dist.ProcessGroup) -> None:
        """Return `group`, which has no messages in flight, to the pool."""
        self._free.append(group)

    def close(self) -> None:
        """Forget the groups, which end with the world."""


def open_link(world: World, delay: str) -> "Link":
    """A link between all ranks of `world`, with the axis `delay`. Collective."""
    pool = next((item for item in world.companions if isinstance(item, LinkPool)), None)
    if pool is None:
        pool = LinkPool(world)
        world.companions.append(pool)
    alpha, _, beta = delay.partition(",")
    return pool.take((float(alpha), float(beta)) if beta else None)


class Link:
    """A data group. All calls come from one thread, in the same order on all ranks, and block unless named `start_...`.

    delay            (alpha, beta): seconds added per message, and per byte of it
    host_pairs       whether point-to-point messages are copied through host memory: gloo does not send GPU tensors
    messages, bytes  given to collectives by this rank; `wire_bytes`: sent by the ring or tree algorithm in use
    """

    def __init__(self, world: World, group: dist.ProcessGroup, delay: Delay | None, pool: LinkPool) -> None:
        self.size = world.size
        self.rank = world.rank
        self.device = world.device
        self.synchronize = world.synchronize
        self.group = group
        self._delay = delay
        self._pool = pool
        # torch implements reduce-scatter over gloo by an all-reduce, of which each rank keeps its part.
        self._scatter_share = (2 if world.backend == "gloo" else 1) * (world.size - 1) / world.size
        self.host_pairs = world.is_gloo_on_gpu
        self._turns = ThreadPoolExecutor(1, "swap") if world.backend == "gloo" else None
        self.messages = 0
        self.bytes = 0
        self.wire_bytes = 0.0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over ranks, in place."""
        self.start_all_reduce(tensor).wait()
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> dist.Work:
        """Start summing `tensor` over ranks, in place; several may be in flight. Wait for the returned work."""
        self.book(tensor, 2 * (self.size - 1) / self.size)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return work

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """tensor [P n] -> this rank's shard [n] of the sum over ranks."""
        self.book(tensor, self._scatter_share)
        own = tensor.new_empty(tensor.numel() // self.size)
        dist.reduce_scatter_tensor(own, tensor, group=self.group)
        return own

    def all_gather_into(self, whole: Tensor, own: Tensor) -> None:
        """own [n] of each rank -> whole [P n]."""
        self.book(whole, (self.size - 1) / self.size)
        dist.all_gather_into_tensor(whole, own, group=self.group)

    def all_gather(self, own: Tensor) -> list[Tensor]:
        """Each rank's `own`, of the same size on all ranks, by rank."""
        self.book(own, self.size - 1)
        whole = own.new_empty(self.size * own.numel())
        dist.all_gather_into_tensor(whole, own, group=self.group)
        return list(whole.chunk(self.size))

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        """tensor [P n], whose i-th part [n] goes to rank i -> the parts received, by rank."""
        self.book(tensor, (self.size - 1) / self.size)
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=self.group)
        return list(received.chunk(self.size))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Overwrite `tensor` with the root's, and return it. Uses a binomial tree: a rank sends once in each round
        after the one in which it received the tensor."""
        place = (self.rank - root) % self.size
        rounds = range(place.bit_length(), (self.size - 1).bit_length())
        if count := sum(place + 2**number < self.size for number in rounds):
            self.book(tensor, count)
        dist.broadcast(tensor, root, group=self.group)
        return tensor

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send `tensor` to the rank `peer` of this link; returns when the tensor may be changed."""
        self.book(tensor, 1)
        dist.send(self._between_two(tensor), peer, group=self.group)

    def receive(self, tensor: Tensor, peer: int) -> Tensor:
        """Receive `tensor` from the rank `peer` of this link, and return it."""
        place = self._between_two(tensor)
        dist.recv(place, peer, group=self.group)
        return tensor if place is tensor else tensor.copy_(place)

    def swap(self, tensor: Tensor, peers: Sequence[int]) -> list[Tensor]:
        """Send `tensor` to all `peers`, and return theirs, in the order of `peers`."""
        return self.start_swap(tensor, peers)()

    def start_swap(self, tensor: Tensor, peers: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Start sending `tensor`, which must not change, to all `peers`. Returns a function that waits for theirs and
        returns them in the order of `peers`.

        Over gloo peers take turns: a rank sends to the first peer while it receives from the last one. If `peers` are
        the next and the previous rank of a ring, each link carries one message at a time in each direction. On three
        ranks this takes the time of 2.0 messages; sending everything at once took 2.7.
        """
        sent = self._between_two(tensor)
        received = [torch.empty_like(sent) for _ in peers]
        # Post all receives first: gloo sends data only after the peer's "ready", on the same connection. If that queues
        # behind data, the two directions take turns.
        works = [dist.irecv(place, peer, group=self.group) for peer, place in zip(peers, received, strict=True)]
        for _ in peers:
            self.book(tensor, 1)

        def take_turns() -> None:
            for peer, work in zip(peers, reversed(works), strict=True):
                dist.send(sent, peer, group=self.group)
                if work is not None:
                    work.wait()

        turns = None if self._turns is None else self._turns.submit(take_turns)
        if turns is None:
            works += [dist.isend(sent, peer, group=self.group) for peer in peers]

        def finish() -> list[Tensor]:
            if turns is not None:
                turns.result()
            else:
                for work in works:
                    if work is not None:
                        work.wait()
            return [place.to(self.device) for place in received]

        return finish

    def _between_two(self, tensor: Tensor) -> Tensor:
        """The tensor, or its copy in host memory if the backend needs one for point-to-point messages."""
        return tensor.cpu() if self.host_pairs else tensor

    def close(self) -> None:
        """Return the group to the pool. No messages may be in flight."""
        if self._turns is not None:
            self._turns.shutdown()
        self._pool.give_back(self.group)

    @contextmanager
    def leave_out(self) -> Iterator[None]:
        """Do not count messages in this block, e.g. those that measure the network."""
        before = self.messages, self.bytes, self.wire_bytes
        yield
        self.messages, self.bytes, self.wire_bytes = before

    def book(self, tensor: Tensor, factor: float) -> None:
        """Count a message, of which this rank sends `factor` times the size, and sleep for the artificial delay."""
        size = tensor.numel() * tensor.element_size()
        self.messages += 1
        self.bytes += size
        self.wire_bytes += factor * size
        if self._delay is not None:
            time.sleep(self._delay[0] + self._delay[1] * size)


class Leader:
    """Lets rank 0 choose the next message, over a separate control group (gloo, for a number in host memory)."""

    def __init__(self, world: World) -> None:
        self.is_here = world.rank == 0
        group = dist.new_group(list(range(world.size)), backend="gloo", group_desc="order of messages")
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    def announce(self, number: int = -1) -> int:
        """Rank 0's `number`. Collective; ranks wait until rank 0 has chosen."""
        chosen = torch.tensor([number])
        dist.broadcast(chosen, 0, group=self._group)
        return int(chosen)


def measure_cost(link: Link, sizes: Sequence[int], counts: tuple[int, int] = (2, 12)) -> list[float]:
    """Seconds that one more all-reduce adds to a burst, for each of `sizes` (elements).

    A plan needs this marginal cost. Comparing a short burst with a long one removes the fixed cost of a burst (until
    all ranks have started, and until all are done), which is as long as several messages if there are more ranks than
    cores. Collective.
    """
    short, long = counts
    return [(measure_burst(link, size, long) - measure_burst(link, size, short)) / (long - short) for size in sizes]


def measure_burst(link: Link, size: int, count: int) -> float:
    """Seconds of `count` all-reduces of `size` elements, started without waiting, like gradients. Collective.

    Two warm-up operations are excluded.
    """
    tensors = [torch.zeros(size, device=link.device) for _ in range(count + 2)]
    for tensor in tensors[:2]:
        link.all_reduce(tensor)
    link.synchronize()
    begin = time.perf_counter()
    for work in [link.start_all_reduce(tensor) for tensor in tensors[2:]]:
        work.wait()
    link.synchronize()
    return time.perf_counter() - begin
