"""How fast another machine is, and on what the figure is based: each basis by hand."""

import math
from typing import Any

import pytest

from mlbench_cli.predict import machines
from mlbench_cli.predict.machines import (
    HERE,
    Calibrated,
    Gpu,
    MachineType,
    compare_speed,
    find_gpu,
    find_rate,
    load_gpus,
    load_machines,
)
from mlbench_cli.predict.samples import Basis

CPU = Calibrated(2, "", 100.0, "fp32", "gke/n1-standard-4")
VM = MachineType("gke", "n1-standard-8", "", 0, 8, 30, 16)
GPUS = {
    "fast": Gpu("fast", ("Fast",), 80.0, 3200.0, 80, "nvlink"),
    "slow": Gpu("slow", ("Slow", "Slow Ti"), 5.0, 200.0, 16, "pcie"),
    "slower": Gpu("slower", ("Slow Ti Super",), 5.0, 100.0, 16, "pcie"),
}
RATES = [
    {"task": "t", "gpu": "fast", "precision": "amp", "rate": "800", "model": "M", "source": "S"},
    {"task": "t", "gpu": "fast", "precision": "fp32", "rate": "400", "model": "M", "source": "S"},
    {"task": "t", "gpu": "slow", "precision": "fp32", "rate": "50", "model": "M", "source": "S"},
]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "load_gpus", lambda: GPUS)
    monkeypatch.setattr(machines, "_rows", lambda name: {"published_rates.csv": RATES}[name])


def machine(gpu: str = "", gpus: int = 1, **changes: Any) -> MachineType:
    fields: dict[str, Any] = {
        "provider": "gke",
        "name": "m",
        "gpu": gpu,
        "gpus": gpus if gpu else 0,
        "vcpus": 8,
        "memory_gib": 30,
        "gbits": 10,
    }
    return MachineType(**{**fields, **changes})


@pytest.mark.parametrize(("vcpus", "cores"), [(1, 1), (2, 1), (3, 1), (4, 2), (96, 48)])
def test_two_virtual_cpus_are_a_core(vcpus: int, cores: int) -> None:
    assert machine(vcpus=vcpus).cores == cores


def test_a_worker_has_a_rank_for_each_gpu_and_one_without() -> None:
    assert [machine("fast", count).ranks for count in (1, 4)] == [1, 4]
    assert machine().ranks == 1


def test_what_a_machine_is_priced_and_named_as() -> None:
    plain = machine()
    assert (plain.items, plain.kind, str(plain)) == (["m"], "gke/m", "m")
    built = machine("fast", priced_as="m+gpu-fast")
    assert (built.items, built.kind, str(built)) == (["m", "gpu-fast"], "gke/m", "m+fast")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA Fast 80GB", "fast"),
        ("NVIDIA Slow", "slow"),
        ("NVIDIA Slow Ti Super", "slower"),
        ("Radeon", None),
        ("", None),
    ],
)
@pytest.mark.usefixtures("tables")
def test_the_longest_name_that_matches_is_the_gpu(name: str, key: str | None) -> None:
    found = find_gpu(name)
    assert (found.key if found else None) == key


@pytest.mark.parametrize(
    ("task", "gpu", "precision", "found"),
    [
        ("t", "fast", "fp32", (400.0, "M, S")),
        ("t", "fast", "amp", (800.0, "M, S")),
        ("t", "fast", "bf16", (800.0, "M, S")),
        ("t", "slow", "bf16", None),
        ("u", "fast", "fp32", None),
        ("t", "slower", "fp32", None),
    ],
)
@pytest.mark.usefixtures("tables")
def test_a_published_rate_is_for_a_task_a_gpu_and_a_kind_of_numbers(
    task: str, gpu: str, precision: str, found: tuple[float, str] | None
) -> None:
    assert find_rate(task, gpu, precision) == found


def test_this_machine_is_as_fast_as_it_was_measured() -> None:
    here = machine(provider=HERE, vcpus=64)
    assert compare_speed("t", here, CPU) == machines.Speed(1.0, 0.05, Basis.MEASURED, "measured here")


def test_a_calibration_on_the_same_machine_type_counts_before_a_guess() -> None:
    other = Calibrated(4, "", 250.0, "fp32", "gke/n1-standard-8")
    found = compare_speed("t", VM, CPU, [Calibrated(4, "A GPU", 999.0, "fp32", "gke/n1-standard-8"), other])
    assert (found.factor, found.spread, found.basis) == (0.4, 0.05, Basis.MEASURED)
    assert found.note == "measured on gke/n1-standard-8"
    own = compare_speed("t", machine(name="n1-standard-4"), CPU, [other])
    assert (own.factor, own.basis) == (1.0, Basis.MEASURED)


def test_other_processors_are_guessed_from_their_cores() -> None:
    found = compare_speed("t", VM, CPU)
    assert (found.factor, found.spread, found.basis) == (0.5, 0.32, Basis.GUESSED)
    assert found.note == "guessed from 4 physical cores against 2, within a factor of 1.5"


@pytest.mark.usefixtures("tables")
def test_a_processor_is_guessed_from_a_gpu_by_peak_and_memory_rates() -> None:
    """4 cores: 0.32 TFLOPS and 20 GB/s, so 80 / 0.32 = 250 times in arithmetic and 3200 / 20 = 160 in memory."""
    own = Calibrated(2, "NVIDIA Fast", 100.0, "fp32")
    found = compare_speed("t", VM, own)
    assert found.factor == pytest.approx(math.sqrt(250 * 160))
    assert (found.spread, found.basis) == (0.86, Basis.GUESSED)
    assert found.note == "guessed from peak and memory rates of NVIDIA Fast"
    unknown = compare_speed("t", VM, Calibrated(2, "Radeon", 100.0, "fp32"))
    assert unknown.factor == pytest.approx(math.sqrt(20 / 0.32 * 1000 / 20))


@pytest.mark.usefixtures("tables")
def test_a_calibration_on_the_same_gpu_counts_before_published_rates() -> None:
    own, other = Calibrated(2, "NVIDIA Slow", 30.0, "fp32"), Calibrated(2, "NVIDIA Fast", 120.0, "fp32")
    found = compare_speed("t", machine("fast"), own, [other])
    assert (found.factor, found.spread, found.basis) == (0.25, 0.05, Basis.MEASURED)
    assert found.note == "measured on NVIDIA Fast"
    assert compare_speed("t", machine("slow"), own, [other]).factor == 1.0


@pytest.mark.usefixtures("tables")
def test_published_rates_are_compared_with_each_other_if_both_are_known() -> None:
    """Of two GPUs the ratio of their published rates; of a processor its own rate against the published one."""
    found = compare_speed("t", machine("fast"), Calibrated(2, "NVIDIA Slow", 30.0, "fp32"))
    assert (found.factor, found.spread, found.basis) == (0.125, 0.16, Basis.PUBLISHED)
    assert found.note == "published rate of fast: M, S"
    assert compare_speed("t", machine("fast"), CPU).factor == 0.25
    mixed = compare_speed("t", machine("fast"), Calibrated(2, "NVIDIA Slow", 30.0, "bf16"))
    assert mixed.factor == pytest.approx(30 / 800)


@pytest.mark.usefixtures("tables")
def test_without_published_rates_peak_and_memory_rates_decide() -> None:
    """Half as fast in memory as the slow one and as fast in arithmetic: the square root of 2."""
    found = compare_speed("t", machine("slower"), Calibrated(2, "NVIDIA Slow", 30.0, "fp32"))
    assert found.factor == pytest.approx(math.sqrt(2))
    assert (found.spread, found.basis) == (0.32, Basis.GUESSED)
    assert found.note == "guessed from peak and memory rates of slow and slower"


@pytest.mark.usefixtures("tables")
def test_a_gpu_is_guessed_from_cores_within_a_factor_of_three() -> None:
    """Two cores: 0.16 TFLOPS and 10 GB/s."""
    found = compare_speed("t", machine("slower"), CPU)
    assert found.factor == pytest.approx(math.sqrt(0.16 / 5 * 10 / 100))
    assert (found.spread, found.basis) == (0.86, Basis.GUESSED)
    assert found.note == "guessed from peak and memory rates of 2 CPU cores and slower, within a factor of 3"


def test_every_gpu_of_a_machine_type_is_in_the_table_of_gpus() -> None:
    """And the figures are in the documented units: an A100 has 19.5 TFLOPS in fp32, and 40 or 80 GB."""
    assert {each.gpu for each in load_machines() if each.gpus} <= set(load_gpus())
    assert all(bool(each.gpu) is bool(each.gpus) for each in load_machines())
    assert all(0 < each.gbits <= 3200 for each in load_machines())
    a100 = find_gpu("NVIDIA A100-SXM4-40GB")
    assert a100 is not None
    assert (a100.fp32_tflops, round(a100.memory_gib)) == (19.5, 40)
