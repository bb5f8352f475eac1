"""Metrics and resource samples as tables of plain values, with ways into pandas, polars and Arrow."""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from mlbench_cli.config.extras import load_library
from mlbench_cli.errors import UsageError
from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.model.methods import method_of
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.text import counted
from mlbench_cli.util.times import read_moment

if TYPE_CHECKING:  # types of optional libraries
    import pandas
    import polars
    import pyarrow

Row = TypeVar("Row", bound="MetricPoint | ResourceSample")
# What a data frame of metrics says of each run, to group by: name -> kind of the column.
SETTINGS = {**dict.fromkeys(("task", "preset", "method", "network", "backend", "device"), "text"), "seed": "whole"}
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class MetricPoint:
    """One value that a rank reported. `time` is in seconds since 1970; `seconds` are those of training, if known."""

    run: str
    workers: int
    rank: int
    time: float
    name: str
    value: float
    epoch: float | None = None
    step: float | None = None
    seconds: float | None = None
    unit: str | None = None

    @classmethod
    def parse(cls, run: str, workers: int, row: Mapping[str, Any]) -> "MetricPoint | None":
        """A line of metrics.jsonl; None if it is malformed. The texts "nan", "inf" and "-inf" become numbers."""
        value, unit = row.get("value"), row.get("unit")
        number = float(value) if is_finite_number(value) else _SPECIAL.get(str(value))
        moment = read_moment(row.get("time"))
        if number is None or moment is None or not isinstance(row.get("name"), str):
            return None
        rank = row.get("rank")
        return cls(
            run,
            workers,
            rank if isinstance(rank, int) else 0,
            moment,
            row["name"],
            number,
            read_number(row.get("epoch")),
            read_number(row.get("step")),
            read_number(row.get("seconds")),
            unit if isinstance(unit, str) else None,
        )


@dataclass(frozen=True)
class ResourceSample:
    """One sample of a rank's processes. Counters grow from the start of the run; `gpu_percent` is utilization.

    A value that the engine does not measure is None.
    """

    run: str
    rank: int
    time: float
    cpu_seconds: float | None = None
    rss_bytes: float | None = None
    received_bytes: float | None = None
    sent_bytes: float | None = None
    read_bytes: float | None = None
    write_bytes: float | None = None
    gpu_percent: float | None = None
    gpu_memory_bytes: float | None = None
    gpu_watts: float | None = None

    @classmethod
    def parse(cls, run: str, row: Mapping[str, Any]) -> "ResourceSample | None":
        """A line of resources.jsonl; None for one without rank or time, and for one of another kind."""
        moment, rank = read_moment(row.get("time")), row.get("rank")
        if moment is None or not isinstance(rank, int) or "kind" in row:
            return None
        names = [item.name for item in fields(cls)][3:]
        return cls(run, rank, moment, *(read_number(row.get(name)) for name in names))


class Table(Sequence[Row], Generic[Row]):
    """Rows in the order of time. `row_type` is their dataclass, so that an empty table has its columns, too.

    `settings` are those of each run, by its name; data frames then have SETTINGS as columns.
    """

    row_type: type[Row]

    def __init__(self, rows: Iterable[Row], settings: Mapping[str, Mapping[str, object]] | None = None) -> None:
        self._rows: list[Row] = sorted(rows, key=lambda row: row.time)
        self.settings = settings or {}

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {counted(len(self), 'row')}>"

    def to_dicts(self) -> list[dict[str, str | float | None]]:
        """One dictionary per row."""
        return [asdict(row) for row in self._rows]

    def to_columns(self) -> dict[str, list[Any]]:
        """Name of each field to its values, in the order of the rows."""
        return {item.name: [getattr(row, item.name) for row in self._rows] for item in fields(self.row_type)}

    def to_pandas(self) -> "pandas.DataFrame":
        """One row per value; `time` is a UTC timestamp. Raises UsageError without pandas."""
        pandas = load_library("pandas", "tables")
        kinds = {"text": "object", "whole": "int64", "number": "float64", "time": "float64"}
        columns = self._all_columns()
        frame = pandas.DataFrame(
            {name: pandas.Series(columns[name], dtype=kinds[kind]) for name, kind in self._column_kinds()}
        )
        frame["time"] = pandas.to_datetime(frame["time"], unit="s", utc=True)
        return frame

    def to_polars(self) -> "polars.DataFrame":
        """One row per value; `time` is a UTC timestamp. Raises UsageError without polars."""
        polars = load_library("polars", "tables")
        kinds = {"text": polars.String, "whole": polars.Int64, "number": polars.Float64}
        kinds["time"] = polars.Datetime("us", "UTC")
        return polars.DataFrame(
            self._timed_columns(), schema={name: kinds[kind] for name, kind in self._column_kinds()}
        )

    def to_arrow(self) -> "pyarrow.Table":
        """One row per value; `time` is a UTC timestamp in microseconds. Raises UsageError without pyarrow."""
        arrow = load_library("pyarrow", "tables")
        kinds = {"text": arrow.string(), "whole": arrow.int64(), "number": arrow.float64()}
        kinds["time"] = arrow.timestamp("us", "UTC")
        schema = arrow.schema([(name, kinds[kind]) for name, kind in self._column_kinds()])
        return arrow.table(self._timed_columns(), schema=schema)

    def _timed_columns(self) -> dict[str, list[Any]]:
        """As `_all_columns`, with whole microseconds since 1970 as the time."""
        return {**self._all_columns(), "time": [round(row.time * 1e6) for row in self._rows]}

    def _all_columns(self) -> dict[str, list[Any]]:
        names = SETTINGS if self.settings else {}
        return {**self.to_columns(), **{name: [self.settings[row.run][name] for row in self._rows] for name in names}}

    def _column_kinds(self) -> list[tuple[str, str]]:
        return [*_column_kinds(self.row_type), *(SETTINGS if self.settings else {}).items()]


class MetricTable(Table[MetricPoint]):
    """Metrics of one or several runs, in the order of time."""

    row_type = MetricPoint

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in the order of their first appearance."""
        return list(dict.fromkeys(point.name for point in self))

    def select(
        self,
        names: Collection[str] | None = None,
        *,
        since: float | None = None,
        summarize: int | None = None,
        last: int | None = None,
    ) -> "MetricTable":
        """Points of these names, not before `since` (seconds since 1970), summarized and then cut per curve.

        `summarize` N: at most N points of each run, name and rank, by `summarize_points`. `last` N: the last N of each.
        0 and None mean no limit. Raises UsageError for a negative number.
        """
        for word, number in (("summarize", summarize), ("last", last)):
            if number is not None and number < 0:
                raise UsageError(f"{word} must be 0 or more, not {number}.")
        kept = [
            point for point in self if (names is None or point.name in names) and (since is None or point.time >= since)
        ]
        if not summarize and not last:
            return MetricTable(kept, self.settings)
        chosen: list[MetricPoint] = []
        for curve in _curves(kept).values():
            points = summarize_points(curve, summarize) if summarize else curve
            chosen += points[-last:] if last else points
        return MetricTable(chosen, self.settings)


class ResourceTable(Table[ResourceSample]):
    """Resource samples of one or several runs, in the order of time."""

    row_type = ResourceSample

    @classmethod
    def parse(cls, run: str, rows: Iterable[Mapping[str, Any]]) -> "ResourceTable":
        """Read the rows of a resources.jsonl; rows of other kinds and malformed ones are left out."""
        return cls(sample for row in rows if (sample := ResourceSample.parse(run, row)) is not None)


def _column_kinds(row_type: type) -> list[tuple[str, str]]:
    """(field, "text", "whole", "number" or "time") of a row's dataclass."""
    kinds: dict[object, str] = {str: "text", int: "whole", str | None: "text"}
    return [(item.name, "time" if item.name == "time" else kinds.get(item.type, "number")) for item in fields(row_type)]


def summarize_points(curve: Sequence[MetricPoint], count: int) -> list[MetricPoint]:
    """At most `count` points: means of groups of ceil(length / count), dated by the first of each group.

    An incomplete last group is left out, and a curve that is short enough stays as it is: the rule of the original's
    dashboard.
    """
    if len(curve) <= count:
        return list(curve)
    size = math.ceil(len(curve) / count)
    groups = (curve[start : start + size] for start in range(0, len(curve) - size + 1, size))
    return [_mean_point(group) for group in groups]


def _mean_point(group: Sequence[MetricPoint]) -> MetricPoint:
    first = group[0]
    facts = {**asdict(first), "value": math.fsum(point.value for point in group) / len(group)}
    return MetricPoint(**facts)


def _curves(points: Iterable[MetricPoint]) -> dict[tuple[str, str, int], list[MetricPoint]]:
    found: dict[tuple[str, str, int], list[MetricPoint]] = {}
    for point in points:
        found.setdefault((point.run, point.name, point.rank), []).append(point)
    return found


def read_number(value: object) -> float | None:
    """A finite number of a JSON document, as a float; None for anything else."""
    return float(value) if is_finite_number(value) else None


def list_settings(archives: Sequence[Archive]) -> dict[str, dict[str, str | int]]:
    """The settings of several runs by their names, with each parameter in which they differ as "set.NAME"."""
    parameters = {archive.name: archive.run["spec"].get("parameters") or {} for archive in archives}
    names = dict.fromkeys(name for values in parameters.values() for name in values)
    texts = {run: {name: _as_text(values.get(name)) for name in names} for run, values in parameters.items()}
    varied = [name for name in names if len({each[name] for each in texts.values()}) > 1]
    return {
        archive.name: {**settings_of(archive), **{f"set.{name}": texts[archive.name][name] for name in varied}}
        for archive in archives
    }


def _as_text(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def settings_of(archive: Archive) -> dict[str, str | int]:
    """The settings that tables have of each run, as texts and the seed."""
    spec = archive.run["spec"]
    texts = {name: str(spec.get(name) or "") for name in ("preset", "network", "backend", "device")}
    return {"task": str(archive.result["task"]), "method": method_of(spec), **texts, "seed": int(spec.get("seed") or 0)}
