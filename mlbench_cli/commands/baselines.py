"""`mlbench baselines`: the expected performance of machine types, and results and links below it."""

from contextlib import ExitStack
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.commands._archives import open_archives
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.config import settings
from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.expected import (
    NOTHING_COUNTS,
    SHARE,
    CheckedFigure,
    Expected,
    check_figures,
    list_expected,
    record_expected,
)
from mlbench_cli.results.analysis.numbers import format_percent, format_value
from mlbench_cli.results.analysis.verdict import find_worst
from mlbench_cli.results.archive.reader import Archive

Results = Annotated[
    list[str],
    typer.Argument(metavar="RESULT...", help="runs, experiments or archives", autocompletion=complete_names),
]

baselines = typer.Typer(rich_markup_mode=None, add_completion=False)


@baselines.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    machine: Annotated[
        str | None, typer.Option("--machine", metavar="TYPE", help="only types whose name contains this")
    ] = None,
    output: Output = Format.text,
) -> None:
    """Show the expected bandwidth and throughput of machine types, with their sources.

    check compares results with them and names slow links; record stores the results of a known-good machine.
    """
    if context.invoked_subcommand is not None:
        return
    found = [each for each in list_expected(settings.data_dir()) if machine is None or machine in each.machine]
    if output is Format.json:
        console.out_json({"figures": [vars(each) for each in found]})
        return
    _print_expected(found)


@baselines.command()
def check(
    results: Results,
    at_least: Annotated[
        float, typer.Option("--at-least", metavar="PERCENT", help="share of the expected figure that is enough")
    ] = 100 * SHARE,
    output: Output = Format.text,
) -> int:
    """Check results against the expected performance of their machines.

    Exit code 0: all figures reach --at-least; 7: some do not, which names slow links; 9: nothing is expected of these
    machines.
    """
    if not 0 < at_least <= 1000:
        raise UsageError(f"--at-least {at_least:g}: a percentage above 0 is needed.", hint="--at-least 95")
    with ExitStack() as stack:
        found = check_figures(_open(results, stack), list_expected(settings.data_dir()), at_least / 100)
    if not found:
        raise UsageError(NOTHING_COUNTS, hint="mlbench run NAME 2 --task allreduce")
    if output is Format.json:
        console.out_json({"at_least": at_least / 100, "checks": [each.to_dict() for each in found]})
    else:
        _print_checked(found)
    known = [each.verdict for each in found if each.expected is not None]
    return find_worst(known or [each.verdict for each in found]).exit_code


@baselines.command()
def record(results: Results, output: Output = Format.text) -> None:
    """Record results as the expected performance of their machines; repeats count as their mean."""
    with ExitStack() as stack:
        made = record_expected(settings.data_dir(), _open(results, stack))
    if output is Format.json:
        console.out_json({"figures": [vars(each) for each in made]})
        return
    _print_expected(made)


def _open(words: list[str], stack: ExitStack) -> list[Archive]:
    return open_archives(api.Client(notice=console.warn).find_archives(words), stack)


def _print_expected(found: list[Expected]) -> None:
    rows = [
        [each.machine, each.workers, each.ranks, each.backend, _title(each), format_value(each.value), each.source]
        for each in found
    ]
    console.out_table(["MACHINE", "WORKERS", "RANKS", "BACKEND", "FIGURE", "EXPECTED", "SOURCE"], rows, wrap=True)


def _print_checked(found: list[CheckedFigure]) -> None:
    rows = [
        [
            ", ".join(each.runs[:3]),
            each.figure,
            format_value(each.value),
            format_value(each.expected.value if each.expected else None),
            "–" if each.share is None else format_percent(each.share),
            each.verdict.phrase if each.expected else "no baseline for this machine",
        ]
        for each in found
    ]
    console.out_table(["RUNS", "FIGURE", "MEASURED", "EXPECTED", "SHARE", "VERDICT"], rows, wrap=True)
    for each in found:
        for link in each.links:
            ends = f"rank {link.sender} ({link.nodes[0]}) to rank {link.receiver} ({link.nodes[1]})"
            rate = format_value(link.bits_per_second, "bit/s")
            console.out(f"Slow link: {ends}: {rate}, {format_percent(link.share)} of the median.")
        if each.suspects:
            console.out(f"All slow links involve {', '.join(each.suspects)}.")


def _title(each: Expected) -> str:
    return f"{each.figure} of {each.task} ({each.preset})" if each.task else each.figure
