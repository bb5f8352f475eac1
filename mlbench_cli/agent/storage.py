"""Slower storage for one rank: a control group in which the kernel limits reads and writes of a disk.

cgroup v1: blkio.throttle.*_bps_device (Documentation/admin-guide/cgroup-v1/blkio-controller.rst); v2: io.max
(Documentation/admin-guide/cgroup-v2.rst). Reads from the page cache stay fast, and v1 does not limit writes that the
kernel makes later. It takes root, and files on a disk of this machine.
"""

from __future__ import annotations

import contextlib
import os
import time

from task_images.harness import cores

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

V1_LIMITS = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")
V1_BYTES = "blkio.throttle.io_service_bytes_recursive"
EMPTY_SECONDS = 5.0  # for the killed processes of a group to vanish


def find_disk(path: str) -> str:
    """The number of the whole disk that holds a file, e.g. "8:0". Raises OSError if it is on none."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    device = os.stat(path).st_dev
    place = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    if not os.path.exists(place):
        raise OSError(f"{path} is on no disk of this machine")
    if os.path.exists(f"{place}/partition"):
        place = os.path.dirname(os.path.realpath(place))
    with open(f"{place}/dev", encoding="ascii") as file:
        return file.read().strip()


def find_hierarchy() -> tuple[int, str]:
    """Version and place of the control groups that can limit disks. Raises OSError if this process may not use them."""
    for version, _, place in sorted(cores.find_hierarchies("blkio")):
        if version == 1 or "io" in " ".join(cores.read_lines(f"{place}/cgroup.controllers")).split():
            return _writable(version, place)
    raise OSError("this machine has no control groups that limit disks")


def _writable(version: int, place: str) -> tuple[int, str]:
    if not os.access(place, os.W_OK):
        raise OSError(f"it takes the right to create control groups in {place}")
    return version, place


class SlowGroup:
    """A control group with limits. Raises OSError if it cannot be made."""

    def __init__(
        self, name: str, disks: Sequence[str], rate: float, announce: Callable[[str], None] | None = None
    ) -> None:
        """`rate`: bytes per second, for reads and for writes, of each disk. `announce` gets the group's folder before
        there is one."""
        self._version, self._top = find_hierarchy()
        self.folder = f"{self._top}/{name}"
        self._before = self._top  # the group of its processes before
        if self._version == 2:
            with open(f"{self._top}/cgroup.subtree_control", "w", encoding="ascii") as file:
                file.write("+io")
        if announce is not None:
            announce(self.folder)
        os.mkdir(self.folder)
        try:
            for disk in disks:
                for file_name, line in self._limits(disk, round(rate)):
                    with open(f"{self.folder}/{file_name}", "w", encoding="ascii") as file:
                        file.write(line)
        except OSError:
            os.rmdir(self.folder)
            raise

    def _limits(self, disk: str, rate: int) -> list[tuple[str, str]]:
        if self._version == 2:
            return [("io.max", f"{disk} rbps={rate} wbps={rate}")]
        return [(name, f"{disk} {rate}") for name in V1_LIMITS]

    def add(self, pid: int) -> None:
        """Take a process in, and those that it starts from now on. Raises OSError."""
        self._before = self._group_of(pid)
        with open(f"{self.folder}/cgroup.procs", "w", encoding="ascii") as file:
            file.write(str(pid))

    def _group_of(self, pid: int) -> str:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            for line in file:
                number, _, rest = line.rstrip("\n").partition(":")
                controllers, _, path = rest.partition(":")
                if number == "0" if self._version == 2 else "blkio" in controllers.split(","):
                    folder = f"{self._top}{path.rstrip('/')}"
                    return folder if os.path.isdir(folder) else self._top
        return self._top

    def remove(self) -> None:
        """Put its processes where they were, and remove the group."""
        remove_group(self.folder, self._before)

    def read_bytes(self) -> int | None:
        """Bytes that the group has read from its disks and written to them; None if that is not counted."""
        try:
            with open(f"{self.folder}/{V1_BYTES if self._version == 1 else 'io.stat'}", encoding="ascii") as file:
                words = file.read().split()
        except OSError:
            return None
        if self._version == 1:
            return int(words[-1])
        return sum(int(word[7:]) for word in words if word.startswith(("rbytes=", "wbytes=")))


def try_to_slow(path: str) -> None:
    """Raise OSError if the disk of a file cannot be slowed. Tries it with an empty control group."""
    SlowGroup(f"mlbench-try-{os.getpid()}", [find_disk(path)], 1e9).remove()


def remove_group(folder: str, place: str | None = None) -> None:
    """Remove a control group, whose processes move to the group `place`, or end by themselves."""
    end = time.monotonic() + EMPTY_SECONDS
    while os.path.isdir(folder) and time.monotonic() < end:
        if place is not None:
            _move_processes(folder, place)
        with contextlib.suppress(OSError):
            os.rmdir(folder)
            return
        time.sleep(0.05)


def _move_processes(folder: str, place: str) -> None:
    with contextlib.suppress(OSError), open(f"{folder}/cgroup.procs", encoding="ascii") as file:
        for pid in file.read().split():
            # One that has ended is no error.
            with contextlib.suppress(OSError), open(f"{place}/cgroup.procs", "w", encoding="ascii") as target:
                target.write(pid)
