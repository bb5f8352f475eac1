"""Files of nccl-tests and OSU as curves. The samples are made up, in the shape of real ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.results.analysis import foreign_collectives
from mlbench_cli.results.analysis.collectives import Curve, label_curves, to_csv
from mlbench_cli.results.analysis.foreign_collectives import read_foreign_curves

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
    pytest.importorskip("matplotlib")
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


def rows_of_nccl(*rows: str) -> str:
    return "# nccl-tests version 2.19.6\n" + "".join(f"{row}\n" for row in rows)


def points_of(tmp_path: Path, *rows: str) -> tuple[tuple[int, float, float], ...]:
    return read(tmp_path, rows_of_nccl(*rows))["fp32", "in_place"].points


def test_points_without_a_size_or_a_time_are_left_out(tmp_path: Path) -> None:
    """nccl-tests prints 0.00 for what took no measurable time, and runs sizes of 0 bytes with -b 0."""
    assert points_of(
        tmp_path,
        "0    0   float sum -1  11.0 0.00 0.00 0  11.0 0.00 0.00 0",
        "1024 256 float sum -1  0.00 0.00 0.00 0  0.00 0.00 0.00 0",
        "2048 512 float sum -1  inf  0.00 0.00 0  inf  0.00 0.00 0",
        "4096 1024 float sum -1 nan  0.00 0.00 0  nan  0.00 0.00 0",
        "1    0   float sum -1  0.01 0.10 0.10 0  0.01 0.10 0.10 0",
    ) == ((1, 0.01, 0.1),)


def test_a_bandwidth_that_is_no_number_is_unknown_and_its_time_is_kept(tmp_path: Path) -> None:
    assert points_of(
        tmp_path,
        "1024 256  float sum -1  11.0 0.09 N/A 0  11.0 0.09 N/A 0",
        "2048 512  float sum -1  12.0 0.09 inf 0  12.0 0.09 inf 0",
        "4096 1024 float sum -1  13.0 0.00 0.00 0 13.0 0.00 0.00 0",
        "8192 2048 float sum -1  14.0 0.09 -1 0   14.0 0.09 -1 0",
    ) == ((1024, 11.0, 0.0), (2048, 12.0, 0.0), (4096, 13.0, 0.0), (8192, 14.0, 0.0))


@pytest.mark.parametrize(
    ("printed", "dtype"),
    [("float", "fp32"), ("half", "fp16"), ("bfloat16", "bf16"), ("double", "fp64"), ("int32", "int32")],
)
def test_data_types_of_nccl_tests_have_our_names(tmp_path: Path, printed: str, dtype: str) -> None:
    text = rows_of_nccl(f"1024 256 {printed} sum -1  11.0 0.09 0.09 0  11.0 0.09 0.09 0")
    assert {kind for kind, _ in read(tmp_path, text)} == {dtype}


def test_a_data_type_without_our_name_keeps_its_own(tmp_path: Path) -> None:
    text = rows_of_nccl("1024 1024 fp8_e4m3 sum -1  11.0 0.09 0.09 0  11.0 0.09 0.09 0")
    assert {kind for kind, _ in read(tmp_path, text)} == {"fp8_e4m3"}


@pytest.mark.parametrize(
    ("program", "collective"),
    [
        ("all_reduce_perf", "all_reduce"),
        ("all_gather_perf", "all_gather"),
        ("alltoall_perf", "all_to_all"),
        ("broadcast_perf", "broadcast"),
        ("gather_perf", "gather"),
        ("reduce_perf", "reduce"),
        ("reduce_scatter_perf", "reduce_scatter"),
        ("scatter_perf", "scatter"),
        ("sendrecv_perf", "send_recv"),
        ("hypercube_perf", "collective"),
    ],
)
def test_every_program_of_nccl_tests_is_known_by_name(tmp_path: Path, program: str, collective: str) -> None:
    """By the longest name: "all_reduce" and "reduce_scatter" are not "reduce". A file's name counts without a title."""
    row = "1024 256 float sum -1  11.0 0.09 0.09 0  11.0 0.09 0.09 0"
    titled = read(tmp_path, rows_of_nccl(f"# Collective test starting: {program}", row), "x.txt")
    named = read(tmp_path, rows_of_nccl(row), f"{program}.txt")
    assert {curve.collective for curve in [*titled.values(), *named.values()]} == {collective}


def test_rows_with_other_numbers_of_columns_are_not_rows(tmp_path: Path) -> None:
    good = "1024 256 float sum -1  11.0 0.09 0.09 0  11.0 0.09 0.09 0"
    bad = "2048 512 float sum -1  11.0 0.09 0.09 0  11.0 0.09 0.09"
    assert points_of(tmp_path, good, bad, "2048 512 5 sum -1  11.0 0.09 0.09 0  11.0 0.09 0.09 0") == (
        (1024, 11.0, 0.09),
    )


def test_a_file_may_have_64_mib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert foreign_collectives.MAX_BYTES == 64 * 1024**2
    monkeypatch.setattr(foreign_collectives, "MAX_BYTES", len(NCCL))
    assert read(tmp_path, NCCL)
    with pytest.raises(UsageError, match="larger than"):
        read(tmp_path, NCCL + " ")


def test_points_are_sorted_by_size_and_ranks_may_be_unknown(tmp_path: Path) -> None:
    rows = [f"{size} 256 float sum -1  11.0 0.09 0.09 0  11.0 0.09 0.09 0" for size in (4096, 1024, 2048)]
    found = read(tmp_path, rows_of_nccl(*rows))["fp32", "out_of_place"]
    assert [size for size, _, _ in found.points] == [1024, 2048, 4096]
    assert (found.facts["ranks"], found.facts["device"]) == ("unknown ranks", "gpu")


def test_json_with_cpu_times_and_the_names_of_several_experiments(tmp_path: Path) -> None:
    side = {"cpu_time": 11.25, "bus_bw": 0.09}
    rows = [
        {"size": 1024, "type": "float", "out_of_place": side, "experiment_name": "all_gather"},
        {"size": 1024, "type": "float", "out_of_place": {**side, "time": True}},
        {"size": float("inf"), "type": "float", "out_of_place": side},
    ]
    (found,) = read(tmp_path, json.dumps({"results": rows}).replace("Infinity", "inf"), "x.json").values()
    assert (found.collective, found.points) == ("all_gather", ((1024, 11.25, 0.09),))


@pytest.mark.parametrize(
    ("file", "collective"),
    [
        *(
            ("all_reduce_perf.txt", "all_reduce"),
            ("AllGather.log", "all_gather"),
            ("reduce-scatter.txt", "reduce_scatter"),
        ),
        *(("alltoall_perf", "all_to_all"), ("bcast.txt", "broadcast"), ("broadcast_perf.txt", "broadcast")),
        *(("reduce_perf.txt", "reduce"), ("sendrecv.txt", "send_recv"), ("my_gather.txt", "gather")),
        *(("scatter.txt", "scatter"), ("node7.txt", "collective")),
    ],
)
def test_a_file_without_a_title_is_named_by_its_own_name(tmp_path: Path, file: str, collective: str) -> None:
    (tmp_path / file).write_text("  1024  256  float  sum  -1  10.0  0.1  0.2  0  20.0  0.1  0.3  0\n")
    out, inside = read_foreign_curves(tmp_path / file)
    assert (out.collective, inside.collective) == (collective, collective)
    assert (out.place, out.points, inside.place, inside.points) == (
        *("out_of_place", ((1024, 10.0, 0.2),)),
        *("in_place", ((1024, 20.0, 0.3),)),
    )


def test_rows_with_minima_and_a_timestamp_have_eight_numbers_for_each_place(tmp_path: Path) -> None:
    row = "1024 256 float sum -1  11.5 0.09 0.10 1 2 3 4 0  12.5 0.09 0.20 1 2 3 4 0  2026-11-22 10:00:00"
    found = read(tmp_path, rows_of_nccl(row))
    assert {place: curve.points for (_, place), curve in found.items()} == {
        "out_of_place": ((1024, 11.5, 0.10),),
        "in_place": ((1024, 12.5, 0.20),),
    }


def test_json_without_arguments_is_named_by_its_file_of_which_60_letters_are_kept(tmp_path: Path) -> None:
    rows = [{"size": 8, "type": "float", "out_of_place": {"time": 1.0, "bus_bw": 2.0}}]
    name = f"reduce_{'x' * 60}.json"
    argument_lists: list[Any] = [[], None, "all_gather_perf"]
    for arguments in argument_lists:
        (tmp_path / name).write_text(json.dumps({"results": rows, "args": arguments}))
        [found] = read_foreign_curves(tmp_path / name)
        assert found.collective == "reduce"
    assert (found.facts["cluster"], found.run) == (name[:60], name[:60])


def test_only_plain_digits_are_sizes_of_osu(tmp_path: Path) -> None:
    found = read(tmp_path, f"{OSU}\n\u0661\u0662 5.0\n12 5.0\n{'1' * 16} 5.0\n")
    [curve] = found.values()
    assert [size for size, _, _ in curve.points if size in (12, int("1" * 16))] == [12]
