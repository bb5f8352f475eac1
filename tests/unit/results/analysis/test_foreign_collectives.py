"""Files of nccl-tests and OSU as curves. The samples are made up, in the shape of real ones."""

import json
from pathlib import Path

import pytest

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.results.analysis.collectives import Curve, label_curves, to_csv
from mlbench_cli.results.analysis.foreign_collectives import read_foreign_curves
from tests.needs import needs

NCCL = """# nccl-tests version 2.19.6 nccl-headers=22703 nccl-library=22703
# Collective test starting: all_reduce_perf
# Rank  0 Group  0 Pid   1 on host1 device  0 [0x00] A100
# Rank  1 Group  0 Pid   2 on host1 device  1 [0x00] A100
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
        1024           256     float     sum      -1    11.25    0.09    0.09       0    11.02    0.09    0.09     N/A
   134217728      33554432     float     sum      -1   1402.1   95.73  167.52       0  1.4e+03   95.80  167.65       0
        2048           512      half     sum      -1                                    12.5    0.16    0.16     N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 83.8825
"""
PER_ITERATION = """# nccl-tests version 2.19.6
   1024  256  float  sum  -1  11.2 0.09 0.09 0 1 2 3 4  11.0 0.09 0.10 0 1 2 3 4
   2048  512  float  sum  -1  11.2 0.09 0.09 0 11.0 0.09 0.11 0  2026-11-22 10:00:00
"""
OSU = """
# OSU MPI Allreduce Latency Test v7.5
# Datatype: MPI_INT.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
4                       1.34              1.21              1.52        1000
srun: some noise
1048576              4812.07           4790.11           4840.90         100
"""
OSU_RATE = """# OSU MPI Bandwidth Test v5.9
# Size      Bandwidth (MB/s)
1                       3.50
4194304             12000.00
"""


def read(tmp_path: Path, text: str, name: str = "file.txt") -> dict[tuple[str, str], Curve]:
    path = tmp_path / name
    path.write_text(text)
    return {(curve.dtype, curve.place): curve for curve in read_foreign_curves(path)}


def test_the_text_of_nccl_tests_has_a_curve_for_each_type_and_place(tmp_path: Path) -> None:
    found = read(tmp_path, NCCL)
    assert set(found) == {("fp32", "out_of_place"), ("fp32", "in_place"), ("fp16", "in_place")}
    own = found["fp32", "in_place"]
    assert own.points == ((1024, 11.02, 0.09), (134217728, 1400.0, 167.65))
    assert (own.collective, own.facts["ranks"], own.facts["backend"]) == (
        *("all_reduce", "2 ranks", "nccl-tests 2.19.6"),
    )
    assert found["fp16", "in_place"].points == ((2048, 12.5, 0.16),)


def test_rows_with_minima_maxima_and_timestamps_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, PER_ITERATION, "all_gather_perf.log")
    assert found["fp32", "in_place"].points == ((1024, 11.0, 0.1), (2048, 11.0, 0.11))
    assert found["fp32", "in_place"].collective == "all_gather"


def test_the_json_of_nccl_tests_is_read_without_its_environment(tmp_path: Path) -> None:
    row = {
        "size": 1024,
        "count": 256,
        "type": "float",
        "redop": "sum",
        "root": "    -1",
        "out_of_place": {"time": 11.25, "alg_bw": 0.09, "bus_bw": 0.09, "nwrong": 0},
        "in_place": {"time": 11.0, "alg_bw": 0.09, "bus_bw": "nan", "nwrong": "N/A"},
    }
    document = {
        "version": 3,
        "args": ["./build/reduce_scatter_perf", "-g", "2"],
        "env": ["TOKEN=hush"],
        "config": {"devices": [{"rank": 0}, {"rank": 1}], "validation": "true"},
        "results": [row],
        "average_bus_bandwidth": {"bandwidth": 1.0, "okay": "true"},
    }
    text = json.dumps(document).replace('"alg_bw": 0.09', '"alg_bw": inf')  # as it prints it: no JSON
    found = read(tmp_path, text, "x.json")
    assert found["fp32", "out_of_place"].points == ((1024, 11.25, 0.09),)
    assert found["fp32", "in_place"].points == ((1024, 11.0, 0.0),)
    assert found["fp32", "in_place"].collective == "reduce_scatter"
    assert "hush" not in to_csv(label_curves(found.values()))


def test_latencies_of_osu_are_read_among_noise(tmp_path: Path) -> None:
    found = read(tmp_path, OSU)["int32", "out_of_place"]
    assert found.points == ((4, 1.34, 0.0), (1048576, 4812.07, 0.0))
    assert (found.collective, found.facts["backend"], found.facts["device"]) == ("all_reduce", "OSU 7.5", "cpu")


def test_bandwidths_of_osu_become_times(tmp_path: Path) -> None:
    found = read(tmp_path, OSU_RATE)["bytes", "out_of_place"]
    assert [round(value, 2) for value in found.points[1]] == [4194304, 349.53, 12.0]
    assert found.collective == "send_recv"


@pytest.mark.parametrize(
    "text", ["", "hello\n", "{}", "[1]", '{"results": [1, {"size": "x"}]}', "# OSU MPI Allreduce Latency Test v7.5\n"]
)
def test_a_file_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="no rows of nccl-tests"):
        read(tmp_path, text)


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not complete JSON") as caught:
        read(tmp_path, '{"version": 3, "results": [{"size": 10')
    assert "crashes" in str(caught.value.hint)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="There is no file"):
        read_foreign_curves(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be read"):
        read_foreign_curves(tmp_path)


def test_imported_curves_are_drawn_beside_others(tmp_path: Path) -> None:
    needs("matplotlib")
    from mlbench_cli.results.archive.reader import Archive
    from mlbench_cli.results.report.collect import collect
    from tests.unit.results.runs import sealed_run

    (tmp_path / "nccl.txt").write_text(NCCL)
    (tmp_path / "osu.txt").write_text(OSU)
    with Archive.open(sealed_run(tmp_path / "run")) as archive:
        report = collect([archive], foreign=[tmp_path / "nccl.txt", tmp_path / "osu.txt"])
    titles = [figure.title for figure in report.figures if figure.key.startswith("collective")]
    assert titles == [
        *("Latency of all_reduce, fp32", "Bandwidth of all_reduce, fp32", "Latency of all_reduce, fp16"),
        *("Bandwidth of all_reduce, fp16", "Latency of all_reduce, int32"),
    ]
