"""Parameter servers (Li et al. 2014): processes that sum the trainers' gradients, in one gloo group with them.

At each update trainer 0 tells each server which messages come, in which order. A server sums the parts of a message in
the order of ranks, so that sums do not depend on who comes first, and answers all trainers. Messages are in 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from task_images.contract import PeerLostError
from task_images.methods import Lazy, dist, torch
from task_images.methods.base import MethodError, Option, Pending, size_option
from task_images.methods.buckets import Bucketed, Finish, Message
from task_images.methods.scheduled import ByteScheduler, Wfbp, cut

if TYPE_CHECKING:
    from task_images import world as replicas
    from task_images.contract import Contract
else:
    replicas = Lazy("task_images.world")

PREFIX = "servers"
CONTROL, FIRST = 0, 1  # tags: of trainer 0's tables, and of the first message
MAX_SERVERS = 64
COLLECTIVE_SECONDS = 1800.0  # timeout of a message; long, because trainers validate in between


class ServerGroup:
    """Trainers, then servers, as the ranks of a process group beside that of the trainers."""

    def __init__(self, contract: Contract, servers: int) -> None:
        self.trainers, self.size = contract.world_size, contract.world_size + servers
        self.rank = contract.rank
        replicas.prefer_loopback(contract)
        try:
            store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                contract.master_addr, contract.master_port, timeout=timedelta(seconds=replicas.RENDEZVOUS_SECONDS)
            )
            store = dist.PrefixStore(PREFIX, store)  # type: ignore[attr-defined]
            replicas.await_everyone(store, "here", self.rank, self.size, replicas.RENDEZVOUS_SECONDS)
            self._group: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=COLLECTIVE_SECONDS))
        except RuntimeError as error:
            why = " ".join(str(error).split())[:200]
            raise PeerLostError(f"trainers and parameter servers did not meet: {why}") from None

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to send."""
        return self._group.send([tensor], rank, tag)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to receive into `tensor`."""
        return self._group.recv([tensor], rank, tag)

    def announce(self, sizes: Sequence[int], server: int) -> None:
        """Tell a server, as trainer 0, the elements of the messages that come; none: the training is done."""
        for numbers in ([len(sizes)], sizes) if sizes else ([0],):
            self.send(torch.tensor(numbers), self.trainers + server, CONTROL).wait()

    def read(self, count: int) -> list[int]:
        """Numbers from trainer 0."""
        numbers = torch.empty(count, dtype=torch.int64)
        self.receive(numbers, 0, CONTROL).wait()
        return [int(number) for number in numbers]

    def close(self) -> None:
        """Tell the servers that the training is done."""
        for server in range(self.size - self.trainers) if self.rank == 0 else ():
            self.announce([], server)


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

    def cut(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Parts of at most `partition` bytes."""
        return cut(flat, self.values["partition"])

    def arrange(self, messages: list[Message]) -> list[Message]:
        """Distribute the messages over the servers."""
        ordered = super().arrange(messages)
        self._tables: list[list[int]] = [[] for _ in range(self.values["servers"])]  # elements, by server
        self._places: dict[int, tuple[int, int]] = {}  # message -> server, and number there
        chosen = assign([message.size for message in ordered], len(self._tables))
        for message, server in zip(ordered, chosen, strict=True):
            self._places[message.number] = server, len(self._tables[server])
            self._tables[server].append(message.flat.numel())
        return ordered

    def open_update(self) -> None:
        """Announce the update to the servers that have a part in it."""
        super().open_update()
        for server, table in enumerate(self._tables) if self.world.rank == 0 else ():
            if table:
                self.group.announce(table, server)

    def send(self, message: Message) -> Finish:
        """Send the message to its server, which answers with the sum over trainers."""
        server, number = self._places[message.number]
        rank, tag = self.world.size + server, FIRST + number
        sent = message.flat.to("cpu", torch.float32)
        answer = torch.empty_like(sent)
        booked = self.link.book(message.flat, 1)
        sending = self.group.send(sent, rank, tag)
        pending = Pending(self.link, self.group.receive(answer, rank, tag), booked)

        def finish() -> None:
            pending.wait()
            sending.wait()
            message.flat.copy_(answer)

        return finish


class BspPs(Served):
    """All gradients are one bucket, which is full after the backward pass."""

    name = "bsp-ps"
    summary = "parameter servers sum all gradients after the backward pass"
    source = "Li et al. 2014, OSDI"


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
    load, chosen = [0] * servers, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        chosen[number] = load.index(min(load))
        load[chosen[number]] += sizes[number]
    return chosen


def serve(contract: Contract) -> None:
    """Run a parameter server until the trainers are done."""
    trainers, number = contract.world_size, contract.rank - contract.world_size
    if trainers == 1:
        print("there is a single trainer: this parameter server has nothing to do")
        return
    torch.set_num_threads(replicas.cpu_threads(contract))
    group = ServerGroup(contract, contract.servers)
    print(f"parameter server {number} serves {trainers} trainers", flush=True)
    while count := group.read(1)[0]:
        _sum_all(group, group.read(count))
    print(f"parameter server {number}: all {trainers} trainers are done")


def _sum_all(group: ServerGroup, sizes: Sequence[int]) -> None:
    """Sum the messages of an update."""
    arriving = []
    for tag, size in enumerate(sizes, FIRST):
        parts = [torch.empty(size) for _ in range(group.trainers)]
        arriving.append([(part, group.receive(part, rank, tag)) for rank, part in enumerate(parts)])
    answers = []
    for tag, messages in enumerate(arriving, FIRST):
        total = torch.zeros_like(messages[0][0])
        for part, work in messages:
            work.wait()
            total += part
        answers += [group.send(total, rank, tag) for rank in range(group.trainers)]
    for work in answers:
        work.wait()
