"""Wait until this machine is free for a local run (see agent/lock.py)."""

import os
import time
from collections.abc import Callable

from mlbench_cli.agent.lock import SHARE, TAKE, LockHolder, MachineLock, describe_holder
from mlbench_cli.engines.local.state import enqueue, is_abandoned, read_state
from mlbench_cli.errors import DeadlineError
from mlbench_cli.model.run import Run
from mlbench_cli.util.text import rough_duration

POLL_SECONDS = 0.05
SILENT_SECONDS = 1.0  # the previous run may need a moment to end


def acquire_machine(run: Run, *, report: Callable[[str], None]) -> MachineLock:
    """Acquire this machine for `run`, waiting for other runs for at most the run's timeout.

    `report` gets a sentence whenever another run takes the machine. Stops waiting without a lock if another process
    started or canceled `run`. Raises DeadlineError.
    """
    lock = MachineLock(SHARE if run.spec.share_machine else TAKE, run.name, run.spec.timeout)
    end = time.monotonic() + run.spec.timeout
    silent_until = time.monotonic() + SILENT_SECONDS
    reported: LockHolder | None = None
    while not lock.acquire():
        if is_abandoned(run) or read_state(run.folder) is not None or not run.folder.is_dir():
            lock.give_up("another process started, canceled or deleted this run")
            break
        holder, now = lock.read_holder(), time.monotonic()
        if now >= end:
            raise _deadline_error(run, holder)
        if now >= silent_until and (reported is None or (holder is not None and holder != reported)):
            enqueue(run, os.getpid())
            report(_waiting_sentence(run, holder, end - now))
            reported = holder or LockHolder("", "", 0.0, 0.0)
        time.sleep(POLL_SECONDS)
    return lock


def _waiting_sentence(run: Run, holder: LockHolder | None, seconds: float) -> str:
    return (
        f"{run.name} is waiting for this machine: {describe_holder(holder)}. "
        f"Timeout {rough_duration(seconds)} (--timeout); "
        "--share-machine starts it at once and labels the result as shared."
    )


def _deadline_error(run: Run, holder: LockHolder | None) -> DeadlineError:
    return DeadlineError(
        f'The run "{run.name}" waited {rough_duration(run.spec.timeout)} for this machine: {describe_holder(holder)}.',
        hint="mlbench status; or use --share-machine or a longer --timeout.",
    )
