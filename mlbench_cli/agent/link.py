"""Connections between the nodes of a run and its head, and the notes by which they find each other.

Standard library only: it runs on the machines of a run.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import time
from typing import Any

from mlbench_cli.agent import wire
from mlbench_cli.util.files import read_object, write_atomically

HEAD = "head.json"  # in RUN: how to reach the head
MAX_LINE = 1 << 16
MAX_DATA = 1 << 22
SEND_SECONDS = 30.0  # in which the other side must take what it is sent


class Link:
    """One connection. Raises OSError once it is closed or the other side takes nothing more, ValueError for what is no
    message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = wire.Decoder(MAX_LINE, MAX_DATA)
        self._selector = selectors.PollSelector()  # unlike epoll, it takes no open file of its own
        self._selector.register(connection, selectors.EVENT_READ)
        connection.settimeout(SEND_SECONDS)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: wire.Message, data: bytes = b"") -> None:
        """Send one message with its bytes."""
        self._connection.sendall(wire.encode(message, data))

    def receive(self, seconds: float) -> tuple[dict[str, Any], bytes] | None:
        """The next message and its bytes; None if none is complete within `seconds`."""
        end = time.monotonic() + seconds
        while (found := self._decoder.take()) is None:
            if not self._selector.select(max(0.0, end - time.monotonic())):
                return None
            piece = self._connection.recv(1 << 18)
            if not piece:
                raise ConnectionError("closed by the other side")
            self._decoder.feed(piece)
        return found

    def close(self) -> None:
        """Close the connection."""
        self._selector.close()
        self._connection.close()


def connect(addresses: list[str], port: int, seconds: float) -> socket.socket:
    """A connection to the first address that answers within `seconds`. Raises OSError if none does.

    A name is reached by IPv4 if it can be: ranks then use that, too, which every network stack has.
    """
    problem: OSError = ConnectionError("no address")
    for address in addresses:
        try:
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        except OSError as error:
            problem, found = error, []
        for *_, place in sorted(found, key=lambda item: item[0] != socket.AF_INET):
            try:
                return socket.create_connection((str(place[0]), port), timeout=seconds)
            except OSError as error:
                problem = error
    raise problem


def ends_of(connection: socket.socket) -> tuple[str, str]:
    """Own address and that of the other side, as others write them: IPv4 without what IPv6 puts before it."""
    own, other = (str(end[0]).removeprefix("::ffff:") for end in (connection.getsockname(), connection.getpeername()))
    return own, other


def is_token(given: object, token: str) -> bool:
    """Compare a received token with the run's in constant time."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), token.encode())


def read_note(folder: str, name: str) -> dict[str, Any] | None:
    """A note in the run's folder that says how to reach a process; None as long as nobody has written it."""
    with contextlib.suppress(OSError):
        os.listdir(folder)  # NFS: asks the server
    return read_object(os.path.join(folder, name))


def write_note(folder: str, name: str, addresses: list[str], port: int, token: str) -> None:
    """Write such a note, which only its owner may read."""
    note = {"addresses": addresses, "port": port, "token": token}
    write_atomically(os.path.join(folder, name), json.dumps(note).encode(), is_durable=False, mode=0o600)


def new_token() -> str:
    """A word that only the processes of one run know."""
    return os.urandom(16).hex()
