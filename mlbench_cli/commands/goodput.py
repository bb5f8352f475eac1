"""`mlbench goodput`: the useful share of the time of runs with faults, and where the rest went."""

from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.commands._archives import Unproven, open_archives, open_reference
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.results.analysis.goodput import Goodput, has_faults, measure_goodput
from mlbench_cli.results.analysis.numbers import NO_VALUE, SECONDS, format_percent, format_value
from mlbench_cli.results.archive.faults import PARTS


def goodput(
    results: Annotated[
        list[str],
        typer.Argument(metavar="RESULT...", help="runs, experiments or archives", autocompletion=complete_names),
    ],
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="RUN",
            help="the same run without faults, as the reference for the time of a sample; default: each run's own",
            autocompletion=complete_names,
        ),
    ] = None,
    unproven: Unproven = False,
    output: Output = Format.text,
) -> None:
    """Show the goodput of runs with faults, and where the rest of the time was lost.

    Goodput is the time of the useful samples, divided by the wall time of all attempts. ETTR is what the published
    formula expects of the measured time between faults, cost of a checkpoint and restart.
    """
    with ExitStack() as stack:
        client = api.Client(notice=console.warn)
        archives = open_archives(client.find_archives(results), stack, unproven=unproven)
        base = open_reference(client, reference, "--reference", stack, unproven=unproven)
        chosen = [archive for archive in archives if has_faults(archive)] or archives
        measured = [measure_goodput(archive, base) for archive in chosen]
    if output == Format.json:
        console.out_json({"runs": [asdict(item) for item in measured]})
        return
    head = ("RUN", "GOODPUT", "ETTR", "FAULTS", "RESTARTS", "RECOVERY", "WALL", *(part.upper() for part in PARTS))
    console.out_table(head, [_row(item) for item in measured])
    if any(not item.is_referenced for item in measured):
        console.note(
            "Goodput relative to each run's own speed; to compare with a run without faults, use --reference RUN."
        )


def _row(item: Goodput) -> list[str]:
    return [
        item.name,
        NO_VALUE if item.value is None else format_percent(item.value),
        NO_VALUE if item.ettr is None else format_percent(item.ettr),
        str(item.faults),
        str(item.restarts),
        NO_VALUE if item.recovery is None else format_value(item.recovery, SECONDS),
        format_value(item.wall, SECONDS),
        *(format_value(item.parts.get(part, 0.0), SECONDS) for part in PARTS),
    ]
