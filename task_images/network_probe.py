"""The network probe as a program, for engines that emulate the network. Standard library only.

`python -m task_images.network_probe RANK SIZE STAGE HOST:PORT` is one rank of the probe: rank 0 listens at
HOST:PORT for the others, and prints one JSON document.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from task_images import network
from task_images.network import Line, connect, measure_network


class SocketStore:
    """A store for ranks without torch: rank 0 keeps the values, and the others use one connection each."""

    def __init__(self, rank: int, size: int, host: str, port: int) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._line: Line | None = None
        if rank:
            self._line = connect((host, port), b"store")
            return
        server = socket.create_server((host, port), backlog=size + 8)
        threading.Thread(target=self._serve, args=(server,), daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Set the value of a key, for all ranks."""
        self._do("set", key, value)

    def append(self, key: str, value: str) -> None:
        """Append to the value of a key."""
        self._do("append", key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, initially 0, and return the sum."""
        return int(self._do("add", key, str(amount)))

    def get(self, key: str) -> bytes:
        """Wait for the key, and return its value. Raises TimeoutError after CONNECT_SECONDS."""
        return self._do("get", key, "").encode()

    def _do(self, operation: str, key: str, value: str) -> str:
        if self._line is not None:
            self._line.write(json.dumps([operation, key, value]))
            return str(json.loads(self._line.read()))
        with self._changed:
            if operation == "get":
                if not self._changed.wait_for(lambda: key in self._values, network.CONNECT_SECONDS):
                    raise TimeoutError(f"no rank sent {key} within {network.CONNECT_SECONDS:g} s")
                return self._values[key]
            if operation == "append":
                value = self._values.get(key, "") + value
            elif operation == "add":
                value = str(int(self._values.get(key, "0")) + int(value))
            self._values[key] = value
            self._changed.notify_all()
            return value if operation == "add" else ""

    def _serve(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=self._answer, args=(Line(connection),), daemon=True).start()

    def _answer(self, line: Line) -> None:
        with suppress(OSError, ValueError):
            line.read()
            while True:
                line.write(json.dumps(self._do(*json.loads(line.read()))))


def main(arguments: Sequence[str]) -> int:
    """RANK SIZE STAGE HOST:PORT; rank 0 prints the report."""
    rank, size, stage, place = int(arguments[0]), int(arguments[1]), arguments[2], arguments[3]
    host, _, port = place.rpartition(":")
    report = measure_network(SocketStore(rank, size, host, int(port)), rank, size, stage, host)
    if report is not None:
        print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
