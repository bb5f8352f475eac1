"""How the agents of one run talk to each other: messages over TCP, between node 0 (the hub) and the others.

Only those that know the run's token are listened to. Standard library only: it runs on the machines of a run.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from mlbench_cli.agent import interfaces, link, wire
from mlbench_cli.agent.wire import Message

PING_SECONDS = 10.0
SILENT_SECONDS = 60.0  # without a message, until the other side counts as lost
MAX_LINE = 1 << 20
RENDEZVOUS = "rendezvous.json"


class RankLink:
    """One connection. `on_message` gets each message, `on_end` is called once when the other side has gone."""

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        on_message: Callable[[RankLink, Message], None],
        on_end: Callable[[RankLink], None],
    ) -> None:
        self.connection = connection
        self.node: int | None = None
        self.name = ""
        self.lock_identity: str | None = None
        self.place: tuple[str, int, str] | None = None  # where its node listens for the probe of the network
        self.clock_offset = 0.0  # seconds to add to the other side's times
        self.is_open = True
        self.has_left = False  # it has finished its part; its end is no loss
        self._selector = selector
        self._on_message = on_message
        self._on_end = on_end
        self._decoder = wire.Decoder(MAX_LINE)
        self._unsent = bytearray()
        self._next_ping = 0.0
        self._last = time.monotonic()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ, self._on_ready)

    def send(self, message: Message) -> None:
        """Send a message. What does not fit into the socket's buffer at once follows as soon as it does."""
        if self.is_open:
            self._unsent += wire.encode(message)
            self._send_rest()

    def _send_rest(self) -> None:
        try:
            del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:
            # The other side has gone: its last words are still to be read, and `_on_ready` finds the end.
            self._unsent.clear()
        except OSError:
            self.close()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self.connection, events, self._on_ready)

    def tick(self, now: float) -> None:
        """Send a sign of life, and give up the other side if it has sent none for SILENT_SECONDS."""
        if self.node is not None and now >= self._next_ping:
            self._next_ping = now + PING_SECONDS
            self.send({"do": "ping"})
        if self.is_open and now - self._last > SILENT_SECONDS:
            self.close()

    def excuse_silence(self, now: float) -> None:
        """Wait anew for a sign of life."""
        self._last = now

    def close(self) -> None:
        """Close the connection and call `on_end`, once."""
        if not self.is_open:
            return
        self.is_open = False
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self.connection)
        self.connection.close()
        self._on_end(self)

    def _on_ready(self) -> None:
        if self._unsent:
            self._send_rest()
        try:
            piece = self.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self.close()
            return
        self._last = time.monotonic()
        self._decoder.feed(piece)
        while self.is_open:
            try:
                found = self._decoder.take()
            except ValueError:
                self.close()
                return
            if found is None:
                return
            self._on_message(self, found[0])


def open_hub(folder: str, addresses: list[str], known: Message | None = None) -> tuple[socket.socket, str]:
    """Listen on all interfaces and write into the run's folder how to reach this process. Returns socket and token.

    `known`: port and token if the others know them already.
    """
    server = interfaces.listen(known["port"] if known else 0)
    server.setblocking(False)
    token = known["token"] if known else link.new_token()
    link.write_note(folder, RENDEZVOUS, addresses, server.getsockname()[1], token)
    return server, token
