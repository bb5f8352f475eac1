"""The JSON of nccl-tests for each collective."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.exports.nccl import format_nccl
from tests.unit.results.analysis.test_collectives import measured_run


def export(tmp_path: Path, *series: tuple[str, str, str]) -> dict[str, Any]:
    with Archive.open(measured_run(tmp_path / "run", series=list(series))) as archive:
        document: dict[str, Any] = json.loads(format_nccl(archive))
    return document


@pytest.mark.parametrize(
    ("collective", "operation"),
    [
        ("all_reduce", "sum"),
        ("reduce", "sum"),
        ("reduce_scatter", "sum"),
        ("broadcast", "none"),
        ("all_gather", "none"),
    ],
)
def test_only_collectives_that_reduce_have_an_operation(tmp_path: Path, collective: str, operation: str) -> None:
    """nccl-tests prints "none" in the column redop of the others."""
    rows = export(tmp_path, (collective, "fp32", "out_of_place"))["results"]
    assert {row["redop"] for row in rows} == {operation}
    assert {row["root"] for row in rows} == {"-1"}


@pytest.mark.parametrize(
    ("dtype", "name", "size"), [("fp32", "float", 4), ("fp16", "half", 2), ("bf16", "bfloat16", 2)]
)
def test_rows_count_elements_of_nccls_types(tmp_path: Path, dtype: str, name: str, size: int) -> None:
    rows = export(tmp_path, ("all_reduce", dtype, "out_of_place"))["results"]
    assert {row["type"] for row in rows} == {name}
    assert all(row["count"] * size == row["size"] for row in rows)


def test_a_place_has_a_time_in_microseconds_and_gigabytes_per_second(tmp_path: Path) -> None:
    document = export(tmp_path, ("all_reduce", "fp32", "in_place"))
    rows = document["results"]
    assert all(("in_place" in row, "out_of_place" in row) == (True, False) for row in rows)
    side = rows[-1]["in_place"]
    assert side["alg_bw"] == pytest.approx(rows[-1]["size"] / (side["time"] * 1e-6) / 1e9)
    assert side["nwrong"] == "N/A"
    rates = [row["in_place"]["bus_bw"] for row in rows]
    assert document["average_bus_bandwidth"]["bandwidth"] == pytest.approx(sum(rates) / len(rates))
    sizes = [row["size"] for row in rows]
    assert (document["config"]["minimum_bytes"], document["config"]["maximum_bytes"]) == (min(sizes), max(sizes))
    assert (document["config"]["ranks"], document["config"]["ngpus"], document["env"]) == (2, 0, [])


def test_devices_are_named_as_their_ranks_reported_them(tmp_path: Path) -> None:
    facts = {"host": "node-7", "device_name": "NVIDIA H100"}
    with Archive.open(measured_run(tmp_path / "run", environment=facts)) as archive:
        devices = json.loads(format_nccl(archive))["config"]["devices"]
    assert devices == [{"rank": rank, "hostname": "node-7", "device_info": "NVIDIA H100"} for rank in (0, 1)]
