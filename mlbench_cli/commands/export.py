"""`mlbench export`: results in the formats of other tools."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from mlbench_cli import api, console
from mlbench_cli.commands._archives import Unproven, open_archives, tell_apart
from mlbench_cli.commands._common import Format, Output, make_folder, one_of, print_answer
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.errors import UsageError, did_you_mean, naming_file_on_os_error
from mlbench_cli.results.analysis.series import drop_duplicates
from mlbench_cli.results.analysis.tables import MetricTable, ResourceTable, list_settings
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.exports.facts import RunFacts, read_facts
from mlbench_cli.results.exports.tables import write_csv, write_parquet

# A tracker is a function that writes one run; packages register more in the entry point group.
Exporter = Callable[[str, RunFacts, MetricTable, ResourceTable], None]
GROUP = "mlbench.exporters"
OWN = ("mlflow", "wandb")
TABLES: dict[str, Callable[..., list[Path]]] = {"csv": write_csv, "parquet": write_parquet}


def export(
    form: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help="csv, parquet, mlflow, wandb, or that of a package",
            autocompletion=one_of(*TABLES, *OWN),
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="FILE.csv, FILE.parquet, a folder, or for mlflow sqlite:///FILE or http://HOST:PORT"
        ),
    ],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|EXPERIMENT|ARCHIVE]...",
            help="runs to export; default: all finished runs",
            autocompletion=complete_names,
        ),
    ] = None,
    unproven: Unproven = False,
    output: Output = Format.text,
) -> None:
    """Export metrics and resource samples to CSV, Parquet, MLflow or Weights & Biases.

    mlbench verifies the archives first and exports settings, metrics and resource samples, but no secrets. W&B writes
    an offline run unless WANDB_MODE is set. mlflow and wandb need the extra of the same name, parquet needs tables.
    """
    exporter = None if form in TABLES else _find_exporter(form)
    paths = api.Client(notice=console.warn).find_archives(sources or [])
    with ExitStack() as stack:
        several = len(paths) > len(sources or [])  # a word stands for several runs
        opened = open_archives(paths, stack, unproven=unproven, left_out=[] if several else None)
        archives = tell_apart(drop_duplicates(opened))
        if exporter is None:
            written = _write_table(form, Path(target), archives)
        else:
            written = [_export_run(exporter, target, archive) for archive in archives]
    print_answer(output, {"form": form, "target": target, "exported": written}, "\n".join(written))


def _find_exporter(form: str) -> Exporter:
    if form in OWN:
        own: Exporter = import_module(f"mlbench_cli.results.exports.{form}").export_run
        return own
    found = {point.name: point for point in metadata.entry_points(group=GROUP)}
    if form not in found:
        known = sorted({*TABLES, *OWN, *found})
        raise UsageError(
            f'There is no export format "{form[:60]}". {did_you_mean(form, known)}'.rstrip(),
            hint=f"One of: {', '.join(known)}",
        )
    try:
        other: Any = found[form].load()
    except Exception as error:  # somebody else's code
        raise UsageError(f"The exporter {form} cannot be loaded: {error!r}.") from None
    exporter: Exporter = other
    return exporter


def _export_run(exporter: Exporter, target: str, archive: Archive) -> str:
    facts = read_facts(archive)
    with naming_file_on_os_error(Path(archive.path), "exported"):
        exporter(target, facts, api.metrics_of(archive), api.resources_of(archive))
    return facts.name


def _write_table(form: str, target: Path, archives: Sequence[Archive]) -> list[str]:
    if target.suffix.lower() != f".{form}" or target.is_dir():
        raise UsageError(f'"{target}" is not the name of a {form} file.', hint=f"mlbench export {form} OUT.{form}")
    make_folder(target.parent)
    metrics = MetricTable(point for archive in archives for point in api.metrics_of(archive))
    samples = ResourceTable(sample for archive in archives for sample in api.resources_of(archive))
    with naming_file_on_os_error(target, "written"):
        return [str(path) for path in TABLES[form](target, metrics, samples, list_settings(archives))]
