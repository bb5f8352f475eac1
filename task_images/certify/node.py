"""The process of a rank: tells rank 0 what it is, obeys its jobs, and writes what was measured into its own log.

Standard library only. What computes is a child with a limit for each job (`measure.py`).
"""

import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from task_images.certify.rules import PREFIX
from task_images.contract import Contract, PeerLostError
from task_images.facts import machine_facts

START_SECONDS = 120.0  # for the child to import torch
_THROTTLE, _ERRORS = "clocks_throttle_reasons.active", "ecc.errors.uncorrected.volatile.total"
_GPU_FACTS = ("name", "driver_version", "vbios_version", "power.limit", "pcie.link.width.max", "ecc.mode.current")
_GPU_FIELDS = (*_GPU_FACTS, "serial", _THROTTLE, _ERRORS)
# nvmlClocksThrottleReasons: hardware slowdown, hardware thermal slowdown, hardware power brake.
_HARDWARE_SLOWDOWN = 0x8 | 0x40 | 0x80
_MAX_TEXT = 500  # a judge reads no longer ones; a machine may have hundreds of virtual network cards
writing = threading.Lock()  # into this rank's log: rank 0 gives orders and obeys them

Job = dict[str, Any]


def say(kind: str, **fields: Any) -> None:
    """Write a line of evidence."""
    line = PREFIX + json.dumps({"kind": kind, **fields}, separators=(",", ":"), allow_nan=False) + "\n"
    with writing:
        sys.stdout.write(line)
        sys.stdout.flush()


class Child:
    """The process that computes, started again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._port = 0  # of its store, which the next process must take again: the other ranks know no other

    @property
    def is_dead(self) -> bool:
        """Whether the next job has to wait for a new process."""
        return self._process is None

    def start(self) -> dict[str, Any]:
        """Start the child; its first words: versions, the port of its store."""
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._pipe, end = Pipe()
        with end:
            words = [sys.executable, "-m", "task_images.certify.measure", str(end.fileno()), str(self._port)]
            environment = {**os.environ, "PYTHONPATH": path}
            # What libraries print must not cut lines of evidence.
            self._process = subprocess.Popen(words, stdout=sys.stderr, pass_fds=[end.fileno()], env=environment)
        hello = self._read(START_SECONDS)
        self._port = hello.get("port", self._port)
        return hello

    def ask(self, job: Job) -> dict[str, Any]:
        """The child's answer, or {"error": why there is none}."""
        if self._process is None and "error" in (hello := self.start()):
            return hello
        send(self._pipe, job)
        return self._read(job["limit"])

    def _read(self, limit: float) -> dict[str, Any]:
        problem = f"no answer within {limit:g} s"
        try:
            if self._pipe.poll(limit):
                return dict(json.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            assert self._process is not None
            problem = f"the measuring process ended with {self._process.wait()}"
        self.kill()
        return {"error": problem}

    def kill(self) -> None:
        """End the child at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._pipe.close()


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
        **{f"gpu.{key}": gpu[key] for key in _GPU_FACTS if key in gpu},
    }
    return {key: str(value)[:_MAX_TEXT] for key, value in found.items() if value not in (None, "")}


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


def read_counters(contract: Contract) -> dict[str, dict[str, int]]:
    """What the node has counted so far: how often a link went down, errors of this rank's GPU; and whether its hardware
    slows it down now. Without what the node does not tell."""
    gpu = read_gpu(contract.local_rank) if contract.device == "gpu" else {}
    found = {} if (links := count_lost_links(Path("/sys"))) is None else {"links_down": links}
    if gpu.get(_ERRORS, "").isdecimal():
        found["ecc_uncorrected"] = int(gpu[_ERRORS])
    with suppress(KeyError, ValueError):
        found["hardware_slowdown"] = int(int(gpu[_THROTTLE], 16) & _HARDWARE_SLOWDOWN != 0)
    return {"counters": found} if found else {}


def count_lost_links(system: Path) -> int | None:
    """How often the links of physical network cards and InfiniBand ports went down, by a sysfs; None without any."""
    cards = (card.parent / "carrier_down_count" for card in system.glob("class/net/*/device"))
    counts = []
    for path in (*cards, *system.glob("class/infiniband/*/ports/*/counters/link_downed")):
        with suppress(OSError, ValueError):
            counts.append(int(path.read_text()))
    return sum(counts) if counts else None


def identify_machine() -> str:
    """Equal for ranks that share this machine's CPUs, whatever their host names."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def obey(contract: Contract, place: tuple[str, int]) -> None:
    """Do what rank 0 asks for until it says goodbye or is gone. Raises PeerLostError if it cannot be reached."""
    child = Child()
    hello = child.start()
    gpu = read_gpu(contract.local_rank) if contract.device == "gpu" else {}
    say("inventory", keys=inventory(hello.get("versions", {}), gpu), serial=gpu.get("serial"), error=hello.get("error"))
    with _connect(place) as connection:
        introduction = {"rank": contract.rank, "node": contract.node_rank, "run": contract.run_id}
        machine = {"machine": identify_machine(), "time": time.time(), "port": hello.get("port")}
        send(connection, {**introduction, **machine})
        with suppress(OSError, EOFError):
            while (job := json.loads(connection.recv_bytes()))["do"] != "end":
                answer = child.ask(job)
                if job.get("rank", 0) == 0:  # the first of a group speaks for it
                    counters = read_counters(contract) if job["do"] == "node" else {}
                    kind = "failed" if job["say"] != "rates" and "error" in answer else job["say"]
                    say(kind, **job["tag"], **answer, **counters)
                send(connection, {"values": answer.get("values", {}), "restarts": child.is_dead})
    child.kill()


def send(connection: Connection, message: Job) -> None:
    """Send unless the other end is gone."""
    with suppress(OSError):
        connection.send_bytes(json.dumps(message).encode())


def as_connection(link: socket.socket) -> Connection:
    """Messages over a socket that notices if the other machine is gone."""
    link.setblocking(True)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(link.detach())


def _connect(place: tuple[str, int]) -> Connection:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            return as_connection(socket.create_connection(place, timeout=5))
        time.sleep(0.2)
    raise PeerLostError(f"rank 0 does not answer at port {place[1]}")
