"""The file that runs lock which want a machine for themselves: its place, its locking, and who holds it.

Standard library only, and no type of the project: supervisors on machines without the client import this, too. See
`machine_lock` for what the lock means.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections import namedtuple

VARIABLE = "MLBENCH_MACHINE_LOCK"
FILE = "mlbench-machine.lock"
NO_LOCK = "none"
_MAX_HOLDER_BYTES = 4096
_PRINTABLE = re.compile(r"[\w.@-]{1,64}")


class LockHolder(namedtuple("LockHolder", ("run", "user", "since", "deadline"))):
    """Who has the lock, as that process wrote it. Times are seconds since 1970; the run ends before `deadline`."""

    __slots__ = ()

    @property
    def phrase(self) -> str:
        """ "x-2 of user ann has it since 3 min, and for 2 h at most"."""
        now = time.time()
        running, left = format_duration(now - self.since), format_duration(self.deadline - now)
        return f"{self.run} of user {self.user} has it since {running}, and for {left} at most"


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
        raise OSError(errno.EINVAL, "it is not a plain file of its own")
    raise OSError(errno.EAGAIN, "somebody keeps removing it")


def _create(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    os.fchmod(descriptor, 0o666)  # whatever the umask: other users must be able to lock it
    return descriptor


def try_lock(descriptor: int, path: str, *, shared: bool) -> bool:
    if not flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
        return False
    try:
        current, own = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except OSError:
        return False  # removed in between: the next round makes a new one
    return (current.st_dev, current.st_ino) == (own.st_dev, own.st_ino)


def flock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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


def _user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def format_duration(seconds: float) -> str:
    """ "45 s", "3 min", "1.5 h"."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"
