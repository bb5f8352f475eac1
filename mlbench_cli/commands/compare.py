"""`mlbench compare`: two results side by side."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.commands._common import Format, Output, complete_runs
from mlbench_cli.commands._repeats import in_figures
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model import JsonObject
from mlbench_cli.results.analysis.cells import Values, describe_cell, pair_cells
from mlbench_cli.results.analysis.comparability import WORDS, check_words
from mlbench_cli.results.analysis.compare import Comparison
from mlbench_cli.results.analysis.gate import Direction, GateResult, check_gate
from mlbench_cli.results.analysis.statistics import Estimate
from mlbench_cli.results.analysis.verdict import find_worst
from mlbench_cli.results.archive.reader import Archive


def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="a run, the common name of repeats, or the folder or zip of a run",
            autocompletion=complete_runs,
        ),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="result to compare with A", autocompletion=complete_runs)],
    limit: Annotated[
        float | None,
        typer.Option(
            "--fail-above",
            metavar="RATIO",
            help="exit with 7 if B is more than this factor worse than A, with 9 if the 95 % interval does not decide",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="NAME", help="figure for --fail-above; default: seconds"),
    ] = None,
    direction: Annotated[
        Direction | None, typer.Option("--direction", help="what is better; default: as the figure's kind has it")
    ] = None,
    across: Annotated[
        list[str] | None,
        typer.Option("--across", metavar="WORD", help=f"accept a difference; may be repeated: {', '.join(WORDS)}"),
    ] = None,
    output: Output = Format.text,
) -> int:
    """Compare two results: what differs in their settings, and how their figures relate.

    Seconds with B / A below 1: B was faster. Of repeats (mlbench run --repeat) means are compared, with half the 95 %
    interval behind the sign ±. Experiments of several sizes or settings are compared cell by cell, and each cell has to
    pass --fail-above.
    """
    if limit is not None and not 0 < limit < math.inf:
        raise UsageError(f"--fail-above {limit:g}: the ratio must be above 0.")
    if limit is None and (metric is not None or direction is not None):
        raise UsageError("--metric and --direction choose the figure of --fail-above, which is missing.")
    accepted = check_words(across or ())
    with ExitStack() as stack:
        a, b = ([stack.enter_context(api.open_archive(path)) for path in _archives(word)] for word in (first, second))
        pairs, alone = pair_cells(a, b)
        names = _name(first, a), _name(second, b)
        found = {pair.values: api.compare(pair.a, pair.b, names=names, across=accepted) for pair in pairs}
    gates = {} if limit is None else {v: check_gate(found[v], limit, metric, direction) for v in found}
    if output == Format.json:
        console.out_json(_document(found, gates, alone))
    else:
        for number, (values, comparison) in enumerate(found.items()):
            if values:
                console.out(f"{chr(10) if number else ''}{describe_cell(values)}")
            _show(comparison)
    if alone:
        console.warn(f"Left out, for only one side has it: {'; '.join(alone)}.")
    for values, gate in gates.items():
        about = f"{describe_cell(values)}: " if values else ""
        console.note(f"{about}{gate.verdict.replace('_', ' ').capitalize()}. {gate.reason}")
    return find_worst(gate.verdict for gate in gates.values()).exit_code


def _document(
    found: Mapping[Values, Comparison], gates: Mapping[Values, GateResult], alone: Sequence[str]
) -> JsonObject:
    """One comparison as it is; of several a list, each with the values of its cell."""
    each = {
        values: {**comparison.to_dict(), "gate": gates[values].to_dict() if values in gates else None}
        for values, comparison in found.items()
    }
    if list(each) == [()]:
        return each[()]
    comparisons = [{"cell": dict(values), **document} for values, document in each.items()]
    verdict = str(find_worst(gate.verdict for gate in gates.values())) if gates else None
    return {"schema_version": 1, "comparisons": comparisons, "left_out": list(alone), "verdict": verdict}


def _archives(word: str) -> list[Path]:
    """The folders of the run, or of the repeats, of that name; else the path. A word with "/" or ".zip" is a path."""
    client, path = api.Client(), Path(word)
    if "/" in word or path.suffix == ".zip":
        return client.find_archives([word])
    try:
        runs = client.select([word]).runs
    except NotFoundError:
        if path.exists():
            return [path]
        raise
    if path.exists():
        console.note(f'"{word}" is the run of that name; the folder: ./{word}')
    return [run.results for run in runs]


def _name(word: str, archives: Sequence[Archive]) -> str:
    return word if len(archives) > 1 else str(archives[0].run["name"])


def _show(found: Comparison) -> None:
    for title, figures in (("SECONDS", found.seconds), ("FIGURE", found.others)):
        rows = [[name, in_figures(row.a), in_figures(row.b), _ratio(row.ratio)] for name, row in figures.items()]
        if title != "SECONDS":
            console.out("")
        console.out_table([title, found.a, found.b, "B / A"], rows)
    if found.differences:
        console.out("")
        console.out_table(
            ["DIFFERENCE", found.a, found.b], [[name, str(a), str(b)] for name, (a, b) in found.differences.items()]
        )
    for obstacle in found.obstacles:
        accept = f" Accept it with --across {obstacle.word}." if obstacle.word else ""
        console.warn(f"{obstacle.text}{accept}")


def _ratio(found: Estimate | None) -> str | None:
    """ "0.503 (0.47 to 0.54)"; without repeats "0.503"."""
    if found is None:
        return None
    interval = "" if found.low is None else f" ({found.low:.3g} to {found.high:.3g})"
    return f"{found.mean:.3g}{interval}"
