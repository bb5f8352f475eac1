"""Follow the copy of a rank's log in the run's folder; shared by all engines."""

from collections.abc import Callable, Iterator
from pathlib import Path

from mlbench_cli.engines.base import Cursor, LogLine
from mlbench_cli.errors import NotFoundError
from mlbench_cli.model.run import Run
from mlbench_cli.storage.run_folder import RunFolder

BLOCK = 1 << 20


def check_rank(run: Run, rank: int) -> None:
    """Raise NotFoundError unless the run has this rank."""
    if not 0 <= rank < run.spec.process_count:
        raise NotFoundError(
            f'The run "{run.name}" has no rank {rank}, only 0 to {run.spec.process_count - 1}.',
            hint=f"mlbench logs {run.name} --rank 0",
        )


def follow_log(
    run: Run,
    rank: int,
    since: Cursor | None,
    has_ended: Callable[[], bool],
    wait: Callable[[], object] | None = None,
) -> Iterator[LogLine]:
    """The lines of a growing log behind `since`, until `has_ended` and all is read.

    `wait` is called when there is nothing new; without it, that is the end. A last line without its line end is given
    once the rank has ended: until then it may grow. Raises NotFoundError for a rank that the run does not have.
    """
    check_rank(run, rank)
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
