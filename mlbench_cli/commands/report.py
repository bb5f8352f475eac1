"""`mlbench report`: one page about runs, experiments or archives."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.commands._archives import Unproven, open_archives, tell_apart
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.results.report.facts import collect
from mlbench_cli.results.report.render import check_target, write_report
from mlbench_cli.util.text import counted


def report(
    target: Annotated[Path, typer.Argument(metavar="OUT", help="file to write: OUT.html, or OUT.md for pull requests")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|EXPERIMENT|ARCHIVE]...",
            help="runs, experiments, the common name of repeats, or folders and zips of archives; default: every "
            "finished run",
            autocompletion=complete_names,
        ),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="title of the page")] = None,
    unproven: Unproven = False,
    output: Output = Format.text,
) -> None:
    """Write a report about runs: results with intervals, settings, figures and findings.

    The HTML report is one self-contained file that needs no network. mlbench verifies the archives first, and writes
    the data of each figure as CSV into OUT-data/.
    """
    check_target(target, sources or [])
    client = api.Client(notice=console.warn)
    paths = client.find_archives(sources or [])
    with ExitStack() as stack:
        left_out: list[str] = []
        several = len(paths) > len(sources or [])  # a word stands for several runs
        archives = open_archives(paths, stack, unproven=unproven, left_out=left_out if several else None)
        tell_apart(archives)
        with console.Busy("Writing the report"):
            written = write_report(collect(archives, title=title, left_out=left_out), target)
    if output is Format.json:
        console.out_json({"report": str(target.absolute()), "files": [str(path) for path in written]})
        return
    console.out(str(target))
    folder = f"; its rows as CSV: {written[-1].parent}/" if len(written) > 1 else ""
    console.note(f"{counted(len(archives), 'run')}, {console.size(target.stat().st_size)}{folder}")
