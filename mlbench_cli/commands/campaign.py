"""`mlbench campaign`: the earlier name of `mlbench run -f` for a file with `runs`."""

from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli.commands._common import (
    Format,
    Output,
    Yes,
    max_cost_option,
    max_hours_option,
    only_report_option,
    to_option,
)
from mlbench_cli.commands._experiment_file import How, Limits, run_file
from mlbench_cli.runs.experiment_file import list_shipped


def campaign(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help=f"file with runs, or one that is shipped: {', '.join(list_shipped())}")
    ],
    to: Annotated[Path | None, to_option()] = None,
    clusters: Annotated[
        list[str] | None, typer.Option("--cluster", metavar="NAME", help="run on this cluster instead; repeatable")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the runs with their estimated time and price, then exit")
    ] = False,
    only_report: Annotated[bool, only_report_option()] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="rerun failed runs")] = False,
    max_hours: Annotated[float | None, max_hours_option()] = None,
    max_cost: Annotated[float | None, max_cost_option()] = None,
    yes: Yes = False,
    output: Output = Format.text,
) -> int:
    """Run everything in a file with runs; the earlier name of mlbench run -f FILE."""
    limits = Limits(clusters or (), max_hours, max_cost)
    how = How(dry_run=dry_run, only_report=only_report, retry_failed=retry_failed, yes=yes)
    return run_file(file, limits, how, to, output, ("mlbench", *context.obj))
