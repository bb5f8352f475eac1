"""Energy of the machine's CPUs, from a powercap tree as two machines had it."""

from pathlib import Path

import pytest

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
