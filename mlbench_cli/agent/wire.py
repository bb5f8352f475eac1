"""A message between processes: a JSON object on a line, then as many bytes as its "bytes" says (none without it).

Its "do" says what to do, and the other fields are what that takes, as the parameters of a function. Clients and
machines (channel, serve), nodes and their head (link), and the agents of a run (rendezvous) talk like this. Standard
library only, of Python 3.9 or later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Message = Mapping[str, Any]


def encode(message: Message, data: bytes = b"") -> bytes:
    """The message and its bytes as they are sent."""
    return json.dumps({**message, "bytes": len(data)} if data else message).encode() + b"\n" + data


def carry_out(actions: Mapping[str, Callable[..., Any]], message: Message, *context: object) -> Any:
    """Call the action that a message names with its fields, behind `context`. Raises KeyError for another message, and
    TypeError for fields that the action does not take."""
    fields = dict(message)
    return actions[fields.pop("do")](*context, **fields)


class Decoder:
    """Takes messages out of the bytes that have come so far.

    `max_line` and `max_data` bound what one message may have.
    """

    def __init__(self, max_line: int, max_data: int = 0) -> None:
        self._max_line, self._max_data = max_line, max_data
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer that hold no line end
        self._message: dict[str, Any] | None = None  # whose bytes have not all come
        self._size = 0

    def feed(self, piece: bytes) -> None:
        """Add what has come."""
        self._buffer += piece

    def take(self) -> tuple[dict[str, Any], bytes] | None:
        """The next message and its bytes; None if they have not all come. Raises ValueError for what is no message."""
        if self._message is None and not self._take_line():
            return None
        if len(self._buffer) < self._size:
            return None
        data = bytes(self._buffer[: self._size])
        del self._buffer[: self._size]
        message, self._message = self._message, None
        assert message is not None
        return message, data

    def _take_line(self) -> bool:
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
        if max(end, self._searched) > self._max_line:
            raise ValueError(f"a line without an end: {bytes(self._buffer[:40])!r}")
        if end < 0:
            return False
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        try:
            message = json.loads(line)
            size = message.pop("bytes", 0)
            if not 0 <= size <= self._max_data:
                raise ValueError
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"not a message: {line[:80]!r}") from None
        self._message, self._size = message, size
        return True
