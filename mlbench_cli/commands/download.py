"""`mlbench download`: a run's archive as one file."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api import Client, RunHandle
from mlbench_cli.commands._dashboard import DashboardUrl, choose_files, connect, download_runs, require_names
from mlbench_cli.commands._selection import All, Names, NewerThan, OlderThan, States, Tasks, act_on_each, make_filter
from mlbench_cli.errors import UsageError

FORMATS = ("text", "json")


class DownloadKind(StrEnum):
    """Which file `mlbench download` writes."""

    archive = "archive"
    v3 = "mlbench-v3"


def download(
    context: typer.Context,
    names: Names = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="PATH", help="output file or folder; default: results.zip")
    ] = None,
    path: Annotated[Path | None, typer.Option("--output", metavar="PATH", help="same as --to", hidden=True)] = None,
    output: Annotated[str, typer.Option("-o", metavar="[text|json]", help="text, or one JSON document")] = "text",
    kind: Annotated[
        DownloadKind, typer.Option("--format", help="archive, or mlbench-v3 (zip of MLBench 3)")
    ] = DownloadKind.archive,
    anonymous: Annotated[
        bool,
        typer.Option(
            "--anonymous", help="leave out host names, command line, packages that do not compute, and home folders"
        ),
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="archive the partial results of a run that has not ended")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="overwrite the file")] = False,
    all_runs: All = False,
    states: States = None,
    tasks: Tasks = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    dashboard: DashboardUrl = None,
) -> None:
    """Write the archives of finished runs to zip files.

    mlbench verify and mlbench charts read these archives. The format mlbench-v3 is for old scripts and cannot be
    verified. Several runs go to a folder, one NAME.zip each; with --all or a filter, unfinished runs are skipped. A zip
    file appears only when it is complete. With --partial, the run continues, and its archive is marked as partial. With
    --anonymous the evidence is changed, judged again and sealed anew; a signature of the original does not fit it.
    """
    if anonymous and kind is not DownloadKind.archive:
        raise UsageError("--anonymous does not support the format mlbench-v3.")
    if partial and (anonymous or kind is not DownloadKind.archive or all_runs):
        raise UsageError("--partial needs run names and --format archive, and does not work with --anonymous.")
    target, as_json = _target(" ".join(names or ["NAME"]), to, path, output)
    if dashboard is not None:
        there = connect(context, dashboard, "to", "path", "force")
        download_runs(there, require_names(names, "download"), target, force=force, as_json=as_json)
        return
    client = Client(notice=console.note)
    filter = make_filter(states, tasks, older_than, newer_than)
    chosen = client.select(names or (), all_runs=all_runs, filter=filter)
    files = choose_files([run.name for run in chosen.runs], target, force=force)

    def write(run: RunHandle) -> dict[str, object]:
        return _download(run, files[run.name], kind, is_quiet=as_json, anonymous=anonymous, partial=partial)

    documents, worst = act_on_each(chosen.runs, write, is_only=len(chosen.runs) == 1)
    if as_json:
        console.out_json({"runs": documents} if len(chosen.runs) != 1 else documents[0], worst)
    if worst is not None:
        raise worst


def _download(
    run: RunHandle, path: Path, kind: DownloadKind, *, is_quiet: bool, anonymous: bool, partial: bool
) -> dict[str, object]:
    """Write a run's file; its facts as JSON, and unless `is_quiet` in words."""
    with console.Busy(f"Writing {path.name}"):
        if partial:
            run.download_partial(path)
        elif kind is DownloadKind.archive:
            run.complete()
            run.download(path, anonymous=anonymous)
        else:
            run.complete()
            run.download_v3(path)
    size = path.stat().st_size
    if not is_quiet:
        console.out(str(path))
        console.note(console.size(size))
        if kind is DownloadKind.archive:
            console.note(f"Next: mlbench verify {path}, mlbench charts FOLDER {path}")
    return {"run": run.name, "file": str(path.absolute()), "format": kind.value, "bytes": size}


def _target(name: str, to: Path | None, path: Path | None, output: str) -> tuple[Path | None, bool]:
    """The file to write, and whether the answer is JSON. -o means the format, as everywhere; a path behind it is taken
    as the original's download took it. Raises UsageError if the words contradict each other."""
    if path is not None and str(path) in FORMATS:
        raise UsageError(
            f'--output is the file here, but "{path}" is a format.',
            hint=f"mlbench download {name} -o {path}; a file of that name: --to {path}",
        )
    if output not in FORMATS:
        if "/" not in output and not output.endswith(".zip") and not Path(output).is_dir():
            raise UsageError(f'-o "{output}" is not a format; use text or json.', hint=f"The file: --to {output}")
        console.warn(f"-o is the format; to name the file, use --to {output}")
    files = [file for file in (to, path, None if output in FORMATS else Path(output)) if file is not None]
    if len(files) > 1:
        raise UsageError(f"Two files are named: {files[0]} and {files[1]}.", hint=f"mlbench download {name} --to FILE")
    return files[0] if files else None, output == "json"
