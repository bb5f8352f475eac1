"""Utilisation, memory, power and energy of this rank's GPU while it trains, by NVIDIA's management library.

Needs the package nvidia-ml-py (extra `gpu`); without it, or without a driver, nothing is sampled and nothing fails.
Samples go to gpu.jsonl in the rank's output folder, the sums into the result.
"""

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

FILE = "gpu.jsonl"
SECONDS = 1.0


class GpuSampler:
    """A thread that samples the GPU with PCI address `address` from `with` on until the end of the block."""

    def __init__(self, address: str, folder: Path, seconds: float = SECONDS) -> None:
        self._address, self._folder, self._seconds = address, folder, seconds
        self._library, self._handle = _open(address)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[Mapping[str, float]] = []

    def __enter__(self) -> "GpuSampler":
        if self._library is not None:
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
        """Means and sums until now; empty without samples. Energy is the difference of the GPU's own counter."""
        now = self._take() if self._samples else None
        samples = [*self._samples, *([now] if now is not None else [])]
        if not samples:
            return {}
        facts: dict[str, object] = {
            "samples": len(samples),
            "utilization_percent": _mean(samples, "utilization_percent"),
            "power_watts": _mean(samples, "power_watts"),
            "peak_memory_bytes": max(sample["memory_bytes"] for sample in samples),
        }
        if "energy_joules" in samples[0]:
            facts["energy_joules"] = samples[-1]["energy_joules"] - samples[0]["energy_joules"]
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

    def _take(self) -> Mapping[str, float] | None:
        """One sample; None if the driver refuses (a GPU that fell off the bus)."""
        library, handle = self._library, self._handle
        try:
            sample = {
                "time": time.time(),
                "utilization_percent": float(library.nvmlDeviceGetUtilizationRates(handle).gpu),
                "memory_bytes": float(library.nvmlDeviceGetMemoryInfo(handle).used),
                "power_watts": library.nvmlDeviceGetPowerUsage(handle) / 1e3,
            }
        except library.NVMLError:
            return None
        with contextlib.suppress(library.NVMLError):  # GPUs before Volta do not count it
            sample["energy_joules"] = library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        return sample


def _open(address: str) -> tuple[Any, Any]:
    """The library and the GPU's handle; None for both if it cannot be had."""
    try:
        library = import_module("pynvml")
    except ImportError:
        return None, None
    try:
        library.nvmlInit()
        return library, library.nvmlDeviceGetHandleByPciBusId(address)
    except library.NVMLError:
        return None, None


def _mean(samples: list[Mapping[str, float]], name: str) -> float:
    return sum(sample[name] for sample in samples) / len(samples)
