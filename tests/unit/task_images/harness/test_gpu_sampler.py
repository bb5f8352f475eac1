"""Samples of a GPU by a library that stands for NVIDIA's: what is written, what is summed, and what may be missing."""

import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from task_images.harness.gpu_sampler import GpuSampler


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


def test_samples_are_written_and_summed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = sample(monkeypatch, tmp_path, library := Library(), 4).facts()
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    # One was refused; the last is that of the moment when the facts were asked for.
    assert len(lines) + 1 == facts["samples"] == library.asked - 1
    assert {line["power_watts"] for line in lines} == {facts["power_watts"]} == {300.0}
    assert facts["utilization_percent"] == 50
    assert facts["peak_memory_bytes"] == 1000 * library.asked
    assert facts["energy_joules"] == library.asked - 1


def test_what_a_gpu_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "energy_joules" not in sample(monkeypatch, tmp_path, Library(has_energy=False), 1).facts()


def test_without_driver_or_library_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sample(monkeypatch, tmp_path, Library(has_driver=False), 0).facts() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with GpuSampler("0000:01:00.0", tmp_path) as sampler:
        assert sampler.facts() == {}
    assert not list(tmp_path.iterdir())
