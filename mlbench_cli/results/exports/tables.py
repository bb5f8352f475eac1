"""Metrics and samples as CSV or Parquet files. The same archives give the same bytes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.results.analysis.tables import MetricTable, ResourceTable, Table, load_library
from mlbench_cli.util import files
from mlbench_cli.util.csv_text import format_csv

SCHEMA = b"1"


def write_parquet(path: Path, metrics: MetricTable, samples: ResourceTable, tasks: Mapping[str, str]) -> list[Path]:
    """Write metrics to `path` and, if there are any, samples beside it as NAME-resources.parquet.

    `tasks` has the task of each run. Columns: those of `MetricPoint` and of `ResourceSample`, and the task. Times are
    UTC in microseconds. Raises UsageError without pyarrow.
    """
    arrow: Any = load_library("pyarrow")
    parquet: Any = load_library("pyarrow.parquet")
    tables = _name_tables(path, metrics, samples)
    for target, table in tables.items():
        content = table.to_arrow().append_column("task", arrow.array([tasks[row.run] for row in table], arrow.string()))
        with files.replace_file(target) as file:
            parquet.write_table(content.replace_schema_metadata({b"mlbench_schema": SCHEMA}), file, compression="zstd")
    return [*tables]


def write_csv(path: Path, metrics: MetricTable, samples: ResourceTable, tasks: Mapping[str, str]) -> list[Path]:
    """As `write_parquet`; times are seconds since 1970."""
    tables = _name_tables(path, metrics, samples)
    for target, table in tables.items():
        columns = {**table.to_columns(), "task": [tasks[row.run] for row in table]}
        cells = zip(*columns.values(), strict=True)
        text = format_csv([columns, *(["" if cell is None else cell for cell in row] for row in cells)])
        files.write_atomically(target, text.encode())
    return [*tables]


def _name_tables(path: Path, metrics: MetricTable, samples: ResourceTable) -> "dict[Path, Table[Any]]":
    more = {path.with_name(f"{path.stem}-resources{path.suffix}"): samples} if len(samples) else {}
    return {path: metrics, **more}
