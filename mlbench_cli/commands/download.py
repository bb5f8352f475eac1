"""`mlbench download`: a run's archive as one file."""

import shlex
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api import Client, RunHandle
from mlbench_cli.commands._common import make_folder
from mlbench_cli.commands._selection import All, Names, NewerThan, OlderThan, States, Tasks, act_on_each, make_filter
from mlbench_cli.errors import UsageError
from mlbench_cli.results.archive.bundle import is_zip_name, write_bundle

FORMATS = ("text", "json")
DEFAULT_FILE = Path("results.zip")


def download(
    names: Names = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="PATH",
            help="FILE.zip, or a folder for NAME.zip; default: results.zip, of several runs here",
        ),
    ] = None,
    path: Annotated[Path | None, typer.Option("--output", metavar="PATH", help="same as --to", hidden=True)] = None,
    output: Annotated[str, typer.Option("-o", metavar="[text|json]", help="text, or one JSON document")] = "text",
    partial: Annotated[
        bool, typer.Option("--partial", help="archive the partial results of a run that has not ended")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="overwrite the file")] = False,
    all_runs: All = False,
    states: States = None,
    tasks: Tasks = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
) -> None:
    """Write the archives of finished runs to zip files.

    Several runs go to a folder, one NAME.zip each, or with --to FILE.zip into one file, which all commands read like a
    folder of them. With --all or a filter, unfinished runs are skipped. A zip file appears only when it is complete.
    With --partial, the run continues, and its archive is marked as partial.
    """
    if partial and all_runs:
        raise UsageError("--partial needs run names.", hint="mlbench download NAME --partial")
    target, as_json = _target(" ".join(names or ["NAME"]), to, path, output)
    client = Client(notice=console.note)
    filter = make_filter(states, tasks, older_than, newer_than)
    chosen = client.select(names or (), all_runs=all_runs, filter=filter)
    bundle = target if len(chosen.runs) > 1 and target is not None and is_zip_name(target) else None
    with ExitStack() as stack:
        if bundle is not None:
            refuse_existing([bundle], force=force)
            target = Path(stack.enter_context(TemporaryDirectory(prefix="mlbench-download-")))
        _write(chosen.runs, target, bundle, force=force, partial=partial, as_json=as_json)


def _write(
    runs: Sequence[RunHandle], target: Path | None, bundle: Path | None, *, force: bool, partial: bool, as_json: bool
) -> None:
    """Write each run's file, and pack them into one if that was asked for."""
    files = choose_files([run.name for run in runs], target, force=force)

    def write(run: RunHandle) -> dict[str, object]:
        return _download(run, files[run.name], is_quiet=as_json or bundle is not None, partial=partial)

    documents, worst = act_on_each(runs, write, is_only=len(runs) == 1)
    if bundle is None and documents and not as_json:
        _show_next([path for path in files.values() if path.exists()])
    if bundle is not None and worst is None:
        write_bundle([files[run.name] for run in runs], bundle)
        documents = [{**document, "file": str(bundle.absolute())} for document in documents]
        if not as_json:
            _say(bundle)
            _show_next([bundle])
    if as_json:
        console.out_json({"runs": documents} if len(runs) != 1 else documents[0], worst)
    if worst is not None:
        raise worst


def choose_files(runs: Sequence[str], to: Path | None, *, force: bool) -> dict[str, Path]:
    """The file of each run: `to`, or one in that folder. Raises UsageError for one that exists."""
    folder = to or Path()
    if len(runs) == 1 and (to is None or (is_zip_name(to) and not to.is_dir())):
        files = {runs[0]: to or DEFAULT_FILE}
    else:
        make_folder(folder)
        files = {run: folder / f"{run}.zip" for run in runs}
    refuse_existing(files.values(), force=force)
    return files


def refuse_existing(files: Iterable[Path], *, force: bool) -> None:
    """Raise UsageError if one of the files exists and must not be replaced."""
    if not force and (file := next((file for file in files if file.exists()), None)):
        raise UsageError(f"{file} exists.", hint="Add --force to replace it, or choose another file with --to.")


def _download(run: RunHandle, path: Path, *, is_quiet: bool, partial: bool) -> dict[str, object]:
    """Write a run's file; its facts as JSON, and unless `is_quiet` in words."""
    with console.Busy(f"Writing {path.name}"):
        if partial:
            run.download_partial(path)
        else:
            run.complete()
            run.download(path)
    if not is_quiet:
        _say(path)
    return {"name": run.name, "file": str(path.absolute()), "bytes": path.stat().st_size}


def _say(path: Path) -> None:
    console.out(str(path))
    console.note(console.size(path.stat().st_size))


def _show_next(files: Sequence[Path]) -> None:
    folder = files[0].parent  # stands for the files in it
    name, what = (folder.name, [folder]) if len(files) > 1 and folder != Path() else (files[0].stem, files)
    words = shlex.join(map(str, what))
    console.next_step(f"mlbench verify {words}", f"mlbench report {shlex.quote(f'{name}.html')} {words}")


def _target(name: str, to: Path | None, path: Path | None, output: str) -> tuple[Path | None, bool]:
    """The file to write, and whether the answer is JSON. -o means the format, as everywhere; a path behind it is taken
    as the original's download took it. Raises UsageError if the words contradict each other."""
    if path is not None and str(path) in FORMATS:
        raise UsageError(
            f'--output is the file here, but "{path}" is a format.',
            hint=f"mlbench download {name} -o {path}; a file of that name: --to {path}",
        )
    if output not in FORMATS:
        if "/" not in output and not is_zip_name(output) and not Path(output).is_dir():
            raise UsageError(
                f'-o "{output}" is not a format; use text or json.', hint=f"The file: --to {shlex.quote(output)}"
            )
        console.warn(f"-o is the format; to name the file, use --to {shlex.quote(output)}")
    files = [file for file in (to, path, None if output in FORMATS else Path(output)) if file is not None]
    if len(files) > 1:
        raise UsageError(f"Two files are named: {files[0]} and {files[1]}.", hint=f"mlbench download {name} --to FILE")
    return files[0] if files else None, output == "json"
