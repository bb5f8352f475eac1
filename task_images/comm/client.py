"""The client side of parameter servers: connections, and the synchronous sum as a transport."""

import contextlib
import json
import queue
import socket
import threading
from functools import partial

import torch

from task_images.comm.codecs import join_payload
from task_images.comm.exchange import Message, UnderWay
from task_images.comm.link import Link
from task_images.comm.methods import Method
from task_images.comm.served_codecs import make_request, read_answer
from task_images.comm.server import open_store
from task_images.comm.wire import DONE, SUM, Frame, assign, await_bytes, receive_frame, send_frame
from task_images.contract import Contract
from task_images.harness.distributed import World
from task_images.harness.errors import PeerLostError
from task_images.harness.ranks import COLLECTIVE_SECONDS


class Connection:
    """A connection to one server. A reader thread drains answers as they arrive: answers left in the socket would close
    TCP's window, and only one direction would be busy at a time."""

    def __init__(self, stream: socket.socket, seconds: float) -> None:
        """`seconds` is the timeout for an answer, and for the server to read a request."""
        self._stream, self._seconds = stream, seconds
        stream.settimeout(seconds)
        self._answers: queue.SimpleQueue[Frame | OSError] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="answers of a server", daemon=True)
        self._reader.start()

    def send(self, frame: Frame) -> None:
        """Send a request. Raises OSError."""
        send_frame(self._stream, frame)

    def receive(self) -> Frame:
        """The next answer. Raises OSError, also on timeout."""
        try:
            answer = self._answers.get(timeout=self._seconds)
        except queue.Empty:
            raise TimeoutError(f"no answer within {self._seconds:g} s") from None
        if isinstance(answer, OSError):
            self._answers.put(answer)  # for later calls
            raise answer
        return answer

    def has_answer(self) -> bool:
        """Whether an answer or an error is available."""
        return not self._answers.empty()

    def close(self) -> None:
        """Close the connection and end its thread."""
        with contextlib.suppress(OSError):  # the server may have closed it first
            self._stream.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._stream.close()

    def _read(self) -> None:
        try:
            while True:
                await_bytes(self._stream)  # no timeout while nothing was requested
                self._answers.put(receive_frame(self._stream))
        except OSError as error:
            self._answers.put(error)


class ServerClient:
    """One trainer's connections to all servers. Requests are answered in their order, server by server."""

    def __init__(self, contract: Contract, servers: int, seconds: float = COLLECTIVE_SECONDS) -> None:
        store = open_store(contract)
        self._connections: list[Connection] = []
        for number in range(servers):
            try:
                host, port, token = json.loads(store.get(str(number)))
                stream = socket.create_connection((host, port), timeout=seconds)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stream.sendall(bytes.fromhex(token) + contract.rank.to_bytes(4, "big"))
            except (OSError, RuntimeError) as error:
                raise PeerLostError(f"parameter server {number} did not connect: {_short(error)}") from None
            self._connections.append(Connection(stream, seconds))
        self.bytes = 0

    def send(self, server: int, frame: Frame) -> None:
        """Send a request. Raises PeerLostError."""
        try:
            self._connections[server].send(frame)
        except OSError as error:
            raise self._lost(server, error) from None

    def receive(self, server: int) -> Frame:
        """The next answer of a server. Raises PeerLostError."""
        try:
            return self._connections[server].receive()
        except OSError as error:
            raise self._lost(server, error) from None

    def has_answer(self, server: int) -> bool:
        """Whether `receive` would return at once."""
        return self._connections[server].has_answer()

    def close(self) -> None:
        """Tell all servers that this trainer is done."""
        for number, connection in enumerate(self._connections):
            self.send(number, Frame(DONE, 0, 0, torch.empty(0)))
            connection.close()

    def _lost(self, server: int, error: OSError) -> PeerLostError:
        return PeerLostError(f"lost parameter server {server}: {_short(error)}", "See its log for the cause.")


class ServerSum:
    """A transport that sends each message to its server, which answers with the sum over trainers."""

    def __init__(self, link: Link, client: ServerClient, method: Method) -> None:
        self._link = link
        self._client = client
        self._servers = method.server_count
        self._factor = 0.0 if method.momentum == "none" else float(method.momentum)
        self._server_of: list[int] = []

    def arrange(self, messages: list[Message]) -> None:
        """Distribute the messages over the servers, balanced by bytes."""
        sizes = [message.flat.numel() * message.flat.element_size() for message in messages]
        self._server_of = assign(sizes, self._servers)

    def start(self, message: Message, seed: int) -> UnderWay | None:
        """Send the message to its server. `finish` writes the sum into the message."""
        server = self._server_of[message.number]
        payload = message.encode(seed, self._factor)
        is_additive = message.codec.additive
        self._link.book(payload[0] if is_additive else join_payload(payload), 1)
        request = payload[0] if is_additive else make_request(payload, message.flat, message.codec, seed)
        self._client.send(server, Frame(SUM, message.number, seed, request))

        def finish() -> None:
            answer = self._client.receive(server)
            if is_additive:
                message.flat.copy_(message.codec.decode([answer.tensor], message.flat, seed))
            else:
                read_answer(answer.tensor, message.codec, message.flat)

        return UnderWay(partial(self._client.has_answer, server), finish)


def connect_servers(world: World, servers: int) -> ServerClient:
    """This rank's connections to the servers, open as long as the world. Raises PeerLostError."""
    found = next((item for item in world.companions if isinstance(item, ServerClient)), None)
    if found is None:
        found = ServerClient(world.contract, servers)
        world.companions.append(found)
    return found


def make_server_transport(method: Method, link: Link, world: World) -> ServerSum:
    """The synchronous transport of a method."""
    return ServerSum(link, connect_servers(world, method.server_count), method)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
