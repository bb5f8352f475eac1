"""`mlbench report`: one page about runs, experiments or archives."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._selection import complete_names


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
    foreign: Annotated[
        list[Path] | None,
        typer.Option("--import", metavar="FILE", help="collectives of nccl-tests or OSU to draw, too; repeatable"),
    ] = None,
    output: Output = Format.text,
) -> None:
    """Write one page with everything about some runs: results with intervals, settings, figures, findings.

    The HTML page needs no network: it can be mailed, archived and printed. Archives are verified first. The data of
    each figure is written as CSV into OUT-data/.
    """
    from mlbench_cli.results.report.collect import collect
    from mlbench_cli.results.report.provisioning import provisioning_figures
    from mlbench_cli.results.report.write import check_target, write_report

    check_target(target)
    client = api.Client(notice=console.warn)
    paths = client.find_archives(sources or [])
    with ExitStack() as stack:
        archives = [stack.enter_context(api.open_archive(path)) for path in paths]
        made = list(provisioning_figures(client.clusters_of(archives)))
        written = write_report(collect(archives, title=title, more=made, foreign=foreign or ()), target)
    if output is Format.json:
        console.out_json({"report": str(target.absolute()), "files": [str(path) for path in written]})
        return
    console.out(str(target))
    console.note(f"{console.size(target.stat().st_size)} of {len(paths)} runs; data: {len(written) - 1} CSV files")
