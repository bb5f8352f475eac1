"""Energy of a run: counted or integrated, once for each GPU, against sums by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.results.analysis.compare import compare
from mlbench_cli.results.analysis.energy import Energy, figures_of, find_energy
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.report.facts import collect
from tests.unit.results.runs import START, new_run, observation_of, spec, training_log


def run_with(
    folder: Path, gpus: dict[int, list[dict[str, Any]]], nodes: tuple[str, str] = ("a", "a"), **changes: Any
) -> Archive:
    """Two ranks that train for 86 s on 51 200 samples, with samples of GPUs by rank; `changes` of the spec."""
    run = new_run(
        folder, spec(**changes), {0: training_log(0, details={"tokens_per_update": 4096, "global_batch": 32}), 1: []}
    )
    for rank, rows in gpus.items():
        place = folder / "output" / f"rank-{rank}"
        place.mkdir(parents=True)
        (place / "gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_run_document(run)
    seen = observation_of()
    seal(run, replace(seen, workers=tuple(replace(seen.workers[rank], node=nodes[rank]) for rank in (0, 1))))
    return Archive.open(folder)


def samples(address: str, watts: list[float], counter: list[float] | None = None) -> list[dict[str, Any]]:
    """One a second."""
    energy = [{}] * len(watts) if counter is None else [{"energy_joules": joules} for joules in counter]
    return [
        {"time": START + second, "address": address, "power_watts": power, **more}
        for second, (power, more) in enumerate(zip(watts, energy, strict=True))
    ]


def test_the_counter_goes_before_the_sampled_power(tmp_path: Path) -> None:
    archive = run_with(tmp_path / "a", {0: samples("0:1", [300, 300, 300], [1000, 1400, 1900])})
    watts = 900 / 2
    assert find_energy(archive) == Energy(900, watts * 86 / 51200, watts * 86 / 51200 / 128, ("GPU counter",))


def test_without_a_counter_power_is_integrated_and_called_an_estimate(tmp_path: Path) -> None:
    found = find_energy(run_with(tmp_path / "a", {0: samples("0:1", [100, 300, 200])}))
    assert found is not None
    assert found.joules == (100 + 300) / 2 + (300 + 200) / 2
    assert found.is_estimate
    assert found.label == "estimate: GPU power, integrated"


def test_a_counter_needs_no_power(tmp_path: Path) -> None:
    rows = [{key: row[key] for key in row if key != "power_watts"} for row in samples("0:1", [0] * 3, [10, 30, 40])]
    found = find_energy(run_with(tmp_path / "a", {0: rows}))
    assert found is not None
    assert (found.joules, found.is_estimate) == (30, False)


def test_a_counter_that_falls_is_not_believed(tmp_path: Path) -> None:
    found = find_energy(run_with(tmp_path / "a", {0: samples("0:1", [100, 100], [500, 3])}))
    assert found is not None
    assert (found.joules, found.is_estimate) == (100, True)


def test_gpus_add_up_and_a_shared_one_counts_once(tmp_path: Path) -> None:
    one = samples("0:1", [100] * 3, [0, 100, 200])
    apart = run_with(tmp_path / "apart", {0: one, 1: samples("0:2", [100] * 3, [0, 300, 600])})
    shared = run_with(tmp_path / "shared", {0: one, 1: one})
    assert [getattr(find_energy(each), "joules", None) for each in (apart, shared)] == [800, 200]


def test_gpus_of_two_machines_add_up_though_they_have_one_address(tmp_path: Path) -> None:
    one = samples("0:1", [100] * 3, [0, 100, 200])
    found = find_energy(run_with(tmp_path / "a", {0: one, 1: one}, ("n1", "n2")))
    assert found is not None
    assert found.joules == 400


def test_what_is_malformed_or_missing_gives_no_figure(tmp_path: Path) -> None:
    assert find_energy(run_with(tmp_path / "a", {})) is None
    odd: list[dict[str, Any]] = [
        {"time": "now", "power_watts": 1},
        {"time": START, "power_watts": 1e300},
        {"time": START, "power_watts": -1},
    ]
    assert find_energy(run_with(tmp_path / "b", {0: odd})) is None
    text = run_with(tmp_path / "c", {0: []})
    (tmp_path / "c" / "output" / "rank-0" / "gpu.jsonl").write_text("no json\n")
    assert find_energy(text) is None


def test_compare_and_report_show_it_with_its_source(tmp_path: Path) -> None:
    a = run_with(tmp_path / "a", {0: samples("0:1", [300] * 3, [0, 300, 600])})
    b = run_with(tmp_path / "b", {0: samples("0:1", [150] * 3)})
    found = compare([a], [b])
    row = found.rows["energy"]
    assert row.a is not None
    assert row.b is not None
    assert (row.a.mean, row.b.mean, row.higher_is_better) == (600, 300, False)
    assert found.energy_sources == ("GPU counter", "estimate: GPU power, integrated")
    [run] = collect([a])["runs"]
    assert (run["energy"].joules, run["energy"].label) == (600, "GPU counter")


# --- at the limits --------------------------------------------------------------------------------------------------


def test_a_run_without_seconds_of_training_counts_those_of_the_task(tmp_path: Path) -> None:
    archive = run_with(tmp_path / "a", {0: samples("0:1", [100] * 3, [0, 100, 200])})
    archive.result["task_seconds"] = {"training": None, "wall": 50.0}
    found = find_energy(archive)
    assert found is not None
    assert found.per_sample == pytest.approx(100 * 50 / 51200)
    assert figures_of(archive).keys() == {"energy", "energy per sample", "energy per token"}
    archive.result["samples"] = None
    assert figures_of(archive) == {"energy": 200}
