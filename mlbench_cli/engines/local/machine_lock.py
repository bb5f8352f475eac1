"""One run at a time on this machine: a lock that all users and all MLBENCH_HOME folders of a machine share.

It is an flock on one world-writable file in /run/lock, or in /tmp on systems that keep /run/lock for root. The client
acquires it and the run's supervisor inherits it, so it is held exactly as long as the run's ranks have a supervisor: a
killed client neither frees it early nor keeps it. Containers that do not share that folder cannot know of each other;
the measured load (load.py) tells then. MLBENCH_MACHINE_LOCK names another file, or is "none" for no lock at all.

A run with --share-machine holds the lock together with others that share. It never waits, and its result says "shared".
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from mlbench_cli.engines.local.state import enqueue, is_abandoned, read_state
from mlbench_cli.errors import DeadlineError
from mlbench_cli.model import Run

VARIABLE = "MLBENCH_MACHINE_LOCK"
FILE = "mlbench-machine.lock"
NO_LOCK = "none"
POLL_SECONDS = 0.05
SILENT_SECONDS = 1.0  # the run before may need a moment to leave
HELD, SHARED, UNAVAILABLE = "held", "shared", "unavailable"
_MAX_HOLDER_BYTES = 4096
_PRINTABLE = re.compile(r"[\w.@-]{1,64}")


@dataclass(frozen=True)
class LockHolder:
    """Who has the lock, as that process wrote it. Times are seconds since 1970; the run ends before `deadline`."""

    run: str
    user: str
    since: float
    deadline: float

    @property
    def phrase(self) -> str:
        """ "x-2 of user ann, for 3 min, 2 h at most"."""
        now = time.time()
        running, left = _duration(now - self.since), _duration(self.deadline - now)
        return f"{self.run} of user {self.user} has it since {running}, and for {left} at most"


@dataclass
class MachineLease:
    """The outcome of asking for this machine: `lock` is HELD, SHARED or UNAVAILABLE, then with the reason.

    `descriptor` is what a supervisor inherits; -1 without a lock.
    """

    lock: str
    descriptor: int = -1
    reason: str | None = None

    def close(self) -> None:
        """Drop this process's share of the lock; a supervisor that inherited it keeps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


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


def acquire_machine(run: Run, *, report: Callable[[str], None]) -> MachineLease:
    """This machine for `run`, which may have to wait for other runs: at most as long as its own timeout.

    `report` gets a sentence whenever the run that has the machine changes. Stops waiting without a lock when another
    process has started or cancelled `run`. Raises DeadlineError.
    """
    share, path = run.spec.share_machine, lock_path()
    if path is None:
        return MachineLease(UNAVAILABLE, reason=f"{VARIABLE}={NO_LOCK}")
    end = time.monotonic() + run.spec.timeout
    silent_until = time.monotonic() + SILENT_SECONDS
    reported: LockHolder | None = None
    while True:
        try:
            descriptor = _open(path)
        except OSError as error:
            return MachineLease(UNAVAILABLE, reason=f"{path}: {error.strerror or error}")
        if _try_lock(descriptor, path, shared=share):
            _write_holder(descriptor, run)
            return MachineLease(SHARED if share else HELD, descriptor)
        holder = _read_holder(descriptor)
        os.close(descriptor)
        if share:
            return MachineLease(SHARED, reason="another run has this machine")
        if is_abandoned(run) or read_state(run.folder) is not None or not run.folder.is_dir():
            return MachineLease(UNAVAILABLE, reason="another process started, cancelled or deleted this run")
        now = time.monotonic()
        if now >= end:
            raise _deadline_error(run, holder)
        if now >= silent_until and (reported is None or (holder is not None and holder != reported)):
            enqueue(run, os.getpid())
            report(_waiting_sentence(run, holder, end - now))
            reported = holder or LockHolder("", "", 0.0, 0.0)
        time.sleep(POLL_SECONDS)


def probe_lock() -> tuple[str | None, str | None]:
    """The lock file, and why it cannot be used, if it cannot."""
    path = lock_path()
    if path is None:
        return None, f"{VARIABLE}={NO_LOCK}"
    try:
        os.close(_open(path))
    except OSError as error:
        return path, f"{path}: {error.strerror or error}"
    return path, None


def find_holder() -> LockHolder | None:
    """The run that has this machine now; None if it is free or nobody can tell."""
    path = lock_path()
    if path is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # A shared request conflicts with a run that has the machine for itself, not with runs that share it.
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or _flock(descriptor, fcntl.LOCK_SH):
            return None
        return _read_holder(descriptor) or LockHolder("a run", "unknown", time.time(), time.time())
    finally:
        os.close(descriptor)


def _open(path: str) -> int:
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


def _try_lock(descriptor: int, path: str, *, shared: bool) -> bool:
    if not _flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
        return False
    try:
        current, own = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except OSError:
        return False  # removed in between: the next round makes a new one
    return (current.st_dev, current.st_ino) == (own.st_dev, own.st_ino)


def _flock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_holder(descriptor: int, run: Run) -> None:
    now = time.time()
    holder = LockHolder(run.name, _user_name(), round(now, 3), round(now + run.spec.timeout, 3))
    with contextlib.suppress(OSError):  # only the message of those who wait needs it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)


def _read_holder(descriptor: int) -> LockHolder | None:
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


def _waiting_sentence(run: Run, holder: LockHolder | None, seconds: float) -> str:
    who = holder.phrase if holder else "another run has it"
    return (
        f"{run.name} waits for this machine: {who}. It waits for {_duration(seconds)} at most (--timeout); "
        "with --share-machine it would start at once and its result would say so."
    )


def _deadline_error(run: Run, holder: LockHolder | None) -> DeadlineError:
    who = holder.phrase if holder else "another run has it"
    return DeadlineError(
        f'The run "{run.name}" waited {_duration(run.spec.timeout)} for this machine: {who}.',
        hint="mlbench status; or start it with --share-machine, or with a longer --timeout.",
    )


def _duration(seconds: float) -> str:
    """ "45 s", "3 min", "1.5 h"."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"
