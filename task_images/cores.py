"""Usable CPUs of a process: its CPU affinity and the CPU quotas of its control groups (cgroup v1 and v2).

A container with `--cpus 2`, or a pod with a CPU limit, sees all 64 cores of a machine; with more threads than the quota
the kernel throttles all of them. A quota is a number of microseconds of CPU time per period. Groups are nested, and the
smallest quota applies. Standard library only, because ranks, command line and agent all use it. Sources:
Documentation/admin-guide/cgroup-v2.rst (cpu.max, cpu.stat), Documentation/scheduler/sched-bwc.rst (v1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

# Environment variable of a pinned rank: the CPUs of all ranks on its machine, such as "0,1".
PINNED_FROM = "MLBENCH_PINNED_FROM"


class Throttling:
    """How often, and for how many seconds, the kernel throttled these groups."""

    __slots__ = ("periods", "seconds")

    def __init__(self, periods: int, seconds: float) -> None:
        self.periods = periods
        self.seconds = seconds


def effective_cores(root: str = "/") -> int:
    """Number of CPUs that this process can use: those in its affinity, limited by the smallest CPU quota; at least 1.

    A quota of 2.5 CPUs counts as 2: a third thread would be throttled half of the time, and the others would wait for
    it. `root` contains proc/ and sys/.
    """
    usable = count_usable()
    quota = cpu_quota(root)
    return usable if quota is None else max(1, min(usable, int(quota)))


def count_usable() -> int:
    """Number of CPUs in this process's affinity; for a pinned rank, those of all ranks on its machine."""
    if given := os.environ.get(PINNED_FROM):
        return len(given.split(","))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pinned_cpus() -> list[int] | None:
    """The CPUs to which this rank is pinned; None if it is not."""
    return sorted(os.sched_getaffinity(0)) if os.environ.get(PINNED_FROM) else None


def share_cpus(cpus: Sequence[int], ranks: int, root: str = "/") -> list[list[int]]:
    """Divide CPUs evenly among `ranks` ranks, keeping CPUs of a core, and cores of a socket, together.

    Raises ValueError if there are more ranks than CPUs, or than the smallest quota allows. A quota does not make shares
    smaller: another container with the same quota would choose the same CPUs.
    """
    quota = cpu_quota(root)
    most = len(cpus) if quota is None else max(1, min(len(cpus), int(quota)))
    if ranks > most:
        raise ValueError(f"{ranks} processes cannot each have their own CPUs: only {most} are available")
    size, near = len(cpus) // ranks, sorted(cpus, key=lambda cpu: (*_place_of(cpu, root), cpu))
    return [sorted(near[number * size : (number + 1) * size]) for number in range(ranks)]


def _place_of(cpu: int, root: str) -> tuple[int, int]:
    """Socket and core of a CPU; zeros if unknown."""
    folder = f"{root}/sys/devices/system/cpu/cpu{cpu}/topology"
    lines = [read_lines(f"{folder}/{name}") for name in ("physical_package_id", "core_id")]
    socket, core = (int(found[0]) if found and found[0].lstrip("-").isdigit() else 0 for found in lines)
    return socket, core


def cpu_quota(root: str = "/") -> float | None:
    """Number of CPUs that the smallest quota allows, such as 0.5; None without a quota. `root` contains proc/ and
    sys/."""
    quotas = [quota for folder in _cpu_groups(root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def read_throttling(root: str = "/") -> Throttling:
    """The sum over all groups of this process, since each was created."""
    periods, seconds = 0, 0.0
    for folder in _cpu_groups(root):
        pairs = (line.split() for line in read_lines(f"{folder}/cpu.stat"))
        values = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
        periods += values.get("nr_throttled", 0)
        # cgroup v2 counts microseconds, v1 nanoseconds.
        seconds += values.get("throttled_usec", 0) / 1e6 + values.get("throttled_time", 0) / 1e9
    return Throttling(periods, round(seconds, 6))


def _cpu_groups(root: str) -> Iterator[str]:
    """Folders of the groups that limit this process's CPU time, innermost first, if they are mounted here."""
    mounts = list(find_hierarchies("cpu", root))
    for line in read_lines(f"{root}/proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and "cpu" not in controllers.split(","):
            continue
        for mounted_version, top, place in mounts:
            if mounted_version == version:
                yield from _folders_up(f"{root}{place}", _below(path, top))


def find_hierarchies(controller: str, root: str = "/") -> Iterator[tuple[int, str, str]]:
    """(version, root within the hierarchy, mount point) of each mounted cgroup hierarchy that has this controller of
    version 1, such as "cpu", or is of version 2."""
    for line in read_lines(f"{root}/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield 2, fields[3], fields[4]
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            yield 1, fields[3], fields[4]


def _below(path: str, top: str) -> list[str]:
    """The path components from a mount whose root is the group `top` to the group `path`.

    In a container without a cgroup namespace, `path` is the host's, and the mount's root is the container's group.
    """
    top = top.rstrip("/")
    inside = path == top or path.startswith(f"{top}/")
    steps = [step for step in path[len(top) :].split("/") if step] if inside else []
    return [] if ".." in steps else steps


def _folders_up(place: str, steps: list[str]) -> Iterator[str]:
    for length in range(len(steps), -1, -1):
        folder = "/".join([place, *steps[:length]])
        if os.path.isdir(folder):
            yield folder


def _quota_of(folder: str) -> float | None:
    lines = read_lines(f"{folder}/cpu.max")
    if lines:
        quota, _, period = lines[0].partition(" ")
    else:
        quota = "".join(read_lines(f"{folder}/cpu.cfs_quota_us")[:1])
        period = "".join(read_lines(f"{folder}/cpu.cfs_period_us")[:1])
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max", "-1", or no such file
        return None
    return int(quota) / int(period)


def read_lines(path: str) -> list[str]:
    """The lines of a file of the kernel; none without it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
