"""The lines of a run's logs: from its archive or its engine, merged by time, and as they arrive."""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbench_cli.engines.base import Cursor, Engine, LogLine
from mlbench_cli.model.run import Run
from mlbench_cli.results.archive.log_times import LogBlock, read_log_sizes, split_blocks
from task_images import contract

WAITING_LINES = 10_000  # between the threads and a slow terminal
LOOK_EVERY = 0.05  # seconds; a queue with locks costs more than all that is done with the lines
_EVENT = contract.PREFIX.encode()


@dataclass(frozen=True)
class LogEntry:
    """One line with its rank and its time in seconds since 1970, as `LogBlock` has them."""

    rank: int
    time: float | None
    is_exact: bool
    text: bytes


class LogReader:
    """Reads the logs of some ranks of a run, from its archive if `engine` is None."""

    def __init__(self, run: Run, engine: Engine | None, ranks: Sequence[int]) -> None:
        self._run = run
        self._engine = engine
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
            yield from _read_file(self._run.folder / "logs" / f"rank-{rank}.log")
            return
        yield from self._note(rank, self._engine.logs(self._run, rank, follow=follow))

    def read_new(self, rank: int) -> Iterator[bytes]:
        """The lines of one rank behind those that were read; of an archive all of them, once."""
        if self._engine is None:
            if rank not in self._read:
                self._read.add(rank)
                yield from self.read_lines(rank)
            return
        yield from self._note(rank, self._engine.logs(self._run, rank, self._cursors[rank]))

    def _note(self, rank: int, lines: Iterable[LogLine]) -> Iterator[bytes]:
        """The texts of the lines; how far they were read is noted."""
        for line in lines:
            self._cursors[rank] = line.cursor
            yield line.text

    def read_blocks(self) -> Iterator[LogBlock]:
        """The lines of all ranks as they are now, merged by time; lines of one rank keep their order."""
        sizes = read_log_sizes(self._run.folder)
        blocks = [split_blocks(rank, self.read_lines(rank), sizes.get(rank)) for rank in self.ranks]
        return heapq.merge(*blocks, key=lambda block: (block.time or 0.0, block.rank))

    def follow(self, write: Callable[[int, bytes], None], flush: Callable[[], None]) -> None:
        """Hand over the lines behind those that were read, whole, in the order in which they arrive, until the ranks
        have ended. Raises the first trouble that a rank has."""
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
            for line in self._engine.logs(self._run, rank, self._cursors[rank], follow=True):
                arrived.append((rank, line.text))
                while len(arrived) > WAITING_LINES:
                    time.sleep(LOOK_EVERY)
            arrived.append((rank, None))
        except Exception as error:
            arrived.append((rank, error))


def select_entries(
    blocks: Iterable[LogBlock], *, raw: bool, since: float | None = None, tail: int | None = None
) -> Iterable[LogEntry]:
    """The lines that are shown: without those that hold only events (unless `raw`), not before `since`, the last
    `tail` of them. A line of unknown time counts as recent."""
    found = (
        LogEntry(block.rank, block.time, block.is_exact, line)
        for block in blocks
        if since is None or block.time is None or block.time >= since
        for line in block.lines
        if raw or _EVENT not in line or without_event(line)
    )
    return found if tail is None else deque(found, maxlen=tail)


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
