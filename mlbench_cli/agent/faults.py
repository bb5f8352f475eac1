"""What an agent does to its ranks on purpose, and how it starts them again: faults, attempts, and the record of both.

An *attempt* is one start of all ranks. A rank that fails ends its attempt; by the run's policy the run fails with it,
or all ranks start again from the last whole checkpoint. faults.json in the run's folder says what was planned, what
was done at which moment, and what became of each attempt. Its times are seconds since the first rank was started, by
the monotonic clock.

Nothing is left stopped or slowed: ranks die with the agent, and a guard process kills the groups of stopped ranks if
the agent is killed itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time

from mlbench_cli.agent import machine, processes
from mlbench_cli.model.faults import Fault, FaultKind, Policy, parse_faults

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any, Protocol

    from mlbench_cli.agent.network.shaped import ShapedNetwork

    class Rank(Protocol):
        """A rank of the agent."""

        number: int
        pid: int
        running: bool
        environment: dict[str, str]

    class Agent(Protocol):
        """What is asked of the agent."""

        folder: str
        plan: Any
        state: Any
        network: ShapedNetwork | None

        @property
        def ranks(self) -> Sequence[Rank]:
            """All ranks."""

        def renew_port(self) -> None: ...
        def start_again(self, rank: Any) -> None: ...
        def leave_out(self, number: int) -> None: ...
        def fail(self, number: int, code: int) -> None: ...
        def abandon_ranks(self) -> None: ...
        def on_write_error(self, error: OSError) -> None: ...


PERIOD = 0.1  # seconds of one turn of a slowed rank: running, then stopped
MARK_SECONDS = 0.05  # between two looks whether ranks train
MAX_BARREN = 3  # attempts in a row that end without a new checkpoint
# Exit codes that another attempt would give again: usage, wrong results, an unfit environment (task_images.contract).
FINAL_CODES = (64, 70, 78, 126, 127)
COLLECTIVE_FACTOR = 3  # the collectives' patience is this many times that of the watch on stopped ranks
MAIN = "main.pt"


class FaultControl:
    """The faults and attempts of the ranks of one agent."""

    def __init__(self, agent: Agent, plan: Mapping[str, Any]) -> None:
        self._agent = agent
        self._plan = plan
        self.policy = Policy(plan["policy"])
        self._detect: float | None = plan["detect_seconds"]
        self.folder = f"{agent.folder}/.state/checkpoints"
        script = plan["script"]
        self._due: Iterator[Fault] = iter(())
        if script is not None:
            self._due = parse_faults(script).plan(plan["seed"], plan["ranks"], plan["workers"])
        self._next: Fault | None = next(self._due, None)
        self._begun = 0.0  # when the first rank started, by the monotonic clock
        self._zero: float | None = None  # the first update of the training, from which faults count
        self._trains = False  # the ranks of this attempt have begun to train
        self._next_look = 0.0
        self._lasting: list[_Lasting] = []
        self._stalled: dict[int, tuple[float, int]] = {}  # rank: since when it is stopped, its CPU time then
        self._guard = -1
        self.restarting = False
        self._resume: int | None = None
        self._resumed_size = self._plan["ranks"]  # ranks that wrote the checkpoint
        self._barren = 0
        self._size = len(agent.ranks)  # ranks of this attempt: those below it
        self._last = (0, 1)  # the rank that failed last, and its exit code
        self.document: dict[str, Any] = {
            "schema_version": 1,
            "script": script,
            "seed": plan["seed"],
            "policy": str(self.policy),
            "checkpoint_every": plan["checkpoint_every"],
            "detect_seconds": self._detect,
            "began": None,
            "zero": None,
            "ended": None,
            "attempts": [],
            "events": [],
        }

    # --- start --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the first rank starts."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        self._start_guard()
        self._begun = time.monotonic()
        self.document["began"] = round(time.time(), 3)
        if self._plan["from_start"]:
            self._zero = self._begun
        self._note_attempt()

    def environment(self, rank: Rank) -> dict[str, str]:
        """The variables of the contract that one rank gets for this attempt."""
        found = {"MLBENCH_CHECKPOINT_DIR": self.folder}
        if self.policy is not Policy.FAIL:
            found["MLBENCH_CHECKPOINT_EVERY"] = str(self._plan["checkpoint_every"])
        if self._detect is not None:
            found["MLBENCH_COLLECTIVE_SECONDS"] = str(max(10, round(COLLECTIVE_FACTOR * self._detect)))
        if number := len(self.document["attempts"]) - 1:
            found["MLBENCH_ATTEMPT"] = str(number)
            found["MLBENCH_RESUME"] = "" if self._resume is None else f"{self.folder}/{self._resume}"
        if self._size < self._plan["ranks"]:
            found |= self._shrunk_environment()
        return found

    def _shrunk_environment(self) -> dict[str, str]:
        """As many ranks as are left, with the global batch that all had together."""
        parameters = json.loads(self._agent.plan["environment"]["MLBENCH_PARAMETERS"])
        parameters["batch_size"] = parameters["batch_size"] * self._plan["ranks"] // self._size
        return {
            "WORLD_SIZE": str(self._size),
            "MLBENCH_PARAMETERS": json.dumps(parameters, sort_keys=True, separators=(",", ":")),
            **({"MLBENCH_SHRUNK": "1"} if self._resumed_size != self._size else {}),
        }

    def _note_attempt(self) -> None:
        self._trains, self._next_look = False, 0.0
        self.document["attempts"].append(
            {
                "number": len(self.document["attempts"]),
                "started": self._now(),
                "training": None,
                "ended": None,
                "ranks": self._size,
                "resumed_update": self._resume,
                "rank": None,
                "exit_code": None,
                "why": None,
            }
        )

    def _now(self) -> float:
        return round(time.monotonic() - self._begun, 4)

    # --- time ---------------------------------------------------------------------------------------------------

    def next_moment(self) -> float:
        """When `on_time` wants to be called next, by the monotonic clock."""
        moments = [self._next_look, *(lasting.next for lasting in self._lasting)]
        if self.restarting:
            return 0.0 if not self._running() else min(moments)
        if self._trains and self._next is not None and self._zero is not None:
            moments.append(self._zero + self._next.at)
        return min(moments)

    def on_time(self, now: float) -> None:
        """Do what is due."""
        if self._agent.state["ended"] is not None:
            self._give_up()
            return
        if self.restarting and not self._running():
            self._restart()
        if now >= self._next_look:
            self._look(now)
        while self._trains and not self.restarting and self._is_due(now):
            fault, self._next = self._next, next(self._due, None)
            assert fault is not None
            self._inject(fault, now)
        for lasting in list(self._lasting):
            if now >= lasting.next and lasting.turn(now):
                self._end_lasting(lasting)
                self.write()

    def _is_due(self, now: float) -> bool:
        return self._next is not None and self._zero is not None and now >= self._zero + self._next.at

    def _look(self, now: float) -> None:
        """Whether ranks train by now, and whether one is stopped."""
        self._next_look = now + (MARK_SECONDS if not self._trains else max(0.25, (self._detect or 40.0) / 8))
        if not self._trains:
            self._look_for_training()
        if self._detect is None:
            return
        for rank in self._running():
            fields = processes.stat_fields(rank.pid)
            if fields is None or fields[0] not in "Tt":
                self._stalled.pop(rank.number, None)
                continue
            used = int(fields[11]) + int(fields[12])
            since, before = self._stalled.setdefault(rank.number, (now, used))
            if used != before:  # slowed, not stopped
                self._stalled[rank.number] = (now, used)
            elif now - since >= self._detect:
                self._note_end(rank.number, None, "stopped")
                processes.signal_group(rank.pid, signal.SIGKILL)
                return

    def _look_for_training(self) -> None:
        attempt = self.document["attempts"][-1]
        if self._plan["from_start"]:
            self._trains = True
        elif os.path.exists(f"{self.folder}/training-{attempt['number']}-0"):
            self._trains = True
            if self._zero is None:
                with open(f"{self.folder}/clock-0.json", encoding="ascii") as file:
                    self._zero = float(json.load(file)["monotonic"])
        if self._trains:
            attempt["training"] = self._now()
            if self._zero is not None:
                self.document["zero"] = round(self._zero - self._begun, 4)
            self.write()

    def _running(self) -> list[Rank]:
        return [rank for rank in self._agent.ranks if rank.running]

    # --- faults -------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault, now: float) -> None:
        note: dict[str, Any] = {"planned": fault.to_dict(), "at": self._now(), "until": None, "problem": None}
        self.document["events"].append(note)
        try:
            self._do(fault, note, now)
        except OSError as error:
            note["problem"] = error.strerror or str(error)
        self.write()

    def _do(self, fault: Fault, note: dict[str, Any], now: float) -> None:
        kind = FaultKind(fault.kind)
        if kind is FaultKind.LINK:
            self._change_link(fault)
            self._lasting.append(_ChangedLink(self, fault, note, now))
            return
        targets = self._targets(fault)
        if not targets:
            note["problem"] = "nothing of it runs any more"
            return
        if kind in (FaultKind.KILL, FaultKind.NODE):
            for rank in targets:
                processes.signal_group(rank.pid, signal.SIGKILL)
        elif kind is FaultKind.STOP:
            self._lasting.append(_Stopped(self, targets[0], fault, note, now))
        elif kind is FaultKind.SLOW:
            self._lasting.append(_Slowed(self, targets[0].number, fault, note, now))
        else:
            self._lasting.append(_FullDisk(targets, fault, note, now))

    def _targets(self, fault: Fault) -> list[Rank]:
        def is_meant(rank: Rank) -> bool:
            if fault.target is None:
                return True
            if fault.kind == FaultKind.NODE:
                return int(rank.environment["NODE_RANK"]) == fault.target
            return rank.number == fault.target

        return [rank for rank in self._running() if is_meant(rank)]

    def find_rank(self, number: int) -> Rank | None:
        """A rank by its number, if it runs."""
        return next((rank for rank in self._running() if rank.number == number), None)

    def _change_link(self, fault: Fault | None, target: int | None = None) -> None:
        """Change a link of the shaped network; None: as it was. Raises OSError with the reason."""
        network = self._agent.network
        if network is None:
            raise OSError("the run has no network of its own")
        worker = fault.target if fault is not None else target
        assert worker is not None
        problem = network.change_link(
            worker, rate=None if fault is None else fault.rate, loss=(fault.share or 0.0) if fault else 0.0
        )
        if problem:
            raise OSError(problem)

    def restore_link(self, worker: int) -> None:
        """Give a link its own rate again, without loss."""
        with contextlib.suppress(OSError):
            self._change_link(None, worker)

    # --- guard --------------------------------------------------------------------------------------------------

    def _start_guard(self) -> None:
        """A child that kills the groups of stopped ranks if this process ends without saying that it has done so."""
        reader, writer = os.pipe()
        if os.fork():
            os.close(reader)
            self._guard = writer
            os.set_inheritable(writer, False)
            return
        try:
            os.close(writer)
            os.setsid()
            machine.keep_only(reader)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            held: set[int] = set()
            with os.fdopen(reader, encoding="ascii") as lines:
                for line in lines:
                    (held.add if line[0] == "+" else held.discard)(int(line[1:]))
            for pid in held:
                processes.signal_group(pid, signal.SIGKILL)
        finally:
            os._exit(0)

    def hold(self, pid: int) -> None:
        """Stop a process group; if this process is killed, the guard kills it. Raises OSError."""
        os.write(self._guard, f"+{pid}\n".encode())
        os.killpg(pid, signal.SIGSTOP)

    def free(self, pid: int) -> None:
        """Let a stopped process group go on. One that has ended is no error."""
        processes.signal_group(pid, signal.SIGCONT)
        with contextlib.suppress(OSError):
            os.write(self._guard, f"-{pid}\n".encode())

    # --- attempts -----------------------------------------------------------------------------------------------

    def take_end(self, rank: Rank, code: int, number: int | None) -> bool:
        """A rank's process has ended; True if its run goes on with another attempt. Any agent's rank, any code."""
        if self._agent.state["ended"] is not None:
            return False
        if self.restarting:
            return True
        if not code:
            return False
        self._note_end(rank.number, code, "killed" if number is not None else "failed")
        if self.policy is Policy.FAIL or code in FINAL_CODES:
            return False
        self._last = (rank.number, code)
        self.restarting = True
        for other in self._running():
            processes.signal_group(other.pid, signal.SIGKILL)
        return True

    def _note_end(self, rank: int, code: int | None, why: str) -> None:
        """The first reason of an attempt's end stays."""
        attempt = self.document["attempts"][-1]
        if attempt["ended"] is None:
            attempt.update({"ended": self._now(), "rank": rank, "why": why})
        if attempt["rank"] == rank and code is not None:
            attempt["exit_code"] = code
        self.write()

    def _restart(self) -> None:
        """Start all ranks again, from the last whole checkpoint."""
        self.restarting = False
        for lasting in [lasting for lasting in self._lasting if not lasting.outlives_attempt]:
            self._end_lasting(lasting)
        self._stalled.clear()
        found = self._find_checkpoint()
        self._barren = self._barren + 1 if found == self._resume else 0
        self._resume = found
        problem = self._shrink() if self.policy is Policy.SHRINK else None
        if self._barren >= MAX_BARREN:
            problem = f"{MAX_BARREN} attempts in a row came to no new checkpoint"
        if problem is not None:
            self.document["problem"] = problem
            self._end_for_good()
            return
        self._agent.renew_port()
        self._note_attempt()
        try:
            for rank in self._agent.ranks:
                if rank.number < self._size:
                    self._agent.start_again(rank)
        except OSError as error:
            self.document["problem"] = error.strerror or str(error)
            self._end_for_good()
        self.write()

    def _shrink(self) -> str | None:
        """Go on with one rank less; why that cannot be done, or None. Ranks are numbered without gaps, so that it is
        the number of the last one that is not there any more."""
        total = json.loads(self._agent.plan["environment"]["MLBENCH_PARAMETERS"])["batch_size"] * self._plan["ranks"]
        if self._size < 2 or total % (self._size - 1):
            return f"the global batch of {total} samples cannot be shared by {self._size - 1} ranks alike"
        self._size -= 1
        self._agent.leave_out(self._size)
        return None

    def _find_checkpoint(self) -> int | None:
        """The greatest update of which all ranks have written their part, as many as there were then."""
        whole: dict[int, int] = {}
        with contextlib.suppress(OSError):
            for name in filter(str.isdecimal, os.listdir(self.folder)):
                files = set(os.listdir(f"{self.folder}/{name}"))
                for size in dict.fromkeys(attempt["ranks"] for attempt in self.document["attempts"]):
                    if {MAIN, *(f"rank-{number}.pt" for number in range(size))} <= files:
                        whole.setdefault(int(name), size)
        found = max(whole, default=None)
        self._resumed_size = self._size if found is None else whole[found]
        return found

    def _end_for_good(self) -> None:
        rank, code = self._last
        self._agent.fail(rank, code)

    def _give_up(self) -> None:
        """The run ends: nobody is started again, and who is stopped shall hear of it."""
        if self.restarting:
            self.restarting = False
            self._agent.abandon_ranks()
        for lasting in list(self._lasting):
            self._end_lasting(lasting)

    def _end_lasting(self, lasting: _Lasting) -> None:
        lasting.end()
        lasting.note["until"] = self._now()
        self._lasting.remove(lasting)

    def finish(self) -> None:
        """Undo what lasts, and write the record for good."""
        self._give_up()
        if self.document["attempts"] and self.document["attempts"][-1]["ended"] is None:
            self.document["attempts"][-1]["ended"] = self._now()
        self.document["ended"] = self._now()
        left = self._next
        moment = None if left is None or self._zero is None else self._zero + left.at - self._begun
        # A fault whose time had come, and which was not carried out, would make the run milder than its script.
        self.document["missed"] = (
            left.to_dict() if left is not None and moment is not None and moment < self.document["ended"] - 1 else None
        )
        self.document["never_trained"] = self._zero is None
        self.write()
        if self._guard >= 0:
            os.close(self._guard)

    def write(self) -> None:
        """Write faults.json."""
        path = f"{self._agent.folder}/faults.json"
        try:
            with open(f"{self._agent.folder}/.state/faults.tmp", "w", encoding="utf-8") as file:
                file.write(json.dumps(self.document, indent=2) + "\n")
            os.replace(file.name, path)
        except OSError as error:
            self._agent.on_write_error(error)


class _Lasting:
    """A fault that lasts: `turn` does what is due at `next`, and says whether it is over."""

    outlives_attempt = False

    def __init__(self, fault: Fault, note: dict[str, Any], now: float) -> None:
        self.note = note
        self.over = now + fault.seconds if fault.seconds is not None else float("inf")
        self.next = self.over

    def turn(self, now: float) -> bool:
        self.end()
        return True

    def end(self) -> None:
        """Things are as before. May be called again."""


class _Stopped(_Lasting):
    def __init__(self, control: FaultControl, rank: Rank, fault: Fault, note: dict[str, Any], now: float) -> None:
        super().__init__(fault, note, now)
        self._control, self._pid = control, rank.pid
        control.hold(rank.pid)

    def end(self) -> None:
        self._control.free(self._pid)


class _Slowed(_Lasting):
    """Runs and stops in turns, so that its share of the time is as asked, whatever the machine gives it."""

    outlives_attempt = True

    def __init__(self, control: FaultControl, number: int, fault: Fault, note: dict[str, Any], now: float) -> None:
        super().__init__(fault, note, now)
        assert fault.share is not None
        self._control, self._number, self._share = control, number, fault.share
        self._held: int | None = None
        self._since = self._begun = now
        self._stopped = 0.0
        self.turn(now)

    def turn(self, now: float) -> bool:
        if now >= self.over:
            self.end()
            return True
        if self._held is not None:
            self._release(now)
            self.next = min(self.over, now + PERIOD * self._share)
            return False
        rank = self._control.find_rank(self._number)
        if rank is not None:  # else it is between two attempts
            with contextlib.suppress(OSError):
                self._control.hold(rank.pid)
                self._held, self._since = rank.pid, now
        self.next = min(self.over, now + PERIOD * (1 - self._share))
        return False

    def _release(self, now: float) -> None:
        if self._held is not None:
            self._control.free(self._held)
            self._stopped += now - self._since
            self._held = None

    def end(self) -> None:
        now = time.monotonic()
        self._release(now)
        if now > self._begun:
            self.note["stopped_share"] = round(self._stopped / (now - self._begun), 4)


class _FullDisk(_Lasting):
    """No file of the ranks can grow: RLIMIT_FSIZE, which gives EFBIG where a full disk gives ENOSPC."""

    def __init__(self, ranks: list[Rank], fault: Fault, note: dict[str, Any], now: float) -> None:
        super().__init__(fault, note, now)
        self._pids: list[int] = []
        for rank in ranks:
            resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            self._pids.append(rank.pid)

    def end(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class _ChangedLink(_Lasting):
    outlives_attempt = True

    def __init__(self, control: FaultControl, fault: Fault, note: dict[str, Any], now: float) -> None:
        super().__init__(fault, note, now)
        assert fault.target is not None
        self._control, self._worker = control, fault.target

    def end(self) -> None:
        self._control.restore_link(self._worker)
