"""The lines of a run's logs: from its archive or its engine, rank by rank, and as they arrive."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from mlbench_cli.engines.base import Cursor, Engine, LogLine
from mlbench_cli.engines.follow import read_log
from mlbench_cli.model.run import Run
from mlbench_cli.storage.run_folder import RunFolder
from task_images import contract

MAX_BEGUN = 1 << 12  # bytes of an unfinished line that are read
WAITING_LINES = 10_000  # buffered between the reading threads and a slow terminal
LOOK_EVERY = 0.05  # seconds; polling, because a queue with locks would cost more than handling the lines
_EVENT = contract.PREFIX.encode()


class LogEntry(Struct, frozen=True):
    """One line with its rank, and the time of the event in it in seconds since 1970 (None: it holds no event)."""

    rank: int
    time: float | None
    text: bytes


class LogReader:
    """Reads the logs of some ranks of a run, from its archive if `engine` is None.

    `notice` gets a sentence if a cluster does not answer while its logs are followed.
    """

    def __init__(
        self, run: Run, engine: Engine | None, ranks: Sequence[int], notice: Callable[[str], None] | None = None
    ) -> None:
        self._run = run
        self._engine = engine
        self._notice = notice
        self.ranks = ranks
        self._cursors: dict[int, Cursor | None] = dict.fromkeys(ranks)
        self._read: set[int] = set()

    @property
    def is_whole(self) -> bool:
        """Whether nothing more will come: the archive is complete."""
        return self._engine is None

    def read_lines(self, rank: int, follow: bool = False) -> Iterator[bytes]:
        """The lines of one rank as they are now, or with `follow` until the rank has ended."""
        if self._engine is None:
            yield from _read_file(RunFolder(self._run.folder).log(rank))
            return
        yield from self._note(rank, read_log(self._engine, self._run, rank, follow=follow, report=self._notice))

    def read_new(self, rank: int) -> Iterator[bytes]:
        """The lines of one rank since the last read; from an archive, all of them once."""
        if self._engine is None:
            if rank not in self._read:
                self._read.add(rank)
                yield from self.read_lines(rank)
            return
        yield from self._note(rank, read_log(self._engine, self._run, rank, self._cursors[rank]))

    def read_begun(self, rank: int) -> bytes:
        """The end of what stands behind the lines of one rank that were read."""
        cursor = self._cursors[rank]
        try:
            with open(RunFolder(self._run.folder).log(rank), "rb") as file:
                file.seek(max(cursor.offset if cursor else 0, file.seek(0, os.SEEK_END) - MAX_BEGUN))
                return file.read()
        except OSError:
            return b""

    def _note(self, rank: int, lines: Iterable[LogLine]) -> Iterator[bytes]:
        """The texts of the lines; remembers how far they were read."""
        for line in lines:
            self._cursors[rank] = line.cursor
            yield line.text

    def read_entries(self, *, raw: bool, tail: int | None = None) -> Iterable[LogEntry]:
        """The lines as they are now, one rank after the other, the last `tail` of each rank; without those that hold
        only events, unless `raw`."""
        for rank in self.ranks:
            lines = (line for line in self.read_lines(rank) if raw or _EVENT not in line or without_event(line))
            for line in lines if tail is None else deque(lines, maxlen=tail):
                event = contract.parse_event(line) if _EVENT in line else None
                yield LogEntry(rank, float(event["time"]) if event else None, line)

    def follow(self, write: Callable[[int, bytes], None], flush: Callable[[], None]) -> None:
        """Pass on complete new lines, in the order in which they arrive, until the ranks have ended. Raises the first
        error of reading a rank's log."""
        arrived: deque[tuple[int, bytes | Exception | None]] = deque()
        for rank in self.ranks:
            threading.Thread(target=self._collect, args=(rank, arrived), daemon=True).start()
        open_ranks = len(self.ranks)
        while open_ranks:
            while arrived:
                rank, item = arrived.popleft()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    open_ranks -= 1
                else:
                    write(rank, item)
            flush()
            if open_ranks:
                time.sleep(LOOK_EVERY)

    def _collect(self, rank: int, arrived: deque[tuple[int, bytes | Exception | None]]) -> None:
        assert self._engine is not None
        try:
            cursor = self._cursors[rank]
            for line in read_log(self._engine, self._run, rank, cursor, follow=True, report=self._notice):
                arrived.append((rank, line.text))
                while len(arrived) > WAITING_LINES:
                    time.sleep(LOOK_EVERY)
            arrived.append((rank, None))
        except Exception as error:
            arrived.append((rank, error))


def without_event(line: bytes) -> bytes:
    """The line without the event in it; empty if it holds nothing else."""
    if contract.parse_event(line) is None:
        return line
    before = line[: line.find(_EVENT + b"{")]
    return before + b"\n" if before.strip() else b""


def _read_file(path: Path) -> Iterator[bytes]:
    if not path.exists():  # a rank that never started, or whose log could not be fetched
        return
    with open(path, "rb", buffering=1 << 20) as file:
        yield from file
