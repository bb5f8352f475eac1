"""Parameter servers (Li et al. 2014): processes that sum the trainers' gradients, in one gloo group with them.

Trainer 0 tells each server which messages to expect and in which order, then announces every update. A server sums the
parts of a message in the order of ranks, so that sums do not depend on who comes first, and answers all trainers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from task_images.errors import PeerLostError
from task_images.methods import Lazy, dist, plans, torch
from task_images.methods.base import MethodError, Option, size_option
from task_images.methods.buckets import Bucketed, Finish, Message
from task_images.methods.link import Pending
from task_images.methods.plans import Groups
from task_images.methods.scheduled import ByteScheduler, Wfbp, cut
from task_images.ranks import COLLECTIVE_SECONDS, RENDEZVOUS_SECONDS, cpu_threads

if TYPE_CHECKING:
    from torch import Tensor

    from task_images import world as distributed
    from task_images.contract import Contract
else:
    distributed = Lazy("task_images.world")

PREFIX = "servers"
CONTROL, FIRST = 0, 1  # tags: of trainer 0's orders, and of the first message
END, UPDATE, TABLE = range(3)
DTYPES = ("float32", "float16", "bfloat16", "float64")
MAX_SERVERS = 64


class ServerGroup:
    """Trainers, then servers, as the ranks of a process group beside that of the trainers."""

    def __init__(self, contract: Contract, servers: int) -> None:
        self.trainers, self.size = contract.world_size, contract.world_size + servers
        self.rank = contract.rank
        distributed.prefer_loopback(contract)
        try:
            store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                contract.master_addr, contract.master_port, timeout=timedelta(seconds=RENDEZVOUS_SECONDS)
            )
            store = dist.PrefixStore(PREFIX, store)  # type: ignore[attr-defined]
            distributed.await_everyone(store, "here", self.rank, self.size, RENDEZVOUS_SECONDS)
            self._group: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=COLLECTIVE_SECONDS))
        except RuntimeError as error:
            raise PeerLostError(f"trainers and parameter servers did not meet: {_short(error)}") from None

    def name(self, rank: int) -> str:
        """What a rank is."""
        return f"trainer {rank}" if rank < self.trainers else f"parameter server {rank - self.trainers}"

    def start_send(self, tensor: Tensor, rank: int, tag: int) -> Any:
        """Start to send. Raises PeerLostError, as `wait` does."""
        try:
            return self._group.send([tensor], rank, tag)
        except RuntimeError as error:
            raise self.lost(rank, error) from None

    def start_receive(self, tensor: Tensor, rank: int, tag: int) -> Any:
        """Start to receive into `tensor`."""
        try:
            return self._group.recv([tensor], rank, tag)
        except RuntimeError as error:
            raise self.lost(rank, error) from None

    def wait(self, work: Any, rank: int) -> None:
        """Wait until a message to or from `rank` has arrived."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(rank, error) from None

    def lost(self, rank: int, error: RuntimeError) -> PeerLostError:
        """The error of a rank that is gone."""
        return PeerLostError(f"lost {self.name(rank)}: {_short(error)}", "See its log for the cause.")

    def order(self, kind: int, table: Sequence[tuple[int, int]] = (), server: int = 0) -> None:
        """Send an order to a server, as trainer 0."""
        rank = self.trainers + server
        for numbers in ([kind, len(table)], *([table] if table else [])):
            self.wait(self.start_send(torch.tensor(numbers), rank, CONTROL), rank)

    def close(self) -> None:
        """Tell the servers that the training is done."""
        if self.rank == 0:
            for server in range(self.size - self.trainers):
                self.order(END, server=server)


class Served(Bucketed):
    """Messages go to parameter servers instead of to the other ranks."""

    options = {  # noqa: RUF012
        "servers": Option(1, 1, MAX_SERVERS, "number of parameter servers (run.servers)"),
        "partition": size_option("4096000", "messages are cut into parts of at most this size"),
    }
    formula = "M"
    exact = True
    collective = "ps"

    def check(self, ranks: int) -> None:
        """More servers than workers have no use."""
        if (servers := self.values["servers"]) > max(1, ranks):
            raise MethodError(
                f"{servers} servers for {ranks} workers: more servers than workers have no use",
                f"--set run.servers={max(1, ranks)}",
            )

    def start(self) -> None:
        """Meet the servers, once per run."""
        found = next((item for item in self.world.companions if isinstance(item, ServerGroup)), None)
        if found is None:
            found = ServerGroup(self.world.contract, self.values["servers"])
            self.world.companions.append(found)
        self.group = found
        super().start()

    def cut(self, flat: Tensor) -> Sequence[Tensor]:
        """Parts of at most `partition` bytes."""
        return cut(flat, self.values["partition"])

    def arrange(self, messages: list[Message]) -> list[Message]:
        """Distribute the messages over the servers, balanced by bytes, and tell them."""
        ordered = super().arrange(messages)
        chosen = assign([message.size for message in ordered], self.values["servers"])
        self._places: dict[int, tuple[int, int]] = {}  # message -> server and number there
        tables: list[list[tuple[int, int]]] = [[] for _ in range(self.values["servers"])]
        for message, server in zip(ordered, chosen, strict=True):
            self._places[message.number] = server, len(tables[server])
            kind = DTYPES.index(str(message.flat.dtype).removeprefix("torch."))
            tables[server].append((message.flat.numel(), kind))
        for server, table in enumerate(tables) if self.world.rank == 0 else ():
            self.group.order(TABLE, table, server)
        return ordered

    def open_update(self) -> None:
        """Announce the update."""
        super().open_update()
        for server in range(self.values["servers"]) if self.world.rank == 0 else ():
            self.group.order(UPDATE, server=server)

    def send(self, message: Message) -> Finish:
        """Send the message to its server, which answers with the sum over trainers."""
        server, number = self._places[message.number]
        rank, tag = self.world.size + server, FIRST + number
        sent = message.flat.cpu()
        answer = torch.empty_like(sent)
        booked = self.link.book(message.flat, 1)
        sending, receiving = self.group.start_send(sent, rank, tag), self.group.start_receive(answer, rank, tag)
        pending = Pending(self.link, receiving, booked)

        def finish() -> None:
            try:
                pending.wait()
            except RuntimeError as error:
                raise self.group.lost(rank, error) from None
            self.group.wait(sending, rank)
            message.flat.copy_(answer)

        return finish


class BspPs(Served):
    """All gradients are one bucket, which is full after the backward pass."""

    name = "bsp-ps"
    summary = "parameter servers sum all gradients after the backward pass"
    source = "Li et al. 2014, OSDI"

    def plan(self, sizes: Sequence[int], ready: Sequence[float]) -> Groups:
        """All tensors share a bucket."""
        return plans.threshold(sizes, float("inf"))


class WfbpPs(Served, Wfbp):
    """Wait-free backpropagation."""

    name = "wfbp-ps"
    summary = "parameter servers sum each tensor as soon as it is ready"
    source = "Jiang et al. 2020, OSDI"


class ByteSchedulerPs(Served, ByteScheduler):
    """Priorities and gates."""

    name = "bytescheduler-ps"
    summary = "parameter servers; splits tensors and sends those of the first layers first"
    source = "Peng et al. 2019, SOSP"
    options = {**Served.options, "partition": size_option("1MB", Served.options["partition"].help)}  # noqa: RUF012


def assign(sizes: Sequence[int], servers: int) -> list[int]:
    """The server of each message of `sizes` bytes: largest first, each to the server with the fewest bytes so far."""
    load = [0] * servers
    chosen = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        server = min(range(servers), key=lambda index: (load[index], index))
        chosen[number] = server
        load[server] += sizes[number]
    return chosen


def serve(contract: Contract) -> None:
    """Run a parameter server until the trainers are done. Raises PeerLostError if one is lost."""
    trainers, number = contract.world_size, contract.rank - contract.world_size
    if trainers == 1:
        sys.stdout.write("there is a single trainer: this parameter server has nothing to do\n")
        return
    torch.set_num_threads(cpu_threads(contract))
    group = ServerGroup(contract, contract.servers)
    sys.stdout.write(f"parameter server {number} serves {trainers} trainers\n")
    sys.stdout.flush()
    table: list[tuple[int, int]] = []
    try:
        while (order := _receive(group, 2))[0] != END:
            if order[0] == TABLE:
                numbers = _receive(group, 2 * order[1])
                table = list(zip(numbers[::2], numbers[1::2], strict=True))
            else:
                _sum_all(group, table)
    except PeerLostError as error:
        raise PeerLostError(f"the parameter server ends: {error}", "See the trainers' logs for the cause.") from None
    sys.stdout.write(f"parameter server {number}: all {trainers} trainers are done\n")


def _receive(group: ServerGroup, count: int) -> list[int]:
    """Numbers of an order of trainer 0."""
    numbers = torch.empty(count, dtype=torch.int64)
    group.wait(group.start_receive(numbers, 0, CONTROL), 0)
    return [int(number) for number in numbers]


def _sum_all(group: ServerGroup, table: Sequence[tuple[int, int]]) -> None:
    """Sum the messages of an update. Half precision is added in 32 bits."""
    arriving = []
    for number, (size, kind) in enumerate(table):
        parts = [torch.empty(size, dtype=getattr(torch, DTYPES[kind])) for _ in range(group.trainers)]
        works = [group.start_receive(part, rank, FIRST + number) for rank, part in enumerate(parts)]
        arriving.append((parts, works))
    answers = []
    for number, (parts, works) in enumerate(arriving):
        for rank, work in enumerate(works):
            group.wait(work, rank)
        total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32)).clone()
        for part in parts[1:]:
            total += part
        total = total.to(parts[0].dtype)
        answers.append((total, [group.start_send(total, rank, FIRST + number) for rank in range(group.trainers)]))
    for _, works in answers:
        for rank, work in enumerate(works):
            group.wait(work, rank)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
