"""What a GPU does during training: samples of utilization, memory, power and energy, and the network that NCCL chose.

torch samples by the vendor's library. NVIDIA: the package nvidia-ml-py (extra `gpu`), which also has the counter of the
GPU's energy. AMD: the package amdsmi of ROCm. Without the package or a driver, nothing is sampled, which is not an
error. Samples go to gpu.jsonl in the rank's output folder, summaries into the result.

With NCCL_DEBUG=INFO, NCCL (or AMD's RCCL) logs its choices. `log_to` directs the log to the rank's output folder unless
the user has chosen otherwise; `describe` reads it after the first collective.
"""

import atexit
import contextlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from task_images.contract import anonymize

LOG = "nccl.log"
FABRIC = "MLBENCH_FABRIC"  # "GBITS NAME" of the machine's fast network, from the cluster's record
MAX_LOG_BYTES = 1 << 20

# "Using network IB", "NET/Socket : Using [0]eth0:10.0.0.1<0>", "... -> 1[0] [send] via NET/IB/0/GDRDMA"
_CHOSEN = re.compile(r"Using network (\S+(?: \S+)?)$", re.MULTILINE)
_PLUGIN = re.compile(r"NET/(\w+)\s*: Using (.*\[\d+\].+)")  # without a number there is no interface
# The number is that of the card, with that of the rank that sends if another one does (PXN): "via NET/IB/2(4)/GDRDMA".
_VIA = re.compile(r"\bvia ((?:COLL)?NET/[^/\n]+|P2P/\w+|SHM/?\w*)(?:/\d+(?:\(\d+\))?)?(/GDRDMA)?")
# "AllReduce: 1048576 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..15}": on rank 0 with NCCL_DEBUG_SUBSYS=TUNING,
# since NCCL 2.24.3, for each launch.
_CHOICE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
_CHANNELS = re.compile(r"(\d+) coll channels\b.*? (\d+) p2p channels\b(?! per peer)")
_ADDRESS = re.compile(r":[0-9a-fA-F.:%]+<\d+>")  # "eth0:10.0.0.1<0>" -> "eth0"
_VERSION = re.compile(r"[NR]CCL version(?: :)? (\S+)")  # AMD's RCCL: "RCCL version : 2.22.3-develop:8fdb8c0"


def log_to(folder: Path, environ: MutableMapping[str, str]) -> None:
    """Have NCCL log its choices to `folder`, unless the user has set another place.

    Each line of the log names this machine: in an anonymous run it is kept elsewhere until this process exits.
    """
    if "NCCL_DEBUG_FILE" in environ or environ.get("NCCL_DEBUG", "INFO") != "INFO":
        return
    if environ.get("MLBENCH_ANONYMOUS"):
        folder = Path(tempfile.mkdtemp(prefix="mlbench-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    environ["NCCL_DEBUG"] = "INFO"
    environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET,ENV")
    environ["NCCL_DEBUG_FILE"] = str(folder / LOG)


def describe(environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """For the result: NCCL's variables, the network in its log, and the machine's network.

    `nominal_gbits` is the bandwidth of the machine's fast network in Gbit/s, `fabric` its name. Empty entries are
    omitted. In an anonymous run, variables that are not numbers are digests, and interfaces have no addresses.
    """
    variables = {name: value for name, value in sorted(environ.items()) if name.startswith(("NCCL_", "RCCL_"))}
    is_anonymous = bool(environ.get("MLBENCH_ANONYMOUS"))
    if is_anonymous:
        variables = {name: value if value.isdecimal() else anonymize(value) for name, value in variables.items()}
    facts: dict[str, object] = {"variables": variables}
    gbits, _, name = environ.get(FABRIC, "").partition(" ")
    if gbits.isdecimal():
        facts |= {"fabric": name, "nominal_gbits": int(gbits)}
    try:
        with open(environ.get("NCCL_DEBUG_FILE", ""), encoding="utf-8", errors="replace") as file:
            facts |= parse_log(file.read(MAX_LOG_BYTES))
    except OSError:
        pass
    if is_anonymous and "interfaces" in facts:
        facts["interfaces"] = _ADDRESS.sub("", str(facts["interfaces"]))
    return facts


def parse_log(text: str) -> dict[str, object]:
    """version, network (IB, Socket, a plugin's name), interfaces, transports and number of channels, and NCCL's
    algorithm, protocol and channels for each collective and size in bytes, as far as logged."""
    chosen, plugin, version = _CHOSEN.findall(text), _PLUGIN.search(text), _VERSION.search(text)
    network = chosen[-1] if chosen else plugin[1] if plugin else None  # the last of several attempts counts
    ways = sorted({way + direct for way, direct in _VIA.findall(text)})
    choices = {
        (name, int(size)): {"algorithm": algorithm, "protocol": protocol, "channels": int(last) - int(first) + 1}
        for name, size, algorithm, protocol, first, last in _CHOICE.findall(text)
    }
    channels = _CHANNELS.search(text)
    found = {
        "version": version[1] if version else None,
        "network": network,
        "interfaces": plugin[2].strip() if plugin else None,
        "ways": ways or None,
        "channels": {"collective": int(channels[1]), "p2p": int(channels[2])} if channels else None,
        "choices": [{"collective": name, "bytes": size, **choice} for (name, size), choice in sorted(choices.items())]
        or None,
    }
    return {name: value for name, value in found.items() if value is not None}


FILE = "gpu.jsonl"
COUNTERS = ("utilization_percent", "memory_bytes", "power_watts", "energy_joules")
SECONDS = 1.0


class GpuSampler:
    """A context manager whose thread samples the GPU `device`."""

    def __init__(self, device: torch.device, folder: Path, seconds: float = SECONDS) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        self._device, self._address = device, address
        self._folder, self._seconds = folder, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
        self._samples: list[Mapping[str, Any]] = []

    def __enter__(self) -> "GpuSampler":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
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
        if self._take() is None:
            return
        with open(self._folder / FILE, "w", encoding="utf-8") as file:
            while True:
                if (sample := self._take()) is not None:
                    self._samples.append(sample)
                    file.write(json.dumps(sample) + "\n")
                if self._stop.wait(self._seconds):
                    return

    def _take(self) -> Mapping[str, Any] | None:
        """The counters that this GPU has: partitions lack utilization, and unified memory has no size. None if none
        answers, as without the vendor's package."""
        cuda, watts = torch.cuda, 1.0 if torch.version.hip else 1e-3  # torch gives AMD's in W, NVIDIA's in mW
        readers: dict[str, Callable[[], float]] = {
            "utilization_percent": lambda: float(cuda.utilization(self._device)),
            "memory_bytes": lambda: float(cuda.device_memory_used(self._device)),
            "power_watts": lambda: cuda.power_draw(self._device) * watts,
            "energy_joules": self._count_joules,
        }
        sample = {}
        for name, read in readers.items():
            with contextlib.suppress(Exception):  # each library has its own
                sample[name] = read()
        return {"time": time.time(), "address": self._address, **sample} if sample else None

    def _count_joules(self) -> float:
        """NVIDIA's counter since the driver was loaded, which torch does not ask for."""
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(self._address)
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
