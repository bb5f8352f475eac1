"""`mlbench fabric`: what a fabric costs trainings and gives collectives, in the reporting form of the IETF draft."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.commands._archives import Unproven, open_archives, open_reference
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.model.network import parse_network
from mlbench_cli.results.analysis.fabric import report_fabric
from mlbench_cli.results.report.fabric import fabric_tables, make_fabric_page
from mlbench_cli.results.report.write import check_target, write_report


def fabric(
    results: Annotated[
        list[str],
        typer.Argument(metavar="RESULT...", help="runs, experiments or archives", autocompletion=complete_names),
    ],
    compute: Annotated[
        str | None,
        typer.Option(
            "--compute",
            metavar="RUN",
            help="the same training with --method noop, for JCT ratio and overlap",
            autocompletion=complete_names,
        ),
    ] = None,
    alone: Annotated[
        str | None,
        typer.Option(
            "--alone",
            metavar="RUN",
            help="the same training run alone, for the interference factor",
            autocompletion=complete_names,
        ),
    ] = None,
    access_rate: Annotated[
        str | None,
        typer.Option("--access-rate", metavar="RATE", help="rate of each rank's link, e.g. 100gbit; default: measured"),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="write the report as a page, too: .html or .md")
    ] = None,
    unproven: Unproven = False,
    output: Output = Format.text,
) -> None:
    """Report on a fabric in the form of draft-calabria-bmwg-ai-fabric-training-bench.

    JCT ratio is the time of an update divided by computation plus communication at the full rate, one after the other.
    Overlap is the share of that communication which costs no time. Interference is the time beside other runs divided
    by the time alone. Recovery is the time from the return of a failed link to the next update. mlbench sees endpoints
    only: nothing here is about switches.
    """
    if page is not None:
        check_target(page)
    rate = None if access_rate is None else parse_network(access_rate, "--access-rate").rate
    with ExitStack() as stack:
        client = api.Client(notice=console.warn)
        archives = open_archives(client.find_archives(results), stack, unproven=unproven)
        base = open_reference(client, compute, "--compute", stack, unproven=unproven)
        lone = open_reference(client, alone, "--alone", stack, unproven=unproven)
        report = report_fabric(archives, base, lone, rate)
    if page is not None:
        write_report(make_fabric_page(report), page)
    if output == Format.json:
        console.out_json(report.to_dict())
        return
    for table in fabric_tables(report):
        console.out_table(tuple(name.upper() for name in table.head), [list(row) for row in table.rows])
    if report.fairness is not None:
        console.note(f"Fairness (Jain's index) of {len(report.jobs)} runs: {report.fairness:.3f}")
    for line in report.excluded:
        console.note(f"Left out: {line}")
    document = report.to_dict()
    console.note(f"Observed at: {document['observation_points']}; {document['topology']}.")
    if page is not None:
        console.note(f"Page: {page}")
