"""Wait until this machine is free for a local run (see agent/lock.py)."""

import os
import time
from collections.abc import Callable

from mlbench_cli.agent.lock import SHARE, TAKE, Line, LockHolder, MachineLock, describe_holder
from mlbench_cli.engines.local.state import enqueue, is_abandoned, read_state
from mlbench_cli.errors import DeadlineError
from mlbench_cli.model.run import Run
from mlbench_cli.util.text import rough_duration

POLL_SECONDS = 0.05
SILENT_SECONDS = 1.0  # the previous run may need a moment to end


def acquire_machine(run: Run, *, report: Callable[[str], None]) -> MachineLock:
    """Acquire this machine for `run`: first come, first served, for at most the run's timeout.

    `report` gets a sentence when the wait begins, and whenever the run's place in the line changes. Stops waiting
    without a lock if another process started or canceled `run`. Raises DeadlineError.
    """
    lock = MachineLock(SHARE if run.spec.share_machine else TAKE, run.name, run.spec.timeout)
    if run.spec.share_machine:
        lock.acquire()
        return lock
    line = Line()
    try:
        _wait(run, lock, line, report)
    finally:
        line.close()
    return lock


def _wait(run: Run, lock: MachineLock, line: Line, report: Callable[[str], None]) -> None:
    begun = time.monotonic()
    end = begun + run.spec.timeout
    reported: int | None = None
    while (before := line.count_before()) or not lock.acquire():
        if is_abandoned(run) or read_state(run.folder) is not None or not run.folder.is_dir():
            lock.give_up("another process started, canceled or deleted this run")
            return
        holder, now = lock.read_holder(), time.monotonic()
        if now >= end:
            raise _deadline_error(run, holder)
        if now >= begun + SILENT_SECONDS and before != reported:
            enqueue(run, os.getpid())
            report(_waiting_sentence(run, holder, before, end - now))
            reported = before
        time.sleep(POLL_SECONDS)


def _waiting_sentence(run: Run, holder: LockHolder | None, before: int, seconds: float) -> str:
    others = f", behind {before} other{'s' * (before > 1)} that came earlier" if before else ", next in line"
    return (
        f"{run.name} is waiting for this machine: {describe_holder(holder)}{others}. "
        f"Timeout {rough_duration(seconds)}; "
        "mlbench run --share-machine would start it at once and label the result as shared."
    )


def _deadline_error(run: Run, holder: LockHolder | None) -> DeadlineError:
    return DeadlineError(
        f'The run "{run.name}" waited {rough_duration(run.spec.timeout)} for this machine: {describe_holder(holder)}.',
        hint="mlbench status; mlbench run also has --share-machine and a longer --timeout.",
    )
