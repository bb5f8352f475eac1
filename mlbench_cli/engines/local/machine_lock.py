"""One run at a time on this machine: a lock that all users and all MLBENCH_HOME folders of a machine share.

It is an flock on one world-writable file in /run/lock, or in /tmp on systems that keep /run/lock for root. The client
acquires it and the run's supervisor inherits it, so it is held exactly as long as the run's ranks have a supervisor: a
killed client neither frees it early nor keeps it. Containers that do not share that folder cannot know of each other;
the measured load (load.py) tells then. MLBENCH_MACHINE_LOCK names another file, or is "none" for no lock at all.

A run with --share-machine holds the lock together with others that share. It never waits, and its result says "shared".
"""

import fcntl
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass

from mlbench_cli.engines.local.lock_file import (
    NO_LOCK as NO_LOCK,
)
from mlbench_cli.engines.local.lock_file import (
    VARIABLE as VARIABLE,
)
from mlbench_cli.engines.local.lock_file import (
    LockHolder,
    flock,
    format_duration,
    open_lock,
    read_holder,
    try_lock,
    write_holder,
)
from mlbench_cli.engines.local.lock_file import (
    lock_path as lock_path,
)
from mlbench_cli.engines.local.state import enqueue, is_abandoned, read_state
from mlbench_cli.errors import DeadlineError
from mlbench_cli.model import Run

POLL_SECONDS = 0.05
SILENT_SECONDS = 1.0  # the run before may need a moment to leave
HELD, SHARED, UNAVAILABLE = "held", "shared", "unavailable"


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
            descriptor = open_lock(path)
        except OSError as error:
            return MachineLease(UNAVAILABLE, reason=f"{path}: {error.strerror or error}")
        if try_lock(descriptor, path, shared=share):
            write_holder(descriptor, run.name, run.spec.timeout)
            return MachineLease(SHARED if share else HELD, descriptor)
        holder = read_holder(descriptor)
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
        os.close(open_lock(path))
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
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or flock(descriptor, fcntl.LOCK_SH):
            return None
        return read_holder(descriptor) or LockHolder("a run", "unknown", time.time(), time.time())
    finally:
        os.close(descriptor)


def _waiting_sentence(run: Run, holder: LockHolder | None, seconds: float) -> str:
    who = holder.phrase if holder else "another run has it"
    return (
        f"{run.name} waits for this machine: {who}. It waits for {format_duration(seconds)} at most (--timeout); "
        "with --share-machine it would start at once and its result would say so."
    )


def _deadline_error(run: Run, holder: LockHolder | None) -> DeadlineError:
    who = holder.phrase if holder else "another run has it"
    return DeadlineError(
        f'The run "{run.name}" waited {format_duration(run.spec.timeout)} for this machine: {who}.',
        hint="mlbench status; or start it with --share-machine, or with a longer --timeout.",
    )
