"""Metrics and samples as Parquet files. The same archives give the same bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_cli.results.analysis.tables import MetricTable, ResourceTable, load_library
from mlbench_cli.util import files

if TYPE_CHECKING:
    import pyarrow

SCHEMA = b"1"


def write_parquet(path: Path, metrics: MetricTable, samples: ResourceTable, tasks: dict[str, str]) -> list[Path]:
    """Write metrics to `path` and, if there are any, samples beside it as NAME-resources.parquet.

    `tasks` has the task of each run. Columns: those of `MetricPoint` and of `ResourceSample`, and the task. Times are
    UTC in microseconds. Raises UsageError without pyarrow.
    """
    written = [_write(path, metrics.to_arrow(), [tasks[point.run] for point in metrics])]
    if len(samples):
        other = path.with_name(f"{path.stem}-resources.parquet")
        written.append(_write(other, samples.to_arrow(), [tasks[sample.run] for sample in samples]))
    return written


def _write(path: Path, table: "pyarrow.Table", tasks: Sequence[str]) -> Path:
    arrow: Any = load_library("pyarrow")
    load_library("pyarrow.parquet")
    table = table.append_column("task", arrow.array(tasks, arrow.string()))
    table = table.replace_schema_metadata({b"mlbench_schema": SCHEMA})
    with files.replace_file(path) as file:
        arrow.parquet.write_table(table, file, compression="zstd")
    return path
