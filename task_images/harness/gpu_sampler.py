"""Utilization, memory, power and energy of this rank's GPU during training, from the vendor's management library.

NVIDIA: the package nvidia-ml-py (extra `gpu`). AMD: the package amdsmi of ROCm. Without the package or a driver,
nothing is sampled, which is not an error. Samples go to gpu.jsonl in the rank's output folder, summaries into the
result.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

FILE = "gpu.jsonl"
COUNTERS = ("utilization_percent", "memory_bytes", "power_watts", "energy_joules")
SECONDS = 1.0


class Reader(Protocol):
    """One GPU, read through the vendor's library."""

    def take(self) -> dict[str, float] | None:
        """Those of COUNTERS that the GPU has; None if the driver fails (e.g. the GPU has fallen off the bus)."""


class GpuSampler:
    """A context manager whose thread samples the GPU with PCI address `address`.

    is_amd   AMD's GPU instead of NVIDIA's
    """

    def __init__(self, address: str, folder: Path, seconds: float = SECONDS, *, is_amd: bool = False) -> None:
        self._address, self._folder, self._seconds = address, folder, seconds
        self._reader = (_open_amd if is_amd else _open_nvidia)(address)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[Mapping[str, float]] = []

    def __enter__(self) -> "GpuSampler":
        if self._reader is not None:
            self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def facts(self) -> dict[str, object]:
        """Means and sums so far; empty without samples. Energy is the difference of the GPU's counter."""
        now = self._take() if self._samples else None
        samples = [*self._samples, *([now] if now is not None else [])]
        if not samples:
            return {}
        found = {name: [sample[name] for sample in samples if name in sample] for name in COUNTERS}
        facts: dict[str, object] = {"samples": len(samples)}
        for name in ("utilization_percent", "power_watts"):
            if found[name]:
                facts[name] = sum(found[name]) / len(found[name])
        if found["memory_bytes"]:
            facts["peak_memory_bytes"] = max(found["memory_bytes"])
        if len(found["energy_joules"]) > 1:
            facts["energy_joules"] = found["energy_joules"][-1] - found["energy_joules"][0]
        return facts

    def _run(self) -> None:
        with open(self._folder / FILE, "w", encoding="utf-8") as file:
            while True:
                sample = self._take()
                if sample is not None:
                    self._samples.append(sample)
                    file.write(json.dumps(sample) + "\n")
                if self._stop.wait(self._seconds):
                    return

    def _take(self) -> Mapping[str, Any] | None:
        """One sample; None if the driver fails."""
        sample = None if self._reader is None else self._reader.take()
        return sample and {"time": time.time(), "address": self._address, **sample}


class _Nvidia:
    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def take(self) -> dict[str, float] | None:
        library, handle = self._library, self._handle
        counters: dict[str, Callable[[], float]] = {
            "utilization_percent": lambda: float(library.nvmlDeviceGetUtilizationRates(handle).gpu),
            "memory_bytes": lambda: float(library.nvmlDeviceGetMemoryInfo(handle).used),
            "power_watts": lambda: library.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "energy_joules": lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
        }
        return _read_each(counters, library.NVMLError)


class _Amd:
    """Power is the current value (MI300) or an average (MI200); the other one is the string "N/A"."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def take(self) -> dict[str, float] | None:
        library, handle = self._library, self._handle

        def read_watts() -> float:
            power = library.amdsmi_get_power_info(handle)
            watts = [power.get(name) for name in ("current_socket_power", "average_socket_power")]
            return next(float(each) for each in watts if isinstance(each, int | float))

        def read_joules() -> float:
            count = library.amdsmi_get_energy_count(handle)
            return float(count["energy_accumulator"] * count["counter_resolution"] / 1e6)  # from microjoules

        counters: dict[str, Callable[[], float]] = {
            "utilization_percent": lambda: float(library.amdsmi_get_gpu_activity(handle)["gfx_activity"]),
            "memory_bytes": lambda: library.amdsmi_get_gpu_vram_usage(handle)["vram_used"] * 2.0**20,
            "power_watts": read_watts,
            "energy_joules": read_joules,
        }
        return _read_each(counters, library.AmdSmiException)


def _read_each(counters: Mapping[str, Callable[[], float]], failure: type[Exception]) -> dict[str, float] | None:
    """The counters that this GPU has: partitions lack utilization, unified memory has no size, and old GPUs count no
    energy. None if none answers."""
    sample = {}
    for name, read in counters.items():
        with contextlib.suppress(failure, KeyError, TypeError, ValueError, StopIteration):
            sample[name] = read()
    return sample or None


def _open_nvidia(address: str) -> Reader | None:
    """The GPU; None if it is not available."""
    try:
        library = import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
        return _Nvidia(library, library.nvmlDeviceGetHandleByPciBusId(address))
    except library.NVMLError:
        return None


def _open_amd(address: str) -> Reader | None:
    """The GPU; None if it is not available."""
    try:
        library = import_module("amdsmi")
    except (ImportError, OSError, KeyError):  # importing the package loads ROCm's library
        return None
    try:
        library.amdsmi_init()
        return _Amd(library, library.amdsmi_get_processor_handle_from_bdf(address[-12:]))  # four digits of domain
    except library.AmdSmiException:
        return None
