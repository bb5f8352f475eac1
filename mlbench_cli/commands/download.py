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

FORMATS = ("text", "json")
DEFAULT_FILE = Path("results.zip")


class Kind(StrEnum):
    archive = "archive"
    v3 = "mlbench-v3"


def download(
    name: RunName,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="PATH", help="file or folder to write to; default: results.zip")
    ] = None,
    path: Annotated[Path | None, typer.Option("--output", metavar="PATH", help="the same as --to")] = None,
    output: Annotated[str, typer.Option("-o", metavar="[text|json]", help="text, or one JSON document")] = "text",
    kind: Annotated[Kind, typer.Option("--format", help="archive, or the zip of MLBench 3")] = Kind.archive,
    force: Annotated[bool, typer.Option("--force", help="replace the file if it exists")] = False,
) -> None:
    """Write the results of a run that has ended to a zip file, which appears only when it is whole.

    The archive is what mlbench verify and charts read; mlbench-v3 is for old scripts, and cannot be verified.
    """
    target, as_json = _target(name, to, path, output)
    store = Store()
    run = store.run(name).run
    if target.is_dir():
        target = target / f"{name}.zip"
    if target.exists() and not force:
        raise UsageError(f"{target} exists.", hint="Add --force to replace it, or choose another file with --to.")
    _complete(run, store)
    if kind is Kind.archive:
        pack(run.folder, target)
    else:
        from mlbench_cli.results.archive.mlbench_v3 import export_v3

        with Archive.open(run.folder) as archive:
            export_v3(archive, target)
    size = target.stat().st_size
    if as_json:
        console.out_json({"run": name, "file": str(target.absolute()), "format": kind.value, "bytes": size})
        return
    console.out(str(target))
    console.note(console.size(size))
    if kind is Kind.archive:
        console.note(f"Next: mlbench verify {target}, mlbench charts FOLDER {target}")


def _target(name: str, to: Path | None, path: Path | None, output: str) -> tuple[Path, bool]:
    """The file to write, and whether the answer is JSON. -o means the format, as everywhere; a path behind it is taken
    as the original's download took it. Raises UsageError if the words contradict each other."""
    if path is not None and str(path) in FORMATS:
        raise UsageError(
            f'--output names the file here, and "{path}" is a format.',
            hint=f"mlbench download {name} -o {path}; a file of that name: --to {path}",
        )
    if output not in FORMATS:
        if "/" not in output and not output.endswith(".zip") and not Path(output).is_dir():
            raise UsageError(f'-o "{output}" is no format, only text or json.', hint=f"The file: --to {output}")
        console.warn(f"-o is the format; name the file with --to {output}")
    files = [file for file in (to, path, None if output in FORMATS else Path(output)) if file is not None]
    if len(files) > 1:
        raise UsageError(f"Two files are named: {files[0]} and {files[1]}.", hint=f"mlbench download {name} --to FILE")
    return files[0] if files else DEFAULT_FILE, output == "json"


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
