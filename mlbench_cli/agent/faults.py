"""Fault injection and restarts by the agents: faults, attempts, and the record of both.

An *attempt* is one start of all ranks. A rank that fails ends its attempt; by the run's policy the run fails with it,
or all ranks start again from the last whole checkpoint. faults.json in the run's folder says what was planned, what
was done at which moment, and what became of each attempt. Its times are seconds since the first rank was started, by
the monotonic clock.

Every agent of a run has `NodeFaults`, which do things to the ranks of its machine. Those of node 0 are a
`FaultControl`: it decides, tells those of all nodes what to do (`obey`), and hears what became of it (`take`).
On one machine that is all one object.

Nothing is left stopped or slowed: ranks die with the agent, and a guard process kills the groups of stopped ranks if
the agent is killed itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from mlbench_cli.agent import machine, processes
from mlbench_cli.agent.network.shaped import ShapedNetwork
from mlbench_cli.agent.wire import carry_out
from mlbench_cli.model.faults import Fault, FaultKind, Policy, parse_faults
from mlbench_cli.util.files import write_atomically


class Rank(Protocol):
    """A rank of the agent."""

    number: int
    pid: int
    running: bool
    environment: dict[str, str]


class Agent(Protocol):
    """The part of the agent that this module uses."""

    folder: str
    plan: Any
    state: Any
    network: ShapedNetwork | None
    node: int
    count: int

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks of its machine."""

    def find_node(self, *, rank: int | None = None, worker: int | None = None) -> int: ...
    def send_faults(self, node: int, message: Mapping[str, Any]) -> None: ...
    def set_port(self, port: int) -> None: ...
    def start_again(self, rank: Any) -> None: ...
    def fail(self, number: int, code: int) -> None: ...
    def abandon_ranks(self) -> None: ...
    def on_write_error(self, error: OSError) -> None: ...


PERIOD = 0.1  # seconds of one turn of a slowed rank: running, then stopped
GROUPS_SECONDS = 2.0  # between two looks for the process groups of a slowed rank
MARK_SECONDS = 0.05  # between two looks whether ranks train
MAX_BARREN = 3  # attempts in a row that end without a new checkpoint
# Exit codes that another attempt would give again: usage, wrong results, an unfit environment (task_images.contract).
FINAL_CODES = (64, 70, 78, 126, 127)
COLLECTIVE_FACTOR = 3  # the collectives' patience is this many times that of the watch on stopped ranks
MAIN = "main.pt"
UNCONFIRMED = "its machine has not confirmed it"


class NodeFaults:
    """Injects faults into the ranks of one agent and restarts them, on orders from node 0."""

    def __init__(self, agent: Agent, plan: Mapping[str, Any]) -> None:
        self._agent = agent
        self._plan = plan
        self.policy = Policy(plan["policy"])
        self._detect: float | None = plan["detect_seconds"]
        self.folder = f"{agent.folder}/.state/checkpoints"
        self._next_look = 0.0
        self._lasting: list[_Lasting] = []
        self._stalled: dict[int, float] = {}  # rank: since when it is stopped, unless to slow it
        self._guard = -1
        self._attempt: Mapping[str, Any] = {"number": 0, "resume": None}  # the last one that node 0 announced
        self._next_rest = 0.0
        self._halted = self._is_idle = False  # between two attempts, and node 0 knows that nothing runs here any more
        self._is_over = self.policy is Policy.FAIL  # no other attempt will come

    # --- start --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the first rank starts."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        self._guard = machine.start_guard(self._watch_held)

    def environment(self, rank: Rank) -> dict[str, str]:
        """The variables of the contract that one rank gets for this attempt."""
        found = {"MLBENCH_CHECKPOINT_DIR": self.folder}
        if self.policy is not Policy.FAIL:
            found["MLBENCH_CHECKPOINT_EVERY"] = str(self._plan["checkpoint_every"])
        if self._detect is not None:
            found["MLBENCH_COLLECTIVE_SECONDS"] = str(max(10, round(COLLECTIVE_FACTOR * self._detect)))
        if number := self._attempt["number"]:
            resume = self._attempt["resume"]
            found["MLBENCH_ATTEMPT"] = str(number)
            found["MLBENCH_RESUME"] = "" if resume is None else f"{self.folder}/{resume}"
        return found

    # --- messages -----------------------------------------------------------------------------------------------

    def _report(self, do: str, **fields: Any) -> None:
        """Tell node 0."""
        self._agent.send_faults(0, {"do": do, **fields})

    def take(self, node: int, message: Mapping[str, Any]) -> None:
        """Handle a message from another node. It is from node 0, the only one that this node has a link to."""
        self.obey(message)

    def obey(self, message: Mapping[str, Any]) -> None:
        """Carry out an order from node 0."""
        orders: dict[str, Callable[..., None]] = {
            "inject": self._inject,
            "halt": self._halt,
            "start": self._start_attempt,
            "end": self._expect_no_attempt,
        }
        if self._agent.state["ended"] is None:
            carry_out(orders, message)

    def _expect_no_attempt(self) -> None:
        """All ranks of all nodes have ended well."""
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
        return min((self._next_look, *(lasting.next for lasting in self._lasting)))

    def on_time(self, now: float) -> None:
        """Do what is due."""
        if self._agent.state["ended"] is not None:
            self._give_up()
            return
        self._next_rest = now + MARK_SECONDS
        if self._halted and not self._is_idle and not self._running():
            # What has left the group of its rank, as torchrun's workers do, would run beside the next attempt.
            processes.kill_processes(f"{self._agent.folder}/output")
            self._is_idle = True
            self._report("idle", checkpoints=self._list_checkpoints())
        if now >= self._next_look:
            self._look(now)
        for lasting in list(self._lasting):
            if now >= lasting.next and lasting.turn(now):
                self._end_lasting(lasting)

    def _look(self, now: float) -> None:
        """Whether a rank is stopped."""
        self._next_look = now + max(0.25, (self._detect or 40.0) / 8)
        if self._detect is None:
            return
        slowed = {lasting.number for lasting in self._lasting if isinstance(lasting, _Slowed)}
        for rank in self._running():
            fields = processes.stat_fields(rank.pid)
            if rank.number in slowed or fields is None or fields[0] not in "Tt":
                self._stalled.pop(rank.number, None)
            elif now - self._stalled.setdefault(rank.number, now) >= self._detect:
                self._report("failed", rank=rank.number, code=None, why="stopped", is_final=False)
                processes.signal_group(rank.pid, signal.SIGKILL)
                return

    def _running(self) -> list[Rank]:
        return [rank for rank in self._agent.ranks if rank.running]

    # --- faults -------------------------------------------------------------------------------------------------

    def _inject(self, event: int, fault: Mapping[str, Any]) -> None:
        problem = None
        try:
            problem = self._do(event, Fault(**fault), time.monotonic())
        except OSError as error:
            problem = error.strerror or str(error)
        self._report("event", number=event, facts={"problem": problem}, is_over=False)

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
        if kind is FaultKind.KILL:
            for group in [group for rank in targets for group in processes.find_groups(rank.pid)]:
                processes.signal_group(group, signal.SIGKILL)
        elif kind is FaultKind.STOP:
            self._lasting.append(_Stopped(self, targets[0], event, fault, now))
        else:
            self._lasting.append(_Slowed(self, targets[0].number, event, fault, now))
        return None

    def _targets(self, fault: Fault) -> list[Rank]:
        return [rank for rank in self._running() if fault.target in (None, rank.number)]

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
        self._report("event", number=lasting.event, facts=lasting.facts, is_over=True)

    # --- guard --------------------------------------------------------------------------------------------------

    @staticmethod
    def _watch_held(reader: int) -> None:
        """Kill stopped process groups if the other process ends without having continued them."""
        machine.keep_only(reader)
        held: set[str] = set()
        with os.fdopen(reader, encoding="utf-8") as lines:
            for line in lines:
                (held.add if line[0] == "+" else held.discard)(line[1:-1])
        for name in held:
            processes.signal_group(int(name), signal.SIGKILL)

    def hold(self, groups: Iterable[int]) -> None:
        """Stop process groups; if this process is killed, the guard kills them. Raises OSError."""
        for group in groups:
            os.write(self._guard, f"+{group}\n".encode())
            processes.signal_group(group, signal.SIGSTOP)

    def free(self, groups: Iterable[int]) -> None:
        """Let stopped process groups go on. Those that have ended are no error."""
        for group in groups:
            processes.signal_group(group, signal.SIGCONT)
            with contextlib.suppress(OSError):
                os.write(self._guard, f"-{group}\n".encode())

    # --- attempts -----------------------------------------------------------------------------------------------

    def take_end(self, rank: Rank, code: int, number: int | None) -> bool:
        """A rank's process has ended; True if its run goes on with another attempt. Any agent's rank, any code."""
        if self._agent.state["ended"] is not None:
            return False
        if self._halted:
            return True
        if not code:
            if not self._running():
                self._report("done", attempt=self._attempt["number"])
            return False
        is_final = self.policy is Policy.FAIL or code in FINAL_CODES
        why = "killed" if number is not None else "failed"
        self._report("failed", rank=rank.number, code=code, why=why, is_final=is_final)
        if not is_final:
            self._halt()
        return not is_final

    def _halt(self) -> None:
        """End what runs, before another attempt."""
        if not self._halted:
            self._halted, self._is_idle = True, False
            for rank in self._running():
                processes.signal_group(rank.pid, signal.SIGKILL)

    def _list_checkpoints(self) -> dict[str, list[str]]:
        """The files of each checkpoint on this machine, by the update that it was written after."""
        found: dict[int, set[str]] = {}
        with contextlib.suppress(OSError):
            for name in filter(str.isdecimal, os.listdir(self.folder)):
                found.setdefault(int(name), set()).update(os.listdir(f"{self.folder}/{name}"))
        return {str(update): sorted(names) for update, names in found.items()}

    def _start_attempt(self, attempt: Mapping[str, Any]) -> None:
        """Start all ranks again."""
        self._halted = False
        self._next_look = 0.0
        for lasting in [lasting for lasting in self._lasting if not lasting.outlives_attempt]:
            self._end_lasting(lasting)
        self._stalled.clear()
        self._attempt = attempt
        self._agent.set_port(attempt["port"])
        try:
            for rank in self._agent.ranks:
                self._agent.start_again(rank)
        except OSError as error:
            self._report("broken", problem=error.strerror or str(error))

    def _give_up(self) -> None:
        """Rule out further attempts, and end lasting faults, so that stopped ranks notice the end of the run."""
        self._is_over = True
        if self._halted:
            self._halted = False
            self._agent.abandon_ranks()
        for lasting in list(self._lasting):
            self._end_lasting(lasting)

    def finish(self) -> None:
        """Undo lasting faults."""
        self._give_up()
        if self._guard >= 0:
            os.close(self._guard)


class FaultControl(NodeFaults):
    """The `NodeFaults` of node 0, which also direct those of the other nodes, follow the plan, and keep the record."""

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
        self.document["attempts"].append(
            {
                "number": attempt["number"],
                "started": self._now(),
                "training": None,
                "ended": None,
                "ranks": self._plan["ranks"],
                "resumed_update": attempt["resume"],
                "rank": None,
                "exit_code": None,
                "why": None,
            }
        )

    def _now(self) -> float:
        return round(time.monotonic() - self._begun, 4)

    # --- messages -----------------------------------------------------------------------------------------------

    def _report(self, do: str, **fields: Any) -> None:
        self.take(self._agent.node, {"do": do, **fields})

    def _tell(self, node: int | None, do: str, **fields: Any) -> None:
        """Tell a node what to do; None: all, this one last, because what it does may end the run."""
        message = {"do": do, **fields}
        for other in [node] if node is not None else reversed(range(self._agent.count)):
            if other == self._agent.node:
                self.obey(message)
            else:
                self._agent.send_faults(other, message)

    def take(self, node: int, message: Mapping[str, Any]) -> None:
        """Handle a report from a node."""
        reports: dict[str, Callable[..., None]] = {
            "event": self._on_event,
            "failed": self._on_failure,
            "idle": self._on_idle,
            "done": self._on_done,
            "broken": self._on_broken,
        }
        carry_out(reports, message, node)

    def _on_idle(self, node: int, checkpoints: Mapping[str, list[str]]) -> None:
        self._idle[node] = checkpoints

    def _on_done(self, node: int, attempt: int) -> None:
        if attempt == self._attempt["number"]:
            self._done.add(node)
            if len(self._done) == self._agent.count:
                self._tell(None, "end")

    def _on_broken(self, node: int, problem: str) -> None:
        self.document["problem"] = problem
        self._end_for_good()

    def _on_event(self, node: int, number: int, facts: dict[str, Any], is_over: bool) -> None:
        note, facts = self.document["events"][number], dict(facts)
        if note["problem"] not in (None, UNCONFIRMED):  # of another node, whose ranks it was meant for, too
            facts.pop("problem", None)
        note.update(facts)
        if is_over:
            note["until"] = self._now()
        self.write()

    def _on_failure(self, node: int, rank: int, code: int | None, why: str, is_final: bool) -> None:
        """A rank has failed, or will be killed because it is stopped. The first reason of an attempt's end stays."""
        attempt = self.document["attempts"][-1]
        if attempt["ended"] is None:
            attempt.update({"ended": self._now(), "rank": rank, "why": why})
        if attempt["rank"] == rank and code is not None:
            attempt["exit_code"] = code
        self.write()
        if code is None or is_final:
            return
        if not self._restarting:
            self._restarting, self._last = True, (rank, code)
            self._tell(None, "halt")

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
        return self._restarting and len(self._idle) == self._agent.count

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
        self._tell(node, "inject", event=len(events) - 1, fault=fault.to_dict())
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
        found = self._find_checkpoint()
        self._restarting = False
        self._idle.clear()
        self._done.clear()
        self._barren = self._barren + 1 if found == self._attempt["resume"] else 0
        if self._barren >= MAX_BARREN:
            self.document["problem"] = f"{MAX_BARREN} attempts in a row made no new checkpoint"
            self._end_for_good()
            return
        attempt = {
            "number": self._attempt["number"] + 1,
            "resume": found,
            "port": machine.free_port(),  # another one: the last may still be in use
        }
        self._tell(None, "start", attempt=attempt)
        self.write()

    def _start_attempt(self, attempt: Mapping[str, Any]) -> None:
        self._note_attempt(attempt)
        super()._start_attempt(attempt)

    def _find_checkpoint(self) -> int | None:
        """The greatest update of which all ranks have written their part."""
        files: dict[int, set[str]] = {}
        for listed in self._idle.values():
            for name, names in listed.items():
                files.setdefault(int(name), set()).update(names)
        parts = {MAIN, *(f"rank-{rank}.pt" for rank in range(self._plan["ranks"]))}
        return max((update for update, names in files.items() if parts <= names), default=None)

    def _end_for_good(self) -> None:
        rank, code = self._last
        self._agent.fail(rank, code)

    def finish(self) -> None:
        """Undo lasting faults, and write the final record."""
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
            data = (json.dumps(self.document, indent=2) + "\n").encode()
            write_atomically(path, data, is_durable=False)
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
        """Restore the previous state. May be called again."""


class _Stopped(_Lasting):
    def __init__(self, node: NodeFaults, rank: Rank, event: int, fault: Fault, now: float) -> None:
        super().__init__(event, fault, now)
        self._node, self._groups = node, processes.find_groups(rank.pid)
        node.hold(self._groups)

    def end(self) -> None:
        self._node.free(self._groups)


class _Slowed(_Lasting):
    """Stops and continues a rank in turns, so that it runs for the requested share of the time on any machine."""

    outlives_attempt = True

    def __init__(self, node: NodeFaults, number: int, event: int, fault: Fault, now: float) -> None:
        super().__init__(event, fault, now)
        assert fault.share is not None
        self._node, self.number, self._share = node, number, fault.share
        self._held: set[int] = set()  # process groups
        self._known: tuple[int, float, set[int]] = (0, 0.0, set())  # those of a rank's process, since when
        self._since = self._begun = now
        self._stopped = 0.0
        self.turn(now)

    def turn(self, now: float) -> bool:
        if now >= self.over:
            self.end()
            return True
        if self._held:
            self._release(now)
            self.next = min(self.over, now + PERIOD * self._share)
            return False
        rank = self._node.find_rank(self.number)
        if rank is not None:  # else it is between two attempts
            pid, since, _ = self._known
            if rank.pid != pid or now >= since + GROUPS_SECONDS:
                self._known = rank.pid, now, processes.find_groups(rank.pid)
            with contextlib.suppress(OSError):
                self._node.hold(self._known[2])
                self._held, self._since = self._known[2], now
        self.next = min(self.over, now + PERIOD * (1 - self._share))
        return False

    def _release(self, now: float) -> None:
        if self._held:
            self._node.free(self._held)
            self._stopped += now - self._since
            self._held = set()

    def end(self) -> None:
        now = time.monotonic()
        self._release(now)
        if now > self._begun:
            self.facts["stopped_share"] = round(self._stopped / (now - self._begun), 4)


class _ChangedLink(_Lasting):
    outlives_attempt = True

    def __init__(self, node: NodeFaults, event: int, fault: Fault, now: float) -> None:
        super().__init__(event, fault, now)
        assert fault.target is not None
        self._node, self._worker = node, fault.target

    def end(self) -> None:
        self._node.restore_link(self._worker)
