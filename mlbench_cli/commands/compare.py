"""`mlbench compare`: two results side by side."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, results_of
from mlbench_cli.commands._repeats import in_figures, runs_named
from mlbench_cli.errors import TaskFailedError, UsageError
from mlbench_cli.results.analysis.compare import Comparison
from mlbench_cli.results.analysis.compare import compare as compare_archives
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.store import Store


def compare(
    first: Annotated[
        str, typer.Argument(metavar="A", help="a run, the common name of repeats, or the folder or zip of a run")
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="another one")],
    slower: Annotated[
        float | None,
        typer.Option(
            "--fail-above", metavar="RATIO", help="exit with 7 where B takes longer than RATIO times A's time"
        ),
    ] = None,
    output: Output = Format.text,
) -> int:
    """Compare two results: what differs in their settings, and how their figures relate.

    Seconds with B / A below 1: B was faster. Of repeats (mlbench run --repeat) means are compared, with half the 95 %
    interval behind the sign ±.
    """
    if slower is not None and not slower > 0:
        raise UsageError(f"--fail-above {slower:g}: the ratio must be above 0.")
    with ExitStack() as stack:
        a, b = ([stack.enter_context(open_verified(path)) for path in _archives(word)] for word in (first, second))
        found = compare_archives(a, b, (_name(first, a), _name(second, b)))
    if output == Format.json:
        console.out_json(found.to_dict())
    else:
        _show(found)
    return 0 if slower is None else _verdict(found, slower)


def _archives(word: str) -> list[Path]:
    """A path where there is one, else the folders of the run, or of the repeats, of that name."""
    path = Path(word)
    return [path] if path.exists() else [results_of(run) for run in runs_named(Store(), word)]


def _name(word: str, archives: Sequence[Archive]) -> str:
    return word if len(archives) > 1 else str(archives[0].run["name"])


def _show(found: Comparison) -> None:
    for title, figures in (("SECONDS", found.seconds), ("FIGURE", found.others)):
        rows = [[name, *map(in_figures, (row.a, row.b, row.ratio))] for name, row in figures.items()]
        if title != "SECONDS":
            console.out("")
        console.out_table([title, found.a, found.b, "B / A"], rows)
    if found.differences:
        console.out("")
        console.out_table(
            ["DIFFERENCE", found.a, found.b], [[name, str(a), str(b)] for name, (a, b) in found.differences.items()]
        )
    for obstacle in found.obstacles:
        console.warn(obstacle)


def _verdict(found: Comparison, limit: float) -> int:
    """0 where B is fast enough. Times that mean little together are no reason to pass."""
    ratio = found.ratios.get("task") or found.ratios.get("run")
    if ratio is None or found.obstacles:
        console.note(f"{found.b} cannot be held against {found.a}.")
        return TaskFailedError.exit_code
    if ratio > limit:
        console.note(f"{found.b} takes {ratio:.3g} times as long as {found.a}; {limit:g} times are allowed.")
        return TaskFailedError.exit_code
    return 0
