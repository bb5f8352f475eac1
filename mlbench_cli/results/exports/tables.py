"""Metrics and samples as CSV or Parquet files. The same archives give the same bytes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.config.extras import load_library
from mlbench_cli.results.analysis.tables import SETTINGS, MetricTable, ResourceTable, Table
from mlbench_cli.util import files
from mlbench_cli.util.csv_text import format_csv

SCHEMA = b"1"
Settings = Mapping[str, Mapping[str, str | int]]  # by run


def write_parquet(path: Path, metrics: MetricTable, samples: ResourceTable, settings: Settings) -> list[Path]:
    """Write metrics to `path` and, if there are any, samples beside it as NAME-resources.parquet.

    Columns: those of `MetricPoint` and of `ResourceSample`, and the `settings` of each run. Times are UTC in
    microseconds. Raises UsageError without pyarrow.
    """
    arrow: Any = load_library("pyarrow", "tables")
    parquet: Any = load_library("pyarrow.parquet", "tables")
    tables = _name_tables(path, metrics, samples)
    for target, table in tables.items():
        content = table.to_arrow()
        for name in _list_settings(settings):
            values = [settings[row.run][name] for row in table]
            column = arrow.array(values, arrow.int64() if SETTINGS.get(name) == "whole" else arrow.string())
            content = content.append_column(name, column)
        with files.replace_file(target) as file:
            parquet.write_table(content.replace_schema_metadata({b"mlbench_schema": SCHEMA}), file, compression="zstd")
    return [*tables]


def write_csv(path: Path, metrics: MetricTable, samples: ResourceTable, settings: Settings) -> list[Path]:
    """As `write_parquet`; times are seconds since 1970."""
    tables = _name_tables(path, metrics, samples)
    for target, table in tables.items():
        names = _list_settings(settings)
        columns = {**table.to_columns(), **{name: [settings[row.run][name] for row in table] for name in names}}
        cells = zip(*columns.values(), strict=True)
        text = format_csv([columns, *(["" if cell is None else cell for cell in row] for row in cells)])
        files.write_atomically(target, text.encode())
    return [*tables]


def _list_settings(settings: Settings) -> list[str]:
    return list(next(iter(settings.values()), SETTINGS))  # all runs have the same


def _name_tables(path: Path, metrics: MetricTable, samples: ResourceTable) -> "dict[Path, Table[Any]]":
    more = {path.with_name(f"{path.stem}-resources{path.suffix}"): samples} if len(samples) else {}
    return {path: metrics, **more}
