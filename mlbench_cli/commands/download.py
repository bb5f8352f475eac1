"""`mlbench download`: a run's archive as one file."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import RunName, engine_of_run
from mlbench_cli.errors import CleanupError, UsageError
from mlbench_cli.model import Run
from mlbench_cli.results.archive.pack import pack
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.runs.finalize import finalize
from mlbench_cli.runs.finished import read_finished
from mlbench_cli.store import Store


class Kind(StrEnum):
    archive = "archive"
    v3 = "mlbench-v3"


def download(
    name: RunName,
    output: Annotated[Path, typer.Option("--output", "-o", help="the file to write")] = Path("results.zip"),
    kind: Annotated[Kind, typer.Option("--format", help="archive, or the zip of MLBench 3")] = Kind.archive,
    force: Annotated[bool, typer.Option("--force", help="replace the file if it is there")] = False,
) -> None:
    """Write the results of a run that has ended to a zip file, which appears only when it is whole.

    The archive is what mlbench verify and charts read; mlbench-v3 is for old scripts, and cannot be verified.
    """
    store = Store()
    run = store.run(name).run
    if output.is_dir():
        output = output / f"{name}.zip"
    if output.exists() and not force:
        raise UsageError(f"{output} is there already.", hint="Add --force to replace it, or choose another with -o.")
    _complete(run, store)
    if kind is Kind.archive:
        pack(run.folder, output)
    else:
        from mlbench_cli.results.archive.mlbench_v3 import export_v3

        with Archive.open(run.folder) as archive:
            export_v3(archive, output)
    console.out(str(output))
    console.note(console.size(output.stat().st_size))
    if kind is Kind.archive:
        console.note(f"Next: mlbench verify {output}, mlbench charts FOLDER {output}")


def _complete(run: Run, store: Store) -> None:
    """Fetch what is still outside and seal the archive."""
    if read_finished(run) is not None:
        return
    console.note(f"Fetching and sealing the results of {run.name} ...")
    finished = finalize(run, engine_of_run(run, store), store, notice=console.note)
    if finished is None:
        raise UsageError(
            f'The run "{run.name}" has not ended yet.', hint=f"mlbench wait {run.name}, or mlbench cancel {run.name}"
        )
    if finished.result is None:
        raise CleanupError(finished.findings[-1].summary, hint=finished.findings[-1].hint)
