"""`mlbench charts`: figures from archives, without any cluster."""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api import Client, RunHandle
from mlbench_cli.commands._archives import Unproven, open_archives, tell_apart
from mlbench_cli.commands._common import Format, Output, Yes, print_answer
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.results.archive.bundle import is_zip_name
from mlbench_cli.results.figures.charts import draw


def charts(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder for the figures")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|EXPERIMENT|ARCHIVE]...",
            help="what to draw; default: ask, or all finished runs",
            autocompletion=complete_names,
        ),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="add the results that the original MLBench published")
    ] = False,
    min_runs: Annotated[
        int,
        typer.Option(
            "--min-runs",
            min=1,
            metavar="N",
            help="speedup only for sizes of which N runs reached their goal",
        ),
    ] = 1,
    filter: Annotated[str | None, typer.Option("--filter", "-f", help="only runs whose name contains this")] = None,
    unproven: Unproven = False,
    yes: Yes = False,
    output: Output = Format.text,
) -> None:
    """Draw figures of finished runs as PNG and SVG, with a CSV of the data.

    Always total time, speedup and time per phase; cost, price index, metrics over time, resources and collectives if
    the runs have them. Without names, mlbench asks on a terminal which runs to draw; with --yes or without a terminal,
    it draws all.
    """
    _refuse_results(folder)
    if sources and filter is not None:
        raise UsageError("--filter selects among all finished runs; it cannot be combined with names.")
    if sources:
        chosen = Client(notice=console.warn).find_archives(sources)
    else:
        chosen = [run.folder for run in _choose(_candidates(filter), ask=not yes and console.interactive())]

    several = len(chosen) > len(sources or [])  # a word stands for several runs
    with ExitStack() as stack:
        opened = tell_apart(open_archives(chosen, stack, unproven=unproven, left_out=[] if several else None))
        drawn = draw(opened, folder, published=published, min_runs=min_runs)
    _print(folder, drawn, output)


def _print(folder: Path, paths: Sequence[Path], output: Format) -> None:
    files = [str(path) for path in paths]
    names = list(dict.fromkeys(path.stem for path in paths))
    kinds = sorted({path.suffix[1:].upper() for path in paths}, key=["PNG", "SVG", "CSV"].index)
    words = f"Wrote {', '.join(names)} to {folder}/ as {', '.join(kinds)}."
    print_answer(output, {"folder": str(folder.absolute()), "files": files}, words)


def _refuse_results(folder: Path) -> None:
    """Reject a first argument that names what to draw instead of the output folder."""
    if is_zip_name(folder) or (folder / "run.json").is_file():
        raise UsageError(
            f"{folder} is an archive, not a folder for figures.",
            hint=f"mlbench charts FOLDER {shlex.quote(str(folder))}",
        )
    if len(folder.parts) != 1 or folder.exists():
        return
    try:
        Client().select([str(folder)])
    except NotFoundError:
        return
    raise UsageError(
        f'"{folder}" is a run, not a folder for figures.',
        hint=f"mlbench charts {folder}-charts {folder}",
    )


def _candidates(filter: str | None) -> list[RunHandle]:
    found = [run for run in Client().runs(contains=filter or "") if run.is_sealed][::-1]
    if not found:
        which = "finished run" if filter is None else f'finished run with "{filter}" in its name'
        raise NotFoundError(f"There is no {which}.", hint="mlbench status")
    return found


def _choose(runs: Sequence[RunHandle], *, ask: bool) -> Sequence[RunHandle]:
    """The runs that the user chose by number, e.g. "0 2"; Enter or "all" selects all."""
    if not ask:
        return runs
    console.note(
        "\n".join(f"{f'[{index}]':>6}  {run.name}" for index, run in enumerate(runs)) + "\n [all]  all of them\n"
    )
    while True:
        answer = console.ask("Runs to draw, e.g. 0 2 [all]: ")
        if answer in ("", "all"):
            return runs
        words = answer.replace(",", " ").split()
        if all(word.isascii() and word.isdecimal() and int(word) < len(runs) for word in words):
            return [runs[int(word)] for word in dict.fromkeys(words)]
        console.note(f"Enter numbers from 0 to {len(runs) - 1}, or all.")
