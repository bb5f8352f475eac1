"""The task allreduce on real ranks: every collective right, faults noticed, budgets and gate kept, files written."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from tests import NIGHTLY
from tests.contract.task_images.ranks import Ended, Parameters, RankServer
from tests.contract.task_images.test_tiny_runs import check_times

CHECKS = "tests.contract.task_images.allreduce.collective_checks"
TIMES = ("min_us", "p50_us", "max_us")


def run_task(
    ranks: RankServer, folder: Path, size: int = 2, preset: str = "tiny", backend: str = "gloo", **changes: Any
) -> list[Ended]:
    parameters = load_task("allreduce").resolve(preset, changes)
    return ranks.run("task_images.run allreduce", size, folder, parameters, MLBENCH_BACKEND=backend)


def written(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "output-0" / "results" / "collectives.json").read_text()))


@pytest.mark.parametrize("size", (1, 2, 3) if NIGHTLY else (3,))
def test_every_collective_is_checked_and_every_fault_shows(ranks: RankServer, tmp_path: Path, size: int) -> None:
    for one in ranks.run(CHECKS, size, tmp_path, {}, MLBENCH_BACKEND="faulty"):
        assert (one.code, one.stderr) == (0, "")
        assert one.stdout.count("OK") == (1 if size == 1 else 2)


def test_the_official_measurement(ranks: RankServer, tmp_path: Path) -> None:
    first, second = run_task(ranks, tmp_path, seconds_per_size=0.0, seconds_total=0.0)
    assert [(one.code, one.stderr) for one in (first, second)] == [(0, "")] * 2
    result, rows = first.result, written(tmp_path)["rows"]
    check_times(result)
    assert result["outcome"] == "completed"
    assert result["goal"] is None
    assert [(row["dtype"], row["elements"]) for row in rows] == [
        (dtype, 10**power) for dtype in ("fp32", "fp16") for power in range(6)
    ]
    for row in rows:
        assert (row["collective"], row["place"]) == ("all_reduce", "in_place")
        assert row["bytes"] == row["elements"] * (4 if row["dtype"] == "fp32" else 2)
        assert row["samples"] == 10
        assert row["p95_us"] is row["p99_us"] is None  # of ten samples they would be the maximum
        assert 0 < row["rank_p50_min_us"] <= row["rank_p50_max_us"] <= row["max_us"]
        figures = [row[name] for name in TIMES]
        assert figures[0] > 0
        assert figures == sorted(figures)
        assert row["min_us"] <= row["mean_us"] <= row["max_us"]
        assert row["algbw"] == pytest.approx(row["bytes"] / row["p50_us"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"])  # 2 (k - 1) / k is 1 for two ranks
    assert first.metric("all_reduce_fp32_p50") == [row["p50_us"] for row in rows[:6]]
    assert not second.events("result")
    with open(tmp_path / "output-0" / "results" / "collectives.csv", newline="") as file:
        assert [float(row["p50_us"]) for row in csv.DictReader(file)] == [row["p50_us"] for row in rows]
    assert list((tmp_path / "output-1").iterdir()) == []


# MPI's ranks wait without sleeping, which takes all of a core: only nightly.
ALL, LACKING = ("fp32", "fp16", "bf16", "int32"), ("fp16", "bf16")
WAYS = [("gloo", ("fp32", "bf16")), ("gloo", ALL), ("mpi", LACKING), ("mpi", ALL)]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtypes"), WAYS if NIGHTLY else WAYS[:1])
def test_all_collectives_in_both_places_and_all_types(
    ranks: RankServer, tmp_path: Path, backend: str, dtypes: tuple[str, ...]
) -> None:
    changes: Parameters = {
        "collectives": "all",
        "places": "all",
        "dtypes": ",".join(dtypes),
        "sizes": "4B,100B:10KB:x10",
        "samples": 3,
    }
    first, second = run_task(ranks, tmp_path, backend=backend, seconds_total=0.0, **changes)
    assert [(one.code, one.stderr) for one in (first, second)] == [(0, "")] * 2
    details, document = first.result["details"], written(tmp_path)
    assert len(details["series"]) == (5 * 2 + 3) * len(dtypes)
    assert details["not_supported"] == []
    for one in details["series"]:
        assert (one["sizes"], one["left_out"]) == (4, None)
        assert set(one["fit"]) >= {"alpha_us", "algbw", "off_mean"}
    formulas = details["formulas"]
    assert formulas["all_gather"]["busbw"] == "algbw * (k - 1) / k"
    halves = {row["busbw"] / row["algbw"] for row in document["rows"] if row["collective"] == "all_to_all"}
    assert halves == {0.5}
    by_name = {row["collective"]: row["busbw"] / row["algbw"] for row in document["rows"]}
    assert by_name["bidirectional"] == 2
    # What is cut in parts is at least one number for each rank.
    gathered = [row for row in document["rows"] if row["collective"] == "all_gather" and row["dtype"] == dtypes[0]]
    assert min(row["bytes"] for row in gathered) == (8 if dtypes[0] == "fp32" else 4)
    assert formulas["all_reduce"]["busbw"] == "algbw * 2 (k - 1) / k"
    if backend == "mpi":
        assert "by the backend: float16 reduced as float32" in first.stdout
        assert "bfloat16 reduced as float32" in details["backend"]["detours"]


def test_a_wrong_sum_fails_the_run(ranks: RankServer, tmp_path: Path) -> None:
    parameters = load_task("allreduce").resolve("tiny", {"dtypes": "fp32"})
    faults = json.dumps({"allreduce": "flip"})
    ended = ranks.run(CHECKS, 2, tmp_path, parameters, MLBENCH_BACKEND="faulty", FAULTS=faults)
    for rank, one in enumerate(ended):
        assert one.code == 70
        assert f"rank {rank}: all_reduce, fp32, in place of 8 numbers gave a wrong result" in one.stderr
        assert "1 on rank 1" in one.stderr
        assert "Traceback" not in one.stderr
    assert not ended[0].events("result")


def test_what_a_backend_lacks_is_named_and_the_rest_measured(ranks: RankServer, tmp_path: Path) -> None:
    changes: Parameters = {
        "collectives": "broadcast,reduce_scatter,ping_pong",
        "dtypes": "fp32",
        "sizes": "1KiB",
        "places": "all",
    }
    parameters = load_task("allreduce").resolve("tiny", changes)
    faults = json.dumps({"_reduce_scatter_base": "refuse"})
    first, second = ranks.run(CHECKS, 2, tmp_path, parameters, MLBENCH_BACKEND="faulty", FAULTS=faults)
    assert [(one.code, one.stderr) for one in (first, second)] == [(0, "")] * 2
    lacking = first.result["details"]["not_supported"]
    assert [one["series"] for one in lacking] == [
        f"reduce_scatter, fp32, {place}" for place in ("in place", "out of place")
    ]
    assert all("does not support" in one["why"] for one in lacking)
    assert "not supported: reduce_scatter, fp32, in place: ProcessGroupFaulty does not support" in first.stdout
    assert {row["collective"] for row in written(tmp_path)["rows"]} == {"broadcast", "ping_pong"}


def test_alone_there_is_nobody_to_play_ping_pong_with(ranks: RankServer, tmp_path: Path) -> None:
    [one] = run_task(ranks, tmp_path, size=1, collectives="all_reduce,ping_pong", sizes="8B:8KiB:x8", samples=3)
    assert one.code == 0
    assert {entry["why"] for entry in one.result["details"]["not_supported"]} == {"it takes 2 ranks"}
    assert {row["busbw"] for row in written(tmp_path)["rows"]} == {0.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"collectives": "ping_pong"},
            "supports none of the requested measurements; ping_pong, fp32, out of place: it takes 2",
        ),
        ({"protocol": "legacy", "collectives": "reduce"}, "supports only the all-reduce, in place"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    ranks: RankServer, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    [one] = run_task(ranks, tmp_path, size=1, dtypes="fp32", **changes)
    assert one.code == 64
    assert words in one.stderr
    assert "Traceback" not in one.stderr


def test_the_time_budget_names_what_it_left_out(ranks: RankServer, tmp_path: Path) -> None:
    # So many samples of each size take longer than what the whole run has.
    changes: Parameters = {"seconds_total": 0.5, "seconds_per_size": 0.2, "samples": 100_000, "sizes": "8B:1MiB:x2"}
    first, _ = run_task(ranks, tmp_path, collectives="all_reduce,reduce", dtypes="fp32", **changes)
    details = first.result["details"]
    for one in details["series"]:
        assert one["sizes"] + len(one["left_out"]["bytes"]) == 18
        assert one["left_out"]["bytes"][-1] == 2**20
        assert one["left_out"]["why"] == "the time budget of 0.5 s is spent"
        assert one["shortened"] == one["sizes"]
    assert any(one["sizes"] for one in details["series"])
    assert first.stdout.count(" 1 MiB: the time budget of 0.5 s is spent") == 2


def test_no_memory_for_a_size_leaves_it_out(ranks: RankServer, tmp_path: Path) -> None:
    changes: Parameters = {"dtypes": "fp32", "sizes": "8B,64B,512B,100000GiB", "seconds_total": 0.0}
    first, second = run_task(ranks, tmp_path, **changes)
    assert [(one.code, one.stderr) for one in (first, second)] == [(0, "")] * 2
    [one] = first.result["details"]["series"]
    assert (one["sizes"], one["left_out"]["why"]) == (3, "no memory for larger buffers")


def test_as_the_original_measured_it(ranks: RankServer, tmp_path: Path) -> None:
    changes: Parameters = {"max_exponent": 1.0, "count": 12, "samples": 5}
    first, second = run_task(ranks, tmp_path, preset="legacy", **changes)
    sizes = [1, 1, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10]
    rows = written(tmp_path)["rows"]
    assert [row["elements"] for row in rows] == sizes * 2
    for rank in (first, second):
        assert (rank.code, rank.stderr) == (0, "")
        assert rank.metric("val_tensor_size") == [size for size in sizes for _ in "ab"]
        assert rank.metric("val_dtype") == [32, 16] * 12
        assert rank.metric("val_cuda") == [0] * 24
        assert len(rank.metric("val_avg_time")) == 24
    assert rows[0]["p50_us"] is None
    assert all(row["busbw"] == pytest.approx(row["bytes"] / row["mean_us"] / 1e3) for row in rows)
    assert rows[0]["mean_us"] == pytest.approx(1e6 * first.metric("val_avg_time")[0])


def test_the_original_had_no_halves_with_mpi(ranks: RankServer, tmp_path: Path) -> None:
    changes: Parameters = {"max_exponent": 1.0, "count": 2, "samples": 3}
    first, _ = run_task(ranks, tmp_path, preset="legacy", backend="mpi", **changes)
    assert (first.code, first.stderr) == (0, "")
    assert {row["dtype"] for row in written(tmp_path)["rows"]} == {"fp32"}
    [lacking] = first.result["details"]["not_supported"]
    assert lacking["series"] == "all_reduce, fp16, in place"
