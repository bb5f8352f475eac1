"""The local engine: a run is a group of processes on this machine, under an agent that owns the run's folder.

    FOLDER/run.json  logs/rank-N.log  output/rank-N/  resources.jsonl     what the archive is made of
    FOLDER/.state/request.json  state.json  supervisor.log                between engine and agent
    FOLDER/.state/supervisor.lock     held by whoever starts the run, then by its agent until that ends

Ranks get the same command line and the same variables as on a cluster. Any process that can read the folder can
observe, follow, cancel or delete the run, which outlives its client. A run without a state is being started as long as
somebody holds the lock; one that is canceled before it starts has an observation that says so.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mlbench_cli.agent.lock import SHARE, TAKE, Line, LockHolder, MachineLock, describe_holder
from mlbench_cli.agent.machine import read_bytes
from mlbench_cli.agent.messages import AT_START, LocalPlan, LocalShape, RankPlan
from mlbench_cli.agent.processes import (
    end_overdue,
    is_alive,
    is_lock_held,
    kill_processes,
    process_note,
    signal_process,
    try_lock,
)
from mlbench_cli.engines.base import Fetched, Submission, refuse_running
from mlbench_cli.engines.diagnosis import read_last_lines
from mlbench_cli.engines.observe import NodeReport, Snapshot, check_state, damaged, explain_absence, node_name, observe
from mlbench_cli.engines.plan import contract_environment, plan_rank, plan_ranks
from mlbench_cli.errors import CapacityError, DamagedRun, DeadlineError, UsageError
from mlbench_cli.isolation import isolated_command, protected_path
from mlbench_cli.model.network import NOT_AS_ASKED_HINT, worker_address
from mlbench_cli.model.run import Ending, Finding, Observation, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.run_folder import OBSERVATION, RunFolder
from mlbench_cli.util.files import read_object, remove_folder
from mlbench_cli.util.text import rough_duration

LOCK = ".state/supervisor.lock"
HEARTBEAT = 1.0  # seconds for which a client waits for a change before it looks anyway
ENDING = 10.0  # seconds that a forced delete waits for a run to end cleanly
LOCK_POLL = 0.01  # seconds between two attempts to get the run's lock
NOTE_BYTES = 512  # of a process in the lock's file, however long the note before it was
MACHINE_POLL = 0.05  # seconds between two attempts to get the machine
PASS_SECONDS = 2.0  # for which one may leave a free machine unused before the next in line passes it
SILENT_SECONDS = 1.0  # of waiting for it: the previous run may need a moment to end
_NETWORK = "network: "  # prefix of an agent's reason for not shaping the network
_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_INTERFACE_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
# On a shaped network. Each worker also gets its own NCCL_HOSTID: between hosts, NCCL uses neither NVLink, PCI nor
# shared memory.
_NCCL_OVER_SOCKETS = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"}


class LocalHead:
    """The folder of a local run: nothing has to be copied."""

    poll_seconds = 0.02

    def __init__(self, run: Run) -> None:
        self._run = run
        self._written: bytes | None = None  # what `_state` was read from
        self._state: dict[str, Any] | None = None

    def read(self, *, max_age: float = 0.0) -> Snapshot:
        """The state that the agent has written last, and whether the agent is alive."""
        self._refresh()
        alive = self._find_alive()
        if alive is False:  # it may have ended in between
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
        if self._state is not None:
            end_overdue(self._state)
        end = time.monotonic() + HEARTBEAT
        while time.monotonic() < end:
            time.sleep(self.poll_seconds)
            if read_bytes(_state_path(self._run)) != self._written or self._find_alive() is False:
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

    def _refresh(self) -> None:
        written = read_bytes(_state_path(self._run))
        if written is not None and written != self._written:
            self._state = _parse_state(self._run, written)
            self._written = written

    def _find_alive(self) -> bool | None:
        """Whether the agent is alive, which holds a lock in the folder until it ends; None if it cannot be seen, or if
        nothing depends on it any more."""
        if self._state is None or self._state["ended"]:
            return None
        return is_alive(self._state, self._run.folder / LOCK)


def read_state(run: Run) -> dict[str, Any] | None:
    """The last state that the agent wrote; None if there is none yet. Raises DamagedRun."""
    written = read_bytes(_state_path(run))
    return None if written is None else _parse_state(run, written)


def _state_path(run: Run) -> str:
    return f"{run.folder}/.state/state.json"


def _parse_state(run: Run, written: bytes) -> dict[str, Any]:
    try:
        return check_state(run.name, json.loads(written))
    except ValueError as error:
        raise damaged(run.name, str(error)) from None


class LocalEngine:
    """Executes runs as processes of this machine, one run at a time.

    `report` is called with sentences while a run waits for another one to end.
    """

    def __init__(self, finalizer: str | None = None, report: Callable[[str], None] | None = None) -> None:
        """`finalizer` names the module whose `main(FOLDER)` the agent calls when the run is over."""
        self._finalizer = finalizer
        self._report = report or (lambda sentence: None)
        self._children: set[int] = set()
        self._heads: dict[Path, LocalHead] = {}

    # --- plan ---------------------------------------------------------------------------------------------------

    def render(self, spec: RunSpec) -> Submission:
        """One document, a LocalPlan. Folders are relative to the run's."""
        defaults = {_INTERFACE_VARIABLES[spec.backend]: _INTERFACE} if spec.backend in _INTERFACE_VARIABLES else {}
        is_shaped = spec.has_shaped_network
        master = worker_address(0) if is_shaped else "127.0.0.1"
        environment = contract_environment(spec, _hosts(spec), master, AT_START)
        shape: LocalShape = {}
        if is_shaped:  # in the environment, not the defaults: no other interface leads to the other workers
            environment["GLOO_SOCKET_IFNAME"] = "eth0"
            if spec.backend == "nccl":
                environment |= _NCCL_OVER_SOCKETS
            shape = {"network": str(spec.network), "workers": spec.unit_count}
        ranks = [_plan_rank(spec, rank) for rank in range(spec.process_count)]
        plan: LocalPlan = {**plan_ranks(spec, "LocalRun", environment, defaults), "ranks": ranks, **shape}
        return Submission(spec, (plan,))

    # --- start --------------------------------------------------------------------------------------------------

    def submit(self, run: Run, submission: Submission) -> None:
        """Start the run; the ranks are running when this returns. Waits while another run is using this machine.

        Raises UsageError if the folder or the machine does not allow it, DeadlineError after too long a wait.
        """
        with _explain_os_errors(run), _hold_submission(run) as lock:
            if lock is None:
                _require_same(run)
                return
            lease = _acquire_machine(run, self._report)
            try:
                with RunFolder(run.folder).lock():  # to cancel or delete it is possible before this, or after it
                    _require_wanted(run, lock)
                    _prepare(run, submission, self._finalizer, lease)
                    self._launch(run, lock, lease)
            finally:
                lease.close()

    def _launch(self, run: Run, lock: int, lease: MachineLock) -> None:
        """Start the agent. It inherits the locks of the folder and of the machine and keeps them until it ends, so a
        client killed here cannot make room for a second one.
        """
        told, ready = os.pipe()
        inherited = [descriptor for descriptor in (ready, lock, lease.descriptor) if descriptor >= 0]
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)
        try:
            pid = _spawn(run.folder, ready, lock, lease.descriptor)
        except OSError:
            os.close(told)
            raise
        finally:
            os.set_inheritable(lock, False)
            os.close(ready)
            lease.close()
        self._children.add(pid)
        try:
            with os.fdopen(told, "rb") as file:
                answer = file.readline().decode("utf-8", "replace").strip()
        except BaseException:
            os.kill(pid, signal.SIGTERM)
            raise
        if answer.startswith(_NETWORK):
            raise CapacityError(
                f'The network {run.spec.network} of the run "{run.name}" cannot be created on this machine: '
                f"{answer.removeprefix(_NETWORK)}.",
                hint=NOT_AS_ASKED_HINT,
            )
        if answer != "ok":
            last = read_last_lines(run.folder / ".state" / "supervisor.log")[-1:]
            problem = answer or "its agent died; " + " ".join(last)
            raise UsageError(
                f'The run "{run.name}" could not be started: {problem}.',
                hint="Free up resources (disk, number of processes), then run it again.",
            )

    # --- look ---------------------------------------------------------------------------------------------------

    def resume(self, run: Run) -> None:
        """Do nothing: there is no partial submission of a local run."""

    def head(self, run: Run) -> LocalHead:
        """The run's own folder."""
        return self._heads.setdefault(run.folder, LocalHead(run))

    def look(self, run: Run, *, max_age: float = 0.0) -> Observation:
        """The run as its agent tells of it, or its place in a queue before there is an agent."""
        if (kept := RunFolder(run.folder).read_observation()) is not None:
            return kept
        snapshot = self.head(run).read()
        if snapshot.nodes[0].state is None:
            if is_starting(run):
                return Observation.of_waiting(time.time(), run.spec, "waiting for the runs before it")
            snapshot = self.head(run).read()  # it may have begun, and even ended, since it was read
        report = snapshot.nodes[0]
        if report.state is None:
            return explain_absence(run, Observation.of_waiting(time.time(), run.spec), "The run has no agent")
        seen = observe(run.spec, (), snapshot, lambda rank: read_last_lines(RunFolder(run.folder).log(rank)))
        if seen.ended is not None:
            self._reap()
        elif report.alive is None:
            host = node_name(report.state)
            finding = Finding(
                "unknown_from_here",
                f"The run was started on {host}; this machine cannot tell whether it is still running.",
                hint=f"Run on {host}: mlbench status {run.name}",
            )
            seen = replace(seen, findings=(finding,))
        return seen

    # --- end ----------------------------------------------------------------------------------------------------

    def cancel(self, run: Run) -> None:
        """Ask the agent to end the ranks; a run that has not started will not start.

        Processes of a lost agent are killed. Raises UsageError if the run is on another machine.
        """
        head = self.head(run)
        report = head.report
        if report.state is None:
            if run.folder.is_dir() and not _cancel_before_start(run):
                self.cancel(run)  # it has started in the meantime
        elif report.is_lost:
            kill_processes(f"{run.folder}/output")
        elif not report.has_ended:
            if is_alive(report.state) is None:
                host = node_name(report.state)
                raise UsageError(
                    f'The run "{run.name}" is on {host}, which cannot be reached from here.',
                    hint=f"Run on {host}: mlbench cancel {run.name}",
                )
            signal_process(report.state, signal.SIGCONT)  # it may have been stopped
            signal_process(report.state, signal.SIGTERM)
            end_overdue(report.state)

    def delete(self, run: Run, *, force: bool = False) -> None:
        """Remove the run's folder. A running run is refused, or with `force` ended first."""
        try:
            self._end(run, force)
        except DamagedRun:
            if not force:
                raise
            kill_processes(f"{run.folder}/output")
        self._reap()
        self._heads.pop(run.folder, None)
        with _explain_os_errors(run, "removed"):
            remove_folder(run.folder)

    def _end(self, run: Run, force: bool) -> None:
        head = self.head(run)
        if head.is_running and not force:
            raise refuse_running(run)
        if head.report.state is not None:  # else whoever waits to start it will see that its folder is gone
            self.cancel(run)
        end = time.monotonic() + ENDING
        while head.is_running and time.monotonic() < end:
            time.sleep(head.poll_seconds)
        report = head.report
        if report.state is not None and not report.has_ended:
            if not report.is_lost:
                signal_process(report.state, signal.SIGKILL)
            kill_processes(f"{run.folder}/output")

    def _reap(self) -> None:
        """Take up the ends of agents that this process has started."""
        for pid in list(self._children):
            try:
                is_over = os.waitpid(pid, os.WNOHANG) != (0, 0)
            except ChildProcessError:
                is_over = True
            if is_over:
                self._children.discard(pid)


# --- plan -------------------------------------------------------------------------------------------------------


def _hosts(spec: RunSpec) -> str:
    hosts = map(worker_address, range(spec.workers)) if spec.has_shaped_network else ["localhost"] * spec.workers
    return ",".join(hosts)


def _plan_rank(spec: RunSpec, rank: int) -> RankPlan:
    plan = plan_rank(spec, rank)
    if spec.has_shaped_network and spec.backend == "nccl":
        plan["environment"] = {**plan["environment"], "NCCL_HOSTID": f"worker-{spec.unit_of(rank)}"}
    return plan


# --- start ------------------------------------------------------------------------------------------------------


def _acquire_machine(run: Run, report: Callable[[str], None]) -> MachineLock:
    """Acquire this machine for `run`: first come, first served, for at most the run's timeout.

    `report` gets a sentence when the wait begins, and whenever the run's place in the line changes. Stops waiting
    without a lock if somebody canceled or deleted `run`. Raises DeadlineError.
    """
    lock = MachineLock(SHARE if run.spec.share_machine else TAKE, run.name, run.spec.timeout)
    if run.spec.share_machine:
        lock.acquire()
        return lock
    line = Line()
    try:
        _wait_for_machine(run, lock, line, report)
    finally:
        line.close()
    return lock


def _wait_for_machine(run: Run, lock: MachineLock, line: Line, report: Callable[[str], None]) -> None:
    begun = time.monotonic()
    end = begun + run.spec.timeout
    reported: int | None = None
    used = begun  # when the machine was last seen in use
    while (before := line.count_before()) or not lock.acquire():
        if not lock.is_free():
            used = time.monotonic()
        elif time.monotonic() > used + PASS_SECONDS * before and lock.acquire():
            return  # those before have been stopped, e.g. by Ctrl-Z
        if (run.folder / OBSERVATION).exists() or not run.folder.is_dir():
            lock.give_up("somebody canceled or deleted this run")
            return
        holder, now = lock.read_holder(), time.monotonic()
        if now >= end:
            raise _deadline_error(run, holder)
        if now >= begun + SILENT_SECONDS and before != reported:
            report(_waiting_sentence(run, holder, before, end - now))
            reported = before
        time.sleep(MACHINE_POLL)


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


def _require_same(run: Run) -> None:
    """Raise UsageError if the agent in the run's folder is that of another run."""
    state = read_state(run)
    if state is not None and state["spec_hash"] != run.spec.hash:
        raise UsageError(
            f'The folder {run.folder} holds another run, "{state["name"]}".', hint=f"mlbench delete {state['name']}"
        )


def _require_wanted(run: Run, lock: int) -> None:
    """Raise UsageError if somebody canceled or deleted the run while it waited. Hold the folder's lock."""
    try:
        is_there = os.path.samestat(os.stat(run.folder / LOCK), os.fstat(lock))
    except FileNotFoundError:
        is_there = False
    if not is_there:
        with contextlib.suppress(OSError):
            run.folder.rmdir()  # locking it has made it again
        raise UsageError(f'The run "{run.name}" was deleted before it was started.')
    if (run.folder / OBSERVATION).exists():
        raise UsageError(f'The run "{run.name}" was canceled before it started.')


def _prepare(run: Run, submission: Submission, finalizer: str | None, lease: MachineLock) -> None:
    (plan,) = submission.documents
    (run.folder / "logs").mkdir(exist_ok=True)
    for entry in plan["ranks"]:
        (run.folder / entry["environment"]["MLBENCH_OUTPUT_DIR"]).mkdir(parents=True, exist_ok=True)
    request = {
        "run_id": run.id,
        "python": sys.executable,
        "installed_code_only": run.spec.runs_task_program,
        "plan": plan,
        "finalizer": finalizer,
        "finalizer_path": protected_path(),
        "machine_lock": {"lock": lease.state, "lock_reason": lease.reason},
    }
    path = run.folder / ".state" / "request.json"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(request, file)


def _spawn(folder: Path, ready: int, lock: int, machine_lock: int) -> int:
    words = [*isolated_command("mlbench_cli.agent.agent"), str(folder), *map(str, (ready, lock, machine_lock))]
    log = str(folder / ".state" / "supervisor.log")
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(sys.executable, words, os.environ, file_actions=actions, setsid=True)


@contextlib.contextmanager
def _hold_submission(run: Run) -> Iterator[int | None]:
    """The lock of the run's folder, for the block; an agent that inherits the descriptor keeps it until it ends.

    None if the run has an agent. The file names this process, for readers on other machines.
    """
    (run.folder / ".state").mkdir(parents=True, exist_ok=True)
    lock = os.open(run.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # A process that waits for the machine holds it for the run's timeout at most, an observer for a moment.
        while not (is_held := try_lock(lock)) and read_state(run) is None:
            time.sleep(LOCK_POLL)
        is_held = is_held and read_state(run) is None  # else it has begun, and ended, since it was asked
        if is_held:
            os.pwrite(lock, json.dumps(process_note(os.getpid())).ljust(NOTE_BYTES).encode(), 0)
        yield lock if is_held else None
    finally:
        os.close(lock)


@contextlib.contextmanager
def _explain_os_errors(run: Run, action: str = "created") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"The folder {run.folder} of the run cannot be {action}: {error.strerror or error}.",
            hint="Free up disk space or fix its permissions, or set MLBENCH_HOME to another folder.",
        ) from None


# --- before the agent has written a state -----------------------------------------------------------------------------


def has_begun(run: Run) -> bool:
    """Whether the run has an agent, or was canceled before it got one."""
    return (run.folder / OBSERVATION).exists() or read_state(run) is not None


def is_starting(run: Run) -> bool:
    """Whether a client, which may wait for this machine, or the agent that it has started is about to write the first
    state of a run that has none. False for runs of other engines."""
    return is_lock_held(run.folder / LOCK, read_object(run.folder / LOCK)) is not False


def _cancel_before_start(run: Run) -> bool:
    """Record that a run without a state is canceled, so that nobody starts it; False if it has a state by now."""
    folder = RunFolder(run.folder)
    with _explain_os_errors(run, "changed"), folder.lock():
        if read_state(run) is not None:
            return False
        if folder.read_observation() is None:
            folder.write_observation(Observation.of_waiting(time.time(), run.spec, ended=Ending.CANCELED))
        return True
