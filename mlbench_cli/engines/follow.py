"""Follow a run to its end, and the logs of its ranks as they grow; the same on every engine, as is how long a cluster
that does not answer is waited for: `Silence`.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.config.settings import unreachable_timeout
from mlbench_cli.engines.base import Cursor, Engine, LogLine
from mlbench_cli.errors import CredentialError, MissingRight, MlbenchError, NotFoundError, RemoteError, UnreachableError
from mlbench_cli.model.run import Finding, Observation, Run
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.text import rough_duration
from task_images import contract

BLOCK = 1 << 20
POLL_SECONDS = 0.5
IDLE_FACTOR = 15  # sleep 15x the CPU time of an observation, so that 1,000 busy nodes cost about 6 % of a core
UNREACHABLE = "unreachable"  # code of the finding
SHORT_SECONDS = 10.0  # shorter silences are not reported
STARTING_SECONDS = 60.0  # an API server that has just started rejects everybody until it has read its roles
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 5.0
MAX_BEGUN = 1 << 12  # bytes of an unfinished line that are read
WAITING_LINES = 10_000  # buffered between the reading threads and a slow terminal
LOOK_EVERY = 0.05  # seconds; polling, because a queue with locks would cost more than handling the lines
_EVENT = contract.PREFIX.encode()


class Silence:
    """The time since a cluster last answered. `kinds` are errors that count as no answer.

    `has_answered`: it accepted these credentials before, so a refusal may be temporary.
    """

    def __init__(self, *kinds: type[MlbenchError], has_answered: bool = False) -> None:
        self.seconds = unreachable_timeout()
        self._kinds: tuple[type[MlbenchError], ...] = (UnreachableError, *kinds)
        self._has_answered = has_answered
        self._since: float | None = None
        self._refused_since: float | None = None
        self._words = ""
        self._hint: str | None = None
        self._is_told = False

    def end(self) -> None:
        """Record that the cluster has answered."""
        self._since = self._refused_since = None
        self._has_answered, self._is_told = True, False

    def tolerate(self, error: MlbenchError, begun: float | None = None) -> None:
        """Record an attempt without an answer that started at `begun` on the monotonic clock.

        Raises `error` if it is of another kind, or if the cluster has been silent for too long.
        """
        now = time.monotonic()
        is_refusal = isinstance(error, CredentialError)
        if isinstance(error, MissingRight):
            raise error
        if is_refusal:
            self._refused_since = self._refused_since or now
            if (not self._has_answered and self._since is None) or now - self._refused_since >= STARTING_SECONDS:
                raise error
        elif not isinstance(error, self._kinds):
            raise error
        else:
            self._refused_since = None
        if self._since is None:
            self._since = now if begun is None else begun
        if now - self._since >= self.seconds:
            raise error
        if not is_refusal or not self._words:
            self._words, self._hint = error.message, error.hint

    def finding(self) -> Finding | None:
        """The finding for the user; None while the cluster answers or has only just become silent."""
        if self._since is None or (silent := time.monotonic() - self._since) < min(SHORT_SECONDS, self.seconds):
            return None
        return Finding(
            UNREACHABLE,
            f"{self._words.rstrip('.')}. The run may continue there. Silent for {rough_duration(silent)}; "
            f"retrying for {rough_duration(self.seconds)} (MLBENCH_UNREACHABLE_TIMEOUT).",
            hint=self._hint,
            retryable=True,
        )

    def tell(self, report: Callable[[str], None] | None) -> None:
        """Report the finding once per silence."""
        finding = self.finding()
        if finding is not None and report is not None and not self._is_told:
            self._is_told = True
            report(finding.summary)

    def observe(self, last: Observation) -> Observation:
        """The last observation of a run whose cluster does not answer. It is no evidence that the run ended."""
        finding = self.finding()
        return replace(last, time=time.time(), ended=None, findings=() if finding is None else (finding,))

    def pause(self) -> float:
        """Seconds to the next attempt: a tenth of the silence so far, within bounds."""
        silent = 0.0 if self._since is None else time.monotonic() - self._since
        return min(max(PAUSE_SECONDS, silent / 10), MAX_PAUSE_SECONDS)


def watch(engine: Engine, run: Run) -> Generator[Observation, None, None]:
    """Yield observations until one has `ended`: at least once per second, or whenever something changes.

    Raises UnreachableError after the limit of silence.
    """
    silence = Silence(RemoteError)
    last = None
    while True:
        begun, used = time.monotonic(), time.thread_time()
        try:
            observation = engine.look(run, max_age=0.9 * POLL_SECONDS)
            silence.end()
        except MlbenchError as error:
            silence.tolerate(error, begun)
            observation = silence.observe(last or Observation.of_waiting(time.time(), run.spec))
        last = observation
        yield observation
        if observation.ended:
            return
        used = time.thread_time() - used
        engine.head(run).wait(max(0.05, POLL_SECONDS - (time.monotonic() - begun), IDLE_FACTOR * used))


def read_log(
    engine: Engine,
    run: Run,
    rank: int,
    since: Cursor | None = None,
    *,
    follow: bool = False,
    report: Callable[[str], None] | None = None,
) -> Iterator[LogLine]:
    """The lines of one rank's log after `since`; with `follow`, until the rank has ended.

    `report` is called with a sentence if the run's head does not answer for long. Raises NotFoundError for a rank that
    the run does not have.
    """
    if not 0 <= rank < run.spec.process_count:
        raise NotFoundError(
            f'The run "{run.name}" has no rank {rank}, only 0 to {run.spec.process_count - 1}.',
            hint=f"mlbench logs {run.name} --rank 0",
        )
    silence, poll = Silence(RemoteError), engine.head(run).poll_seconds

    def has_ended() -> bool:
        begun = time.monotonic()
        try:
            is_over = _has_ended(engine, run, rank)
        except MlbenchError as error:
            silence.tolerate(error, begun)
            silence.tell(report)
            return False
        silence.end()
        return is_over

    return follow_log(run, rank, since, has_ended, (lambda: time.sleep(poll)) if follow else None)


def _has_ended(engine: Engine, run: Run, rank: int) -> bool:
    """Whether no more lines of the rank will come; those that there are have been copied when this returns."""
    if RunFolder(run.folder).read_observation() is not None:
        return True
    head = engine.head(run)
    max_age = 0.9 * head.poll_seconds
    for report in head.read(max_age=max_age).nodes.values():
        if (is_whole := report.has_whole_log(rank)) is not None:
            return is_whole
    return engine.look(run, max_age=max_age).ended is not None


def follow_log(
    run: Run,
    rank: int,
    since: Cursor | None,
    has_ended: Callable[[], bool],
    wait: Callable[[], object] | None = None,
) -> Iterator[LogLine]:
    """The lines of a growing log behind `since`, until `has_ended` and all is read.

    `wait` is called when there is nothing new; without it, that is the end. A last line without its line end is given
    once the rank has ended: until then it may grow.
    """
    path, offset = RunFolder(run.folder).log(rank), since.offset if since else 0
    pieces: list[bytes] = []  # of an incomplete line
    while True:
        is_over, found = has_ended(), False  # asked before reading, because nothing is written after the end
        for line in _read_lines(path, offset):
            found = True
            offset += len(line)
            if line[-1:] != b"\n":
                pieces.append(line)
                continue
            if pieces:
                line = b"".join((*pieces, line))
                pieces = []
            yield LogLine(rank, line, Cursor(offset))
        if found:
            continue
        if is_over or wait is None:
            break
        wait()
    if pieces and is_over:
        yield LogLine(rank, b"".join(pieces), Cursor(offset))


def _read_lines(path: Path, offset: int) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=BLOCK) as file:
            file.seek(offset)
            yield from file
    except FileNotFoundError:  # a rank that has not started, or whose log could not be fetched
        return


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

    @property
    def is_whole(self) -> bool:
        """Whether nothing more will come: the archive is complete."""
        return self._engine is None

    def read_lines(self, rank: int, follow: bool = False) -> Iterator[bytes]:
        """The lines of one rank as they are now, or with `follow` until the rank has ended."""
        if self._engine is None:
            yield from _read_lines(RunFolder(self._run.folder).log(rank), 0)
            return
        self._cursors[rank] = None
        yield from self.read_new(rank, follow, self._notice)

    def read_new(self, rank: int, follow: bool = False, notice: Callable[[str], None] | None = None) -> Iterator[bytes]:
        """The lines of one rank since the last read; with `follow`, until the rank has ended."""
        since = self._cursors[rank]
        if self._engine is None:
            lines = follow_log(self._run, rank, since, lambda: True)
        else:
            lines = read_log(self._engine, self._run, rank, since, follow=follow, report=notice)
        for line in lines:
            self._cursors[rank] = line.cursor
            yield line.text

    def read_begun(self, rank: int) -> bytes:
        """The end of what stands behind the lines of one rank that were read."""
        cursor = self._cursors[rank]
        try:
            with open(RunFolder(self._run.folder).log(rank), "rb") as file:
                file.seek(max(cursor.offset if cursor else 0, file.seek(0, os.SEEK_END) - MAX_BEGUN))
                return file.read()
        except OSError:
            return b""

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
