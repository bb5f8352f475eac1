"""A rank's standard error: part of its log, with the places noted, so that both streams can be read apart.

Standard output goes straight to the log. Standard error takes a pipe to the agent, which appends it and writes
"OFFSET LENGTH" of each piece to `.state/stderr-RANK`.
"""

from __future__ import annotations

import contextlib
import os

PIECE = 64 * 1024  # bytes; as much as a pipe holds
MAX_PIECES = 16  # that are copied before ranks and deadlines have their turn
INDEX = "stderr-"  # begins the names of the files in .state


class ErrorPipe:
    """The pipe of one rank. The rank gets `writer` as its standard error; the agent reads at `reader`."""

    def __init__(self, folder: str, rank: int) -> None:
        """Raises OSError."""
        flags, names = os.O_WRONLY | os.O_CREAT | os.O_APPEND, (f"logs/rank-{rank}.log", f".state/{INDEX}{rank}")
        # A separate file description: the rank's standard output moves the position of the other.
        self._log, self._index = (os.open(f"{folder}/{name}", flags, 0o644) for name in names)
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def begin(self) -> None:
        """The rank has been forked, and its processes alone keep the other end open."""
        os.close(self.writer)

    def copy(self) -> bool:
        """Append what has come to the log; False at the end. Raises OSError if it cannot be written."""
        for _ in range(MAX_PIECES):
            try:
                data = os.read(self.reader, PIECE)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._append(data)
        return True

    def _append(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            written = os.write(self._log, left)
            # Where an append has ended; the rank may have written before it.
            place = os.lseek(self._log, 0, os.SEEK_CUR) - written
            os.write(self._index, b"%d %d\n" % (place, written))
            left = left[written:]

    def close(self) -> None:
        """Let go of the pipe and the files."""
        for file in (self.reader, self._log, self._index):
            with contextlib.suppress(OSError):
                os.close(file)
