"""Follow a run to its end, and the logs of its ranks as they grow; the same on every engine."""

import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from mlbench_cli.engines.base import Cursor, Engine, LogLine
from mlbench_cli.engines.observe import Snapshot, observe
from mlbench_cli.errors import MlbenchError, NotFoundError, RemoteError
from mlbench_cli.model.run import Observation, Run
from mlbench_cli.model.silence import Silence
from mlbench_cli.storage.run_folder import RunFolder

BLOCK = 1 << 20
POLL_SECONDS = 0.5
IDLE_FACTOR = 15  # sleep 15x the CPU time of an observation, so that 1,000 busy nodes cost about 6 % of a core


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
            observation = silence.observe(last or observe(run.spec, (), Snapshot(time.time(), {}), lambda rank: []))
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
    except FileNotFoundError:
        return
