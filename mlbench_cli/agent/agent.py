"""The agent of a run on one machine: starts, watches and ends the ranks, and records what it observes.

It is started by the local engine, in a separate session, as `main([FOLDER, READY, LOCK, MACHINE])`,
and outlives its client. Only the standard library, `machine`, `load` and `cores` are imported: it starts in 25 ms.
When the run is over it imports the finalizer that the request names, which completes the archive.

FOLDER  the run's folder. `.state/request.json` holds the request, `.state/state.json` is rewritten on each change
READY   file descriptor that gets the line "ok" once every rank is started, or the reason why not
LOCK    file descriptor of the folder's lock, held until this process ends: a free lock proves that it is dead
MACHINE file descriptor of the machine's lock, held until this process ends, or -1

It decides nothing about success and writes no sentence for users: facts only, from which the engine makes findings.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import selectors
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mlbench_cli import isolation
from mlbench_cli.agent import hang, load, machine, processes
from mlbench_cli.agent.clock import ClockWatch
from mlbench_cli.agent.messages import AT_START, SCHEMA_VERSION, NodeState, pending_facts
from mlbench_cli.util.files import explain_start, write_atomically
from task_images import cores

if TYPE_CHECKING:  # loaded for runs that have them: together they would delay the ranks of all others by 15 ms
    from mlbench_cli.agent.faults import NodeFaults
    from mlbench_cli.agent.network.shaped import ShapedNetwork

GRACE = 5.0  # seconds between TERM and KILL
UNKILLABLE = 30.0  # seconds after KILL for a process in the kernel to disappear
SIGNAL_SECONDS = 0.3
STALL_SECONDS = 5.0  # by which a sample may be late before the agent counts as stalled
SAMPLE = 1.0  # least seconds between two lines of resources per rank
SAMPLES = 600  # after this many seconds lines get rarer, so that a day has about 3,600 per rank
SCARCE = 1 << 20  # bytes of free disk below which it is watched closely
RESERVE = 1 << 16  # bytes kept so that the last state can be written on a full disk
# Variables that other launchers set for their own processes. A rank that inherited them would join their groups, or
# wait for their servers: torchrun (PET_: what its options default to), Slurm's srun, MPI's mpirun and PMI, Cray's and
# IBM's launchers.
FOREIGN_PREFIXES = (
    *("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "PALS_", "MV2_COMM_WORLD_", "MPI_LOCAL", "JSM_NAMESPACE_"),
    *("HYDI_", "PET_", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_"),
    *("SLURM_STEP", "SLURM_CPU_BIND", "SLURM_MPI_", "SLURM_PMI", "SRUN_", "FLUX_TASK_", "ALPS_APP_"),
)
FOREIGN_VARIABLES = frozenset(
    (
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE"),
        *("SLURM_NTASKS_PER_NODE", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_DISTRIBUTION", "SLURM_LAUNCH_NODE_IPADDR"),
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "CROSS_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "PMI2_RANK", "MPIRUN_RANK"),
        "TF_CONFIG",
    )
)


def main(arguments: list[str]) -> int:
    """Read the request, start the ranks, report "ok" or the problem on the descriptor `ready`, and watch them to their
    end.

    The arguments are the run's folder and three descriptors: ready, lock of the run, lock of the machine.
    """
    folder, ready, lock, machine_lock = arguments[0], *map(int, arguments[1:4])
    machine.keep_only(ready, lock, machine_lock)
    with open(f"{folder}/.state/request.json", encoding="utf-8") as file:
        request = json.load(file)
    agent = Agent(folder, request)
    agent.prepare()
    problem = agent.start()
    # A client that died in between has closed its end.
    with contextlib.suppress(OSError):
        os.write(ready, ((problem or "ok") + "\n").encode())
    os.close(ready)
    agent.watch()
    agent.finish()
    _finalize(folder, request["finalizer"], request["finalizer_path"])
    return 0


def _finalize(folder: str, module: str | None, path: list[str]) -> None:
    """Complete the archive, by a module that finds its libraries on `path`.

    A failure is in supervisor.log, and `mlbench wait` tries again.
    """
    if module is None or not os.path.isdir(folder):
        return
    signal.set_wakeup_fd(-1)
    sys.path += [entry for entry in path if entry not in sys.path]  # behind the standard library
    try:
        importlib.import_module(module).main(folder)
    except Exception:
        sys.excepthook(*sys.exc_info())


class Rank:
    """One process of the run, or a rank that has none because only rank 0 runs the command."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.number: int = plan["rank"]
        self.argv: list[str] | None = plan["argv"]
        self.environment: dict[str, str] = plan["environment"]
        self.cpus: list[int] = []  # those that it is bound to; empty: not bound
        self.pid = 0
        self.pidfd = -1
        self.begun = self.ended = 0.0  # by the monotonic clock
        self.running = False  # its process has been started and has not ended
        self.facts = pending_facts(self.number)

    def begin(self, pid: int, begun: float, started: float) -> None:
        """Record that its process was started, for the first time or again, at these times of the monotonic and the
        wall clock.

        Both are read before the fork, because the process may run for long before this one runs again.
        """
        self.running, self.pid = True, pid
        self.begun = self.begun or begun
        started = self.facts["started"] or started
        self.facts.update({"pid": pid, "phase": "running", "started": started, "finished": None})

    def end(self) -> None:
        """Record that its process has ended, or was given up."""
        self.running = False
        self.ended = time.monotonic()
        self.facts.update({"finished": time.time(), "seconds": round(self.ended - self.begun, 3)})


class Agent:
    """Owns the ranks of a run on one machine and their folder, and writes its state whenever it changes."""

    takes_users_path = True  # whether `python` of a user's command is that of the user's PATH
    node, count = 0, 1  # of this machine, and of all of the run
    token = ""  # that the agents of a run share
    next_look = float("inf")  # when `_on_time` is due, however rare samples have become

    def __init__(self, folder: str, request: dict[str, Any]) -> None:
        plan = request["plan"]
        self.folder = folder
        self.python: str = request["python"]
        self.installed_code_only: bool = request["installed_code_only"]
        self.plan = plan
        self.ranks = [Rank(entry) for entry in plan["ranks"]]
        self.deadline = time.monotonic() + plan["timeout"]
        self.port = machine.free_port()
        self.stop_at: float | None = None  # when TERM becomes KILL
        self.give_up_at: float | None = None
        # Else the run starts without nodes that are missing, and survives the ends of ranks other than 0.
        self.needs_all = plan.get("absent_seconds") is None
        self.next_sample = 0.0
        self.first_sample = 0.0
        self.sampler = machine.Sampler()
        users = {**plan["defaults"], **os.environ, **plan["environment"]}
        self.preloaded = load.find_preloaded(users)
        self.load = load.LoadMeter(**request["machine_lock"], preloaded=self.preloaded)
        self.clock = ClockWatch()
        self.idle = hang.IdleWatch()
        self.are_stacks_wanted = False
        self.out_of_memory_before = machine.memory_kills()
        self.canceled = False
        self.network: ShapedNetwork | None = None
        self.faults = self._control_faults(plan.get("faults"))
        note = processes.process_note(os.getpid())
        self.state: NodeState = {
            "schema_version": SCHEMA_VERSION,
            "run_id": request["run_id"],
            "name": plan["name"],
            "spec_hash": plan["spec_hash"],
            "pid": note["pid"],
            "start_time": note["start_time"],
            "host": note["host"],
            "boot_id": note["boot_id"],
            "pid_namespace": note["pid_namespace"],
            "master_port": self.port,
            "deadline": self.deadline,
            "started": time.time(),
            "finished": None,
            "seconds": None,
            "stepped_seconds": 0.0,
            "ended": None,
            "first": None,
            "first_failed": None,
            "idle_since": None,
            "disk_full": False,
            "start_problem": None,
            "network_problem": None,
            "ranks": [rank.facts for rank in self.ranks],
        }
        self.selector = selectors.DefaultSelector()

    def _control_faults(self, plan: Mapping[str, Any] | None) -> NodeFaults | None:
        """The part that injects faults and restarts ranks, if the plan asks for it."""
        if plan is None:
            return None
        from mlbench_cli.agent.faults import FaultControl, NodeFaults

        return NodeFaults(self, plan) if self.node else FaultControl(self, plan)

    # --- start --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Adopt orphans, and handle signals."""
        machine.prctl(machine.PR_SET_CHILD_SUBREAPER, 1)
        self._listen()

    def start(self) -> str | None:
        """Start every rank. Returns why it cannot be done, or None; a command that does not exist is a rank's end."""
        try:
            self._reserve()
            self._share_cpus()
            if not self._shape_network():
                return f"network: {self.state['network_problem']}"
            if self.faults is not None:
                self.faults.begin()
            for rank in self.ranks:
                self._start(rank)
        except OSError as error:
            self.state["disk_full"] = machine.is_full(error)
            self.state["start_problem"] = error.strerror or str(error)
            self._stop("never_started", grace=0)
            return str(self.state["start_problem"])
        self._sample()
        self._write_state()
        return None

    def _share_cpus(self) -> None:
        """Pin every process to its own CPUs if the plan asks for it. Raises OSError if there are too few."""
        ranks = [rank for rank in self.ranks if rank.argv is not None]
        if not self.plan.get("pin") or not ranks:
            return
        try:
            shares = cores.share_cpus(sorted(os.sched_getaffinity(0)), len(ranks))
        except (ValueError, AttributeError) as error:
            raise OSError(errno.EINVAL, f"run.pin: {error}") from None
        for number, rank in enumerate(ranks):
            rank.cpus = shares[number]

    def _shape_network(self) -> bool:
        """Create and verify the planned network; False if that fails."""
        asked = self.plan.get("network")
        if asked is None:
            return True
        from mlbench_cli.agent.network.namespaces import ShapingError
        from mlbench_cli.agent.network.shaped import ShapedNetwork
        from mlbench_cli.model.network import parse_network

        try:
            self.network = ShapedNetwork(parse_network(asked), self.plan["workers"])
            self.network.verify()
        except ShapingError as error:
            self.state["network_problem"] = str(error)
            self._stop("never_started", grace=0)
            return False
        self.selector.register(self.network.channel, selectors.EVENT_READ, self._on_network_lost)
        return True

    def _on_network_lost(self) -> None:
        """Handle a readable hub socket: the hub only sends answers, so it has ended, and the network with it."""
        assert self.network is not None
        self.selector.unregister(self.network.channel)
        self.state["network_problem"] = "the process that made it has ended"
        self._stop("failed", GRACE)

    def _finish_network(self) -> None:
        if self.network is None:
            return
        try:
            self.network.finish(f"{self.folder}/shaping.json")
        except OSError as error:
            self.on_write_error(error)

    def _listen(self) -> None:
        """Make signals wake the selector."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.selector.register(reader, selectors.EVENT_READ, lambda: machine.drain(reader))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_cancel)
        signal.signal(signal.SIGUSR1, self._on_stacks)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _reserve(self) -> None:
        with open(f"{self.folder}/.state/reserve", "wb") as file:
            file.write(b"\0" * RESERVE)

    def _start(self, rank: Rank) -> None:
        log = self._open_log(rank)
        try:
            if rank.argv is None:
                return
            reader, writer = os.pipe()
            parent = os.getpid()
            begun, started = time.monotonic(), time.time()
            if (pid := os.fork()) == 0:
                self._exec_command(rank, log, writer, parent)
            os.close(writer)
        finally:
            os.close(log)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        rank.begin(pid, begun, started)
        with os.fdopen(reader, "rb") as file:
            rank.facts["start_error"] = file.read().decode("utf-8", "replace") or None
        rank.pidfd = processes.process_handle(rank.pid)
        if rank.pidfd >= 0:
            self.selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._on_exit(rank))

    def _log_path(self, rank: Rank) -> str:
        return f"{self.folder}/logs/rank-{rank.number}.log"

    def _open_log(self, rank: Rank) -> int:
        return os.open(self._log_path(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _exec_command(self, rank: Rank, log: int, report: int, parent: int) -> None:
        """In the forked child: turn into the rank's command. Never returns."""
        code, argv, path = 126, self._complete_command(rank), ""
        try:
            os.setpgid(0, 0)
            if self.network is not None:  # first, since a new user namespace clears PR_SET_PDEATHSIG
                self.network.enter_worker(int(rank.environment["NODE_RANK"]))
            machine.prctl(machine.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(code)
            # What is ignored stays ignored across exec, and Python ignores some.
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            environment = self._environment(rank)
            if rank.cpus:  # here, since what it starts and its threads inherit it
                os.sched_setaffinity(0, rank.cpus)
            null = os.open(os.devnull, os.O_RDONLY)
            for target, source in enumerate((null, log, log)):
                os.dup2(source, target)
            if self.installed_code_only:
                argv = isolation.rank_command(argv, os.environ, self.plan["environment"].get("MLBENCH_TASK_PATH"))
            if argv[0] == "python" and (
                self.installed_code_only
                or not self.takes_users_path
                or not shutil.which("python", path=environment["PATH"])
            ):
                argv[0] = self.python  # also as its name, by which Python finds sys.executable
            path = environment.get("PATH", os.defpath)
            os.execvpe(argv[0], argv, environment)
        except BaseException as error:
            code = 127 if isinstance(error, FileNotFoundError) else code
            why = explain_start(argv[0], error, path) if path and isinstance(error, OSError) else error
            os.write(report, f"{argv[0]}: {why}".encode("utf-8", "replace"))
        finally:
            os._exit(code)

    def _complete_command(self, rank: Rank) -> list[str]:
        """The command with what is known only now in place of its placeholders."""
        variables = self.plan["environment"]
        known = {
            "hosts": variables["MLBENCH_HOSTS"],
            "run_id": self.plan["name"],
            "backend": variables["MLBENCH_BACKEND"],
            "rank": str(rank.number),
            "master_port": str(self.port),
        }
        words = list(rank.argv or ())
        for name, value in known.items():
            words = [word.replace(f"{{{name}}}", value) for word in words]
        return [*self.plan.get("launcher", ()), *words]

    def _environment(self, rank: Rank) -> dict[str, str]:
        """The user's environment, what it lacks of the plan's defaults, and the contract's variables on top."""
        own = {**self.plan["environment"], **rank.environment}
        own["MASTER_PORT"] = str(self.port)
        own["MLBENCH_OUTPUT_DIR"] = os.path.join(self.folder, own["MLBENCH_OUTPUT_DIR"])
        threads = max(1, cores.effective_cores() // len(self.ranks))
        defaults = {key: str(threads) if value == AT_START else value for key, value in self.plan["defaults"].items()}
        users = isolation.rank_environment(os.environ) if self.installed_code_only else dict(os.environ)
        users = {name: value for name, value in users.items() if not is_foreign(name)}
        environment = {**defaults, **users, **own}
        if rank.cpus:
            environment[cores.PINNED_FROM] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        if self.faults is not None:
            environment |= self.faults.environment(rank)
        own_bin, path = os.path.dirname(self.python), environment.get("PATH", os.defpath)
        if self.installed_code_only or not self.takes_users_path:
            environment["PATH"] = own_bin + os.pathsep + path
        else:  # a command of the user runs with the user's programs; ours serve only what there is none of
            environment["PATH"] = path + os.pathsep + own_bin
        if not self.installed_code_only:
            given = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = f"{hang.BESIDE}{os.pathsep}{given}" if given else hang.BESIDE
            environment["MLBENCH_STACKS_SIGNAL"] = str(int(hang.STACKS_SIGNAL))
            if int(own["WORLD_SIZE"]) > 1:
                environment["MLBENCH_RANK_LOG"] = os.path.abspath(self._log_path(rank))
        count, devices = self.plan["gpus_per_worker"], machine.visible_gpus(os.environ)
        if count and devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(
                machine.gpus_of_worker(int(own["NODE_RANK"]), count, devices)
            )
        return environment

    # --- watch --------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Wait until all ranks have ended."""
        while any(rank.running for rank in self.ranks) or (self.faults is not None and self.faults.waits):
            moments = [self.next_sample, self.next_look, self.stop_at or self.deadline]
            if self.give_up_at is not None:
                moments.append(self.give_up_at)
            if self.faults is not None and (self.state["ended"] is None or self.faults.waits):
                moments.append(self.faults.next_moment())
            # With pidfds, epoll hands the ranks over in the order in which they ended, however late this process
            # gets its turn: whoever failed first is known on a crowded machine, too.
            for key, _ in self.selector.select(max(0.0, min(moments) - time.monotonic())):
                key.data()
            for rank in self.ranks:
                if rank.running and rank.pidfd < 0:
                    self._on_exit(rank)
            self._reap_orphans()
            self._on_time(time.monotonic())

    def _on_time(self, now: float) -> None:
        if self.are_stacks_wanted:
            self.are_stacks_wanted = False
            self._print_stacks()
        if self.canceled:
            self._stop("canceled", GRACE)
        if now >= self.deadline:
            if self.state["ended"] is None:
                self._print_stacks()
            self._stop("deadline", GRACE)
        if self.stop_at is not None and now >= self.stop_at:
            self._signal(signal.SIGKILL)
            self.stop_at = now + GRACE
            self.give_up_at = self.give_up_at or now + UNKILLABLE
        if self.give_up_at is not None and now >= self.give_up_at:
            for rank in self.ranks:
                if rank.running:
                    rank.end()
                    rank.facts.update({"phase": "lost", "stopped": True})
        if now >= self.next_sample:
            self._sample()
        if self.faults is not None:
            self.faults.on_time(now)

    # --- attempts: what `faults` has done -----------------------------------------------------------------------

    def find_node(self, *, rank: int | None = None, worker: int | None = None) -> int:
        """The node of a rank or of a worker."""
        return 0

    def send_faults(self, node: int, message: Mapping[str, Any]) -> None:
        """Send a message of `faults`: an order to another node, or a report to node 0."""
        raise NotImplementedError("a run on one machine")

    def set_port(self, port: int) -> None:
        """Use another port for the rendezvous of the ranks."""
        self.port = self.state["master_port"] = port

    def start_again(self, rank: Rank) -> None:
        """Start a rank whose process has ended. Raises OSError."""
        rank.facts["restarts"] += 1
        rank.facts.update({"exit_code": None, "signal": None, "stopped": False, "out_of_memory": None})
        self._start(rank)
        self._write_state()

    def fail(self, number: int, code: int) -> None:
        """End the run with the failure of this rank."""
        self.state["first_failed"] = number
        self.abandon_ranks()
        self._stop("failed", grace=0)

    def abandon_ranks(self) -> None:
        """Mark ranks that wait for another attempt as ended: there will be none."""
        for rank in self.ranks:
            if not rank.running and rank.facts["phase"] == "running":
                self._mark_failed(rank)

    def _mark_failed(self, rank: Rank) -> None:
        code = rank.facts["exit_code"]
        rank.facts["phase"] = "failed" if code else "succeeded"
        rank.facts["stopped"] = self.state["first_failed"] not in (None, rank.number)

    def _on_cancel(self, *_: object) -> None:
        self.canceled = True

    def _on_exit(self, rank: Rank) -> None:
        # A batch system that ends a job signals ranks and agents alike: then a rank has not failed by itself.
        if self.state["ended"] is None and not self.canceled and processes.is_signaled(rank.pid):
            time.sleep(SIGNAL_SECONDS)  # this process's own signal may come a moment later
        if self.canceled:
            self._stop("canceled", GRACE)
        pid, status, usage = os.wait4(rank.pid, os.WNOHANG)
        if pid == 0:
            return
        if rank.pidfd >= 0:
            self.selector.unregister(rank.pidfd)
            os.close(rank.pidfd)
        # As in a container: when the rank's own process ends, what it left behind ends, too.
        processes.signal_group(rank.pid, signal.SIGKILL)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = os.WEXITSTATUS(status) if number is None else 128 + number
        rank.end()
        if self.faults is not None and self.faults.take_end(rank, code, number):
            rank.facts.update({"exit_code": code, "signal": number})  # and the phase stays: its log continues
            self._write_state()
            return
        rank.facts.update(
            {
                "phase": "failed" if code else "succeeded",
                "exit_code": code,
                "signal": number,
                "stopped": self.state["ended"] is not None,
            }
        )
        last = self.sampler.last(rank.number, usage)
        rank.facts["peak_rss_bytes"] = last["peak_rss_bytes"]
        self._write_resources(self._with_log_sizes([last]))
        if code and self.state["ended"] is None and (self.needs_all or rank.number == 0):
            self.state["first_failed"] = rank.number
            if number == signal.SIGKILL:
                rank.facts["out_of_memory"] = machine.risen(self.out_of_memory_before, machine.memory_kills())
                rank.facts["memory_limit_bytes"] = machine.memory_limit() if rank.facts["out_of_memory"] else None
            self._stop("failed", GRACE)
        self._write_state()

    def _stop(self, why: str, grace: float) -> None:
        """End the run: TERM now, KILL after `grace` seconds. The first reason stays; a later one may only hasten it."""
        first = self.state["ended"] is None
        if not first and grace:
            return
        self.state["ended"] = self.state["ended"] or why
        if self.state["first"] is None:
            self.state["first"] = {
                "why": why,
                "node": self.node,
                "rank": self.state["first_failed"],
                "time": time.time(),
            }
        self.stop_at = time.monotonic() + grace
        self._signal(signal.SIGTERM if grace else signal.SIGKILL)
        if first:
            self._write_state()

    def _signal(self, number: int) -> None:
        """KILL goes to all that a rank has started, TERM as in a container to its own process, which ends the rest."""
        for rank in self.ranks:
            if rank.running and number == signal.SIGKILL:
                processes.signal_group(rank.pid, number)
            elif rank.running:
                with contextlib.suppress(OSError):  # the rank may run as another user by now
                    os.kill(rank.pid, number)  # not yet waited for, so the number is its own

    def _reap_orphans(self) -> None:
        """Take up the ends of processes that lost their parent, but leave the ranks to their own turn."""
        ranks = {rank.pid for rank in self.ranks if rank.running}
        with contextlib.suppress(ChildProcessError, AttributeError):
            while True:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid in ranks:
                    return
                os.waitpid(ended.si_pid, 0)

    # --- write --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """When this returns, no process of the run remains, and the last state is on disk."""
        if self.faults is not None:
            self.faults.finish()
        self._finish_network()
        processes.kill_descendants()
        if self.first_sample:  # else nothing has run, and the load of the machine is nobody's business
            self._write_resources([self.load.row(0.0)])
        self._check_space()
        if self.state["ended"] is None:
            self.state["ended"] = "exited"
        for rank in self.ranks:
            if rank.argv is None:  # as on a cluster, where the workers that only wait end well when worker 0 does
                fine = self.state["ended"] == "exited"
                rank.facts.update(
                    {"phase": "succeeded" if fine else "failed", "exit_code": 0 if fine else None, "stopped": not fine}
                )
        run = [rank for rank in self.ranks if rank.ended]
        if run:
            first, last = min(rank.begun for rank in run), max(rank.ended for rank in run)
            self.state["seconds"] = round(last - first, 3)
        self.state["stepped_seconds"] = self.clock.check()
        self.state["finished"] = time.time()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.folder}/.state/reserve")
        self._write_state(last=True)

    def _write_state(self, last: bool = False) -> None:
        if self.state["ended"] and not last:
            # Readers rely on `ended`: once it is set, no process of the run remains.
            document: NodeState = {**self.state, "ended": None, "stopping": self.state["ended"]}
        else:
            document = self.state
        try:
            write_atomically(f"{self.folder}/.state/state.json", json.dumps(document).encode(), is_durable=last)
        except OSError as error:
            self.on_write_error(error)

    def _sample(self) -> None:
        now = time.monotonic()
        self.first_sample = self.first_sample or now
        if self.next_sample and now - self.next_sample > STALL_SECONDS:  # stopped, or not given any CPU
            stalled = self.state.get("stalled_seconds", 0.0) + now - self.next_sample
            self.state["stalled_seconds"] = round(stalled, 1)
        self.next_sample = now + max(SAMPLE, (now - self.first_sample) / SAMPLES)
        self.state["stepped_seconds"] = self.clock.check()
        with contextlib.suppress(OSError):
            found = os.statvfs(self.folder)
            if found.f_bavail * found.f_frsize < SCARCE:
                self._check_space()
        samples = self.sampler.lines({rank.number: rank.pid for rank in self.ranks if rank.running})
        if self.needs_all and self.idle.look(samples):  # others do not wait for each other
            self.state["idle_since"] = self.idle.since if self.idle.is_long else None
            self._write_state()
        self._write_resources([*self._with_log_sizes(samples), self.load.row(self.sampler.running_seconds)])

    def _on_stacks(self, *_: object) -> None:
        self.are_stacks_wanted = True

    def _print_stacks(self) -> None:
        """Have every rank write the stacks of its threads into its log."""
        with contextlib.suppress(OSError):
            hang.print_stacks({rank.number: rank.pid for rank in self.ranks if rank.running}, self.folder)

    def _with_log_sizes(self, samples: list[dict[str, object]]) -> list[dict[str, object]]:
        """The samples with the size of each rank's log, by which its lines get a time."""
        for sample in samples:
            with contextlib.suppress(OSError):
                sample["log_bytes"] = os.stat(f"{self.folder}/logs/rank-{sample['rank']}.log").st_size
        return samples

    def _write_resources(self, lines: Iterable[dict[str, object]]) -> None:
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        try:
            log = os.open(f"{self.folder}/resources.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            return self.on_write_error(error)
        try:
            size = os.fstat(log).st_size
            if os.write(log, data) < len(data):
                os.ftruncate(log, size)  # drop the incomplete last line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.on_write_error(error)
        finally:
            os.close(log)

    def _check_space(self) -> None:
        """Detect a full disk, so that the run does not count as a success: a task may ignore failed writes of its last
        lines.
        """
        path = f"{self.folder}/.state/probe"
        try:
            with open(path, "wb") as file:
                file.write(b"\0" * machine.PAGE)
        except OSError as error:
            self.on_write_error(error)
        with contextlib.suppress(OSError):
            os.unlink(path)

    def on_write_error(self, error: OSError) -> None:
        """A file of the run could not be written: the run ends, and says why."""
        if machine.is_full(error):
            self.state["disk_full"] = True
        elif not os.path.isdir(self.folder):
            self._stop("canceled", grace=0)  # the run's folder was removed
            return
        self._stop("failed", GRACE)


def is_foreign(name: str) -> bool:
    """Whether a variable of the environment belongs to a process that another launcher has started."""
    return name in FOREIGN_VARIABLES or name.startswith(FOREIGN_PREFIXES)
