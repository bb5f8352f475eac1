"""`mlbench report`: one page about runs, experiments or archives."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.commands._common import Format, Output, results_of
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.run_folder import RunFolder
from mlbench_cli.runs.repeats import is_sealed, runs_named
from mlbench_cli.store import Store


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
    output: Output = Format.text,
) -> None:
    """Write one page with everything about some runs: results with intervals, settings, figures, findings.

    The HTML page needs no network: it can be mailed, archived and printed. Archives are verified first. The data of
    each figure is written as CSV into OUT-data/.
    """
    from mlbench_cli.results.report.collect import collect
    from mlbench_cli.results.report.write import check_target, write_report

    check_target(target)
    paths = _archives(sources or [], Store())
    with ExitStack() as stack:
        archives = [stack.enter_context(api.open_archive(path)) for path in paths]
        written = write_report(collect(archives, title=title), target)
    if output is Format.json:
        console.out_json({"report": str(target.absolute()), "files": [str(path) for path in written]})
        return
    console.out(str(target))
    console.note(f"{console.size(target.stat().st_size)} of {len(paths)} runs; data: {len(written) - 1} CSV files")


def _archives(words: Sequence[str], store: Store) -> list[Path]:
    """The archives that words name, each once; of experiments those of runs that have ended."""
    if not words:
        found = [row.run.folder for row in store.runs() if is_sealed(row.run)]
        if not found:
            raise NotFoundError("There are no finished runs.", hint="mlbench run NAME 1 2 --task TASK")
        return found
    return list(dict.fromkeys(path for word in words for path in _named_archives(word, store)))


def _named_archives(word: str, store: Store) -> list[Path]:  # words: ok
    path = Path(word)
    if "/" in word or path.suffix == ".zip":
        if not path.exists():
            raise NotFoundError(f"There is no archive {word}.", hint="mlbench download NAME --to FILE")
        return [path]
    try:
        runs = runs_named(store, word)
    except NotFoundError:
        if RunFolder(path).is_sealed:
            return [path]
        raise
    if len(runs) == 1:
        return [results_of(runs[0])]
    ended = [run.folder for run in runs if is_sealed(run)]
    if not ended:
        raise UsageError(f"No run of {word} has results yet.", hint=f"mlbench wait {word}")
    if len(ended) < len(runs):
        console.warn(f"{len(runs) - len(ended)} of {len(runs)} runs of {word} have no results yet and are left out.")
    return ended
