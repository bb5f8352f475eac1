"""The JSON of nccl-tests for each collective."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
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


def test_a_document_as_a_whole(tmp_path: Path) -> None:
    """Latency 100 us and a nanosecond per byte, as `measured_run` has it, for sizes of 4 bytes to 8 MiB."""
    facts = {"host": "n1", "device_name": "H100"}
    folder = measured_run(tmp_path / "run", series=[("reduce", "int32", "out_of_place")], environment=facts)
    with Archive.open(folder) as archive:
        text = format_nccl(archive)
        document = json.loads(text)
        assert (document["start_time"], document["end_time"]) == (archive.result["started"], archive.result["finished"])
    assert text.endswith("}\n")
    assert {key: document[key] for key in ("version", "args", "env", "out_of_bounds")} == {
        "version": 3,
        "args": [],
        "env": [],
        "out_of_bounds": {"count": 0, "okay": "unchecked"},
    }
    assert document["config"] == {
        "nthreads": 1,
        "ngpus": 0,
        "ranks": 2,
        "minimum_bytes": 4,
        "maximum_bytes": 4 * 8**7,
        "backend": "gloo",
        "devices": [{"rank": rank, "hostname": "n1", "device_info": "H100"} for rank in (0, 1)],
    }
    first = document["results"][0]
    assert first == {
        "size": 4,
        "count": 1,
        "type": "int32",
        "redop": "sum",
        "root": "-1",
        "out_of_place": {
            "time": 100.004,
            "alg_bw": pytest.approx(4 / 100.004e-6 / 1e9),
            "bus_bw": pytest.approx(4 / 100_004),
            "nwrong": "N/A",
        },
        "experiment_name": "reduce",
    }
    assert len(document["results"]) == 8
    assert document["average_bus_bandwidth"]["okay"] == "unchecked"


def test_types_that_nccl_does_not_have_keep_their_names(tmp_path: Path) -> None:
    rows = export(tmp_path, ("all_reduce", "fp64", "in_place"))["results"]
    assert {(row["type"], row["count"] == row["size"]) for row in rows} == {("fp64", True)}


def test_machines_that_report_nothing_have_empty_names(tmp_path: Path) -> None:
    devices = export(tmp_path, ("all_reduce", "fp32", "in_place"))["config"]["devices"]
    assert devices == [{"rank": rank, "hostname": "", "device_info": ""} for rank in (0, 1)]


def test_a_run_with_gpus_has_their_number_per_worker(tmp_path: Path) -> None:
    folder = measured_run(tmp_path / "run", gpus_per_worker=4)
    with Archive.open(folder) as archive:
        assert json.loads(format_nccl(archive))["config"]["ngpus"] == 4


def test_a_run_without_collectives_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = measured_run(tmp_path / "run", document={"ranks": 2, "rows": [], "series": []})
    with (
        Archive.open(folder) as archive,
        pytest.raises(UsageError, match="run-2 did not measure collectives") as caught,
    ):
        format_nccl(archive)
    assert caught.value.hint == "mlbench run NAME 2 --task allreduce"
