"""A parameter server: a process of its own that sums gradients, or holds weights that trainers add to.

Each trainer has one connection, served by a thread that reads and one that answers, so that neither end can block the
other. Sums are made in the order of ranks when the last part has come, so they do not depend on who comes first. If a
trainer goes away before it said that it is done, the server ends with an error, and so do the other trainers.

Asynchronous trainers that have just met at a barrier would send their first changes together, share the server's link,
get their answers together, and so on: nothing pulls them apart, since one that begins a little earlier ends a little
earlier. So each trainer asks for its turn before its first change after a barrier, and the next one gets it when that
change has been read. From then on trainers are out of step by the time that a change takes on the link, and nobody
waits for anybody. Not reading from the others is no turn: their sockets take in megabytes after earlier messages.
"""

import hmac
import json
import queue
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from task_images.comm.methods import Method
from task_images.comm.served_codecs import make_adder
from task_images.comm.wire import (
    DONE,
    PULL,
    PUSH,
    SET,
    SUM,
    TOKEN_BYTES,
    TURN,
    Frame,
    receive_exactly,
    receive_frame,
    send_frame,
)
from task_images.contract import Contract
from task_images.harness.errors import PeerLostError
from task_images.harness.ranks import COLLECTIVE_SECONDS, RENDEZVOUS_SECONDS, cpu_threads

STORE_PREFIX = "mlbench-servers"
Add = Callable[[Mapping[int, Tensor]], Tensor]


@dataclass
class Round:
    """One sum on its way: the parts by rank, and the sum when it is there."""

    parts: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor | None = None
    taken: int = 0


class ParameterServer:
    """What one server holds.

    bound   how many updates a trainer may be ahead of the slowest; None: any number
    add     from requests by rank to the answer; None: their sum
    """

    def __init__(
        self, trainers: int, bound: int | None, seconds: float = COLLECTIVE_SECONDS, add: Add | None = None
    ) -> None:
        self._trainers = trainers
        self._add = add or _add_in_order
        self._bound = bound
        self._seconds = seconds
        self._changed = threading.Condition()
        self._rounds: dict[tuple[int, int], Round] = {}
        self._weights: dict[int, Tensor] = {}
        self._clocks: dict[int, dict[int, float]] = {}  # key -> rank -> updates made
        self._done: set[int] = set()
        self.failure: str | None = None
        self.turns = threading.Lock()  # held while a trainer that asked for its turn sends a change

    @property
    def parts(self) -> int:
        """How many parts of the weights are here."""
        return len(self._weights)

    def answer(self, rank: int, frame: Frame) -> Frame:
        """The answer to a request of `rank`. Raises TimeoutError if the other trainers do not come."""
        if frame.kind == SUM:
            return Frame(SUM, frame.key, frame.clock, self._sum(rank, frame))
        if frame.kind == TURN:
            return frame
        with self._changed:
            if frame.kind == SET:
                # Keys ascend: those above this one are of an earlier model, the self-check's.
                self._weights = {key: part for key, part in self._weights.items() if key < frame.key}
                self._weights[frame.key] = frame.tensor.clone()
                self._clocks[frame.key] = dict.fromkeys(range(self._trainers), frame.clock)
                self._changed.notify_all()
                return Frame(SET, frame.key, 0, torch.empty(0))
            ahead = 0
            if frame.kind == PUSH:
                ahead = self._push(rank, frame)
            return Frame(frame.kind, frame.key, ahead, self._weights[frame.key].clone())

    def _sum(self, rank: int, frame: Frame) -> Tensor:
        place = (frame.key, frame.clock)
        with self._changed:
            entry = self._rounds.setdefault(place, Round())
            entry.parts[rank] = frame.tensor
            if len(entry.parts) == self._trainers:
                entry.total = self._add(entry.parts)
                entry.parts.clear()
                self._changed.notify_all()
            self._wait(lambda: entry.total is not None, f"part {frame.key} of update {frame.clock}")
            assert entry.total is not None
            entry.taken += 1
            if entry.taken == self._trainers:
                del self._rounds[place]
            return entry.total

    def _push(self, rank: int, frame: Frame) -> int:
        """Add a difference; then wait until no trainer is too far behind. How far ahead this one is at last."""
        self._weights[frame.key] += frame.tensor
        clocks = self._clocks[frame.key]
        clocks[rank] = frame.clock
        self._changed.notify_all()
        bound = self._bound
        if bound is not None:
            self._wait(lambda: frame.clock - min(clocks.values()) <= bound, f"update {frame.clock - bound}")
        return int(max(0, frame.clock - min(clocks.values())))

    def _wait(self, reached, what: str) -> None:  # type: ignore[no-untyped-def]
        if not self._changed.wait_for(lambda: reached() or self.failure, self._seconds):
            raise TimeoutError(f"{what} did not come from all trainers within {self._seconds:g} s")
        if self.failure and not reached():
            raise TimeoutError(self.failure)

    def finish(self, rank: int) -> None:
        """Rank `rank` is done: it holds nobody up any more."""
        with self._changed:
            self._done.add(rank)
            for clocks in self._clocks.values():
                clocks[rank] = float("inf")
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """End for a reason; the first one stays."""
        with self._changed:
            self.failure = self.failure or reason
            self._changed.notify_all()

    def await_end(self) -> None:
        """Until all trainers are done. Raises PeerLostError if one is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or len(self._done) == self._trainers)
        if self.failure:
            raise PeerLostError(f"the parameter server ends: {self.failure}", "The trainers' own logs say why.")


def _add_in_order(parts: Mapping[int, Tensor]) -> Tensor:
    """The sum of all parts by rank, in at least 32 bits, in the format of the parts."""
    first = parts[min(parts)]
    total = first.to(torch.promote_types(first.dtype, torch.float32)).clone()
    for rank in sorted(parts)[1:]:
        total += parts[rank]
    return total.to(first.dtype)


def serve(contract: Contract) -> None:
    """One parameter server's life: publish its address, serve all trainers, end with them."""
    number, trainers = contract.rank - contract.world_size, contract.world_size
    if trainers == 1:
        sys.stdout.write("a single trainer exchanges nothing: this parameter server has nothing to do\n")
        return
    torch.set_num_threads(cpu_threads(contract))
    method = Method.from_dict(contract.method)
    word, _, steps = method.staleness.partition(":")
    state = ParameterServer(trainers, int(steps) if word == "ssp" else None, add=make_adder(method))
    token = secrets.token_bytes(TOKEN_BYTES)
    with socket.create_server((_own_address(contract), 0)) as listener:
        host, port = listener.getsockname()[:2]
        store = open_store(contract)
        store.set(str(number), json.dumps([host, port, token.hex()]))
        sys.stdout.write(f"parameter server {number} listens at {host}:{port}\n")
        sys.stdout.flush()
        listener.settimeout(RENDEZVOUS_SECONDS)
        connections = [_accept(listener, token) for _ in range(trainers)]
        threads = [
            threading.Thread(target=_serve_trainer, args=(state, connection, rank), daemon=True)
            for connection, rank in connections
        ]
        for thread in threads:
            thread.start()
        try:
            state.await_end()
        finally:
            for connection, _ in connections:
                connection.close()
        # A thread within torch while the interpreter ends takes the process down with SIGABRT.
        for thread in threads:
            thread.join()
    sys.stdout.write(f"parameter server {number}: all {trainers} trainers are done\n")


def open_store(contract: Contract) -> PrefixStore:
    """The store of the rendezvous, for addresses of servers. Raises PeerLostError if rank 0 does not come."""
    try:
        store = TCPStore(
            contract.master_addr, contract.master_port, is_master=False, timeout=timedelta(seconds=RENDEZVOUS_SECONDS)
        )
    except RuntimeError as error:
        raise PeerLostError(f"rank 0 is not to be reached: {' '.join(str(error).split())[:200]}") from None
    return PrefixStore(STORE_PREFIX, store)


def _own_address(contract: Contract) -> str:
    """The address of this machine on the way to rank 0."""
    family, _, _, _, address = socket.getaddrinfo(contract.master_addr, contract.master_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _accept(listener: socket.socket, token: bytes) -> tuple[socket.socket, int]:
    """The next trainer that knows the token, and its rank. Raises PeerLostError if none comes."""
    while True:
        try:
            connection, _ = listener.accept()
            connection.settimeout(30)
            proof = receive_exactly(connection, TOKEN_BYTES + 4)
        except TimeoutError:
            raise PeerLostError(f"not all trainers came within {RENDEZVOUS_SECONDS:g} s") from None
        except OSError:
            continue
        if hmac.compare_digest(proof[:TOKEN_BYTES], token):
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection, int.from_bytes(proof[TOKEN_BYTES:], "big")
        connection.close()


def _serve_trainer(state: ParameterServer, connection: socket.socket, rank: int) -> None:
    """Read requests until the trainer is done; a second thread answers them in their order."""
    requests: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
    answering = threading.Thread(target=_answer_trainer, args=(state, connection, rank, requests), daemon=True)
    answering.start()
    try:
        for frame in _read_requests(state, connection):
            requests.put(frame)
    except OSError as error:
        state.fail(f"trainer {rank} is gone: {error}")
        return
    requests.put(None)
    answering.join()
    state.finish(rank)


def _read_requests(state: ParameterServer, connection: socket.socket) -> Iterator[Frame]:
    """The requests of a trainer until it is done. One for a turn waits for it, and all parts of the change that follows
    are read before the next trainer gets its turn. Raises OSError."""
    left = 0  # parts of that change
    with ExitStack() as turn:
        while (frame := receive_frame(connection)).kind != DONE:
            if frame.kind == TURN:
                turn.enter_context(state.turns)
                left = state.parts
            elif left:
                left -= 1
                if not left:
                    turn.close()
            yield frame


def _answer_trainer(
    state: ParameterServer, connection: socket.socket, rank: int, requests: "queue.SimpleQueue[Frame | None]"
) -> None:
    try:
        while (frame := requests.get()) is not None:
            send_frame(connection, state.answer(rank, frame))
    except (OSError, TimeoutError, KeyError, RuntimeError) as error:
        state.fail(f"serving trainer {rank} failed: {error}")


__all__ = ["DONE", "PULL", "PUSH", "SET", "SUM", "ParameterServer", "open_store", "serve"]
