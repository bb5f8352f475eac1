"""Energy of the machine's CPUs, from a powercap tree as two machines had it."""

import os
from pathlib import Path

import pytest

from mlbench_cli.agent import machine
from mlbench_cli.agent.load import LoadMeter

MOST = 262_143_328_850  # of an Intel package; AMD's is 65_532_610_987


def write_zone(root: Path, zone: str, name: str, counter: int, most: int = MOST) -> Path:
    folder = root / "sys/class/powercap" / zone
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    (folder / "energy_uj").write_text(f"{counter}\n")
    return folder / "energy_uj"


def test_packages_and_memory_count_and_what_they_contain_does_not(tmp_path: Path) -> None:
    zones = {
        "intel-rapl:0": ("package-0", 3_000_000),
        "intel-rapl:0:0": ("core", 1_000_000),  # within the package
        "intel-rapl:0:1": ("dram", 500_000),  # beside it
        "intel-rapl:1": ("package-1", 2_000_000),
        "intel-rapl:2": ("psys", 9_000_000),  # all of it, and more
        "intel-rapl-mmio:0": ("package-0", 3_000_000),  # the same counter by another way
    }
    files = {zone: write_zone(tmp_path, zone, name, 0) for zone, (name, _) in zones.items()}
    meter = LoadMeter("held", root=str(tmp_path))
    for zone, (_, counter) in zones.items():
        files[zone].write_text(f"{counter}\n")
    assert meter.row(0.0)["cpu_joules"] == 5.5


def test_a_counter_that_begins_again_goes_on(tmp_path: Path) -> None:
    file = write_zone(tmp_path, "intel-rapl:0", "package-0", MOST - 1_000_000)
    meter = LoadMeter("held", root=str(tmp_path))
    for counter, joules in ((1_000_000, 2.0), (4_000_000, 5.0)):
        file.write_text(f"{counter}\n")
        assert meter.row(0.0)["cpu_joules"] == pytest.approx(joules)


def test_without_counters_there_is_no_figure(tmp_path: Path) -> None:
    assert "cpu_joules" not in LoadMeter("held", root=str(tmp_path)).row(0.0)
    write_zone(tmp_path, "intel-rapl:0", "package-0", 1).unlink()  # as for everybody but root: it cannot be read
    assert "cpu_joules" not in LoadMeter("held", root=str(tmp_path)).row(0.0)


def write_counters(root: Path, busy: int, stolen: int, waited: int) -> None:
    """Counters of two CPUs, in ticks of 10 ms, of which this process may use the first; microseconds of waiting."""
    ticks = f"{busy} 1 2 1000 1000 3 4 {stolen} 50 60"
    (root / "proc/pressure").mkdir(parents=True, exist_ok=True)
    (root / "proc/stat").write_text(f"cpu  9 9 9 9 9 9 9 9\ncpu0 {ticks}\ncpu1 9999 0 0 0 0 0 0 0 0 0\nintr 1\n")
    pressure = f"some avg10=0.00 avg60=0.00 total={waited}\nfull avg10=0.00 total=99\n"
    (root / "proc/pressure/cpu").write_text(pressure)


def test_the_time_of_usable_cpus_counts_and_that_of_others_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(machine, "TICKS", 100)
    write_counters(tmp_path, 1000, 10, 5_000_000)
    meter = LoadMeter("held", "why", root=str(tmp_path))
    write_counters(tmp_path, 1250, 40, 7_500_000)
    row = meter.row(0.0)
    assert (row["busy_seconds"], row["steal_seconds"], row["waiting_seconds"]) == (2.5, 0.3, 2.5)
    assert (row["kind"], row["lock"], row["lock_reason"]) == ("machine", "held", "why")
    assert not {"lock", "lock_reason", "cores", "quota"} & set(meter.row(0.0))  # which do not change


def test_a_machine_that_counts_nothing_has_only_the_runs_own_time(tmp_path: Path) -> None:
    row = LoadMeter("shared", root=str(tmp_path)).row(0.0)
    assert not {"busy_seconds", "steal_seconds", "waiting_seconds", "cpu_joules"} & set(row)
    assert row["elapsed_seconds"] >= 0


def test_the_runs_own_time_never_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = os.times()
    monkeypatch.setattr(os, "times", lambda: spent)
    meter = LoadMeter("held", root=str(tmp_path))
    assert [meter.row(seconds)["own_seconds"] for seconds in (2.5, 1.0, 4.0)] == [2.5, 2.5, 4.0]
