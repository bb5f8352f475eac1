"""When the lines of a rank's log were written, as far as a run's evidence says.

A line that holds an event carries its own time, to the millisecond. Of all other lines it is known that they were
written no later than the next event of their rank, and no later than the moment at which the log was first found to
reach beyond them: resources.jsonl holds the logs' sizes once a second ("log_bytes"), measured by the local engine, and
on clusters from the nodes' time stamps of the lines. The earlier of the two is taken for the line's time. If there is
neither, a line has the time of the event before it; before the first event its time is unknown.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mlbench_cli.results.archive import sample_blocks
from mlbench_cli.storage.run_folder import LOG_TIMES, RESOURCES, STATE_FOLDER
from mlbench_cli.util.json_text import parse_document
from mlbench_cli.util.times import MAX_SECONDS
from task_images import contract

SLACK_SECONDS = 2.0  # by which an event may claim to be later than the sample that has found its line
_EVENT = contract.PREFIX.encode()


@dataclass(frozen=True)
class LogBlock:
    """Successive lines of one rank that have the same time in seconds since 1970 (None: unknown).

    `is_exact` tells whether that is the time of an event, else the time is the latest possible one.
    """

    rank: int
    time: float | None
    is_exact: bool
    lines: list[bytes]


@dataclass(frozen=True)
class LogSizes:
    """`times[i]`: the first moment at which the log was known to have `offsets[i]` bytes; both ascend."""

    offsets: list[int]
    times: list[float]

    def find_time(self, offset: int) -> float | None:
        """The first moment at which the log reached `offset`; None if no sample says so."""
        index = bisect_left(self.offsets, offset)
        return self.times[index] if index < len(self.times) else None


def read_log_sizes(folder: Path) -> dict[int, LogSizes]:
    """The sizes of the ranks' logs over time, as the folder of a run has them; empty if it holds none."""
    found: dict[int, LogSizes] = {}
    samples = folder / RESOURCES  # a running run on a cluster has none yet, but the times of each log
    for path in [samples] if samples.exists() else (folder / STATE_FOLDER).glob(f"{LOG_TIMES}*.jsonl"):
        with suppress(OSError), open(path, "rb") as file:
            for line in file:
                if b'"log_bytes"' in line:
                    _take_sample(line, found)
    return found


def split_blocks(rank: int, lines: Iterable[bytes], sizes: LogSizes | None) -> Iterator[LogBlock]:
    """The lines of a rank's log, from its beginning, as blocks in their order; times never decrease."""
    offset, latest = 0, None
    waiting: list[bytes] = []  # lines whose time is still open: the next event may be before `limit`
    limit: float | None = None
    for line in lines:
        offset += len(line)
        known = sizes.find_time(offset) if sizes else None
        if waiting and known != limit:
            latest = _later(latest, limit)
            yield LogBlock(rank, latest, False, waiting)
            waiting = []
        limit = known
        moment = _event_time(line, rank, limit) if _EVENT in line else None
        if moment is None:
            waiting.append(line)
            continue
        if waiting:
            latest = _later(latest, moment if sizes else latest)
            yield LogBlock(rank, latest, False, waiting)
            waiting = []
        latest = _later(latest, moment)
        yield LogBlock(rank, latest, latest == moment, [line])
    if waiting:
        yield LogBlock(rank, _later(latest, limit), False, waiting)


def _event_time(line: bytes, rank: int, limit: float | None) -> float | None:
    """The time of the rank's own event in the line; None if there is none, or if it claims what cannot be."""
    event = contract.parse_event(line)
    if event is None or event["rank"] != rank:
        return None
    moment = float(event["time"])
    is_possible = 0 <= moment <= MAX_SECONDS and (limit is None or moment <= limit + SLACK_SECONDS)
    return moment if is_possible else None


def _later(first: float | None, second: float | None) -> float | None:
    return max((time for time in (first, second) if time is not None), default=None)


def _take_sample(line: bytes, found: dict[int, LogSizes]) -> None:
    try:
        row = parse_document(line)
        if row.get("kind") == sample_blocks.KIND:
            sample_blocks.check(row)
            columns = sample_blocks.read_columns(row, ("log_bytes",))
            for each in zip(columns["log_bytes"], columns["time"], strict=True):
                _take_size(row["rank"], *each, found)
            return
        _take_size(row["rank"], row["log_bytes"], _seconds(row["time"]), found)
    except (ValueError, KeyError, TypeError, OverflowError):
        return


def _take_size(rank: object, size: object, time: float | None, found: dict[int, LogSizes]) -> None:
    if type(rank) is not int or type(size) is not int or time is None:
        return
    sizes = found.setdefault(rank, LogSizes([], []))
    if not sizes.offsets or (size > sizes.offsets[-1] and time >= sizes.times[-1]):
        sizes.offsets.append(size)
        sizes.times.append(time)


def _seconds(value: Any) -> float | None:
    """A sample's time, which is RFC 3339 in an archive and seconds while the run is running."""
    if isinstance(value, str):
        return datetime.fromisoformat(value).timestamp()
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
