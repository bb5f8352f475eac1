"""What a curve takes from a run, how repeats become one, and names of other programs: by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import DamagedArchive, UsageError
from mlbench_cli.results.analysis.collectives import (
    FACTS,
    Curve,
    figures_of,
    find_published,
    label_curves,
    load_published,
    read,
    to_csv,
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


def test_the_facts_of_a_curve_are_those_of_its_run(sealed: Path) -> None:
    [found] = read(archive(sealed))
    assert found.facts == {
        "backend": "gloo",
        "ranks": "2 ranks",
        "device": "cpu",
        "processes": "2 per worker",
        "cpus": "1.5 CPUs",
        "cluster": "local",
        "preset": "",
    }
    assert (found.run, found.published, found.functional, found.label) == ("run-2", False, False, "")
    [other] = read(archive(sealed, {"processes_per_worker": 1, "cpus": None, "preset": "legacy"}))
    assert [other.facts[name] for name in ("processes", "cpus", "preset")] == ["", "", "the original's protocol"]
    [functional] = read(archive(sealed, {"functional_only": "one machine"}))
    assert functional.functional


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


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": 0, "p50_us": 5.0, "busbw": 1.0},
        {"p50_us": 0.0, "mean_us": 0.0, "busbw": 1.0},
        {"p50_us": -5.0, "busbw": 1.0},
        {"p50_us": 5.0, "busbw": -1.0},
        {"p50_us": "x", "busbw": 1.0},
    ],
)
def test_a_point_without_a_size_or_a_time_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    document = {"ranks": 1, "rows": [{**ROW, **change}], "series": []}
    with pytest.raises(DamagedArchive, match="not as the task writes it"):
        read(Archive.open(measured_run(tmp_path / "a", document=document)))


def test_what_the_fit_could_not_tell_is_left_out(tmp_path: Path) -> None:
    entry = {key: ROW[key] for key in ("collective", "dtype", "place")}
    fit = {"alpha_us": 3, "algbw": None, "off_mean": 0.5}
    row = {**ROW, "p50_us": 5.0, "busbw": 2.0}
    document = {
        "ranks": 2,
        "rows": [row, {**row, "place": "out_of_place", "busbw": 7.0}],
        "series": [{**entry, "fit": fit}],
    }
    found = Archive.open(measured_run(tmp_path / "a", document=document))
    assert [curve.fit for curve in read(found)] == [{"alpha_us": 3.0, "off_mean": 0.5}, None]
    assert figures_of(found) == {
        "reduce fp32, alpha us": 3.0,
        "reduce fp32, best busbw GB/s": 2.0,
        "reduce fp32 out of place, best busbw GB/s": 7.0,
    }


def curve(run: str = "r", points: Any = ((8, 1.0, 2.0),), fit: Any = None, **facts: str) -> Curve:
    known = {**dict.fromkeys(FACTS, ""), "backend": "gloo", "ranks": "2 ranks", "device": "cpu", **facts}
    return Curve(run, "all_reduce", "fp32", "in_place", points, fit, known, "m")


def test_repeats_are_one_curve_of_medians_over_common_sizes() -> None:
    fits = [{"alpha_us": 1.0, "algbw": 2.0}, {"alpha_us": 3.0}, {"alpha_us": 8.0, "algbw": 2.0}]
    points = [
        ((8, 1.0, 10.0), (16, 5.0, 1.0)),
        ((16, 6.0, 4.0), (8, 9.0, 40.0)),
        ((8, 2.0, 20.0), (16, 9.0, 2.0), (32, 1.0, 1.0)),
    ]
    [found] = label_curves(curve(name, each, fit) for name, each, fit in zip("abc", points, fits, strict=True))
    assert (found.run, found.label) == ("a b c", "gloo, 2 ranks (3 runs)")
    assert found.points == ((8, 2.0, 20.0), (16, 6.0, 2.0))
    assert found.fit == {"alpha_us": 4.0}
    [without] = label_curves([curve("a", fit=fits[0]), curve("b")])
    assert without.fit is None


def test_a_label_has_backend_ranks_and_what_varies() -> None:
    found = label_curves([curve(cpus="1 CPUs", device="cpu"), curve(cpus="2 CPUs", processes="")])
    assert [each.label for each in found] == ["gloo, 2 ranks, 1 CPUs", "gloo, 2 ranks, 2 CPUs"]
    alone = label_curves([curve(cpus="1 CPUs")])
    assert [each.label for each in alone] == ["gloo, 2 ranks"]
    published = replace(curve(cpus="9 CPUs"), published=True)
    assert [each.label for each in label_curves([curve(), published])] == [
        "gloo, 2 ranks",
        "published 2020, gloo, 2 ranks",
    ]


def test_published_curves_of_as_many_ranks_or_else_all_of_the_device_and_type() -> None:
    def found(**facts: str) -> set[tuple[str, str, str]]:
        return {(each.facts["device"], each.dtype, each.facts["ranks"]) for each in find_published([curve(**facts)])}

    assert found() == {("cpu", "fp32", "2 ranks")}
    assert found(ranks="3 ranks") == {("cpu", "fp32", f"{ranks} ranks") for ranks in (2, 4, 8)}
    assert found(device="tpu") == set()
    assert find_published([replace(curve(), collective="reduce")]) == []


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


def test_the_table_of_curves() -> None:
    text = to_csv([curve(points=((8, 1.23456789, 2.0),), cpus="1 CPUs"), replace(curve("s"), published=True)])
    assert text.splitlines() == [
        "collective,dtype,place,backend,ranks,device,processes,cpus,cluster,preset,published,bytes,microseconds,busbw,runs",
        "all_reduce,fp32,in_place,gloo,2 ranks,cpu,,1 CPUs,,,no,8,1.23457,2,r",
        "all_reduce,fp32,in_place,gloo,2 ranks,cpu,,,,,yes,8,1,2,s",
    ]


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


def test_rows_of_osu_are_a_size_and_a_number(tmp_path: Path) -> None:
    lines = [
        "8 2.0 1.0 3.0",
        "16",
        "-32 2.0",
        "64 nan",
        "128 x",
        "a 5.0",
        f"{10**15 - 1} 4.0",
        f"{10**15} 4.0",
        "256 0.0",
    ]
    assert osu(tmp_path, " Allreduce Latency", *lines).points == ((8, 2.0, 0.0), (10**15 - 1, 4.0, 0.0))
    rate = osu(tmp_path, " Bandwidth", "1000000 500.0", "2000000 0.0")
    assert rate.points == ((1000000, 2000.0, 0.5),)  # 1 MB at 500 MB/s takes 2000 microseconds


def test_a_file_of_another_program_keeps_its_name_as_place(tmp_path: Path) -> None:
    found = osu(tmp_path, " Reduce Latency", "8 2.0")
    assert (found.facts["cluster"], found.machine, found.run) == ("x.txt", "OSU 7.5, x.txt", "x")
    assert (found.place, found.fit, found.facts["ranks"]) == ("out_of_place", None, "unknown ranks")
    with pytest.raises(UsageError, match="no rows"):
        osu(tmp_path, " Reduce Latency", "8 inf")
