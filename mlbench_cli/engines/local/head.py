"""The head of a local run: the run's own folder, which its agent writes and any process of this machine may read."""

import json
import signal
import time
from datetime import datetime
from typing import Any

from mlbench_cli.agent.processes import is_alive, is_locked, kill_processes, process_note, signal_process
from mlbench_cli.engines.base import Fetched
from mlbench_cli.engines.diagnosis import diagnose
from mlbench_cli.engines.observe import NodeReport, Snapshot, check_state, damaged
from mlbench_cli.model.run import Ending, Observation, Run, WorkerState
from mlbench_cli.util.files import write_atomically

LOCK = ".state/supervisor.lock"  # of whoever submits the run, then of its agent until that ends
STARTING = 60.0  # seconds until a recorded run must have an agent
HEARTBEAT = 1.0  # seconds for which a client waits for a change before it looks anyway
OVERDUE_SECONDS = 15.0  # after its deadline an agent is woken, after twice as long it is killed


class LocalHead:
    """The folder of a local run: nothing has to be copied, and the agent's state is read again when it has changed."""

    poll_seconds = 0.02

    def __init__(self, run: Run) -> None:
        self._run = run
        self._path = run.folder / ".state" / "state.json"
        self._stamp: tuple[int, int] | None = None
        self._state: dict[str, Any] | None = None

    def read(self, *, max_age: float = 0.0) -> Snapshot:
        """The state that the agent has written last, and whether the agent is alive."""
        self._refresh()
        alive = self._find_alive()
        if alive is False:  # it may have ended in between, or so fast that the file looks the same
            self._stamp = None
            self._refresh()
        # An agent on another machine cannot be seen from here, and is not taken for dead.
        report = NodeReport(self._state, {}, alive, beat_age=0.0 if alive is None else None, is_here=True)
        # Whoever may signal the agent of a run on this machine is its owner: nobody else stopped it.
        return Snapshot(time.time(), {0: report}, is_canceled=True)

    @property
    def report(self) -> NodeReport:
        """What is known of the run's only node."""
        return self.read().nodes[0]

    @property
    def is_running(self) -> bool:
        """Whether there is an agent, and it has not ended the run."""
        report = self.report
        return report.state is not None and not report.is_over

    def wait(self, seconds: float) -> None:
        """Wait until the state changes or the agent dies, for at most HEARTBEAT; wake an agent that is overdue."""
        self.end_overdue()
        end = time.monotonic() + HEARTBEAT
        while time.monotonic() < end:
            time.sleep(self.poll_seconds)
            if self._find_stamp() != self._stamp or self._find_alive() is False:
                return

    def fetch(self) -> Fetched:
        """Local results are already in place. If the agent died, kill orphaned ranks first."""
        if self.report.is_lost:
            kill_processes(f"{self._run.folder}/output")
        return Fetched(files=0, bytes=0)

    def print_stacks(self) -> None:
        """Send the agent a signal, on which it makes the ranks print their stacks."""
        if (state := read_state(self._run)) is not None:
            signal_process(state, signal.SIGUSR1)

    def end_overdue(self) -> None:
        """Wake an agent that has missed its own deadline, because somebody stopped it; kill it if that does not
        help."""
        state = self._state
        if state is None or state["ended"] or self._find_alive() is False:
            return
        late = time.time() - (state.get("started") or time.time()) - self._run.spec.timeout
        if late > OVERDUE_SECONDS:
            signal_process(state, signal.SIGCONT)
            signal_process(state, signal.SIGTERM)
        if late > 2 * OVERDUE_SECONDS:
            signal_process(state, signal.SIGKILL)

    def _find_stamp(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def _refresh(self) -> None:
        stamp = self._find_stamp()
        if stamp is not None and stamp != self._stamp and (state := read_state(self._run)) is not None:
            self._stamp, self._state = stamp, state

    def _find_alive(self) -> bool | None:
        """Whether the agent is alive, which holds a lock in the folder until it ends; None if it cannot be seen, or if
        nothing depends on it any more."""
        if self._state is None or self._state["ended"]:
            return None
        return is_alive(self._state, self._run.folder / LOCK)


def read_state(run: Run) -> dict[str, Any] | None:
    """The last state that the agent wrote; None if there is none yet. Raises DamagedRun."""
    try:
        text = (run.folder / ".state" / "state.json").read_bytes()
    except OSError:
        return None
    try:
        return check_state(run.name, json.loads(text))
    except ValueError as error:
        raise damaged(run.name, str(error)) from None


# --- before the agent has written a state -----------------------------------------------------------------------------


def observe_waiting(run: Run) -> Observation:
    """The place of a run in its queue, or why it did not start."""
    is_canceled = is_abandoned(run)
    waits = not is_canceled and _waits_for_machine(run)
    reason = "waiting for the runs before it" if waits else None
    workers = tuple(WorkerState(rank, reason=reason) for rank in range(run.spec.process_count))
    if is_canceled:
        return Observation(time.time(), workers, (), Ending.CANCELED)
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
        return is_locked(run.folder / LOCK)
    except OSError:
        return False


def has_begun(run: Run) -> bool:
    """Whether the run has an agent or is about to, or was taken out of its queue."""
    return is_abandoned(run) or _is_submitting(run) or read_state(run) is not None


def abandon(run: Run) -> None:
    """Record that a run without a state must not start. Hold the lock of its submission."""
    (run.folder / ".state" / "given_up").touch()


def is_abandoned(run: Run) -> bool:
    """Whether the run was taken out of the queue before it started."""
    return (run.folder / ".state" / "given_up").exists()
