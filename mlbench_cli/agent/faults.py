"""What agents do to their ranks on purpose, and how they start them again: faults, attempts, and the record of both.

An *attempt* is one start of all ranks. A rank that fails ends its attempt; by the run's policy the run fails with it,
or all ranks start again from the last whole checkpoint; those that notice the loss may do so without a new process
(`replace`, task_images/harness/survivors.py). faults.json in the run's folder says what was planned, what
was done at which moment, and what became of each attempt. Its times are seconds since the first rank was started, by
the monotonic clock.

Every agent of a run has `FaultHands`, which do things to the ranks of its machine. Those of node 0 are a
`FaultControl`: it decides, tells the hands of all nodes what to do (`obey`), and hears what became of it (`hear`).
On one machine that is all one object.

Nothing is left stopped or slowed: ranks die with the agent, and a guard process kills the groups of stopped ranks if
the agent is killed itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import time

from mlbench_cli.agent import machine, processes, storage
from mlbench_cli.model.faults import Fault, FaultKind, Policy, parse_faults

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from typing import Any, Protocol

    from mlbench_cli.agent.copies import Copies
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
        node: int
        count: int
        copies: Copies | None
        token: str

        @property
        def ranks(self) -> Sequence[Rank]:
            """The ranks of its machine."""

        def find_node(self, *, rank: int | None = None, worker: int | None = None) -> int: ...
        def find_holder(self, lost: Sequence[int]) -> tuple[str, int] | None: ...
        def send_faults(self, node: int, message: Mapping[str, Any]) -> None: ...
        def set_port(self, port: int) -> None: ...
        def start_again(self, rank: Any) -> None: ...
        def leave_out(self, rank: Any) -> None: ...
        def fail(self, number: int, code: int) -> None: ...
        def abandon_ranks(self) -> None: ...
        def on_write_error(self, error: OSError) -> None: ...


PERIOD = 0.1  # seconds of one turn of a slowed rank: running, then stopped
MARK_SECONDS = 0.05  # between two looks whether ranks train
SURVIVOR_SECONDS = 30.0  # for ranks to notice that another one is gone; then they are started again, too
LONELY_SECONDS = 2.0  # after which a rank that waits although no other has ended has lost its connections
MAX_BARREN = 3  # attempts in a row that end without a new checkpoint
# Exit codes that another attempt would give again: usage, wrong results, an unfit environment (task_images.contract).
FINAL_CODES = (64, 70, 78, 126, 127)
EXIT_LOST = 75  # of a rank whose connections are lost
COLLECTIVE_FACTOR = 3  # the collectives' patience is this many times that of the watch on stopped ranks
MAIN = "main.pt"
UNCONFIRMED = "its machine has not confirmed it"


class FaultHands:
    """What is done to the ranks of one agent, at the word of node 0."""

    def __init__(self, agent: Agent, plan: Mapping[str, Any]) -> None:
        self._agent = agent
        self._plan = plan
        self.policy = Policy(plan["policy"])
        self._detect: float | None = plan["detect_seconds"]
        self.folder = f"{agent.folder}/.state/checkpoints"
        self._next_look = 0.0
        self._lasting: list[_Lasting] = []
        self._stalled: dict[int, tuple[float, int]] = {}  # rank: since when it is stopped, its CPU time then
        self._guard = -1
        # What `attempt` said last: its number, which ranks of the first attempt it has, by their numbers in this one,
        # the checkpoint they go on from, and which nodes are lost.
        self._attempt: Mapping[str, Any] = {
            "number": 0,
            "members": list(range(plan["ranks"])),
            "resume": None,
            "resumed_size": None,
            "lost": [],
        }
        self._halted_at = self._next_rest = self._lonely_since = 0.0
        self._halted = self._is_idle = False  # between two attempts, and node 0 knows that nothing runs here any more
        self._is_over = self.policy is Policy.FAIL  # no other attempt will come

    # --- start --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the first rank starts."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        self._guard = machine.start_guard(self._watch_held)
        if self._agent.copies is not None:
            self._agent.copies.on_held = lambda node, update: self._report({"held": update, "of": node})
        self._begin_copies()

    def environment(self, rank: Rank) -> dict[str, str]:
        """The variables of the contract that one rank gets for this attempt."""
        found = {"MLBENCH_CHECKPOINT_DIR": self.folder}
        if self.policy is not Policy.FAIL:
            found["MLBENCH_CHECKPOINT_EVERY"] = str(self._plan["checkpoint_every"])
        if self.policy is Policy.REPLACE:
            found["MLBENCH_SURVIVE"] = "1"
        if self._detect is not None:
            found["MLBENCH_COLLECTIVE_SECONDS"] = str(max(10, round(COLLECTIVE_FACTOR * self._detect)))
        if number := self._attempt["number"]:
            resume = self._attempt["resume"]
            found["MLBENCH_ATTEMPT"] = str(number)
            found["MLBENCH_RESUME"] = "" if resume is None else f"{self.folder}/{resume}"
        if len(self._attempt["members"]) < self._plan["ranks"]:
            found |= self._shrunk_environment(rank)
        return found

    def _shrunk_environment(self, rank: Rank) -> dict[str, str]:
        """As many ranks as are left, numbered without gaps, with the global batch that all had together."""
        members, resumed_size = self._attempt["members"], self._attempt["resumed_size"]
        size = len(members)
        parameters = json.loads(self._agent.plan["environment"]["MLBENCH_PARAMETERS"])
        parameters["batch_size"] = parameters["batch_size"] * self._plan["ranks"] // size
        return {
            "WORLD_SIZE": str(size),
            "MLBENCH_PARAMETERS": json.dumps(parameters, sort_keys=True, separators=(",", ":")),
            **({"MLBENCH_SHRUNK": "1"} if resumed_size != size else {}),
            **(self._renumbered_environment(rank) if members != list(range(size)) else {}),
        }

    def _renumbered_environment(self, rank: Rank) -> dict[str, str]:
        """What depends on a rank's number. There is one rank per worker, so they have the same numbers."""
        members = self._attempt["members"]
        number, hosts = str(members.index(rank.number)), self._agent.plan["environment"]["MLBENCH_HOSTS"].split(",")
        return {
            "RANK": number,
            "NODE_RANK": number,
            "MLBENCH_HOSTS": ",".join(hosts[member] for member in members),
            "MLBENCH_FIRST_RANK": str(rank.number),
        }

    # --- words --------------------------------------------------------------------------------------------------

    def _report(self, message: Mapping[str, Any]) -> None:
        """Tell node 0."""
        self._agent.send_faults(0, message)

    def take(self, node: int, message: Mapping[str, Any]) -> None:
        """A message from another node: of this run's node 0, since it has no link to others."""
        self.obey(message)

    def obey(self, message: Mapping[str, Any]) -> None:
        """Do what node 0 says."""
        if self._agent.state["ended"] is not None:
            return
        if "inject" in message:
            self._inject(int(message["event"]), Fault(**message["inject"]))
        elif "halt" in message:
            self._halt()
        elif "attempt" in message:
            gone = set(message["attempt"]["gone"])
            members = [rank for rank in range(self._plan["ranks"]) if rank not in gone]
            self._start_attempt({**message["attempt"], "members": members})
        elif "over" in message:
            self._is_over = True

    # --- time ---------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether the agent stays although none of its ranks runs: another attempt may come."""
        return self._halted or not self._is_over

    def next_moment(self) -> float:
        """When `on_time` wants to be called next, by the monotonic clock."""
        if self._halted and not self._is_idle:
            return self._next_rest if self._running() else 0.0
        look = self._agent.copies.next_look if self._agent.copies is not None else float("inf")
        return min(self._next_look, look, *(lasting.next for lasting in self._lasting))

    def on_time(self, now: float) -> None:
        """Do what is due."""
        if self._agent.state["ended"] is not None:
            self._give_up()
            return
        if self._halted and not self._is_idle and self._is_at_rest(now):
            self._is_idle = True
            self._report({"idle": self._list_checkpoints()})
        if now >= self._next_look:
            self._look(now)
        if self._agent.copies is not None:
            self._agent.copies.on_time(now)
        for lasting in list(self._lasting):
            if now >= lasting.next and lasting.turn(now):
                self._end_lasting(lasting)

    def _is_at_rest(self, now: float) -> bool:
        """Whether no rank works any more: they have ended, or wait for the next attempt."""
        self._next_rest = now + MARK_SECONDS
        working = [rank for rank in self._running() if not self._waits(rank)]
        if now >= self._halted_at + SURVIVOR_SECONDS:
            for rank in working:
                processes.signal_group(rank.pid, signal.SIGKILL)
        return not working

    def _waits(self, rank: Rank) -> bool:
        mark = f"{self.folder}/waiting-{self._attempt['number']}-{rank.number}"
        return self.policy is Policy.REPLACE and os.path.exists(mark)

    def _look(self, now: float) -> None:
        """Whether a rank is stopped, or waits for one that has not ended."""
        self._next_look = now + max(0.25, (self._detect or 40.0) / 8)
        if self._halted or not (lonely := [rank for rank in self._running() if self._waits(rank)]):
            self._lonely_since = now
        elif now - self._lonely_since >= LONELY_SECONDS:
            self._report({"end": lonely[0].number, "code": EXIT_LOST, "why": "failed", "is_final": False})
            self._halt()
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
                self._report({"end": rank.number, "code": None, "why": "stopped"})
                processes.signal_group(rank.pid, signal.SIGKILL)
                return

    def _running(self) -> list[Rank]:
        return [rank for rank in self._agent.ranks if rank.running]

    # --- faults -------------------------------------------------------------------------------------------------

    def _inject(self, event: int, fault: Fault) -> None:
        if fault.kind == FaultKind.NODE and self._agent.count > 1:
            self._report({"event": event, "facts": {"problem": None}})
            for rank in self._running():
                processes.signal_group(rank.pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        problem = None
        try:
            problem = self._do(event, fault, time.monotonic())
        except OSError as error:
            problem = error.strerror or str(error)
        self._report({"event": event, "facts": {"problem": problem}})

    def _do(self, event: int, fault: Fault, now: float) -> str | None:
        """Carry out a fault; why that cannot be done, or None. Raises OSError."""
        kind = FaultKind(fault.kind)
        if kind is FaultKind.LINK:
            assert fault.target is not None  # parse_faults gives every link its worker
            self._change_link(fault.target, fault.rate, fault.share or 0.0)
            self._lasting.append(_ChangedLink(self, event, fault, now))
            return None
        targets = self._targets(fault)
        if not targets:
            return "none of its processes is running"
        if kind in (FaultKind.KILL, FaultKind.NODE):
            for rank in targets:
                processes.signal_group(rank.pid, signal.SIGKILL)
        elif kind is FaultKind.STOP:
            self._lasting.append(_Stopped(self, targets[0], event, fault, now))
        elif kind is FaultKind.SLOW:
            self._lasting.append(_Slowed(self, targets[0].number, event, fault, now))
        elif kind is FaultKind.STORAGE:
            self._lasting.append(_SlowStorage(self, targets[0], event, fault, now))
        else:
            self._lasting.append(_FullDisk(targets, event, fault, now))
        return None

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

    def _change_link(self, worker: int, rate: float | None, loss: float) -> None:
        """Give a link of the shaped network a rate (None: its own) and a share of packets lost. Raises OSError."""
        network = self._agent.network
        if network is None:
            raise OSError("the run has no shaped network")
        if problem := network.change_link(worker, rate=rate, loss=loss):
            raise OSError(problem)

    def restore_link(self, worker: int) -> None:
        """Give a link its own rate again, without loss."""
        with contextlib.suppress(OSError):
            self._change_link(worker, None, 0.0)

    def _end_lasting(self, lasting: _Lasting) -> None:
        lasting.end()
        self._lasting.remove(lasting)
        self._report({"event": lasting.event, "facts": lasting.facts, "is_over": True})

    # --- guard --------------------------------------------------------------------------------------------------

    @staticmethod
    def _watch_held(reader: int) -> None:
        """Kill stopped process groups, and remove control groups, if the other process ends without having done so."""
        machine.keep_only(reader)
        held: set[str] = set()
        with os.fdopen(reader, encoding="utf-8") as lines:
            for line in lines:
                (held.add if line[0] == "+" else held.discard)(line[1:-1])
        for name in held:
            if name.isdecimal():
                processes.signal_group(int(name), signal.SIGKILL)
            else:
                storage.remove_group(name, os.path.dirname(name))

    @property
    def places(self) -> tuple[str, str]:
        """Folders that ranks read and write: of their data, and of the run."""
        return self._agent.plan["environment"]["MLBENCH_DATA_DIR"], self._agent.folder

    def guard(self, name: str | int) -> None:
        """If this process is killed, the guard kills a process group, or removes a control group. Raises OSError."""
        os.write(self._guard, f"+{name}\n".encode())

    def unguard(self, name: str | int) -> None:
        """What `guard` named is as before."""
        with contextlib.suppress(OSError):
            os.write(self._guard, f"-{name}\n".encode())

    def hold(self, pid: int) -> None:
        """Stop a process group; if this process is killed, the guard kills it. Raises OSError."""
        self.guard(pid)
        os.killpg(pid, signal.SIGSTOP)

    def free(self, pid: int) -> None:
        """Let a stopped process group go on. One that has ended is no error."""
        processes.signal_group(pid, signal.SIGCONT)
        self.unguard(pid)

    # --- attempts -----------------------------------------------------------------------------------------------

    def take_end(self, rank: Rank, code: int, number: int | None) -> bool:
        """A rank's process has ended; True if its run goes on with another attempt. Any agent's rank, any code."""
        if self._agent.state["ended"] is not None:
            return False
        if self._halted:
            return True
        if not code:
            self._note_success()
            return False
        is_final = self.policy is Policy.FAIL or code in FINAL_CODES
        why = "killed" if number is not None else "failed"
        self._report({"end": rank.number, "code": code, "why": why, "is_final": is_final})
        if not is_final:
            self._halt()
        return not is_final

    def _note_success(self) -> None:
        if not self._running():
            self._report({"done": self._attempt["number"]})

    def _halt(self) -> None:
        """End what runs, before another attempt."""
        if not self._halted:
            self._halted, self._is_idle, self._halted_at = True, False, time.monotonic()
            for rank in self._running() if self.policy is not Policy.REPLACE else ():
                processes.signal_group(rank.pid, signal.SIGKILL)

    def _list_checkpoints(self) -> dict[str, list[str]]:
        """The files of each checkpoint on this machine, also in its memory, by the update that it was written after."""
        found: dict[int, set[str]] = {} if self._agent.copies is None else self._agent.copies.names()
        with contextlib.suppress(OSError):
            for name in filter(str.isdecimal, os.listdir(self.folder)):
                found.setdefault(int(name), set()).update(os.listdir(f"{self.folder}/{name}"))
        return {str(update): sorted(names) for update, names in found.items()}

    def _begin_copies(self) -> None:
        """Have the files that this machine's ranks write from now on copied to another machine."""
        if self._agent.copies is None:
            return
        attempt = self._attempt
        own = [rank.number for rank in self._agent.ranks if rank.number in attempt["members"]]
        names = [f"rank-{attempt['members'].index(number)}.pt" for number in own]
        place = self._agent.find_holder(attempt["lost"])
        self._agent.copies.begin(self._agent.token, attempt["number"], place, self.folder, names, attempt["resume"])

    def _restore_checkpoint(self) -> None:
        """Bring back copies that this machine holds for those without ranks, and drop checkpoints that were not
        completed: ranks with other numbers write them again. Raises OSError."""
        resume = self._attempt["resume"]
        for name in self._list_checkpoints():
            if int(name) > (resume or 0):
                shutil.rmtree(f"{self.folder}/{name}", ignore_errors=True)
        if self._agent.copies is not None and resume is not None:
            gone = {self._agent.find_node(rank=rank) for rank in self._attempt["gone"]}
            self._agent.copies.restore(gone, resume, self.folder)

    def _start_attempt(self, attempt: Mapping[str, Any]) -> None:
        """Start the ranks again that take part."""
        self._halted = False
        self._next_look = 0.0
        for lasting in [lasting for lasting in self._lasting if not lasting.outlives_attempt]:
            self._end_lasting(lasting)
        self._stalled.clear()
        before, self._attempt = self._attempt["members"], attempt
        self._agent.set_port(attempt["port"])
        try:
            if self.policy is Policy.SHRINK:
                self._restore_checkpoint()
            self._begin_copies()
            for rank in self._agent.ranks:
                if rank.running:
                    self._go_on(rank)
                elif rank.number in attempt["members"]:
                    self._agent.start_again(rank)
                elif rank.number in before:
                    self._agent.leave_out(rank)
        except OSError as error:
            self._report({"broken": error.strerror or str(error)})
        self._note_success()  # of a machine none of whose ranks takes part any more

    def _go_on(self, rank: Rank) -> None:
        """Tell a rank that waits what is different in this attempt. Raises OSError."""
        place = f"{self.folder}/next-{self._attempt['number']}-{rank.number}.json"
        variables = {**self.environment(rank), "MASTER_PORT": str(self._attempt["port"])}
        machine.replace_file(place, variables)

    def _give_up(self) -> None:
        """The run ends: nobody is started again, and who is stopped shall hear of it."""
        self._is_over = True
        if self._halted:
            self._halted = False
            self._agent.abandon_ranks()
        for lasting in list(self._lasting):
            self._end_lasting(lasting)

    def lose(self, node: int) -> bool:
        """Another machine is lost, with its agent. Whether the run goes on without it, which only node 0 can say."""
        return False

    def finish(self) -> None:
        """Undo what lasts."""
        self._give_up()
        if self._guard >= 0:
            os.close(self._guard)


class FaultControl(FaultHands):
    """The hands of node 0, which also lead those of the others: they know the plan, and keep the record."""

    def __init__(self, agent: Agent, plan: Mapping[str, Any]) -> None:
        super().__init__(agent, plan)
        script = plan["script"]
        self._due: Iterator[Fault] = iter(())
        if script is not None:
            self._due = parse_faults(script).plan(plan["seed"], plan["ranks"], plan["workers"])
        self._next: Fault | None = next(self._due, None)
        self._begun = 0.0  # when the first rank started, by the monotonic clock
        self._zero: float | None = None  # the first update of the training, from which faults count
        self._trains = False  # the ranks of this attempt have begun to train
        self._next_mark = 0.0
        self._restarting = False
        self._barren = 0
        self._last = (0, 1)  # the rank that failed last, and its exit code
        self._done: set[int] = set()  # nodes whose ranks have all ended well
        self._idle: dict[int, Mapping[str, list[str]]] = {}  # nodes that have halted: their checkpoints
        self._lost: set[int] = set()  # nodes that the run goes on without
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

    def begin(self) -> None:
        """Before the first rank starts."""
        super().begin()
        self._begun = time.monotonic()
        self.document["began"] = round(time.time(), 3)
        if self._plan["from_start"]:
            self._zero = self._begun
        self._note_attempt(self._attempt)

    def _note_attempt(self, attempt: Mapping[str, Any]) -> None:
        self._trains, self._next_mark = False, 0.0
        members, size = attempt["members"], len(attempt["members"])
        self.document["attempts"].append(
            {
                "number": attempt["number"],
                "started": self._now(),
                "training": None,
                "ended": None,
                "ranks": size,
                **({"members": members} if members != list(range(size)) else {}),
                "resumed_update": attempt["resume"],
                "rank": None,
                "exit_code": None,
                "why": None,
            }
        )

    def _now(self) -> float:
        return round(time.monotonic() - self._begun, 4)

    # --- words --------------------------------------------------------------------------------------------------

    def _report(self, message: Mapping[str, Any]) -> None:
        self.hear(self._agent.node, message)

    def _tell(self, node: int | None, message: Mapping[str, Any]) -> None:
        """Tell the hands of a node what to do; None: all, this one last, because what it does may end the run."""
        for other in [node] if node is not None else reversed(range(self._agent.count)):
            if other == self._agent.node:
                self.obey(message)
            else:
                self._agent.send_faults(other, message)

    def take(self, node: int, message: Mapping[str, Any]) -> None:
        """A message from the hands of another node."""
        self.hear(node, message)

    def hear(self, node: int, message: Mapping[str, Any]) -> None:
        """What the hands of a node say."""
        if "event" in message:
            self._take_event(node, message)
        elif "end" in message:
            self._take_failure(message)
        elif "idle" in message:
            self._idle[node] = message["idle"]
        elif "done" in message and message["done"] == self._attempt["number"]:
            self._done.add(node)
            self._end_if_done()
        elif "held" in message:  # the last update of which another machine holds what the ranks of this node wrote
            copied, of = self.document["attempts"][-1].setdefault("copied", {}), str(message["of"])
            copied[of] = max(message["held"], copied.get(of, 0))
            self.write()
        elif "broken" in message:
            self.document["problem"] = str(message["broken"])
            self._end_for_good()

    def _end_if_done(self) -> None:
        if len(self._done) + len(self._lost) == self._agent.count:
            self._tell(None, {"over": True})

    def lose(self, node: int) -> bool:
        """Another machine is lost, with its agent. The run goes on without it if it may shrink, and is not over."""
        is_over = self._is_over or self._agent.state["ended"] is not None
        if self.policy is not Policy.SHRINK or is_over or not self.document["attempts"]:
            return False
        self._lost.add(node)
        self._agent.state["lost_nodes"] = sorted(self._lost)
        self._idle.pop(node, None)
        self._done.discard(node)
        gone = self._ranks_of([node])
        if not gone:  # none of its ranks took part any more
            self._end_if_done()
            return True
        attempt = self.document["attempts"][-1]
        if attempt["exit_code"] == EXIT_LOST:  # another rank, which lost its connections with them, was faster
            attempt.update({"rank": gone[0], "why": "lost"})
        self._take_failure({"end": gone[0], "code": EXIT_LOST, "why": "lost", "is_final": False})
        return True

    def _ranks_of(self, nodes: Collection[int]) -> list[int]:
        """The ranks of this attempt on these nodes, by their numbers in the first one."""
        return [rank for rank in self._attempt["members"] if self._agent.find_node(rank=rank) in nodes]

    def _take_event(self, node: int, message: Mapping[str, Any]) -> None:
        note = self.document["events"][message["event"]]
        facts = dict(message["facts"])
        if note["problem"] not in (None, UNCONFIRMED):  # of another node, whose ranks it was meant for, too
            facts.pop("problem", None)
        note.update(facts)
        if message.get("is_over"):
            note["until"] = self._now()
        self.write()

    def _take_failure(self, message: Mapping[str, Any]) -> None:
        """A rank has failed, or will be killed because it is stopped. The first reason of an attempt's end stays."""
        rank, code, attempt = message["end"], message["code"], self.document["attempts"][-1]
        if attempt["ended"] is None:
            attempt.update({"ended": self._now(), "rank": rank, "why": message["why"]})
        if attempt["rank"] == rank and code is not None:
            attempt["exit_code"] = code
        self.write()
        if code is None or message["is_final"]:
            return
        if not self._restarting:
            self._restarting, self._last = True, (rank, code)
            self._tell(None, {"halt": True})

    # --- time ---------------------------------------------------------------------------------------------------

    def next_moment(self) -> float:
        """When `on_time` wants to be called next, by the monotonic clock."""
        if self._is_ready():
            return 0.0
        moments = [super().next_moment()]
        if not self._trains:
            moments.append(self._next_mark)
        elif self._next is not None and self._zero is not None and not self._restarting:
            moments.append(self._zero + self._next.at)
        return min(moments)

    def on_time(self, now: float) -> None:
        """Do what is due."""
        super().on_time(now)
        if self._agent.state["ended"] is not None:
            return
        if self._is_ready():
            self._restart()
        if not self._trains and now >= self._next_mark:
            self._next_mark = now + MARK_SECONDS
            self._look_for_training()
        while self._trains and not self._restarting and self._is_due(now):
            fault, self._next = self._next, next(self._due, None)
            assert fault is not None
            self._order(fault)

    def _is_ready(self) -> bool:
        """Whether no rank runs any more, and all shall start again."""
        return self._restarting and len(self._idle) + len(self._lost) == self._agent.count

    def _is_due(self, now: float) -> bool:
        return self._next is not None and self._zero is not None and now >= self._zero + self._next.at

    def _order(self, fault: Fault) -> None:
        """Have a fault carried out on the node of its target."""
        events = self.document["events"]
        events.append({"planned": fault.to_dict(), "at": self._now(), "until": None, "problem": UNCONFIRMED})
        node = None
        if fault.target is not None:
            kind = "worker" if FaultKind(fault.kind).targets_worker else "rank"
            node = self._agent.find_node(**{kind: fault.target})
        if node in self._lost:
            events[-1]["problem"] = "its machine is lost"
        self._tell(node, {"inject": fault.to_dict(), "event": len(events) - 1})
        self.write()

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

    # --- attempts -----------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        """Start all ranks again, from the last whole checkpoint."""
        found, resumed_size = self._find_checkpoint()
        self._restarting = False
        self._idle.clear()
        self._done.clear()
        self._barren = self._barren + 1 if found == self._attempt["resume"] else 0
        members = self._attempt["members"]
        gone = set(range(self._plan["ranks"])) - set(members)
        problem = None
        if self.policy is Policy.SHRINK:
            # Any other rank that failed leaves a machine that can start a rank, so it is the last one that goes.
            gone |= {*(self._ranks_of(self._lost) or members[-1:])}
            problem = self._explain_no_shrinking(self._plan["ranks"] - len(gone))
        if self._barren >= MAX_BARREN:
            problem = f"{MAX_BARREN} attempts in a row made no new checkpoint"
        if problem is not None:
            self.document["problem"] = problem
            self._end_for_good()
            return
        attempt = {
            "number": self._attempt["number"] + 1,
            "gone": sorted(gone),
            "lost": sorted(self._lost),
            "resume": found,
            "resumed_size": resumed_size,
            "port": machine.free_port(),  # another one: the last may still be in use
        }
        self._tell(None, {"attempt": attempt})
        self.write()

    def _start_attempt(self, attempt: Mapping[str, Any]) -> None:
        self._note_attempt(attempt)
        super()._start_attempt(attempt)

    def _explain_no_shrinking(self, size: int) -> str | None:
        """Why the run cannot go on with so many ranks, or None."""
        total = json.loads(self._agent.plan["environment"]["MLBENCH_PARAMETERS"])["batch_size"] * self._plan["ranks"]
        if size < 1 or total % size:
            return f"the global batch of {total} samples cannot be divided evenly among {size} ranks"
        return None

    def _find_checkpoint(self) -> tuple[int | None, int]:
        """The greatest update of which all ranks have written their part, as many as there were then: and how many.

        If there is none any more, the greatest that lacks only parts of ranks on lost machines.
        """
        files: dict[int, set[str]] = {}
        for listed in self._idle.values():
            for name, names in listed.items():
                files.setdefault(int(name), set()).update(names)
        attempts = self.document["attempts"]
        sizes = {attempt["ranks"]: attempt.get("members", range(attempt["ranks"])) for attempt in attempts}
        incomplete = None
        for update in sorted(files, reverse=True):
            for size, members in sizes.items():
                parts = {f"rank-{number}.pt": self._agent.find_node(rank=rank) for number, rank in enumerate(members)}
                missing = {MAIN, *parts} - files[update]
                if not missing:
                    return update, size
                if incomplete is None and all(parts.get(name) in self._lost for name in missing):
                    incomplete = update, size
        return incomplete or (None, len(self._attempt["members"]))

    def _end_for_good(self) -> None:
        rank, code = self._last
        self._agent.fail(rank, code)

    def finish(self) -> None:
        """Undo what lasts, and write the record for good."""
        super().finish()
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

    def __init__(self, event: int, fault: Fault, now: float) -> None:
        self.event = event
        self.facts: dict[str, Any] = {}  # for the record
        self.over = now + fault.seconds if fault.seconds is not None else float("inf")
        self.next = self.over

    def turn(self, now: float) -> bool:
        self.end()
        return True

    def end(self) -> None:
        """Things are as before. May be called again."""


class _Stopped(_Lasting):
    def __init__(self, hands: FaultHands, rank: Rank, event: int, fault: Fault, now: float) -> None:
        super().__init__(event, fault, now)
        self._hands, self._pid = hands, rank.pid
        hands.hold(rank.pid)

    def end(self) -> None:
        self._hands.free(self._pid)


class _Slowed(_Lasting):
    """Runs and stops in turns, so that its share of the time is as asked, whatever the machine gives it."""

    outlives_attempt = True

    def __init__(self, hands: FaultHands, number: int, event: int, fault: Fault, now: float) -> None:
        super().__init__(event, fault, now)
        assert fault.share is not None
        self._hands, self._number, self._share = hands, number, fault.share
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
        rank = self._hands.find_rank(self._number)
        if rank is not None:  # else it is between two attempts
            with contextlib.suppress(OSError):
                self._hands.hold(rank.pid)
                self._held, self._since = rank.pid, now
        self.next = min(self.over, now + PERIOD * (1 - self._share))
        return False

    def _release(self, now: float) -> None:
        if self._held is not None:
            self._hands.free(self._held)
            self._stopped += now - self._since
            self._held = None

    def end(self) -> None:
        now = time.monotonic()
        self._release(now)
        if now > self._begun:
            self.facts["stopped_share"] = round(self._stopped / (now - self._begun), 4)


class _FullDisk(_Lasting):
    """No file of the ranks can grow: RLIMIT_FSIZE, which gives EFBIG where a full disk gives ENOSPC."""

    def __init__(self, ranks: list[Rank], event: int, fault: Fault, now: float) -> None:
        super().__init__(event, fault, now)
        self._pids: list[int] = []
        for rank in ranks:
            resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            self._pids.append(rank.pid)

    def end(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class _SlowStorage(_Lasting):
    """The disks of a rank's data and output are slow for it; a process that takes its place is slowed, too."""

    outlives_attempt = True

    def __init__(self, hands: FaultHands, rank: Rank, event: int, fault: Fault, now: float) -> None:
        super().__init__(event, fault, now)
        assert fault.rate is not None
        self._hands, self._number, self._pid = hands, rank.number, 0
        disks = sorted({storage.find_disk(os.path.abspath(place)) for place in hands.places})
        self._group = storage.SlowGroup(f"mlbench-{os.getpid()}-{event}", disks, fault.rate, hands.guard)
        try:
            self._join(rank)
        except OSError:
            self.end()
            raise
        self.next = min(self.over, now + PERIOD)

    def turn(self, now: float) -> bool:
        if now >= self.over:
            self.end()
            return True
        rank = self._hands.find_rank(self._number)
        if rank is not None and rank.pid != self._pid:  # None: it is between two attempts
            with contextlib.suppress(OSError):  # it has just ended
                self._join(rank)
        self.next = min(self.over, now + PERIOD)
        return False

    def _join(self, rank: Rank) -> None:
        self._group.add(rank.pid)
        self._pid = rank.pid

    def end(self) -> None:
        if (count := self._group.read_bytes()) is not None:
            self.facts["bytes"] = count
        self._group.remove()
        self._hands.unguard(self._group.folder)


class _ChangedLink(_Lasting):
    outlives_attempt = True

    def __init__(self, hands: FaultHands, event: int, fault: Fault, now: float) -> None:
        super().__init__(event, fault, now)
        assert fault.target is not None
        self._hands, self._worker = hands, fault.target

    def end(self) -> None:
        self._hands.restore_link(self._worker)
