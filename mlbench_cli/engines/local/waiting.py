"""A local run before its agent has written a state: it is being submitted, waits for the machine, or was canceled."""

import json
import time
from datetime import datetime

from mlbench_cli.agent.processes import is_alive, is_locked, process_note
from mlbench_cli.engines.diagnosis import diagnose
from mlbench_cli.engines.local.head import read_state
from mlbench_cli.model.run import Ending, Observation, Run, WorkerState
from mlbench_cli.util.files import write_atomically

STARTING = 60.0  # seconds until a recorded run must have an agent


def observe_waiting(run: Run) -> Observation:
    """The place of a run in its queue, or why it did not start."""
    is_canceled = is_abandoned(run)
    waits = not is_canceled and _waits_for_machine(run)
    reason = "waiting for the runs before it" if waits else None
    workers = tuple(WorkerState(rank, reason=reason) for rank in range(run.spec.process_count))
    if is_canceled:
        return Observation(time.time(), workers, (), Ending.CANCELLED)
    is_new = time.time() - datetime.fromisoformat(run.created).timestamp() < STARTING
    if is_new or waits or _is_submitting(run):
        return Observation(time.time(), workers)
    state = {"name": run.name, "ended": Ending.NEVER_STARTED}
    findings = diagnose(state, lambda rank: [], timeout=run.spec.timeout)
    return Observation(time.time(), workers, findings, Ending.NEVER_STARTED)


def enqueue(run: Run, pid: int) -> None:
    """Note that process `pid` will start the run when the machine is free."""
    (run.folder / ".state").mkdir(parents=True, exist_ok=True)
    write_atomically(run.folder / ".state" / "in_line.json", json.dumps(process_note(pid)).encode())


def _waits_for_machine(run: Run) -> bool:
    """Whether there is still a process that will start the run when the machine is free."""
    try:
        note = json.loads((run.folder / ".state" / "in_line.json").read_bytes())
    except (OSError, ValueError):
        return False
    return is_alive(note) is not False


def _is_submitting(run: Run) -> bool:
    """Whether a client, or the agent that it has started, is about to write the run's first state."""
    try:
        return is_locked(run.folder / ".state" / "submit.lock")
    except OSError:
        return False


def has_begun(run: Run) -> bool:
    """Whether the run has an agent or is about to, or was taken out of its queue."""
    return is_abandoned(run) or _is_submitting(run) or read_state(run.folder) is not None


def abandon(run: Run) -> None:
    """Record that a run without a state must not start. Hold the lock of its submission."""
    (run.folder / ".state" / "given_up").touch()


def is_abandoned(run: Run) -> bool:
    """Whether the run was taken out of the queue before it started."""
    return (run.folder / ".state" / "given_up").exists()
