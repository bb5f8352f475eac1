"""Identify, find, signal and kill processes of this machine.

Linux's /proc if there is one; otherwise what needs it is left out. Standard library only: it runs beside the ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import time
from collections.abc import Mapping
from typing import Any, TypedDict

OVERDUE_SECONDS = 15.0  # after its deadline an agent is woken
# After its deadline it is killed. It may print stacks (hang.py), and then give ranks time to end, and the kernel to
# remove them (agent.py).
HOPELESS_SECONDS = 90.0
LOCK_POLL = 0.05  # seconds between two attempts to get a lock


class Origin(TypedDict):
    """Where a process runs."""

    host: str
    boot_id: str | None
    pid_namespace: int | None


class ProcessNote(Origin):
    """Identifies a process even if its number is reused: the number, and clock ticks from boot to its start (None
    without /proc)."""

    pid: int
    start_time: int | None


HAS_PROC = os.path.isdir("/proc/self")


@functools.cache
def boot_id() -> str | None:
    """Names this boot of the machine, so that numbers of processes before it are not mistaken; None without /proc."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def process_origin() -> Origin:
    """Where this process runs, so that a reader elsewhere knows whether it could see it: host, kernel, namespace."""
    namespace = None
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return {"host": os.uname().nodename, "boot_id": boot_id(), "pid_namespace": namespace}


def process_note(pid: int) -> ProcessNote:
    """A note that identifies a process, for readers on this machine and elsewhere."""
    fields = stat_fields(pid)
    return {"pid": pid, "start_time": None if fields is None else int(fields[19]), **process_origin()}


def is_alive(note: object, lock: str | os.PathLike[str] | None = None) -> bool | None:
    """Whether the process that a note names still runs: one of that number which began at that time. What is no
    ProcessNote, because it is damaged, names none.

    None if that cannot be seen from here: it is on another machine, or in another PID namespace. `lock` is a file that
    the process has locked until it ends, if there is one: on the same kernel that is proof in any PID namespace.
    """
    if not (isinstance(note, Mapping) and note.keys() >= ProcessNote.__annotations__.keys()):
        return False
    origin = process_origin()
    if note["boot_id"] != origin["boot_id"]:  # the same machine after a restart knows that all its processes have ended
        return False if note["host"] == origin["host"] else None
    if lock is not None:
        with contextlib.suppress(OSError):
            return is_locked(lock)
    if note["pid_namespace"] != origin["pid_namespace"]:
        return None
    if note["start_time"] is None:  # a system without /proc
        try:
            os.kill(note["pid"], 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    fields = stat_fields(note["pid"])
    return fields is not None and fields[0] not in "ZX" and int(fields[19]) == note["start_time"]


def try_lock(descriptor: int, *, shared: bool = False, patience: float = 0.0) -> bool:
    """Lock an open file, waiting `patience` seconds at most. A process that has it open keeps the lock. Returns whether
    it was locked."""
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
        time.sleep(LOCK_POLL)


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether any process, even in another PID namespace, holds the lock on a file, so it lives. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def is_lock_held(path: str | os.PathLike[str], holder: object) -> bool | None:
    """Whether any process holds the lock on a file. None if `holder`, the note of the last one that is known, is on
    another machine: its lock may not show here."""
    with contextlib.suppress(OSError):
        if is_locked(path):
            return True
    return None if is_alive(holder, path) is None else False


def signal_process(note: Mapping[str, Any], number: int) -> None:
    """Signal the process that a note names, and never another one with its number: that has got it since, or has it
    here while the one that is meant is on another machine or in another PID namespace."""
    with contextlib.suppress(ProcessLookupError):
        handle = process_handle(note["pid"])  # no other process can get its number now
        try:
            if not is_alive(note):
                return
            if handle >= 0:
                signal.pidfd_send_signal(handle, number)
            else:  # a system without such handles, for example macOS
                os.kill(note["pid"], number)
        finally:
            if handle >= 0:
                os.close(handle)


def end_overdue(state: Mapping[str, Any]) -> None:
    """Wake an agent of this machine that has missed its own deadline, because somebody stopped it; kill it if that does
    not help."""
    if state.get("deadline") is None or state["ended"] or not is_alive(state):
        return
    late = time.monotonic() - state["deadline"]
    if late > OVERDUE_SECONDS:
        signal_process(state, signal.SIGCONT)
        signal_process(state, signal.SIGTERM)
    if late > HOPELESS_SECONDS:
        signal_process(state, signal.SIGKILL)


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on, or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii").split()
    except OSError:
        return None


def process_tree() -> dict[int, list[int]]:
    """Every process of the machine by its parent."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat_fields(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    return children


def descendants(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    """All processes below `pid`; `children` maps each process to its children."""
    found = list(children.get(pid, ()))
    for child in found:  # grows while it is walked
        found += children.get(child, ())
    return found


def find_groups(pid: int) -> set[int]:
    """The process groups of a process that leads one, and of all below it, e.g. of torchrun's workers."""
    below = descendants(pid, process_tree()) if HAS_PROC else []
    return {pid, *(int(fields[2]) for child in below if (fields := stat_fields(child)))}


def process_handle(pid: int) -> int:
    """A descriptor that names the process for good and is readable once it has ended; -1 if there is no such thing:
    another system, an old kernel, a sandbox. Raises ProcessLookupError.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return -1


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group. One that has gone or is not ours is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def kill_descendants() -> None:
    """Kill what escaped its process group: orphans come to this process, so it finds all, however deep."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if HAS_PROC:
            for pid in descendants(os.getpid(), process_tree()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def find_processes(folder: str, *, arguments: bool = False) -> list[int]:
    """Processes that were given an output folder below `folder`, however deep or orphaned.

    With `arguments` also those that have a path below `folder` among their arguments, as agents do.
    """
    mark, argument, found = os.fsencode(f"MLBENCH_OUTPUT_DIR={folder}/"), os.fsencode(f"{folder}/"), []
    for name in os.listdir("/proc") if HAS_PROC else ():
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it may have ended, or belong to somebody else
            with open(f"/proc/{name}/environ", "rb") as file:
                is_found = any(item.startswith(mark) for item in file.read().split(b"\0"))
            if arguments and not is_found:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    is_found = any(item.startswith(argument) for item in file.read().split(b"\0"))
            if is_found:
                found.append(int(name))
    return found


def kill_processes(folder: str, *, arguments: bool = False, seconds: float = 5.0) -> tuple[list[int], list[int]]:
    """Kill what `find_processes` finds, until three looks in a row find nothing, or for `seconds`.

    Returns the processes that were killed, and those that were there at the last look.
    """
    killed: set[int] = set()
    empty, end = 0, time.monotonic() + seconds
    while True:
        found = find_processes(folder, arguments=arguments)
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        empty = 0 if found else empty + 1
        if empty == 3 or time.monotonic() >= end:
            return sorted(killed), found
        time.sleep(0.05)


def is_signaled(pid: int) -> bool:
    """Whether the child has ended, by SIGTERM or otherwise; it can still be waited for."""
    with contextlib.suppress(ChildProcessError, AttributeError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status in (signal.SIGTERM, 128 + signal.SIGTERM)
    return False


def last_line(data: bytes) -> str:
    """The last line of a program's output that is not empty."""
    lines = data.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""
