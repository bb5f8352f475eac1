"""`mlbench export`: results in the formats of other tools."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.commands._archives import Unproven, open_archives
from mlbench_cli.commands._common import Format, Output, make_folder, print_answer
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.tables import MetricTable, ResourceTable
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.exports.facts import RunFacts, Sink, read_facts
from mlbench_cli.results.exports.mllog import Submitter, list_missing, make_lines
from mlbench_cli.results.exports.nccl import format_nccl
from mlbench_cli.results.exports.parquet import write_parquet
from mlbench_cli.results.exports.tensorboard import TensorBoardSink
from mlbench_cli.results.exports.trackers import MlflowSink, WandbSink
from mlbench_cli.util.files import write_atomically

SinkMaker = Callable[[RunFacts], Sink]
STATUSES = ("cloud", "onprem", "preview", "research")


class Form(StrEnum):
    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"
    parquet = "parquet"
    mllog = "mllog"
    nccl = "nccl"


TRACKERS = (Form.tensorboard, Form.wandb, Form.mlflow)


def export(
    form: Annotated[
        Form,
        typer.Argument(
            metavar="FORM", help="tensorboard, wandb, mlflow, parquet, mllog (MLPerf), or nccl (JSON of nccl-tests)"
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="folder, FILE.parquet, or for mlflow sqlite:///FILE or http://HOST:PORT"),
    ],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|EXPERIMENT|ARCHIVE]...",
            help="runs to export; default: all finished runs",
            autocompletion=complete_names,
        ),
    ] = None,
    follows: Annotated[
        bool, typer.Option("--follow", "-f", help="export metrics of running runs as they arrive")
    ] = False,
    is_online: Annotated[
        bool, typer.Option("--online", help="wandb: upload to the server instead of writing a folder")
    ] = False,
    organization: Annotated[
        str, typer.Option("--organization", "--organisation", help="mllog: submitting organization")
    ] = "none",
    platform: Annotated[str, typer.Option("--platform", help="mllog: name of the system; default: the cluster")] = "",
    status: Annotated[str, typer.Option("--status", help=f"mllog: {', '.join(STATUSES)}")] = "research",
    unproven: Unproven = False,
    output: Output = Format.text,
) -> None:
    """Export results to TensorBoard, Weights & Biases, MLflow, Parquet, MLPerf logs or the JSON of nccl-tests.

    mlbench verifies the archives first and exports settings, metrics and resource samples, but no secrets. mllog lists
    what the MLPerf checker will miss. wandb and mlflow need the extra of the same name, parquet needs the extra tables.
    """
    if status not in STATUSES:
        raise UsageError(f'--status "{status[:40]}" is not one of {", ".join(STATUSES)}.', hint="--status research")
    if is_online and form is not Form.wandb:
        raise UsageError("--online works only with wandb.", hint="Leave it out.")
    if follows:
        if form not in TRACKERS:
            raise UsageError(
                f"--follow needs a tracker: {', '.join(TRACKERS)}.", hint="Export after the runs have ended."
            )
        from mlbench_cli.commands._export_live import follow_runs

        written = follow_runs(sources or [], _sink_maker(form, target, is_online))
    else:
        paths = api.Client(notice=console.warn).find_archives(sources or [])
        with ExitStack() as stack:
            several = len(paths) > len(sources or [])  # a word stands for several runs
            archives = open_archives(paths, stack, unproven=unproven, left_out=[] if several else None)
            if form in TRACKERS:
                written = _export_runs(archives, _sink_maker(form, target, is_online))
            else:
                written = _write_files(form, Path(target), archives, (organization, platform, status))
    print_answer(output, {"form": str(form), "target": target, "exported": written}, "\n".join(written))


def _sink_maker(form: Form, target: str, is_online: bool) -> SinkMaker:
    """What makes the place of one run. Raises UsageError for a target that the form cannot use."""
    if form is Form.mlflow:
        if not target.startswith(("sqlite:///", "http://", "https://")):
            raise UsageError(f'"{target}" is not an MLflow URI.', hint="sqlite:///mlflow.db, or http://HOST:PORT")
        return lambda facts: MlflowSink(target, facts)
    folder = make_folder(Path(target))
    if form is Form.wandb:
        return lambda facts: WandbSink(folder, facts, is_online=is_online)

    return lambda facts: TensorBoardSink(folder, facts)


def _export_runs(archives: Iterable[Archive], make_sink: SinkMaker) -> list[str]:
    written = []
    for archive in archives:
        facts = read_facts(archive)
        with layout.naming_file_on_os_error(Path(archive.path), "exported"):
            sink = make_sink(facts)
            try:
                sink.add(list(api.metrics_of(archive)), list(api.resources_of(archive)))
            finally:
                sink.close(facts.summary, facts.outcome)
        written.append(facts.name)
    return written


def _write_files(form: Form, target: Path, archives: Sequence[Archive], about: tuple[str, str, str]) -> list[str]:
    if form is Form.parquet:
        return _write_parquet(target, archives)
    folder = make_folder(target)
    if form is Form.nccl:
        texts = {folder / f"{archive.run['name']}.json": format_nccl(archive) for archive in archives}
    else:
        submitter = Submitter(*about)
        texts = {
            folder / f"result_{number}.txt": _format_mllog(archive, submitter)
            for number, archive in enumerate(archives)
        }
    for path, text in texts.items():
        with layout.naming_file_on_os_error(path, "written"):
            write_atomically(path, text.encode())
    return [str(path) for path in texts]


def _format_mllog(archive: Archive, submitter: "Submitter") -> str:
    lines = make_lines(archive, submitter)
    if missing := list_missing(lines):
        console.note(
            f"{archive.run['name']}: MLPerf's compliance checker will report as missing: {', '.join(missing)}."
        )
    return "".join(f"{line}\n" for line in lines)


def _write_parquet(target: Path, archives: Sequence[Archive]) -> list[str]:
    if target.suffix != ".parquet" or target.is_dir():
        raise UsageError(f'"{target}" is not the name of a Parquet file.', hint="mlbench export parquet OUT.parquet")
    make_folder(target.parent)
    metrics = MetricTable(point for archive in archives for point in api.metrics_of(archive))
    samples = ResourceTable(sample for archive in archives for sample in api.resources_of(archive))
    tasks = {str(archive.run["name"]): str(archive.result["task"]) for archive in archives}
    with layout.naming_file_on_os_error(target, "written"):
        return [str(path) for path in write_parquet(target, metrics, samples, tasks)]
