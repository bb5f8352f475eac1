"""Energy of a run: counted or integrated, once for each GPU and machine, against sums by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.analysis.compare import compare
from mlbench_cli.results.analysis.energy import Energy, figures_of, find_energy
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.report.collect import collect
from tests.unit.results.runs import START, new_run, observation_of, spec, training_log


def run_with(folder: Path, gpus: dict[int, list[dict[str, Any]]], machines: list[dict[str, Any]]) -> Archive:
    """Two ranks that train for 86 s on 51 200 samples, with samples of GPUs by rank and rows of machines."""
    run = new_run(folder, spec(), {0: training_log(0, details={"tokens_per_update": 4096, "global_batch": 32}), 1: []})
    for rank, rows in gpus.items():
        place = folder / "output" / f"rank-{rank}"
        place.mkdir(parents=True)
        (place / "gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if machines:
        (folder / "resources.jsonl").write_text("".join(json.dumps(row) + "\n" for row in machines))
    seal(run, observation_of())
    return Archive.open(folder)


def samples(address: str, watts: list[float], counter: list[float] | None = None) -> list[dict[str, Any]]:
    """One a second."""
    energy = [{}] * len(watts) if counter is None else [{"energy_joules": joules} for joules in counter]
    return [
        {"time": START + second, "address": address, "power_watts": power, **more}
        for second, (power, more) in enumerate(zip(watts, energy, strict=True))
    ]


def machine(second: float, joules: float, **more: Any) -> dict[str, Any]:
    stamp = f"2025-10-09T08:54:{int(second):02d}Z"
    return {"time": stamp, "kind": "machine", "elapsed_seconds": second, "cpu_joules": joules, **more}


def test_the_counter_goes_before_the_sampled_power(tmp_path: Path) -> None:
    archive = run_with(tmp_path / "a", {0: samples("0:1", [300, 300, 300], [1000, 1400, 1900])}, [])
    watts = 900 / 2
    assert find_energy(archive) == Energy(900, watts * 86 / 51200, watts * 86 / 51200 / 128, ("GPU counter",))


def test_without_a_counter_power_is_integrated_and_called_an_estimate(tmp_path: Path) -> None:
    found = find_energy(run_with(tmp_path / "a", {0: samples("0:1", [100, 300, 200])}, []))
    assert found is not None
    assert found.joules == (100 + 300) / 2 + (300 + 200) / 2
    assert found.is_estimate
    assert found.label == "estimate: GPU power, integrated"


def test_a_counter_that_falls_is_not_believed(tmp_path: Path) -> None:
    found = find_energy(run_with(tmp_path / "a", {0: samples("0:1", [100, 100], [500, 3])}, []))
    assert found is not None
    assert (found.joules, found.is_estimate) == (100, True)


def test_gpus_add_up_and_a_shared_one_counts_once(tmp_path: Path) -> None:
    one = samples("0:1", [100] * 3, [0, 100, 200])
    apart = run_with(tmp_path / "apart", {0: one, 1: samples("0:2", [100] * 3, [0, 300, 600])}, [])
    shared = run_with(tmp_path / "shared", {0: one, 1: one}, [])
    assert [getattr(find_energy(each), "joules", None) for each in (apart, shared)] == [800, 200]


def test_cpus_are_added_and_each_node_counts_once(tmp_path: Path) -> None:
    rows = [machine(second, 50.0 * second, worker=worker) for second in (1, 10) for worker in (0, 1)]
    found = find_energy(run_with(tmp_path / "a", {0: samples("0:1", [100] * 3, [0, 100, 200])}, rows))
    assert found is not None
    assert found.joules == 200 + 500  # both workers are on "this-host"
    assert found.label == "GPU counter + CPU counter (RAPL)"
    assert found.per_sample == pytest.approx((100 + 50) * 86 / 51200)


def test_what_is_malformed_or_missing_gives_no_figure(tmp_path: Path) -> None:
    assert find_energy(run_with(tmp_path / "a", {}, [])) is None
    odd: list[dict[str, Any]] = [
        {"time": "now", "power_watts": 1},
        {"time": START, "power_watts": 1e300},
        {"time": START, "power_watts": -1},
    ]
    assert find_energy(run_with(tmp_path / "b", {0: odd}, [machine(1, 0) | {"cpu_joules": "much"}])) is None
    text = run_with(tmp_path / "c", {0: []}, [])
    (tmp_path / "c" / "output" / "rank-0" / "gpu.jsonl").write_text("no json\n")
    assert find_energy(text) is None


def test_compare_and_report_show_it_with_its_source(tmp_path: Path) -> None:
    a = run_with(tmp_path / "a", {0: samples("0:1", [300] * 3, [0, 300, 600])}, [])
    b = run_with(tmp_path / "b", {0: samples("0:1", [150] * 3)}, [])
    found = compare([a], [b])
    row = found.others["energy"]
    assert row.a is not None
    assert row.b is not None
    assert (row.a.mean, row.b.mean, row.higher_is_better) == (600, 300, False)
    assert found.energy_sources == ("GPU counter", "estimate: GPU power, integrated")
    [section] = [each for each in collect([a]).sections if each.heading == "Runs"]
    table = section.tables[0]
    cells = dict(zip(table.head, table.rows[0], strict=True))
    assert (cells["energy"], cells["energy by"]) == ("600\u00a0J", "GPU counter")


# --- at the limits --------------------------------------------------------------------------------------------------


def test_a_run_without_seconds_of_training_counts_those_of_the_task(tmp_path: Path) -> None:
    archive = run_with(tmp_path / "a", {0: samples("0:1", [100] * 3, [0, 100, 200])}, [])
    archive.result["task_seconds"] = {"training": None, "wall": 50.0}
    found = find_energy(archive)
    assert found is not None
    assert found.per_sample == pytest.approx(100 * 50 / 51200)
    archive.result["samples"] = None
    without = find_energy(archive)
    assert without is not None
    assert (without.joules, without.per_sample, without.per_token) == (200, None, None)


@pytest.mark.parametrize("missing", ["tokens_per_update", "global_batch"])
def test_joules_per_token_need_both_the_tokens_and_the_batch(tmp_path: Path, missing: str) -> None:
    archive = run_with(tmp_path / "a", {0: samples("0:1", [100] * 3, [0, 100, 200])}, [])
    del archive.result["details"][missing]
    found = find_energy(archive)
    assert found is not None
    assert (found.per_sample is None, found.per_token) == (False, None)


def test_of_a_shared_gpu_the_longest_series_counts(tmp_path: Path) -> None:
    short, long = samples("0:1", [100] * 2, [0, 100]), samples("0:1", [100] * 4, [0, 100, 200, 300])
    for number, gpus in enumerate(({0: short, 1: long}, {0: long, 1: short})):
        found = find_energy(run_with(tmp_path / str(number), gpus, []))
        assert found is not None
        assert found.joules == 300


def test_gpus_without_an_address_are_those_of_their_ranks(tmp_path: Path) -> None:
    one = [{key: value for key, value in row.items() if key != "address"} for row in samples("", [100] * 2, [0, 50])]
    found = find_energy(run_with(tmp_path / "a", {0: one, 1: one}, []))
    assert found is not None
    assert found.joules == 100


def test_gpus_of_different_nodes_are_different(tmp_path: Path) -> None:
    one = samples("0:1", [100] * 2, [0, 50])
    archive = run_with(tmp_path / "a", {0: one, 1: one}, [])
    archive.result["worker_states"][1]["node"] = "other-host"
    found = find_energy(archive)
    assert found is not None
    assert found.joules == 100


def test_samples_are_in_order_of_time_and_one_is_none(tmp_path: Path) -> None:
    rows = samples("0:1", [100, 300, 200])
    found = find_energy(run_with(tmp_path / "a", {0: [rows[2], rows[0], rows[1]]}, []))
    assert found is not None
    assert found.joules == (100 + 300) / 2 + (300 + 200) / 2
    assert find_energy(run_with(tmp_path / "b", {0: rows[:1]}, [])) is None
    counted = samples("0:1", [100, 100], [5, 5])  # nothing was used, as far as the counter tells
    nothing = find_energy(run_with(tmp_path / "c", {0: counted}, []))
    assert nothing is not None
    assert (nothing.joules, nothing.sources) == (0, ("GPU counter",))


def test_one_row_without_a_counter_makes_the_power_count(tmp_path: Path) -> None:
    rows = samples("0:1", [100, 100, 100], [0, 500, 1000])
    del rows[1]["energy_joules"]
    found = find_energy(run_with(tmp_path / "a", {0: rows}, []))
    assert found is not None
    assert (found.joules, found.label) == (200, "estimate: GPU power, integrated")


def test_machines_count_by_their_last_row_and_by_node(tmp_path: Path) -> None:
    rows = [machine(10, 500.0, worker=0), machine(5, 200.0, worker=0), machine(10, 70.0, worker=1)]
    archive = run_with(tmp_path / "a", {}, rows)
    found = find_energy(archive)
    assert found is not None
    assert (found.joules, found.sources) == (500, ("CPU counter (RAPL)",))
    archive.result["worker_states"][1]["node"] = "other-host"
    apart = find_energy(archive)
    assert apart is not None
    assert apart.joules == 570


@pytest.mark.parametrize(
    "change", [{"kind": "rank"}, {"elapsed_seconds": 0}, {"elapsed_seconds": None}, {"worker": "0"}, {"cpu_joules": -1}]
)
def test_rows_of_machines_that_say_nothing_are_passed_over(tmp_path: Path, change: dict[str, Any]) -> None:
    assert find_energy(run_with(tmp_path / "a", {}, [machine(10, 500.0) | change])) is None


def test_figures_are_those_that_are_known(tmp_path: Path) -> None:
    archive = run_with(tmp_path / "a", {0: samples("0:1", [100] * 3, [0, 100, 200])}, [])
    sample = 100 * 86 / 51200
    assert figures_of(archive) == {
        "energy": 200,
        "energy per sample": pytest.approx(sample),
        "energy per token": pytest.approx(sample / 128),
    }
    archive.result["samples"] = None
    assert figures_of(archive) == {"energy": 200}
    assert figures_of(run_with(tmp_path / "b", {}, [])) == {}


def test_rows_and_files_of_others_do_not_end_the_reading(tmp_path: Path) -> None:
    rows = [{"time": START, "rank": 0, "cpu_seconds": 1.0}, machine(10, 500.0, worker=0), machine(10, 70.0, worker=1)]
    archive = run_with(tmp_path / "a", {0: [], 1: samples("0:2", [100] * 2, [0, 50])}, rows)
    (tmp_path / "a" / "output" / "rank-0" / "gpu.jsonl").write_text("no json\n")
    del archive.run["spec"]["processes_per_worker"]  # as in the first archives: one for each worker
    found = find_energy(archive)
    assert found is not None
    assert found.joules == 50 + 500
