"""A parameter server: a process that sums gradients, or holds weights to which trainers add.

Each trainer has one connection with a reader and a writer thread, so neither end can block the other. Sums are computed
in the order of ranks when the last part has arrived, so they do not depend on arrival order. If a trainer disconnects
without sending DONE, the server ends with an error, and so do the other trainers.

Asynchronous trainers that leave a barrier together would send their first changes together, share the server's link,
get their answers together, and stay synchronized. So each trainer asks for a turn before its first change after a
barrier, and the next one gets its turn when that change has been read. From then on trainers are offset by the transfer
time of a change and do not wait for each other. Merely not reading from the others would not work: socket buffers take
megabytes.
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
    """One sum in progress: the parts by rank, and the sum when it is complete."""

    parts: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor | None = None
    taken: int = 0


class ParameterServer:
    """The state of one server.

    bound   greatest number of updates by which a trainer may be ahead of the slowest; None: unlimited
    add     computes the answer from requests by rank; None: their sum
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
        self.turns = threading.Lock()  # held while a trainer that asked for a turn sends a change

    @property
    def parts(self) -> int:
        """Number of parts of the weights on this server."""
        return len(self._weights)

    def answer(self, rank: int, frame: Frame) -> Frame:
        """The answer to a request of `rank`. Raises TimeoutError if other trainers do not send theirs."""
        if frame.kind == SUM:
            return Frame(SUM, frame.key, frame.clock, self._sum(rank, frame))
        if frame.kind == TURN:
            return frame
        with self._changed:
            if frame.kind == SET:
                # Keys ascend, so higher ones belong to an earlier model, e.g. the self-check's.
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
        """Add a difference, then wait until no trainer is too far behind. Returns how far ahead this one is then."""
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
            raise TimeoutError(f"{what} did not arrive from all trainers within {self._seconds:g} s")
        if self.failure and not reached():
            raise TimeoutError(self.failure)

    def finish(self, rank: int) -> None:
        """Mark `rank` as done, so that others no longer wait for it."""
        with self._changed:
            self._done.add(rank)
            for clocks in self._clocks.values():
                clocks[rank] = float("inf")
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Stop because of `reason`; the first reason is kept."""
        with self._changed:
            self.failure = self.failure or reason
            self._changed.notify_all()

    def await_end(self) -> None:
        """Wait until all trainers are done. Raises PeerLostError if one is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or len(self._done) == self._trainers)
        if self.failure:
            raise PeerLostError(f"the parameter server ends: {self.failure}", "See the trainers' logs for the cause.")


def _add_in_order(parts: Mapping[int, Tensor]) -> Tensor:
    """The sum of all parts in the order of ranks, computed in at least 32 bits, in the type of the parts."""
    first = parts[min(parts)]
    total = first.to(torch.promote_types(first.dtype, torch.float32)).clone()
    for rank in sorted(parts)[1:]:
        total += parts[rank]
    return total.to(first.dtype)


def serve(contract: Contract) -> None:
    """Run a parameter server: publish its address, serve all trainers, end with them."""
    number, trainers = contract.rank - contract.world_size, contract.world_size
    if trainers == 1:
        sys.stdout.write("there is a single trainer: this parameter server has nothing to do\n")
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
        # A thread inside torch at interpreter exit would abort the process (SIGABRT).
        for thread in threads:
            thread.join()
    sys.stdout.write(f"parameter server {number}: all {trainers} trainers are done\n")


def open_store(contract: Contract) -> PrefixStore:
    """The rendezvous store, for addresses of servers. Raises PeerLostError if rank 0 does not appear."""
    try:
        store = TCPStore(
            contract.master_addr, contract.master_port, is_master=False, timeout=timedelta(seconds=RENDEZVOUS_SECONDS)
        )
    except RuntimeError as error:
        raise PeerLostError(f"rank 0 cannot be reached: {' '.join(str(error).split())[:200]}") from None
    return PrefixStore(STORE_PREFIX, store)


def _own_address(contract: Contract) -> str:
    """This machine's address on its route to rank 0."""
    family, _, _, _, address = socket.getaddrinfo(contract.master_addr, contract.master_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _accept(listener: socket.socket, token: bytes) -> tuple[socket.socket, int]:
    """The connection and rank of the next trainer with the right token. Raises PeerLostError on timeout."""
    while True:
        try:
            connection, _ = listener.accept()
            connection.settimeout(30)
            proof = receive_exactly(connection, TOKEN_BYTES + 4)
        except TimeoutError:
            raise PeerLostError(f"not all trainers connected within {RENDEZVOUS_SECONDS:g} s") from None
        except OSError:
            continue
        if hmac.compare_digest(proof[:TOKEN_BYTES], token):
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection, int.from_bytes(proof[TOKEN_BYTES:], "big")
        connection.close()


def _serve_trainer(state: ParameterServer, connection: socket.socket, rank: int) -> None:
    """Read requests until the trainer is done; a second thread answers them in order."""
    requests: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
    answering = threading.Thread(target=_answer_trainer, args=(state, connection, rank, requests), daemon=True)
    answering.start()
    try:
        for frame in _read_requests(state, connection):
            requests.put(frame)
    except OSError as error:
        state.fail(f"lost trainer {rank}: {error}")
        return
    requests.put(None)
    answering.join()
    state.finish(rank)


def _read_requests(state: ParameterServer, connection: socket.socket) -> Iterator[Frame]:
    """The requests of a trainer until it is done. A request for a turn waits for it; all parts of the following change
    are read before the next trainer's turn. Raises OSError."""
    left = 0  # unread parts of that change
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
