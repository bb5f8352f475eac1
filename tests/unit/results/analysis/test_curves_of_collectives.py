"""What a curve takes from a run, how repeats become one, and names of other programs: by hand."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.analysis.collectives import (
    Curve,
    load_published,
    read,
)
from mlbench_cli.results.analysis.foreign_collectives import read_foreign_curves
from mlbench_cli.results.archive.reader import Archive
from tests.unit.results.analysis.test_collectives import measured_run

ROW: dict[str, Any] = {"collective": "reduce", "dtype": "fp32", "place": "in_place", "bytes": 8}


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured_run(tmp_path_factory.mktemp("archives") / "a", processes_per_worker=2, cpus=1.5)


def archive(path: Path, spec: dict[str, Any] | None = None, rank: Any = None, provenance: Any = None) -> Archive:
    found = Archive.open(path)
    found.run["spec"].update(spec or {})
    found.run["provenance"] = provenance
    found.environment["ranks"] = {} if rank is None else {"0": rank}
    return found


@pytest.mark.parametrize(
    ("spec", "rank", "client", "machine"),
    [
        ({}, {"cpu": "EPYC"}, {"cpu": "Xeon", "cores": 2}, "EPYC, 2 cores (local)"),
        ({}, {}, {"cpu": "Xeon"}, "Xeon (local)"),
        ({}, None, {}, "unknown CPU (local)"),
        ({"engine": "kubernetes", "cluster": "c"}, {}, {"cpu": "Xeon", "cores": 2}, "unknown CPU (c)"),
        ({"engine": "kubernetes", "cluster": "c"}, {"device_name": "T4"}, {}, "T4 (c)"),
        ({"device": "gpu"}, {"cpu": "EPYC", "device_name": "T4"}, {"cores": 2}, "EPYC, 2 cores, T4 (local)"),
        ({"device": "cpu"}, {"cpu": "EPYC", "device_name": "T4"}, {}, "EPYC (local)"),
    ],
)
def test_the_machine_of_a_curve_is_that_of_its_first_rank(
    sealed: Path, spec: dict[str, Any], rank: Any, client: dict[str, Any], machine: str
) -> None:
    [found] = read(archive(sealed, spec, rank, {"machine": client}))
    assert found.machine == machine


@pytest.mark.parametrize(
    ("change", "point"),
    [
        ({"p50_us": 5.0, "mean_us": 9.0, "busbw": 2.0}, (8, 5.0, 2.0)),
        ({"p50_us": None, "mean_us": 9.0, "busbw": None}, (8, 9.0, 0.0)),
        ({"bytes": 1, "p50_us": 1e-9, "busbw": 0.0}, (1, 1e-9, 0.0)),
    ],
)
def test_a_point_is_the_median_or_the_mean_of_a_size(
    tmp_path: Path, change: dict[str, Any], point: tuple[int, float, float]
) -> None:
    document = {"ranks": 1, "rows": [{**ROW, **change}], "series": []}
    [found] = read(Archive.open(measured_run(tmp_path / "a", document=document)))
    assert (found.points, found.fit, found.facts["ranks"]) == ((point,), None, "1 rank")


def test_published_bandwidths_are_two_passes_over_all_but_one_rank() -> None:
    """busbw = size / time * 2 (n - 1) / n, as nccl-tests defines it; sizes are elements times 4 or 2 bytes."""
    for each in load_published():
        ranks = int(each.facts["ranks"].split()[0])
        assert (each.collective, each.place, each.run, each.published) == (
            "all_reduce",
            "in_place",
            "published 2020",
            True,
        )
        for size, time, busbw in each.points:
            assert busbw == pytest.approx(size / (time * 1e-6) / 1e9 * 2 * (ranks - 1) / ranks)
            assert size % (4 if each.dtype == "fp32" else 2) == 0


# --- OSU ------------------------------------------------------------------------------------------------------------


def osu(folder: Path, title: str, *lines: str) -> Curve:
    (folder / "x.txt").write_text("\n".join([f"# OSU MPI{title} Test v7.5", *lines]) + "\n")
    [found] = read_foreign_curves(folder / "x.txt")
    return found


@pytest.mark.parametrize(
    ("title", "collective"),
    [
        (" Allreduce Latency", "all_reduce"),
        (" Broadcast Latency", "broadcast"),
        (" Reduce Latency", "reduce"),
        (" Allgather Latency", "all_gather"),
        (" Reduce_scatter Latency", "reduce_scatter"),
        (" Alltoall Latency", "all_to_all"),
        (" Gather Latency", "gather"),
        (" Scatter Latency", "scatter"),
        (" Latency", "send_recv"),
        (" Bi-Directional Bandwidth", "send_recv"),
    ],
)
def test_benchmarks_of_osu_are_known_by_their_titles(tmp_path: Path, title: str, collective: str) -> None:
    found = osu(tmp_path, title, "8 2.0")
    assert (found.collective, found.facts["backend"]) == (collective, "OSU 7.5")


@pytest.mark.parametrize(
    ("printed", "dtype"),
    [
        ("# Datatype: MPI_FLOAT.", "fp32"),
        ("# Datatype: MPI_INT.", "int32"),
        ("# Datatype: MPI_DOUBLE.", "fp64"),
        ("# Datatype: MPI_CHAR.", "bytes"),
        ("#", "bytes"),
    ],
)
def test_data_types_of_osu_have_our_names(tmp_path: Path, printed: str, dtype: str) -> None:
    assert osu(tmp_path, " Allreduce Latency", printed, "8 2.0").dtype == dtype
