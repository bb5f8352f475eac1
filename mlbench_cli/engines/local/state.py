"""The state that a local run's agent writes for other processes, and whether the agent is alive."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from mlbench_cli.agent.processes import boot_id, is_alive, is_locked, process_note
from mlbench_cli.engines.diagnosis import diagnose, read_last_lines
from mlbench_cli.engines.observe import NodeReport, Snapshot, observe
from mlbench_cli.model.run import Ending, Finding, Observation, Run, WorkerState
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import write_atomically

STARTING = 60.0  # seconds until a recorded run must have an agent
ENDED = ("succeeded", "failed", "lost")


class Watch:
    """The agent's state, reread when its file changes, and whether the agent is alive."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._path = run.folder / ".state" / "state.json"
        self._stamp: tuple[int, int] | None = None
        self.state: dict[str, Any] | None = None
        self.lost = False
        self.unknown = False  # started on another machine: this machine cannot tell whether it is alive

    def look(self) -> bool:
        """Refresh; True if something has changed."""
        changed = self._read()
        if self.state is None or self.state["ended"] or self.lost:
            self.unknown = False
            return changed
        liveness = find_liveness(self._run.folder, self.state)
        self.unknown = liveness is Liveness.UNKNOWN
        if liveness is not Liveness.DEAD:
            return changed
        # It may have ended between the two looks, or so fast that the file looks the same.
        self._stamp = None
        self._read()
        self.lost = not self.state["ended"]
        return True

    @property
    def host(self) -> str:
        """The name of the machine that the run is on, as its agent wrote it."""
        return str((self.state or {}).get("host") or "another machine")

    @property
    def running(self) -> bool:
        """Whether the agent is alive and has not ended the run."""
        return self.state is not None and not self.state["ended"] and not self.lost

    def rank_ended(self, rank: int) -> bool:
        """Whether this rank will write no more lines."""
        if self.state is None:
            return not starting(self._run)
        return bool(self.state["ended"]) or self.lost or self.state["ranks"][rank]["phase"] in ENDED

    def _read(self) -> bool:
        try:
            found = self._path.stat()
        except OSError:
            return False
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp == self._stamp:
            return False
        state = read_state(self._run.folder)
        if state is None:
            return False
        self._stamp, self.state = stamp, state
        return True


def read_state(folder: Path) -> dict[str, Any] | None:
    """The last state that the agent wrote; None if there is none yet."""
    try:
        state: dict[str, Any] = json.loads((folder / ".state" / "state.json").read_bytes())
    except (OSError, ValueError):
        return None
    return state


class Liveness(Enum):
    """Whether an agent is running, as far as this process can tell."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


def find_liveness(folder: Path, state: Mapping[str, Any]) -> Liveness:
    """Whether the agent that wrote the state still runs: it holds a lock in the folder until it ends.

    On the same kernel the lock is proof, also for a process in another PID namespace. From another machine that sees
    the same folder nothing can be told; the same machine after a restart knows that all its processes have ended.
    """
    if state["boot_id"] != boot_id():
        return Liveness.DEAD if state.get("host") == os.uname().nodename else Liveness.UNKNOWN
    try:
        is_held = is_locked(folder / ".state" / "supervisor.lock")
    except OSError:
        is_held = is_alive(state) is not False
    return Liveness.ALIVE if is_held else Liveness.DEAD


def starting(run: Run) -> bool:
    """Whether a run without a state may still get one."""
    if is_abandoned(run):
        return False
    is_new = time.time() - datetime.fromisoformat(run.created).timestamp() < STARTING
    return is_new or _is_submitting(run) or _waits_for_machine(run)


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


def observation(run: Run, watch: Watch) -> Observation:
    """The run as its agent tells of it, or its place in a queue before there is an agent."""
    if watch.state is None:
        return _before_the_agent(run)
    # Whoever signals the agent of a run on this machine may do so: nobody else stopped it.
    snapshot = Snapshot(time.time(), {0: NodeReport(watch.state, {}, alive=not watch.lost)}, is_cancelled=True)
    seen = observe(run.spec, (), snapshot, lambda rank: read_last_lines(RunFolder(run.folder).log(rank)))
    return replace(seen, findings=(_unknown_from_here(run, watch.host),)) if watch.unknown else seen


def _before_the_agent(run: Run) -> Observation:
    waits = not is_abandoned(run) and _waits_for_machine(run)
    reason = "waiting for the runs before it" if waits else None
    workers = tuple(WorkerState(rank, reason=reason) for rank in range(run.spec.process_count))
    if is_abandoned(run):
        return Observation(time.time(), workers, (), Ending.CANCELLED)
    if starting(run):
        return Observation(time.time(), workers)
    state = {"name": run.name, "ended": Ending.NEVER_STARTED}
    findings = diagnose(state, lambda rank: [], timeout=run.spec.timeout)
    return Observation(time.time(), workers, findings, Ending.NEVER_STARTED)


def _unknown_from_here(run: Run, host: str) -> Finding:
    return Finding(
        "unknown_from_here",
        f"The run was started on {host}; this machine cannot tell whether it is still running.",
        hint=f"Run on {host}: mlbench status {run.name}",
    )
