"""Estimates when the lines of a rank's log were written, from a run's evidence.

Event lines have their own time, in milliseconds. Other lines were written no later than the next event of their rank,
and no later than the first time at which the log was known to extend beyond them: resources.jsonl has the logs' sizes
once a second ("log_bytes"), measured by the local engine, or on clusters derived from the nodes' timestamps of lines.
The earlier of the two is the line's time. Without either, a line has the time of the previous event; before the first
event its time is unknown.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlbench_cli.results.archive import sample_blocks
from mlbench_cli.storage.run_folder import LOG_TIMES, RESOURCES, STATE_FOLDER
from mlbench_cli.util.json_text import parse_document
from mlbench_cli.util.times import MAX_SECONDS
from task_images import contract

SLACK_SECONDS = 2.0  # by which an event's time may be later than the sample that includes its line
_EVENT = contract.PREFIX.encode()


@dataclass(frozen=True)
class LogBlock:
    """Consecutive lines of one rank with the same time, in seconds since 1970 (None: unknown).

    `is_exact`: the time is that of an event; otherwise it is an upper bound.
    """

    rank: int
    time: float | None
    is_exact: bool
    lines: list[bytes]


@dataclass(frozen=True)
class LogSizes:
    """`times[i]`: the first time at which the log was known to have `offsets[i]` bytes; both ascend."""

    offsets: list[int]
    times: list[float]

    def find_time(self, offset: int) -> float | None:
        """The first time at which the log reached `offset`; None without such a sample."""
        index = bisect_left(self.offsets, offset)
        return self.times[index] if index < len(self.times) else None


def read_log_sizes(folder: Path) -> dict[int, LogSizes]:
    """The sizes of the ranks' logs over time, from the folder of a run; may be empty."""
    found: dict[int, LogSizes] = {}
    samples = folder / RESOURCES  # missing for a running run on a cluster, which has the times of each log instead
    for path in [samples] if samples.exists() else (folder / STATE_FOLDER).glob(f"{LOG_TIMES}*.jsonl"):
        with suppress(OSError), open(path, "rb") as file:
            for line in file:
                if b'"log_bytes"' in line:
                    _take_sample(line, found)
    return found


def split_blocks(rank: int, lines: Iterable[bytes], sizes: LogSizes | None) -> Iterator[LogBlock]:
    """The lines of a rank's log, from its beginning, as blocks in order; times never decrease."""
    offset, latest = 0, None
    waiting: list[bytes] = []  # lines whose time is undecided: the next event may be before `limit`
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
    """The time of the rank's own event in the line; None if there is none, or its time is impossible."""
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
        _take_size(row["rank"], row["log_bytes"], sample_blocks.read_moment(row["time"]), found)
    except (ValueError, KeyError, TypeError, OverflowError):
        return


def _take_size(rank: object, size: object, time: float | None, found: dict[int, LogSizes]) -> None:
    if type(rank) is not int or type(size) is not int or time is None:
        return
    sizes = found.setdefault(rank, LogSizes([], []))
    if not sizes.offsets or (size > sizes.offsets[-1] and time >= sizes.times[-1]):
        sizes.offsets.append(size)
        sizes.times.append(time)
