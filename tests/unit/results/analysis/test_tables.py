"""Metrics and samples as tables."""

import math

import pytest

from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.tables import MetricPoint, MetricTable, ResourceTable
from tests.needs import needs


def points(count: int, name: str = "loss", rank: int = 0) -> list[MetricPoint]:
    return [MetricPoint("demo", 2, rank, float(index), name, float(index)) for index in range(count)]


def test_values_that_json_cannot_hold_become_numbers() -> None:
    row = {"time": "2026-01-01T00:00:00Z", "rank": 0, "name": "loss", "value": "inf"}
    parsed = MetricPoint.parse("demo", 1, row)
    assert parsed is not None
    assert parsed.value == math.inf


def test_samples_of_a_running_and_of_a_finished_run_are_the_same() -> None:
    row = {"rank": 1, "cpu_seconds": 2, "rss_bytes": 3}
    live = ResourceTable.parse("demo", [{**row, "time": 1_760_000_000.0}])
    sealed = ResourceTable.parse("demo", [{**row, "time": "2025-10-09T08:53:20Z"}])
    assert list(live) == list(sealed)
    assert live[0].gpu_percent is None


def test_a_table_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(UsageError, match="polars") as caught:
        MetricTable(points(1)).to_polars()
    assert caught.value.hint == install_hint("tables")


LATE = 150  # more rows than a library looks at when it guesses a type
MOMENT = 1_760_000_000.25


def mixed_table() -> MetricTable:
    """The first value of `seconds` and a value that is no number come late."""
    rows = [MetricPoint("demo", 2, 0, MOMENT + index, "loss", 1.0) for index in range(LATE)]
    return MetricTable([*rows, MetricPoint("demo", 2, 1, MOMENT + LATE, "Prec@1", math.nan, 1.0, 7.0, 2.5, "%")])


def test_a_table_becomes_a_frame_of_pandas() -> None:
    needs("pandas")
    frame = mixed_table().to_pandas()
    assert list(frame["value"][:2]) == [1.0, 1.0]
    assert str(frame["time"].dtype).endswith("UTC]")
    assert frame["time"][0].isoformat() == "2025-10-09T08:53:20.250000+00:00"
    assert (frame["seconds"].isna().sum(), frame["unit"].isna().sum()) == (LATE, LATE)
    assert list(MetricTable([]).to_pandas().columns) == list(frame.columns)
    assert str(ResourceTable([]).to_pandas()["cpu_seconds"].dtype) == "float64"


def test_a_table_becomes_a_frame_of_polars() -> None:
    polars = needs("polars")
    frame = mixed_table().to_polars()
    assert frame.shape == (LATE + 1, 10)
    assert frame.schema["time"] == polars.Datetime("us", "UTC")
    assert frame["time"][0].isoformat() == "2025-10-09T08:53:20.250000+00:00"
    assert math.isnan(frame["value"][-1])  # not a number is a value; null is the lack of one
    assert (frame["seconds"].null_count(), frame["unit"][-1]) == (LATE, "%")
    assert MetricTable([]).to_polars().schema == frame.schema
    assert ResourceTable([]).to_polars().schema["rank"] == polars.Int64


def test_a_table_becomes_a_table_of_arrow() -> None:
    arrow = needs("pyarrow")
    table = mixed_table().to_arrow()
    assert table.schema.field("time").type == arrow.timestamp("us", "UTC")
    assert table.schema.field("unit").type == arrow.string()
    assert table["time"][0].as_py().isoformat() == "2025-10-09T08:53:20.250000+00:00"
    assert (table["seconds"].null_count, table["value"].null_count) == (LATE, 0)
    assert MetricTable([]).to_arrow().schema == table.schema
    assert ResourceTable([]).to_arrow().num_rows == 0
