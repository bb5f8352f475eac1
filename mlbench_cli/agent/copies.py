"""Copies of a machine's checkpoints in the memory of another one, which outlive the machine. Standard library only.

The agent of each machine but node 0, whose loss ends the run, sends the files that its ranks have written to the next
machine of the run while they go on. The agent there holds those of the last KEPT checkpoints, and writes them to its
disk for the ranks of the next attempt if the machine that they came from is lost.

A connection carries files: a line of JSON that says which one it is and how long, then its bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time

from mlbench_cli.agent.rendezvous import is_token

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, BinaryIO

    Place = tuple[str, int]
    Header = Mapping[str, Any]  # node, attempt, update, name, size, token

KEPT = 3  # checkpoints, as many as ranks keep: another rank may be one behind, and the last one may be incomplete
LOOK_SECONDS = 0.25  # between two looks for files that ranks have written
RETRY_SECONDS = 2.0  # before another try to reach the machine that holds the copies
PIECE = 1 << 20
MAX_HEADER = 4096


class Copies:
    """What one machine sends and holds. `selector` is that of its agent, whose loop moves the bytes."""

    def __init__(self, selector: selectors.BaseSelector, node: int) -> None:
        self.on_held: Callable[[int, int], None] = lambda node, update: None  # called with each file that has come
        self._selector, self._node = selector, node
        self._server = socket.create_server(("", 0))
        self._server.setblocking(False)
        selector.register(self._server, selectors.EVENT_READ, self._on_connection)
        self.port: int = self._server.getsockname()[1]
        self._held: dict[int, dict[int, dict[str, bytes]]] = {}  # node -> update -> name -> content
        self._attempt = self._after = 0
        self._token, self._folder = "", ""
        self._place: Place | None = None
        self._names: list[str] = []
        self._sent: set[tuple[int, str]] = set()
        self._sending: _Sending | None = None
        self.next_look = float("inf")

    def begin(
        self, token: str, attempt: int, place: Place | None, folder: str, names: list[str], after: int | None
    ) -> None:
        """An attempt starts. From now on send the files `names` of checkpoints in `folder` behind update `after` to
        `place` (None: nowhere). Copies of later checkpoints are dropped, since the ranks write these again."""
        self._end_sending()
        self._token, self._attempt, self._after = token, attempt, after or 0
        self._place, self._folder, self._names = place, folder, names
        self._sent.clear()
        self.next_look = time.monotonic() if place is not None else float("inf")
        for updates in self._held.values():
            for update in [update for update in updates if update > self._after]:
                del updates[update]

    # --- hold -----------------------------------------------------------------------------------------------------

    def names(self) -> dict[int, set[str]]:
        """The files that this machine holds of each checkpoint, by the update that it was written after."""
        found: dict[int, set[str]] = {}
        for updates in self._held.values():
            for update, files in updates.items():
                found.setdefault(update, set()).update(files)
        return found

    def restore(self, nodes: Iterable[int], update: int, folder: str) -> None:
        """Write what this machine holds of a checkpoint of other nodes into `folder`. Raises OSError."""
        for node in nodes:
            for name, content in self._held.get(node, {}).get(update, {}).items():
                os.makedirs(f"{folder}/{update}", exist_ok=True)
                with open(f"{folder}/{update}/.{name}", "wb") as file:
                    file.write(content)
                os.replace(file.name, f"{folder}/{update}/{name}")

    def _on_connection(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._server.accept()
            _Receiving(connection, self._selector, self._expect, self._take)

    def _expect(self, header: Header) -> int:
        """The bytes of a file that another agent announces. Raises ValueError if it is none of this run."""
        if not is_token(header.get("token"), self._token):
            raise ValueError("it does not know the token")
        return int(header["size"])

    def _take(self, header: Header, content: bytes) -> None:
        """Keep a file that has arrived, unless its ranks are writing that checkpoint again."""
        node, update, name = int(header["node"]), int(header["update"]), os.path.basename(header["name"])
        if int(header["attempt"]) < self._attempt:
            return
        updates = self._held.setdefault(node, {})
        updates.setdefault(update, {})[name] = content
        for old in sorted(updates)[:-KEPT]:
            del updates[old]
        self.on_held(node, update)

    # --- send -----------------------------------------------------------------------------------------------------

    def on_time(self, now: float) -> None:
        """Look for files that are to be sent."""
        if now < self.next_look:
            return
        self.next_look = now + LOOK_SECONDS
        if self._sending is None or self._sending.is_idle:
            self._send_next()

    def _send_next(self) -> None:
        """Begin to send a file of the last checkpoints, if one is new: the latest first."""
        assert self._place is not None
        with contextlib.suppress(OSError):
            updates = sorted((int(name) for name in os.listdir(self._folder) if name.isdecimal()), reverse=True)
            for update in updates[:KEPT]:
                for name in self._names if update > self._after else ():
                    path = f"{self._folder}/{update}/{name}"
                    if (update, name) not in self._sent and os.path.exists(path):
                        self._sending = self._sending or _Sending(self._place, self._selector, self._on_sent)
                        facts = {"token": self._token, "node": self._node, "attempt": self._attempt}
                        self._sending.send(path, {**facts, "update": update, "name": name})
                        self._sent.add((update, name))
                        return

    def _on_sent(self, is_done: bool) -> None:
        """A file has been sent; or the machine was not reached, and everything is sent again later."""
        if is_done:
            self._send_next()
        else:
            self._end_sending()
            self._sent.clear()
            self.next_look = time.monotonic() + RETRY_SECONDS

    def _end_sending(self) -> None:
        if self._sending is not None:
            self._sending.close()
            self._sending = None


class _Receiving:
    """A connection of a machine that sends files."""

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        expect: Callable[[Header], int],
        take: Callable[[Header, bytes], None],
    ) -> None:
        self._connection, self._selector, self._expect, self._take = connection, selector, expect, take
        self._header: Header | None = None
        self._size = 0
        self._content = bytearray()
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self._on_readable)

    def _on_readable(self) -> None:
        try:
            piece = self._connection.recv(PIECE)
            self._content += piece
            while self._take_file():
                pass
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError):  # the other side is gone, or is none of this run's agents
            piece = b""
        if not piece:
            self._selector.unregister(self._connection)
            self._connection.close()

    def _take_file(self) -> bool:
        """Hand over a file that is there as a whole; False if more bytes are needed. Raises ValueError, KeyError."""
        if self._header is None:
            line, end, rest = self._content.partition(b"\n")
            if not end:
                if len(line) > MAX_HEADER:
                    raise ValueError("no header")
                return False
            self._header, self._content = json.loads(line), rest
            self._size = self._expect(self._header)
        if len(self._content) < self._size:
            return False
        header, content = self._header, bytes(self._content[: self._size])
        self._header, self._content = None, self._content[self._size :]
        self._take(header, content)
        return True


class _Sending:
    """A connection to the machine that holds the copies. `on_sent` is told whether the file has gone."""

    def __init__(self, place: Place, selector: selectors.BaseSelector, on_sent: Callable[[bool], None]) -> None:
        self._selector, self._on_sent = selector, on_sent
        self._file: BinaryIO | None = None
        self._line, self._offset = b"", 0
        self._connection = socket.socket()
        self._connection.setblocking(False)
        self._connection.connect_ex(place)

    @property
    def is_idle(self) -> bool:
        """Whether no file is under way."""
        return self._file is None

    def send(self, path: str, header: Header) -> None:
        """Begin to send a file. Raises OSError if it cannot be read."""
        self._file = open(path, "rb")  # noqa: SIM115
        self._line = json.dumps({**header, "size": os.fstat(self._file.fileno()).st_size}).encode() + b"\n"
        self._offset = 0
        self._selector.register(self._connection, selectors.EVENT_WRITE, self._on_writable)

    def _on_writable(self) -> None:
        assert self._file is not None
        try:
            if self._line:
                self._line = self._line[self._connection.send(self._line) :]
                return
            sent = os.sendfile(self._connection.fileno(), self._file.fileno(), self._offset, PIECE)
        except BlockingIOError:
            return
        except OSError:
            self._on_sent(False)
            return
        self._offset += sent
        if not sent:
            self._finish()
            self._on_sent(True)

    def _finish(self) -> None:
        if self._file is not None:
            self._selector.unregister(self._connection)
            self._file.close()
            self._file = None

    def close(self) -> None:
        """End the connection, also in the middle of a file."""
        self._finish()
        self._connection.close()
