"""One run at a time on a machine: a lock that all users and all MLBENCH_HOME folders of a machine share.

It is an flock on one world-writable file in /run/lock, or in /tmp on systems that keep /run/lock for root. Whoever
acquires it for a local run hands it to the run's agent, and agents of hosts acquire it themselves, so it is
held exactly as long as the run's ranks have an agent: a killed client neither frees it early nor keeps it.
Containers that do not share that folder cannot know of each other; the measured load (load.py) shows it then.
MLBENCH_MACHINE_LOCK names another file, or is "none" for no lock at all.

Runs with --share-machine hold the lock together. They never wait, and their results say "shared". Runs that wait stand
in a line, first come, first served: see `Line`. Runs on several machines do not wait: a machine that is busy refuses.
Standard library only: it runs beside the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import re
import stat
import struct
import time
from collections import namedtuple

from mlbench_cli.agent import processes

HELD, SHARED, UNAVAILABLE = "held", "shared", "unavailable"
# How a run's machines are reserved: by the lock, not at all (--share-machine), by the batch system, or unknown.
TAKE, SHARE, WHOLE_NODES, NO_PROMISE = "take", "share", "whole nodes", "no promise"
_NOT_TAKEN = {
    WHOLE_NODES: (HELD, "the cluster allocates whole nodes"),
    NO_PROMISE: (UNAVAILABLE, "nodes are shared (--share-nodes)"),
}
VARIABLE = "MLBENCH_MACHINE_LOCK"
FILE = "mlbench-machine.lock"
NO_LOCK = "none"
TICKET_SECONDS = 2.0  # in which a ticket is taken, unless the one who takes it was stopped
_MAX_HOLDER_BYTES = 4096
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, process
_PRINTABLE = re.compile(r"[\w.@-]{1,64}")


class LockHolder(namedtuple("LockHolder", ("run", "user", "since", "deadline"))):
    """The holder of the lock, as it wrote it. Times are seconds since 1970; the run ends before `deadline`."""

    __slots__ = ()

    @property
    def phrase(self) -> str:
        """ "x-2 of user ann, running for 3 min, at most 2 h more"."""
        now = time.time()
        running, left = _format_duration(now - self.since), _format_duration(self.deadline - now)
        return f"{self.run} of user {self.user}, running for {running}, at most {left} more"


class MachineLock:
    """The lock of this machine as a run wants it. Its result says `state` and, if that is not HELD, the `reason`."""

    def __init__(self, mode: str, run: str, seconds: float) -> None:
        """`mode` is TAKE, SHARE, WHOLE_NODES or NO_PROMISE; the run needs the machine for `seconds` at most."""
        self._mode, self._run, self._seconds = mode, run, seconds
        self._path = lock_path() if mode in (TAKE, SHARE) else None
        self.descriptor = -1  # what an agent inherits; -1 without a lock
        self.state: str
        self.reason: str | None
        self.state, self.reason = _NOT_TAKEN.get(mode, (UNAVAILABLE, f"{VARIABLE}={NO_LOCK}"))
        if self._path is not None:
            self.reason = "not taken yet"

    def find_identity(self) -> str | None:
        """The same for all agents that lock the same file of the same kernel; None if there is nothing to lock."""
        descriptor = self._open()
        if descriptor is None:
            return None
        found = os.fstat(descriptor)
        os.close(descriptor)
        return f"{processes.boot_id()}:{found.st_dev}:{found.st_ino}"

    def acquire(self) -> bool:
        """Whether the run need not wait any more; a lock that was taken is kept until this process ends, or `close`."""
        if self.descriptor >= 0 or (descriptor := self._open()) is None:
            return True
        is_shared = self._mode == SHARE
        if not _try_lock(descriptor, str(self._path), shared=is_shared):
            os.close(descriptor)
            if is_shared:
                self.state, self.reason = SHARED, "another run is using this machine"
            return is_shared
        write_holder(descriptor, self._run, self._seconds)
        self.descriptor = descriptor
        self.mark_taken()
        return True

    def is_free(self) -> bool:
        """Whether no run has the lock."""
        if (descriptor := self._open()) is None:
            return True
        try:
            return processes.try_lock(descriptor)
        finally:
            os.close(descriptor)

    def mark_taken(self) -> None:
        """This process has the lock, or another one of the same run on the same machine."""
        if self._path is not None and self.state != SHARED:
            self.state, self.reason = SHARED if self._mode == SHARE else HELD, None

    def give_up(self, reason: str) -> None:
        """Note why there is no lock to wait for any longer."""
        self._path = None
        self.state, self.reason = UNAVAILABLE, reason

    def read_holder(self) -> LockHolder | None:
        """The run that has the lock, as far as it can be read."""
        descriptor = self._open()
        if descriptor is None:
            return None
        try:
            return read_holder(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Drop this process's share of the lock; an agent that inherited it keeps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def _open(self) -> int | None:
        if self._path is None:
            return None
        try:
            return open_lock(self._path)
        except OSError as error:
            self.give_up(f"{self._path}: {error.strerror or error}")
            return None


class Line:
    """The queue of processes that wait for the lock, over all users of the machine: a file beside the lock.

    Each holds a byte of the file whose number grows with every arrival (by open file description, Linux); who holds the
    lowest one is first. The kernel frees the byte of a process that ends, however it ends. One that is stopped keeps
    it, and is passed by the next when it does not take the free machine. Where there are no such locks, or the file
    cannot be used, everybody is first.
    """

    def __init__(self) -> None:
        self._descriptor, self._ticket = -1, 0
        path = lock_path()
        if path is None or not hasattr(fcntl, "F_OFD_SETLK"):
            return
        descriptor = -1
        with contextlib.suppress(OSError, ValueError):
            descriptor = open_lock(f"{path}.line")
            if not processes.try_lock(descriptor, patience=TICKET_SECONDS):
                raise TimeoutError
            self._ticket = int(os.pread(descriptor, 20, 0) or b"0") + 1
            os.pwrite(descriptor, b"%020d" % self._ticket, 0)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, self._ticket, 1))
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            self._descriptor = descriptor
            return
        if descriptor >= 0:
            os.close(descriptor)

    def count_before(self) -> int:
        """How many came earlier and still wait."""
        return 0 if self._descriptor < 0 else self._count(1, self._ticket)

    def _count(self, start: int, end: int) -> int:
        """Bytes from `start` to before `end` that others hold."""
        if start >= end:
            return 0
        try:
            answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, start, end - start))
        except OSError:
            return 0
        kind, _, place, _, _ = struct.unpack(_FLOCK, answer)
        return 0 if kind == fcntl.F_UNLCK else 1 + self._count(start, place) + self._count(place + 1, end)

    def close(self) -> None:
        """Leave the line."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _range(kind: int, start: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)


def describe_holder(holder: LockHolder | None) -> str:
    """The holder of the lock, as a sentence without a period."""
    return holder.phrase if holder else "another run is using it"


def lock_path() -> str | None:
    """The file that everybody on this machine locks; None if MLBENCH_MACHINE_LOCK is "none"."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return None if chosen == NO_LOCK else chosen
    # The choice must not depend on who asks, so it is not "the first that I may write to".
    with contextlib.suppress(OSError):
        mode = os.stat("/run/lock").st_mode
        if stat.S_ISDIR(mode) and mode & 0o1007 == 0o1007:
            return f"/run/lock/{FILE}"
    return f"/tmp/{FILE}"


def open_lock(path: str) -> int:
    """The lock file, made for all users if it does not exist. Never follows a link, never truncates.

    Opened without O_CREAT first: in a sticky folder the kernel refuses O_CREAT on another user's file
    (fs.protected_regular).
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    for _ in range(3):
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.close(_create(path, flags))
            continue
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    raise OSError(errno.EAGAIN, "somebody keeps removing it")


def _create(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    os.fchmod(descriptor, 0o666)  # whatever the umask: other users must be able to lock it
    return descriptor


def _try_lock(descriptor: int, path: str, *, shared: bool) -> bool:
    if not processes.try_lock(descriptor, shared=shared):
        return False
    try:
        current, own = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except OSError:
        return False  # removed in between: the next round makes a new one
    return (current.st_dev, current.st_ino) == (own.st_dev, own.st_ino)


def write_holder(descriptor: int, run: str, seconds: float) -> None:
    """Say in the lock's file that `run` has it, for `seconds` at most."""
    now = time.time()
    holder = LockHolder(run, _user_name(), round(now, 3), round(now + seconds, 3))
    with contextlib.suppress(OSError):  # only the message of those who wait needs it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder._asdict()).encode(), 0)


def read_holder(descriptor: int) -> LockHolder | None:
    """Foreign text: any user may have written it, so nothing of it reaches a terminal unchecked."""
    try:
        found = json.loads(os.pread(descriptor, _MAX_HOLDER_BYTES, 0))
        names = [str(found[key]) for key in ("run", "user")]
        times = [float(found[key]) for key in ("since", "deadline")]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if not all(_PRINTABLE.fullmatch(name) for name in names) or not all(0 <= moment < 1e11 for moment in times):
        return None
    return LockHolder(names[0], names[1], times[0], times[1])


def probe_lock() -> tuple[str | None, str | None]:
    """The lock file, and why it cannot be used, if it cannot."""
    path = lock_path()
    if path is None:
        return None, f"{VARIABLE}={NO_LOCK}"
    try:
        os.close(open_lock(path))
    except OSError as error:
        return path, f"{path}: {error.strerror or error}"
    return path, None


def find_holder() -> LockHolder | None:
    """The run that is using this machine; None if it is free or unknown."""
    path = lock_path()
    if path is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # A shared request conflicts with a run that has the machine for itself, not with runs that share it.
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or processes.try_lock(descriptor, shared=True):
            return None
        return read_holder(descriptor) or LockHolder("a run", "unknown", time.time(), time.time())
    finally:
        os.close(descriptor)


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _format_duration(seconds: float) -> str:
    """ "45 s", "3 min", "1.5 h"."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"
