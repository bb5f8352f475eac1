"""`mlbench logs`: the ranks' output, byte for byte."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, BinaryIO

import typer

from mlbench_cli import console
from mlbench_cli.api import Client, ExperimentHandle, RunHandle
from mlbench_cli.commands._common import Format, Output, UnreachableTimeout
from mlbench_cli.commands._selection import All, Names, OlderThan, States, Tasks, make_filter
from mlbench_cli.config.settings import set_unreachable_timeout
from mlbench_cli.engines.follow import LogEntry, without_event
from mlbench_cli.errors import UsageError
from mlbench_cli.util.times import MAX_SECONDS, timestamp
from task_images import contract

MAX_FOLLOWED = 64  # ranks; each takes a thread, and nobody reads more at once
_EVENT = contract.PREFIX.encode()


def logs(
    names: Names = None,
    rank: Annotated[int | None, typer.Option("--rank", help="only this rank, without line prefixes")] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="follow the log until the run ends; Ctrl-C stops following, not the run"),
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="everything as written, with the lines that hold events")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", min=0, help="only the last N lines of each rank")
    ] = None,
    queue: Annotated[
        bool, typer.Option("--queue", help="show the output of the experiment queue instead of the runs")
    ] = False,
    unreachable: UnreachableTimeout = None,
    all_runs: All = False,
    states: States = None,
    tasks: Tasks = None,
    older_than: OlderThan = None,
    output: Output = Format.text,
) -> None:
    """Print the logs of a run: what its ranks wrote to standard output and error.

    For an experiment, this prints the logs of all its runs, one rank after the other; with --follow, new lines come in
    the order in which they arrive. With one rank, --raw prints the exact bytes; JSON replaces bytes that are not UTF-8.
    """
    if output is Format.json and follow:
        raise UsageError(
            "-o json prints one complete document, so it cannot be combined with --follow.",
            hint=f"mlbench logs {' '.join(names or ['NAME'])} --follow",
        )
    set_unreachable_timeout(unreachable)
    chosen = Client(notice=console.note).select(
        names or (), all_runs=all_runs, filter=make_filter(states, tasks, older_than)
    )
    if queue:
        _show_queues(chosen.experiments, output)
        return
    is_group = len(chosen.runs) != 1
    documents = []
    for run in chosen.runs:
        if is_group and not run.is_started and not follow:
            continue
        if is_group and output is Format.text:
            sys.stdout.flush()
            console.note(f"--- {run.name} ---")
        style = Style(rank, follow, raw, tail)
        documents.append(_show_run(run, style, output))
    if output is Format.json:
        console.out_json({"runs": documents} if is_group else documents[0])


@dataclass(frozen=True)
class Style:
    """Which lines of a run are shown, and how; as the options of the command."""

    rank: int | None
    follow: bool
    raw: bool
    tail: int | None


def _show_run(run: RunHandle, style: Style, output: Format) -> dict[str, object]:
    """Print the log of a run; for JSON, its document."""
    rank, follow, raw, tail = style.rank, style.follow, style.raw, style.tail
    if follow:
        run.await_start()
    reader = run.open_log(rank)
    ranks = reader.ranks
    if follow and len(ranks) > MAX_FOLLOWED:
        raise UsageError(
            f'The run "{run.name}" has {len(ranks)} ranks; at most {MAX_FOLLOWED} are followed at once.',
            hint=f"mlbench logs {run.name} --follow --rank 0",
        )
    printer = Printer(
        sys.stdout.buffer,
        prefixed=len(ranks) > 1,
        raw=raw,
        is_terminal=console.is_terminal(sys.stdout),
    )
    if output is Format.json:
        lines = [_document(entry, raw) for entry in reader.read_entries(raw=raw, tail=tail)]
        return {"name": run.name, "lines": lines, "gaps": run.list_log_gaps()}
    if len(ranks) == 1 and tail is None:
        for text in reader.read_lines(ranks[0], follow):
            printer.write(ranks[0], text)
            if follow:
                printer.flush()
    else:
        for entry in reader.read_entries(raw=raw, tail=tail):
            printer.write(entry.rank, entry.text)
        if follow and not reader.is_whole:
            printer.flush()
            reader.follow(printer.write, printer.flush)
    for gap in run.list_log_gaps():
        console.warn(str(gap.get("summary")))
    return {}


def _show_queues(experiments: Sequence[ExperimentHandle], output: Format) -> None:
    if not experiments:
        raise UsageError("--queue needs an experiment.", hint="mlbench logs EXPERIMENT --queue")
    lines = {item.name: item.read_queue_log() for item in experiments}
    if output is Format.json:
        console.out_json({"queues": [{"experiment": name, "lines": found} for name, found in lines.items()]})
        return
    for name, found in lines.items():
        console.out("\n".join(console.clean(line) for line in found), raw=True) if found else console.note(
            f"{name} has no queue log: it ran attached to mlbench run."
        )


def _document(entry: LogEntry, raw: bool) -> dict[str, object]:
    text = entry.text if raw else without_event(entry.text)
    return {
        "rank": entry.rank,
        "text": text.decode("utf-8", "replace"),
        "time": None if entry.time is None or not 0 <= entry.time <= MAX_SECONDS else timestamp(entry.time),
    }


class Printer:
    """Writes lines of ranks, each with its prefix, without the events.

    Unless `raw`, a terminal gets no control characters, and GitHub's runner no commands.
    """

    def __init__(self, stream: BinaryIO, *, prefixed: bool, raw: bool, is_terminal: bool = False) -> None:
        self._stream = stream
        self._is_cleaned = is_terminal and not raw
        self._is_disarmed = console.is_on_github() and not raw
        self._prefixed = prefixed
        self._raw = raw

    def write(self, rank: int, text: bytes) -> None:
        """Write one line of a rank."""
        if not self._raw and _EVENT in text:
            text = without_event(text)
        if not text:
            return
        if self._is_cleaned:
            text = console.clean(text.decode("utf-8", "replace"), keep="\n\t").encode()
        if self._is_disarmed:
            text = console.disarm_commands(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        if self._prefixed:
            text = b"[%d] %s" % (rank, text)
        # Another rank's line must not continue a line without a line end.
        if self._prefixed and not text.endswith(b"\n"):
            text += b"\n"
        self._stream.write(text)

    def flush(self) -> None:
        """Hand over what is buffered."""
        self._stream.flush()
