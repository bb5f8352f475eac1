"""This machine as ranks use it: ports, devices, memory kills, and samples of resources. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlbench_cli.agent import processes

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Does nothing on other systems than Linux, which rely on process groups alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def keep_only(*descriptors: int) -> None:
    """Close whatever else was inherited (a daemon must not hold a caller's pipes and locks), and pass nothing on."""
    place = next((path for path in ("/proc/self/fd", "/dev/fd") if os.path.isdir(path)), None)
    for descriptor in map(int, os.listdir(place) if place else ()):
        if descriptor > 2 and descriptor not in descriptors:
            with contextlib.suppress(OSError):  # the one through which the list was read
                os.close(descriptor)
    for descriptor in descriptors:
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)


def start_guard(work: Callable[[int], None]) -> int:
    """A child in a separate session that only KILL ends: it does `work` with the reading end of a pipe.

    Returns the writing end; once it is closed, or this process has ended, the other one is at its end of file.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(reader)
        return writer
    try:
        os.close(writer)
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        work(reader)
    finally:
        os._exit(0)


def free_port() -> int:
    """A free port below the system's range for outgoing connections."""
    lowest, highest = 15000, 32768
    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file,
    ):
        highest = min(highest, max(int(file.read().split()[0]), lowest + 1000))
    for _ in range(1000):
        port = lowest + int.from_bytes(os.urandom(4), "big") % (highest - lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(errno.EADDRINUSE, "no free port")


def visible_gpus(environ: Mapping[str, str], root: str = "") -> list[str]:
    """GPUs that a process may use: CUDA_VISIBLE_DEVICES if it is set, which ROCm heeds, too; else the numbers of
    /dev/nvidiaN, or AMD's GPUs in the order of the kernel's topology. `root` holds dev/ and sys/."""
    try:
        files = os.listdir(f"{root}/dev")
    except OSError:
        files = []
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        # As CUDA reads it: the list ends at the first word that names no device ("-1", "NoDevFiles").
        has_devices = any(name in ("kfd", "dxg") or name[:6] in ("nvidia", "nvhost") for name in files)
        words = [word.strip() for word in given.split(",")] if has_devices else []
        wrong = (n for n, word in enumerate(words) if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", word))
        return words[: next(wrong, len(words))]
    nvidia = sorted((name[6:] for name in files if name[:6] == "nvidia" and name[6:].isdigit()), key=int)
    return nvidia or [str(number) for number in range(_count_amd_gpus(root) if "kfd" in files else 0)]


def _count_amd_gpus(root: str) -> int:
    """Nodes of AMD's compute driver that are no CPUs (Linux, Documentation/gpu/amdgpu: gpu_id is 0 for CPUs)."""
    folder = f"{root}/sys/class/kfd/kfd/topology/nodes"
    count = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            # A container's cgroup may forbid some GPUs; their files cannot be read then.
            with contextlib.suppress(OSError, ValueError), open(f"{folder}/{name}/gpu_id", encoding="ascii") as file:
                count += int(file.read()) != 0
    return count


def gpus_of_worker(worker: int, count: int, devices: list[str]) -> list[str]:
    """The worker's own devices; if there are too few, workers share them."""
    chosen = [devices[(worker * count + index) % len(devices)] for index in range(count)]
    return list(dict.fromkeys(chosen))


def _memory_files(unified: str, legacy: str) -> list[str]:
    """The paths of a file of this process' control group for memory: `unified` in version 2, `legacy` in version 1."""
    places = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file.read().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds:
                places.append(f"/sys/fs/cgroup{path}/{unified}")
            elif "memory" in kinds.split(","):
                places += [f"/sys/fs/cgroup/memory{path}/{legacy}", f"/sys/fs/cgroup/memory/{legacy}"]
    return places


def memory_limit() -> int | None:
    """Bytes that this control group may use, or the machine has, whichever is less; None if nothing says it."""
    limits = []
    for path in _memory_files("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            limits.append(int(file.read()))  # "max" is no number
    with contextlib.suppress(OSError, ValueError, KeyError), open("/proc/meminfo", encoding="ascii") as file:
        values = dict(line.split(":", 1) for line in file)
        limits.append(1024 * int(values["MemTotal"].split()[0]))
    return min(limits, default=None)


def memory_kills() -> dict[str, int]:
    """How often the kernel killed for want of memory: in this control group, and on the machine."""
    counts: dict[str, int] = {}
    places = _memory_files("memory.events", "memory.oom_control")
    for kind, paths in (("cgroup", places), ("machine", ["/proc/vmstat"])):
        for path in paths:
            with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
                values = dict(line.split() for line in file)
                if "oom_kill" in values:
                    counts.setdefault(kind, int(values["oom_kill"]))
    return counts


def risen(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """Which of the two counters of memory kills, "cgroup" or "machine", is higher than it was; None if neither is."""
    return next((kind for kind in ("cgroup", "machine") if after.get(kind, 0) > before.get(kind, 0)), None)


def read_bytes(path: str) -> bytes | None:
    """A file's content; None if there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def is_full(error: OSError) -> bool:
    """Whether an error means that a disk or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def drain(descriptor: int) -> None:
    """Read whatever is in a non-blocking pipe, and forget it."""
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass


def _cpu_seconds(fields: list[str]) -> float:
    """CPU seconds of a process and of the children that it has waited for, so that the sum does not fall when a child
    ends."""
    return sum(int(value) for value in fields[11:15]) / TICKS


class Sampler:
    """CPU seconds, resident bytes, and bytes read and written of each rank's process tree."""

    def __init__(self) -> None:
        self._trees: dict[int, list[int]] = {}
        self._next_scan = 0.0
        self._cpu: dict[int, float] = {}
        self._orphans: list[int] = []  # descendants of this process that belong to no rank's tree any more
        self.running_seconds = 0.0  # CPU time of all processes of the last look, which are not waited for yet

    def lines(self, ranks: Mapping[int, int]) -> list[dict[str, Any]]:
        """One line per rank; `ranks` is rank to process."""
        self.running_seconds = 0.0
        if not ranks or not processes.HAS_PROC:
            return []
        self._scan(ranks)
        self.running_seconds = sum(
            _cpu_seconds(fields) for pid in self._orphans if (fields := processes.stat_fields(pid))
        )
        moment = round(time.time(), 3)
        return [self._line(rank, pid, moment) for rank, pid in ranks.items()]

    def last(self, rank: int, usage: Any) -> dict[str, Any]:
        """The line at a rank's end, from what wait4 says: all its CPU time, and the peak of its largest process."""
        return {
            "time": round(time.time(), 3),
            "rank": rank,
            "cpu_seconds": self._grown(rank, usage.ru_utime + usage.ru_stime),
            "rss_bytes": 0,
            "peak_rss_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        }

    def _scan(self, ranks: Mapping[int, int]) -> None:
        """Look for new members of the trees, but spend at most half a percent of one core on a crowded machine.

        What counts is CPU time: a look that had to wait for a CPU would otherwise put off the next one for long.
        """
        if time.monotonic() < self._next_scan and self._trees.keys() >= ranks.keys():
            return
        begun = time.thread_time()
        children = processes.process_tree()
        self._trees = {rank: processes.descendants(pid, children) for rank, pid in ranks.items()}
        known = {*ranks.values(), *(pid for tree in self._trees.values() for pid in tree)}
        self._orphans = [pid for pid in processes.descendants(os.getpid(), children) if pid not in known]
        self._next_scan = time.monotonic() + 200 * (time.thread_time() - begun)

    def _line(self, rank: int, root: int, moment: float) -> dict[str, object]:
        cpu, resident, read, written = 0.0, 0, 0, 0
        for pid in (root, *self._trees[rank]):
            fields = processes.stat_fields(pid)
            if fields is None:
                continue
            cpu += _cpu_seconds(fields)
            resident += int(fields[21]) * PAGE
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/io", encoding="ascii") as file:
                counts = dict(line.split(": ") for line in file)
                read += int(counts["read_bytes"])
                written += int(counts["write_bytes"])
        self.running_seconds += cpu
        return {
            "time": moment,
            "rank": rank,
            "cpu_seconds": self._grown(rank, cpu),
            "rss_bytes": resident,
            "read_bytes": read,
            "write_bytes": written,
        }

    def _grown(self, rank: int, cpu: float) -> float:
        self._cpu[rank] = max(self._cpu.get(rank, 0.0), round(cpu, 3))
        return self._cpu[rank]
