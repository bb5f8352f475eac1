"""The process of a rank: tells rank 0 what it is, obeys its jobs, and writes what was measured into its own log.

Standard library only. What computes is a child with a limit for each job (`measure.py`).
"""

import json
import os
import platform
import queue
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from task_images.certify.rules import PREFIX
from task_images.contract import Contract
from task_images.facts import machine_facts

START_SECONDS = 120.0  # for the child to import torch
_GPU_FIELDS = (
    *("name", "serial", "driver_version", "vbios_version", "power.limit", "pcie.link.width.max", "ecc.mode.current"),
    *("clocks_throttle_reasons.active", "ecc.errors.uncorrected.volatile.total"),
)
_COUNTERS = {"ecc.errors.uncorrected.volatile.total": "ecc_uncorrected"}
# nvmlClocksThrottleReasons: hardware slowdown, hardware thermal slowdown, hardware power brake.
_HARDWARE_SLOWDOWN = 0x8 | 0x40 | 0x80
_lock = threading.Lock()


def say(kind: str, **fields: Any) -> None:
    """Write a line of evidence."""
    line = PREFIX + json.dumps({"kind": kind, **fields}, separators=(",", ":"), allow_nan=False) + "\n"
    with _lock:
        sys.stdout.write(line)
        sys.stdout.flush()


class Child:
    """The process that computes, started again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def ask(self, job: dict[str, Any], limit: float) -> dict[str, Any]:
        """The child's answer, or {"error": why there is none}."""
        if self._process is None:
            hello = self.start()
            if "error" in hello:
                return hello
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except OSError:
            self.kill()
            return {"error": "the measuring process ended"}
        return self._read(limit)

    def start(self) -> dict[str, Any]:
        """Start the child; its first words: device, versions, the port of its store."""
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._answers = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "task_images.certify.measure"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        threading.Thread(target=_forward, args=(self._process.stdout, self._answers), daemon=True).start()
        return self._read(START_SECONDS)

    def kill(self) -> None:
        """End the child at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _read(self, limit: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=limit)
        except queue.Empty:
            self.kill()
            return {"error": f"no answer within {limit:g} s"}
        if not line:
            code = None if self._process is None else self._process.wait()
            self.kill()
            return {"error": f"the measuring process ended with {code}"}
        answer = json.loads(line)
        return answer if isinstance(answer, dict) else {"error": "the measuring process said nothing sensible"}


def _forward(stream: Any, answers: "queue.Queue[str]") -> None:
    for line in stream:
        answers.put(line)
    answers.put("")


def inventory(versions: dict[str, str], gpu: dict[str, str]) -> dict[str, str]:
    """What nodes of one kind have in common. Without what differs between any two: names, addresses, serials."""
    facts = machine_facts()
    found = {
        "cpu": facts.get("cpu"),
        "cpus": os.cpu_count(),
        "cpu_quota": facts.get("cpu_quota"),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "libc": "-".join(platform.libc_ver()),
        "python": platform.python_version(),
        "memlock": facts.get("memlock_bytes"),
        "network_cards": _network_cards(),
        "infiniband": ",".join(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
        **versions,
        **{f"gpu.{key}": value for key, value in gpu.items() if key not in ("serial", *_COUNTERS, _GPU_FIELDS[-2])},
    }
    return {key: str(value) for key, value in found.items() if value not in (None, "")}


def _network_cards() -> str:
    """Driver and speed of each physical card, e.g. "ena 100000"; counted."""
    cards: dict[str, int] = {}
    for card in Path("/sys/class/net").glob("*/device"):
        with suppress(OSError):
            driver = (card / "driver").resolve().name
            speed = (card.parent / "speed").read_text().strip()
            cards[f"{driver} {speed}"] = cards.get(f"{driver} {speed}", 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in sorted(cards.items()))


def read_gpu(number: int) -> dict[str, str]:
    """What nvidia-smi says of a GPU; empty without it."""
    words = ["nvidia-smi", f"--id={number}", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
        values = [value.strip() for value in done.stdout.strip().split(",")]
        if len(values) == len(_GPU_FIELDS):
            return dict(zip(_GPU_FIELDS, values, strict=True))
    return {}


def read_counters(contract: Contract) -> dict[str, int]:
    """Counters of errors of this rank's GPU, and whether its hardware slows it down; empty on CPUs."""
    gpu = read_gpu(contract.local_rank) if contract.device == "gpu" else {}
    found = {name: int(gpu[field]) for field, name in _COUNTERS.items() if gpu.get(field, "").isdecimal()}
    with suppress(KeyError, ValueError):
        found["hardware_slowdown"] = int(int(gpu[_GPU_FIELDS[-2]], 16) & _HARDWARE_SLOWDOWN != 0)
    return found


def identify_machine() -> str:
    """Equal for ranks that share this machine's CPUs, whatever their host names."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def obey(contract: Contract, place: tuple[str, int]) -> None:
    """Do what rank 0 asks for until it says goodbye or is gone."""
    child = Child()
    hello = child.start()
    gpu = read_gpu(contract.local_rank) if contract.device == "gpu" else {}
    keys = inventory(hello.get("versions", {}), gpu)
    say("inventory", device=hello.get("device"), keys=keys, serial=gpu.get("serial"), error=hello.get("error"))
    connection = _connect(place)
    if connection is None:
        say("alone", error=f"rank 0 does not answer at port {place[1]}")
        return
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        introduction = {"rank": contract.rank, "node": contract.node_rank, "run": contract.run_id}
        introduction |= {"machine": identify_machine(), "time": time.time(), "port": hello.get("port")}
        _send(stream, {**introduction, "error": hello.get("error")})
        for line in stream:
            job = json.loads(line)
            if job["do"] == "end":
                break
            answer = child.ask(job, float(job["limit"]))
            say(job["do"], **job.get("tag", {}), **answer)
            if job.get("counters"):
                say("counters", **read_counters(contract))
            _send(stream, {"id": job["id"], **answer})
    child.kill()


def _send(stream: Any, message: dict[str, Any]) -> None:
    with suppress(OSError):
        stream.write(json.dumps(message) + "\n")
        stream.flush()


def _connect(place: tuple[str, int]) -> socket.socket | None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            connection = socket.create_connection(place, timeout=5)
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return connection
        time.sleep(0.2)
    return None
