"""A link: the collectives of one communication thread on a process group that it has to itself, with their bytes
counted."""

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
    """The process groups of a world's links. Making one is a collective of its own, and NCCL's take GPU memory, so the
    self-check's is kept for the training. All ranks take and give back in the same order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._free: list[dist.ProcessGroup] = []

    def take(self, delay: Delay | None) -> "Link":
        """A link on a group that nobody else uses."""
        group = (
            self._free.pop() if self._free else dist.new_group(list(range(self._world.size)), group_desc="gradients")
        )
        assert isinstance(group, dist.ProcessGroup)
        return Link(self._world, group, delay, self)

    def give_back(self, group: dist.ProcessGroup) -> None:
        """Nothing is under way on `group` any more."""
        self._free.append(group)

    def close(self) -> None:
        """The groups end with the world."""


def open_link(world: World, delay: str) -> "Link":
    """A link between all ranks of `world`, with the axis `delay`. Collective."""
    pool = next((item for item in world.companions if isinstance(item, LinkPool)), None)
    if pool is None:
        pool = LinkPool(world)
        world.companions.append(pool)
    alpha, _, beta = delay.partition(",")
    return pool.take((float(alpha), float(beta)) if beta else None)


class Link:
    """One data group. Every call blocks, and is made by one thread only, in the same order on all ranks.

    delay            (alpha, beta): seconds that every message takes more, and seconds per byte of it
    host_pairs       whether messages between two ranks go through host memory: gloo takes no GPU tensors for them
    messages, bytes  what this rank handed over; `wire_bytes`: what it sends of that by the ring or tree used
    """

    def __init__(self, world: World, group: dist.ProcessGroup, delay: Delay | None, pool: LinkPool) -> None:
        self.size = world.size
        self.rank = world.rank
        self.device = world.device
        self.synchronize = world.synchronize
        self.group = group
        self._delay = delay
        self._pool = pool
        # torch's gloo reduces and scatters by an all-reduce, of which each rank keeps its part.
        self._scatter_share = (2 if world.backend == "gloo" else 1) * (world.size - 1) / world.size
        self.host_pairs = world.is_gloo_on_gpu
        self._turns = ThreadPoolExecutor(1, "swap") if world.backend == "gloo" else None
        self.messages = 0
        self.bytes = 0
        self.wire_bytes = 0.0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """`tensor` becomes its sum over ranks."""
        self.start_all_reduce(tensor).wait()
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> dist.Work:
        """Begin to sum `tensor` over ranks; several may be under way. The work says when it is done."""
        self.book(tensor, 2 * (self.size - 1) / self.size)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return work

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """tensor (P n) -> this rank's n numbers of the sum over ranks."""
        self.book(tensor, self._scatter_share)
        own = tensor.new_empty(tensor.numel() // self.size)
        dist.reduce_scatter_tensor(own, tensor, group=self.group)
        return own

    def all_gather_into(self, whole: Tensor, own: Tensor) -> None:
        """own (n) of each rank -> whole (P n)."""
        self.book(whole, (self.size - 1) / self.size)
        dist.all_gather_into_tensor(whole, own, group=self.group)

    def all_gather(self, own: Tensor) -> list[Tensor]:
        """Every rank's `own`, equally large on all, by rank."""
        self.book(own, self.size - 1)
        whole = own.new_empty(self.size * own.numel())
        dist.all_gather_into_tensor(whole, own, group=self.group)
        return list(whole.chunk(self.size))

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        """tensor (P n): the i-th n numbers go to rank i -> what each rank had for this one."""
        self.book(tensor, (self.size - 1) / self.size)
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=self.group)
        return list(received.chunk(self.size))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Overwrite `tensor` with the root's, and return it. Along a binomial tree, in which a rank sends once in each
        round after the one in which it got the tensor."""
        place = (self.rank - root) % self.size
        rounds = range(place.bit_length(), (self.size - 1).bit_length())
        if count := sum(place + 2**number < self.size for number in rounds):
            self.book(tensor, count)
        dist.broadcast(tensor, root, group=self.group)
        return tensor

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send `tensor` to the rank `peer` of this link; returns when it may be changed."""
        self.book(tensor, 1)
        dist.send(self._between_two(tensor), peer, group=self.group)

    def receive(self, tensor: Tensor, peer: int) -> Tensor:
        """Fill `tensor` with what the rank `peer` of this link sends, and return it."""
        place = self._between_two(tensor)
        dist.recv(place, peer, group=self.group)
        return tensor if place is tensor else tensor.copy_(place)

    def swap(self, tensor: Tensor, peers: Sequence[int]) -> list[Tensor]:
        """`tensor` goes to all `peers`, whose own come back, in their order."""
        return self.start_swap(tensor, peers)()

    def start_swap(self, tensor: Tensor, peers: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Begin to send `tensor`, which must not change, to all `peers`; what waits for theirs, in their order.

        Over gloo it is the turn of one peer after the other, and the last peer's own comes in the first. If `peers`
        are the next and the previous rank of a ring, each link carries one message at a time each way: on three ranks
        that takes 2.0 messages' time, and all at once took 2.7.
        """
        sent = self._between_two(tensor)
        received = [torch.empty_like(sent) for _ in peers]
        # All receives first: gloo sends data only after the peer's "ready", which travels on the same connection. If
        # that waits behind data, the two directions take turns.
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
        """The tensor, or its copy in host memory, as the backend takes it for a message between two ranks."""
        return tensor.cpu() if self.host_pairs else tensor

    def close(self) -> None:
        """Give the group back. Nothing is under way."""
        if self._turns is not None:
            self._turns.shutdown()
        self._pool.give_back(self.group)

    @contextmanager
    def leave_out(self) -> Iterator[None]:
        """Leave messages out of the figures, for those that measure the network and carry no gradients."""
        before = self.messages, self.bytes, self.wire_bytes
        yield
        self.messages, self.bytes, self.wire_bytes = before

    def book(self, tensor: Tensor, factor: float) -> None:
        """Count a message, of which this rank sends `factor` times the size, and take the time that it is to take."""
        size = tensor.numel() * tensor.element_size()
        self.messages += 1
        self.bytes += size
        self.wire_bytes += factor * size
        if self._delay is not None:
            time.sleep(self._delay[0] + self._delay[1] * size)


class Leader:
    """Rank 0 names the next message, on a control group of its own (gloo: it is a number in host memory)."""

    def __init__(self, world: World) -> None:
        self.is_here = world.rank == 0
        group = dist.new_group(list(range(world.size)), backend="gloo", group_desc="order of messages")
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    def announce(self, number: int = -1) -> int:
        """Rank 0's `number`. Collective; every rank waits until rank 0 has chosen."""
        chosen = torch.tensor([number])
        dist.broadcast(chosen, 0, group=self._group)
        return int(chosen)


def measure_cost(link: Link, sizes: Sequence[int], counts: tuple[int, int] = (2, 12)) -> list[float]:
    """Seconds by which the last of several all-reduces ends later for one more, for each of `sizes` numbers.

    That is what counts in a plan. A short burst is compared with a long one: what a burst takes once, whatever its
    length (until the last rank has begun, and until it is done), is no cost of each message. With more ranks than cores
    it is as long as several messages. Collective.
    """
    short, long = counts
    return [(measure_burst(link, size, long) - measure_burst(link, size, short)) / (long - short) for size in sizes]


def measure_burst(link: Link, size: int, count: int) -> float:
    """Seconds of `count` all-reduces of `size` numbers, handed over without waiting, as gradients are. Collective.

    Two before them do not count.
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
