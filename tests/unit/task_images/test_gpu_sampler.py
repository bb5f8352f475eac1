"""Samples of a GPU by stand-ins of NVIDIA's and AMD's libraries: what is written, summed, and may be missing."""

import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from task_images.gpu import GpuSampler


class Library(ModuleType):
    """One GPU that uses 300 W."""

    class NVMLError(Exception):
        pass

    def __init__(self, has_energy: bool = True, has_driver: bool = True) -> None:
        super().__init__("pynvml")
        self.has_energy, self.has_driver, self.asked = has_energy, has_driver, 0

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> str:
        return address

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self.asked += 1
        if self.asked == 2:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=1000 * self.asked)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 300_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if not self.has_energy:
            raise self.NVMLError("Not Supported")
        return 5_000_000 + 1000 * self.asked


def sample(monkeypatch: pytest.MonkeyPatch, folder: Path, library: Library, least: int) -> GpuSampler:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    with GpuSampler("0000:01:00.0", folder, seconds=0.001) as sampler:
        while library.asked < least:
            time.sleep(0.001)
    return sampler


def test_what_a_gpu_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "energy_joules" not in sample(monkeypatch, tmp_path, Library(has_energy=False), 1).facts()


def test_without_driver_or_library_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sample(monkeypatch, tmp_path, Library(has_driver=False), 0).facts() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with GpuSampler("0000:01:00.0", tmp_path) as sampler:
        assert sampler.facts() == {}
    assert not list(tmp_path.iterdir())


class AmdLibrary(ModuleType):
    """One GPU with the answers of the AMD SMI library: an MI300X, or an MI250X, which knows the average power alone."""

    class AmdSmiException(Exception):
        pass

    def __init__(self, *, has_current: bool = True, has_energy: bool = True) -> None:
        super().__init__("amdsmi")
        self.has_current, self.has_energy, self.asked, self.address = has_current, has_energy, 0, ""

    def amdsmi_init(self) -> None: ...

    def amdsmi_get_processor_handle_from_bdf(self, address: str) -> str:
        self.address = address
        return address

    def amdsmi_get_power_info(self, handle: str) -> dict[str, object]:
        self.asked += 1
        if self.asked == 2:
            raise self.AmdSmiException("busy")
        watts = (740, "N/A") if self.has_current else ("N/A", 480)
        return {"current_socket_power": watts[0], "average_socket_power": watts[1], "power_limit": 750_000_000}

    def amdsmi_get_gpu_activity(self, handle: str) -> dict[str, object]:
        return {"gfx_activity": 97, "umc_activity": 40, "mm_activity": "N/A"}

    def amdsmi_get_gpu_vram_usage(self, handle: str) -> dict[str, int]:
        return {"vram_total": 196_592, "vram_used": 1024}

    def amdsmi_get_energy_count(self, handle: str) -> dict[str, float]:
        if not self.has_energy:
            raise self.AmdSmiException("not supported in a guest")
        return {"energy_accumulator": 1_000_000 + 65_536 * self.asked, "counter_resolution": 15.2587890625}


def sample_amd(monkeypatch: pytest.MonkeyPatch, folder: Path, library: AmdLibrary) -> GpuSampler:
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    with GpuSampler("00000000:c1:00.0", folder, seconds=0.001, is_amd=True) as sampler:
        while library.asked < 4:
            time.sleep(0.001)
    return sampler


def test_amd_gpus_are_sampled_by_their_own_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = sample_amd(monkeypatch, tmp_path, library := AmdLibrary()).facts()
    assert library.address == "0000:c1:00.0"
    assert facts["power_watts"] == 740
    assert facts["utilization_percent"] == 97
    assert facts["peak_memory_bytes"] == 1 << 30
    # 65 536 steps of 15.26 microjoules are a joule; the first and the last sample are asked - 1 apart.
    assert facts["energy_joules"] == pytest.approx(library.asked - 1)


def test_older_amd_gpus_and_guests_have_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = sample_amd(monkeypatch, tmp_path, AmdLibrary(has_current=False, has_energy=False)).facts()
    assert facts["power_watts"] == 480
    assert "energy_joules" not in facts


def test_without_amds_library_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with GpuSampler("0000:01:00.0", tmp_path, is_amd=True) as sampler:
        assert sampler.facts() == {}
