"""`mlbench logs`: what the ranks have written, byte for byte."""

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, RunName, engine_of
from mlbench_cli.engines.base import LOG_GAP, Engine
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model import Run
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.run_folder import RunFolder
from mlbench_cli.store import Store
from task_images import contract

MAX_FOLLOWED = 64  # ranks; each takes a thread, and nobody reads more at once
WAITING_LINES = 10_000  # between the threads and a slow terminal
LOOK_EVERY = 0.05  # seconds; a queue with locks costs more than all that is done with the lines
_EVENT = contract.PREFIX.encode()


def logs(
    name: RunName,
    rank: Annotated[int | None, typer.Option("--rank", help="only this rank, without the prefix")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="go on until the run ends (Ctrl-C only ends this)")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="everything as written, with the lines that hold events")] = False,
    output: Output = Format.text,
) -> None:
    """Print what the ranks of a run have written to their standard output and error.

    With one rank and --raw the bytes are exactly those that the rank wrote. In JSON, bytes that are no UTF-8 are
    replaced.
    """
    if output is Format.json and follow:
        raise UsageError(
            "A JSON document has an end, and --follow may have none.", hint=f"mlbench logs {name} --follow"
        )
    store = Store()
    run = store.run(name).run
    size = run.spec.world_size
    if rank is not None and not 0 <= rank < size:
        raise NotFoundError(f'The run "{name}" has no rank {rank}, only 0 to {size - 1}.', hint=f"mlbench logs {name}")
    # The archive is complete, and there when the cluster is long gone.
    engine = None if RunFolder(run.folder).is_sealed else engine_of(store.cluster(run.spec.cluster))
    ranks = range(size) if rank is None else [rank]
    if output is Format.json:
        lines = _documents(run, engine, ranks, raw)
        console.out_json({"name": name, "lines": lines, "gaps": _gaps(run, engine)})
        return
    _print(run, engine, ranks, follow, Printer(sys.stdout.buffer, prefixed=rank is None and size > 1, raw=raw))
    for gap in _gaps(run, engine):
        console.warn(str(gap.get("summary")))


def _gaps(run: Run, engine: Engine | None) -> list[dict[str, Any]]:
    """The findings that lines are missing."""
    if engine is not None:
        return [finding.to_dict() for finding in engine.log_gaps(run)]
    with Archive.open(run.folder) as archive:
        return [finding for finding in archive.findings if finding.get("code") == LOG_GAP]


def _print(run: Run, engine: Engine | None, ranks: Sequence[int], follow: bool, printer: "Printer") -> None:
    size = run.spec.world_size
    if not follow or len(ranks) == 1 or engine is None:
        for number in ranks:
            for text in _lines(run, engine, number, follow):
                printer.write(number, text)
                if follow:
                    printer.flush()
        return
    if size > MAX_FOLLOWED:
        raise UsageError(
            f'The run "{run.name}" has {size} ranks; at most {MAX_FOLLOWED} are followed at once.',
            hint=f"mlbench logs {run.name} --follow --rank 0",
        )
    _follow_all(run, engine, printer)


def _documents(run: Run, engine: Engine | None, ranks: Iterable[int], raw: bool) -> list[dict[str, object]]:
    found = []
    for rank in ranks:
        for line in _lines(run, engine, rank, follow=False):
            if text := line if raw else without_event(line):
                found.append({"rank": rank, "text": text.decode("utf-8", "replace")})
    return found


class Printer:
    """Writes lines of ranks, each with its prefix, without the events."""

    def __init__(self, stream: BinaryIO, *, prefixed: bool, raw: bool) -> None:
        self._stream = stream
        self._prefixed = prefixed
        self._raw = raw

    def write(self, rank: int, text: bytes) -> None:
        if not self._raw and _EVENT in text:
            text = without_event(text)
        if not text:
            return
        if self._prefixed:
            # Another rank's line must not stand behind one without its end.
            text = b"[%d] %s" % (rank, text if text.endswith(b"\n") else text + b"\n")
        self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


def without_event(line: bytes) -> bytes:
    """The line without the event in it; empty if it holds nothing else."""
    if contract.parse_event(line) is None:
        return line
    before = line[: line.find(_EVENT + b"{")]
    return before + b"\n" if before.strip() else b""


def _lines(run: Run, engine: Engine | None, rank: int, follow: bool) -> Iterator[bytes]:
    if engine is None:
        return _file_lines(run.folder / "logs" / f"rank-{rank}.log")
    return (line.text for line in engine.logs(run, rank, follow=follow))


def _file_lines(path: Path) -> Iterator[bytes]:
    if not path.exists():  # a rank that never started, or whose log could not be fetched
        return
    with open(path, "rb", buffering=1 << 20) as file:
        yield from file


def _follow_all(run: Run, engine: Engine, printer: Printer) -> None:
    """All ranks at once, whole lines in the order in which they arrive. Raises the first trouble that a rank has."""
    arrived: deque[tuple[int, bytes | Exception | None]] = deque()

    def read(rank: int) -> None:
        try:
            for line in engine.logs(run, rank, follow=True):
                arrived.append((rank, line.text))
                while len(arrived) > WAITING_LINES:
                    time.sleep(LOOK_EVERY)
            arrived.append((rank, None))
        except Exception as error:
            arrived.append((rank, error))

    for rank in range(run.spec.world_size):
        threading.Thread(target=read, args=(rank,), daemon=True).start()
    open_ranks = run.spec.world_size
    while open_ranks:
        while arrived:
            rank, item = arrived.popleft()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_ranks -= 1
            else:
                printer.write(rank, item)
        printer.flush()
        if open_ranks:
            time.sleep(LOOK_EVERY)
