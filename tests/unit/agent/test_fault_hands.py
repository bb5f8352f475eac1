"""What hands do to the ranks of their machine, how long it lasts, and what they say of it to node 0."""

import errno
import json
import os
import resource
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent import machine, processes, storage
from mlbench_cli.agent.faults import MARK_SECONDS, PERIOD, FaultHands
from tests.fakes.clock import Clock

KILL, STOP, CONTINUE = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT


class Copies:
    """Notes what it is asked to copy and to bring back."""

    def __init__(self) -> None:
        self.next_look = 1002.0
        self.begun: list[Any] = []
        self.restored: list[Any] = []
        self.looks: list[float] = []
        self.on_held: Any = None

    def names(self) -> dict[int, set[str]]:
        return {5: {"rank-0.pt"}, 20: {"rank-0.pt"}}

    def begin(self, *words: Any) -> None:
        self.begun.append(words)

    def restore(self, nodes: set[int], update: int, folder: str) -> None:
        self.restored.append((nodes, update, folder))

    def on_time(self, now: float) -> None:
        self.looks.append(now)


class Network:
    """A shaped network that notes changes of its links, or refuses them."""

    def __init__(self) -> None:
        self.changes: list[Any] = []
        self.problem: str | None = None

    def change_link(self, worker: int, *, rate: float | None, loss: float) -> str | None:
        self.changes.append((worker, rate, loss))
        return self.problem


class Lab:
    """Hands of node 1 of three, with ranks 1 and 2, at a time that the test says. `said` is what node 0 has heard."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock = folder, clock
        self.signals: list[tuple[int, int]] = []
        self.kills: list[tuple[int, int]] = []
        self.limits: list[Any] = []
        self.said: list[Mapping[str, Any]] = []
        self.done: list[Any] = []
        self.stats: dict[int, list[str]] = {}
        self.guard, self.writer = os.pipe()
        os.set_blocking(self.guard, False)

    def make(self, policy: str = "restart", **plan: Any) -> FaultHands:
        (self.folder / ".state").mkdir(exist_ok=True)
        self.agent: Any = SimpleNamespace(
            folder=str(self.folder),
            node=1,
            count=3,
            token="secret",
            copies=plan.pop("copies", None),
            network=plan.pop("network", None),
            state={"ended": None},
            ranks=[
                SimpleNamespace(number=number, pid=100 + number, running=True, environment={"NODE_RANK": str(node)})
                for number, node in ((1, 0), (2, 1))
            ],
            plan={
                "environment": {
                    "MLBENCH_PARAMETERS": '{"batch_size": 8}',
                    "MLBENCH_HOSTS": "a,b,c",
                    "MLBENCH_DATA_DIR": "/data",
                }
            },
            find_holder=lambda lost: ("192.0.2.2", 4700 + len(lost)),
            find_node=lambda *, rank=None, worker=None: rank if rank is not None else worker,
            send_faults=self._hear,
            set_port=lambda port: self.done.append(("port", port)),
            start_again=self._start,
            leave_out=lambda rank: self.done.append(("leave out", rank.number)),
            abandon_ranks=lambda: self.done.append("abandon"),
        )
        document = {"policy": policy, "checkpoint_every": "5", "detect_seconds": None, "ranks": 3, "workers": 3, **plan}
        self.hands = FaultHands(self.agent, document)
        self.hands.begin()
        return self.hands

    def _hear(self, node: int, message: Mapping[str, Any]) -> None:
        assert node == 0
        self.said.append(message)

    def _start(self, rank: Any) -> None:
        rank.running = True
        self.done.append(("start", rank.number))

    def inject(self, kind: str, target: int | None = None, **more: Any) -> None:
        event = more.pop("event", 4)
        self.hands.obey({"inject": {"kind": kind, "at": 0.0, "target": target, **more}, "event": event})

    def end_ranks(self) -> None:
        for rank in self.agent.ranks:
            rank.running = False

    def finish(self) -> None:
        self.hands.finish()
        self.writer = -1

    def turn(self, seconds: float) -> None:
        self.clock.now += seconds
        self.hands.on_time(self.clock.now)

    def read_guard(self) -> str:
        """What the guard process has been told since the last look."""
        try:
            return os.read(self.guard, 4096).decode()
        except BlockingIOError:
            return ""

    def start_attempt(self, **changes: Any) -> None:
        facts = {"number": 1, "gone": [], "lost": [], "resume": None, "resumed_size": 3, "port": 15001}
        self.hands.obey({"attempt": {**facts, **changes}})


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    made = Lab(tmp_path, Clock(1000.0))
    monkeypatch.setattr("mlbench_cli.agent.faults.time", made.clock)
    monkeypatch.setattr(processes, "signal_group", lambda pid, number: made.signals.append((pid, number)))
    monkeypatch.setattr(processes, "stat_fields", made.stats.get)
    monkeypatch.setattr(os, "killpg", lambda pid, number: made.signals.append((pid, number)))
    monkeypatch.setattr(os, "kill", lambda pid, number: made.kills.append((pid, number)))
    monkeypatch.setattr(resource, "prlimit", lambda *words: made.limits.append(words))
    monkeypatch.setattr(machine, "start_guard", lambda work: made.writer)
    yield made
    for descriptor in (made.guard, made.writer):
        if descriptor >= 0:
            os.close(descriptor)


# --- faults that happen once ----------------------------------------------------------------------------------------


def test_only_the_rank_that_is_meant_is_killed(lab: Lab) -> None:
    lab.make()
    lab.inject("kill", 2)
    assert lab.signals == [(102, KILL)]
    assert lab.said == [{"event": 4, "facts": {"problem": None}}]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_target_that_does_not_run_is_the_problem(lab: Lab, is_there: bool) -> None:
    lab.make()
    lab.agent.ranks[1].running = False
    lab.inject("kill", 2 if is_there else 7)
    assert lab.signals == []
    assert lab.said == [{"event": 4, "facts": {"problem": "none of its processes is running"}}]


def test_a_machine_that_is_to_be_gone_says_so_and_ends_with_its_ranks(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.make()
    lab.agent.ranks[1].running = False

    def kill(pid: int, number: int) -> None:
        assert (lab.said, lab.signals) == ([{"event": 4, "facts": {"problem": None}}], [(101, KILL)])
        lab.kills.append((pid, number))
        raise SystemExit

    monkeypatch.setattr(os, "kill", kill)
    with pytest.raises(SystemExit):
        lab.inject("node", 1)
    assert lab.kills == [(os.getpid(), KILL)]


def test_on_one_machine_a_node_is_the_ranks_of_its_worker(lab: Lab) -> None:
    lab.make()
    lab.agent.count = 1
    lab.inject("node", 1)
    assert (lab.signals, lab.kills) == ([(102, KILL)], [])


def test_a_fault_that_the_system_refuses_is_told_in_its_words(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    lab.make()
    monkeypatch.setattr(resource, "prlimit", refuse)
    lab.inject("disk")
    assert lab.said == [{"event": 4, "facts": {"problem": "Operation not permitted"}}]


@pytest.mark.parametrize(
    ("code", "is_final"),
    [
        (os.EX_USAGE, True),
        (os.EX_SOFTWARE, True),  # wrong results
        (os.EX_CONFIG, True),  # an environment that does not fit
        (126, True),  # POSIX: the command cannot be executed
        (127, True),  # POSIX: there is no such command
        (1, False),
        (os.EX_USAGE + 1, False),
        (os.EX_SOFTWARE + 1, False),
        (os.EX_TEMPFAIL, False),
        (os.EX_CONFIG + 1, False),
        (128, False),
        (128 + KILL, False),
    ],
)
def test_only_codes_that_another_attempt_would_give_again_are_final(lab: Lab, code: int, is_final: bool) -> None:
    lab.make()
    assert lab.hands.take_end(lab.agent.ranks[0], code, None) is not is_final
    assert lab.said == [{"end": 1, "code": code, "why": "failed", "is_final": is_final}]


def test_a_rank_that_waits_for_two_seconds_has_lost_its_connections_for_a_while(lab: Lab) -> None:
    """Its code is that of a temporary failure."""
    lab.make("replace")
    lab.turn(0.0)
    Path(lab.hands.folder, "waiting-0-2").touch()
    lab.hands._look(1001.9)
    assert lab.said == []
    lab.hands._look(1002.0)
    assert lab.said == [{"end": 2, "code": os.EX_TEMPFAIL, "why": "failed", "is_final": False}]


def test_ranks_that_notice_nothing_have_half_a_minute(lab: Lab) -> None:
    lab.make("replace")
    lab.hands.obey({"halt": True})
    lab.turn(29.9)
    assert lab.signals == []
    lab.turn(0.25)
    assert lab.signals == [(101, KILL), (102, KILL)]


# --- faults that last -----------------------------------------------------------------------------------------------


def test_a_stopped_rank_goes_on_after_its_time_and_is_guarded_until_then(lab: Lab) -> None:
    lab.make()
    lab.inject("stop", 1, seconds=20.0)
    assert (lab.signals, lab.read_guard()) == ([(101, STOP)], "+101\n")
    lab.said.clear()
    lab.turn(19.9)
    assert lab.signals == [(101, STOP)]
    lab.clock.now = 1020.0
    lab.turn(0.0)
    assert (set(lab.signals[1:]), set(lab.read_guard().split())) == ({(101, CONTINUE)}, {"-101"})
    assert lab.said == [{"event": 4, "facts": {}, "is_over": True}]
    lab.turn(20.0)
    assert len(lab.said) == 1


def test_a_rank_that_is_stopped_for_good_goes_on_with_the_end_of_the_run(lab: Lab) -> None:
    lab.make()
    lab.inject("stop", 1)
    lab.turn(1e6)
    assert lab.signals == [(101, STOP)]
    lab.finish()
    assert set(lab.signals[1:]) == {(101, CONTINUE)}


def test_a_slowed_rank_runs_and_stops_in_turns_of_a_tenth_of_a_second(lab: Lab) -> None:
    """To 25 %: it stops for 75 ms and runs for 25 ms of each turn."""
    lab.make()
    lab.inject("slow", 2, share=0.25, seconds=60.0)
    lab.said.clear()
    moments = []
    for _ in range(6):
        due = lab.hands._lasting[0].next
        moments.append(round(due - lab.clock.now, 6))
        lab.clock.now = due
        lab.hands._lasting[0].turn(due)
    assert moments == [0.075, 0.025, 0.075, 0.025, 0.075, 0.025]
    assert lab.signals == [(102, STOP), (102, CONTINUE)] * 3 + [(102, STOP)]
    lab.clock.now = 1060.0
    lab.turn(0.0)
    assert lab.signals[-1] == (102, CONTINUE)
    assert [(word["event"], word["is_over"]) for word in lab.said] == [(4, True)]


def test_the_share_of_the_time_that_a_rank_was_stopped_is_measured(lab: Lab) -> None:
    """What was asked for is not what a busy machine gives."""
    lab.make()
    lab.inject("slow", 2, share=0.5, seconds=10.0)
    lab.said.clear()
    lab.turn(4.0)  # the agent had no turn for so long
    assert lab.signals == [(102, STOP), (102, CONTINUE)]
    lab.agent.ranks[1].running = False  # between two attempts
    lab.turn(3.0)
    lab.turn(3.0)
    assert lab.said == [{"event": 4, "facts": {"stopped_share": 0.4}, "is_over": True}]


def test_a_slowed_rank_is_slowed_in_the_next_attempt_too(lab: Lab) -> None:
    lab.make()
    lab.inject("slow", 2, share=0.5, seconds=100.0)
    lab.inject("stop", 1, event=5, seconds=100.0)
    lab.said.clear()
    lab.hands.obey({"halt": True})
    lab.end_ranks()
    lab.turn(1.0)
    lab.signals.clear()
    lab.start_attempt()
    assert lab.said[-1] == {"event": 5, "facts": {}, "is_over": True}  # a stopped process is gone for good
    lab.agent.ranks[1].pid = 202
    lab.turn(1.0)
    assert (202, STOP) in lab.signals


def test_no_file_of_a_rank_can_grow_while_its_disk_is_full(lab: Lab) -> None:
    lab.make()
    lab.inject("disk", seconds=30.0)
    endless = resource.RLIM_INFINITY
    size = resource.RLIMIT_FSIZE
    assert lab.limits == [(101, size, (0, endless)), (102, size, (0, endless))]
    lab.turn(30.0)
    assert set(lab.limits[2:]) == {(101, size, (endless, endless)), (102, size, (endless, endless))}


@pytest.mark.parametrize(
    ("given", "change"),
    [({"rate": 0.0}, (2, 0.0, 0.0)), ({"rate": 1e7}, (2, 1e7, 0.0)), ({"share": 0.02}, (2, None, 0.02))],
)
def test_a_link_changes_for_its_time(lab: Lab, given: dict[str, float], change: object) -> None:
    network = Network()
    lab.make(network=network)
    lab.inject("link", 2, seconds=20.0, **given)
    assert network.changes == [change]
    lab.turn(20.0)
    assert set(network.changes[1:]) == {(2, None, 0.0)}
    assert lab.said[1:] == [{"event": 4, "facts": {}, "is_over": True}]


@pytest.mark.parametrize("is_shaped", [False, True])
def test_a_link_that_cannot_be_changed_is_told_with_the_reason(lab: Lab, is_shaped: bool) -> None:
    network = Network()
    network.problem = "no such link"
    lab.make(network=network if is_shaped else None)
    lab.inject("link", 2, rate=0.0)
    problem = "no such link" if is_shaped else "the run has no shaped network"
    assert lab.said == [{"event": 4, "facts": {"problem": problem}}]
    lab.finish()
    assert len(lab.said) == 1  # nothing that could end had begun


class Group:
    """A control group of slow storage that only notes what is done to it."""

    made: list["Group"]
    refuses = False

    def __init__(self, name: str, disks: list[str], rate: float, announce: Any) -> None:
        self.name, self.disks, self.rate, self.folder = name, disks, rate, f"/groups/{name}"
        self.pids: list[int] = []
        self.is_removed = False
        self.bytes: int | None = 700
        announce(self.folder)
        Group.made.append(self)

    def add(self, pid: int) -> None:
        if Group.refuses:
            raise OSError(errno.ESRCH, "No such process")
        self.pids.append(pid)

    def read_bytes(self) -> int | None:
        return self.bytes

    def remove(self) -> None:
        self.is_removed = True


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    monkeypatch.setattr(Group, "made", [], raising=False)
    monkeypatch.setattr(storage, "SlowGroup", Group)
    monkeypatch.setattr(storage, "find_disk", lambda path: "8:0" if path == "/data" else "9:0")
    return Group.made


def test_slow_storage_is_that_of_data_and_output_and_follows_its_rank(lab: Lab, groups: list[Group]) -> None:
    lab.make()
    lab.inject("storage", 2, rate=5e6, seconds=60.0)
    (group,) = groups
    assert (group.name, group.disks, group.rate) == (f"mlbench-{os.getpid()}-4", ["8:0", "9:0"], 5e6)
    assert lab.read_guard() == f"+{group.folder}\n"
    lab.turn(PERIOD)
    assert group.pids == [102]
    lab.agent.ranks[1].running = False
    lab.turn(PERIOD)
    lab.agent.ranks[1].running, lab.agent.ranks[1].pid = True, 202
    lab.turn(PERIOD)
    lab.turn(PERIOD)
    assert group.pids == [102, 202]
    lab.said.clear()
    lab.turn(60.0)
    assert (group.is_removed, set(lab.read_guard().split())) == (True, {f"-{group.folder}"})
    assert lab.said == [{"event": 4, "facts": {"bytes": 700}, "is_over": True}]


def test_bytes_that_the_kernel_does_not_count_are_not_told(lab: Lab, groups: list[Group]) -> None:
    lab.make()
    lab.inject("storage", 2, rate=5e6, seconds=60.0)
    groups[0].bytes = None
    lab.turn(60.0)
    assert lab.said[1:] == [{"event": 4, "facts": {}, "is_over": True}]


def test_a_group_that_a_rank_cannot_join_is_removed(
    lab: Lab, groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.make()
    monkeypatch.setattr(Group, "refuses", True)
    lab.inject("storage", 2, rate=5e6, seconds=60.0)
    assert (groups[0].is_removed, lab.said) == (True, [{"event": 4, "facts": {"problem": "No such process"}}])


# --- the guard ------------------------------------------------------------------------------------------------------


def test_the_guard_undoes_what_an_agent_that_was_killed_has_left(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[Any] = []
    kept: list[int] = []
    monkeypatch.setattr(machine, "keep_only", lambda *descriptors: kept.extend(descriptors))
    monkeypatch.setattr(storage, "remove_group", lambda *words: removed.append(words))
    reader, writer = os.pipe()
    os.write(writer, b"+101\n+102\n+/groups/slow\n-101\n+/groups/other\n-/groups/other\n-103\n")
    os.close(writer)
    FaultHands._watch_held(reader)
    assert (lab.signals, removed, kept) == ([(102, KILL)], [("/groups/slow", "/groups")], [reader])


# --- ranks that are stopped -----------------------------------------------------------------------------------------


def stat(state: str, user: int, system: int = 0) -> list[str]:
    """The fields of /proc/PID/stat from the third one on, as `man 5 proc` numbers them: 14 and 15 are CPU times."""
    fields = ["0"] * 30
    fields[0], fields[14 - 3], fields[15 - 3] = state, str(user), str(system)
    return fields


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_rank_that_is_stopped_for_too_long_is_told_and_killed(lab: Lab, state: str) -> None:
    lab.make(detect_seconds=10.0)
    lab.stats.update({101: stat("R", 50), 102: stat(state, 70)})
    lab.turn(0.0)
    lab.turn(9.9)
    assert (lab.said, lab.signals) == ([], [])
    lab.clock.now = 1010.0
    lab.hands._look(1010.0)
    assert lab.said == [{"end": 2, "code": None, "why": "stopped"}]
    assert lab.signals == [(102, KILL)]


@pytest.mark.parametrize("times", [(71, 0), (70, 1)])
def test_a_rank_that_used_its_cpu_in_between_is_slow_and_not_stopped(lab: Lab, times: tuple[int, int]) -> None:
    lab.make(detect_seconds=10.0)
    lab.stats.update({102: stat("T", 70)})
    lab.turn(0.0)
    lab.stats[102] = stat("T", *times)
    lab.turn(10.0)
    assert lab.said == []
    lab.turn(9.0)
    assert lab.said == []
    lab.turn(1.25)
    assert lab.said == [{"end": 2, "code": None, "why": "stopped"}]


def test_a_rank_that_ran_in_between_has_its_whole_time_again(lab: Lab) -> None:
    lab.make(detect_seconds=10.0)
    lab.stats[102] = stat("T", 70)
    lab.turn(0.0)
    lab.stats[102] = stat("S", 70)
    lab.turn(9.0)
    lab.stats[102] = stat("T", 70)
    lab.turn(5.0)
    lab.turn(9.0)
    assert lab.said == []


def test_without_a_limit_nobody_looks_for_stopped_ranks(lab: Lab) -> None:
    lab.make()
    lab.stats[102] = stat("T", 70)
    lab.turn(0.0)
    lab.turn(1e6)
    assert (lab.said, lab.signals) == ([], [])


@pytest.mark.parametrize(("detect", "pause"), [(None, 5.0), (1.0, 0.25), (2.0, 0.25), (8.0, 1.0), (80.0, 10.0)])
def test_ranks_are_looked_at_eight_times_in_the_time_that_they_may_be_stopped(
    lab: Lab, detect: float | None, pause: float
) -> None:
    lab.make(detect_seconds=detect)
    lab.turn(0.0)
    assert lab.hands.next_moment() == 1000.0 + pause


# --- between two attempts -------------------------------------------------------------------------------------------


def test_what_is_due_first_is_the_next_moment(lab: Lab) -> None:
    copies = Copies()
    lab.make(copies=copies)
    lab.turn(0.0)
    assert copies.looks == [1000.0]
    assert lab.hands.next_moment() == 1002.0
    lab.inject("slow", 2, share=0.5, seconds=10.0)
    assert lab.hands.next_moment() == pytest.approx(1000.05)
    lab.hands.obey({"halt": True})
    lab.turn(1.0)
    assert lab.hands.next_moment() == 1001.0 + MARK_SECONDS  # whether the ranks have ended
    lab.end_ranks()
    assert lab.hands.next_moment() == 0.0


def test_a_machine_that_has_halted_says_once_which_checkpoints_it_has(lab: Lab) -> None:
    lab.make(copies=Copies())
    for name in ("5", "10"):
        Path(lab.hands.folder, name).mkdir()
        Path(lab.hands.folder, name, "rank-2.pt").touch()
    Path(lab.hands.folder, "training-0-0").touch()
    Path(lab.hands.folder, "5", "main.pt").touch()
    lab.hands.obey({"halt": True})
    lab.turn(1.0)
    assert lab.said == []
    lab.end_ranks()
    lab.turn(1.0)
    lab.turn(1.0)
    found = {"5": ["main.pt", "rank-0.pt", "rank-2.pt"], "10": ["rank-2.pt"], "20": ["rank-0.pt"]}
    assert lab.said == [{"idle": found}]


def test_a_halt_that_is_said_twice_kills_once(lab: Lab) -> None:
    lab.make()
    lab.hands.obey({"halt": True})
    lab.hands.obey({"halt": True})
    assert lab.signals == [(101, KILL), (102, KILL)]


def test_an_attempt_starts_all_ranks_with_another_port(lab: Lab) -> None:
    lab.make()
    lab.hands.obey({"halt": True})
    lab.end_ranks()
    lab.start_attempt(number=2, resume=40)
    assert lab.done == [("port", 15001), ("start", 1), ("start", 2)]
    found = lab.hands.environment(lab.agent.ranks[0])
    assert (found["MLBENCH_ATTEMPT"], found["MLBENCH_RESUME"]) == ("2", f"{lab.hands.folder}/40")
    assert lab.hands.next_moment() == 0.0  # it looks at once


def test_a_rank_that_waits_is_told_where_the_others_are_now(lab: Lab) -> None:
    lab.make("replace")
    lab.hands.obey({"halt": True})
    lab.agent.ranks[0].running = False
    lab.start_attempt(number=3, resume=40)
    assert lab.done == [("port", 15001), ("start", 1)]
    told = json.loads(Path(lab.hands.folder, "next-3-2.json").read_text())
    assert told == {
        "MLBENCH_CHECKPOINT_DIR": lab.hands.folder,
        "MLBENCH_CHECKPOINT_EVERY": "5",
        "MLBENCH_SURVIVE": "1",
        "MLBENCH_ATTEMPT": "3",
        "MLBENCH_RESUME": f"{lab.hands.folder}/40",
        "MASTER_PORT": "15001",
    }
    assert not Path(lab.hands.folder, "next-3-1.json").exists()


def test_a_machine_none_of_whose_ranks_takes_part_is_done_at_once(lab: Lab) -> None:
    lab.make("shrink")
    lab.hands.obey({"halt": True})
    lab.end_ranks()
    lab.start_attempt(gone=[1, 2])
    assert lab.done == [("port", 15001), ("leave out", 1), ("leave out", 2)]
    assert lab.said == [{"done": 1}]
    lab.done.clear()
    lab.start_attempt(number=2, gone=[1, 2])
    assert lab.done == [("port", 15001)]  # they have been left out already


def test_what_an_attempt_cannot_be_started_with_is_told(lab: Lab) -> None:
    def refuse(rank: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    lab.make()
    lab.end_ranks()
    lab.agent.start_again = refuse
    lab.start_attempt()
    assert lab.said[0] == {"broken": "Resource temporarily unavailable"}


def test_a_rank_that_is_seen_stopped_in_one_attempt_has_its_whole_time_in_the_next(lab: Lab) -> None:
    lab.make("replace", detect_seconds=10.0)
    lab.stats[102] = stat("T", 70)
    lab.turn(0.0)
    lab.clock.now += 9.0
    lab.start_attempt()
    lab.turn(2.0)
    assert lab.said == []


# --- copies of checkpoints ------------------------------------------------------------------------------------------


def test_the_parts_of_this_machine_are_copied_under_their_numbers_of_the_attempt(lab: Lab) -> None:
    copies = Copies()
    lab.make("shrink", copies=copies)
    folder = lab.hands.folder
    assert copies.begun == [("secret", 0, ("192.0.2.2", 4700), folder, ["rank-1.pt", "rank-2.pt"], None)]
    copies.on_held(2, 15)
    assert lab.said == [{"held": 15, "of": 2}]
    lab.end_ranks()
    lab.start_attempt(gone=[0], lost=[0], resume=10)
    assert copies.begun[1] == ("secret", 1, ("192.0.2.2", 4701), folder, ["rank-0.pt", "rank-1.pt"], 10)
    lab.end_ranks()
    lab.start_attempt(number=2, gone=[0, 1], lost=[0], resume=10)
    assert copies.begun[2] == ("secret", 2, ("192.0.2.2", 4701), folder, ["rank-0.pt"], 10)


@pytest.mark.parametrize(("resume", "restored"), [(10, True), (None, False)])
def test_a_checkpoint_comes_back_for_the_machines_whose_ranks_are_gone(
    lab: Lab, resume: int | None, restored: bool
) -> None:
    copies = Copies()
    lab.make("shrink", copies=copies)
    for name in ("5", "10", "15"):
        Path(lab.hands.folder, name).mkdir()
    lab.end_ranks()
    lab.start_attempt(gone=[0, 2], resume=resume)
    assert copies.restored == ([({0, 2}, 10, lab.hands.folder)] if restored else [])
    assert sorted(path.name for path in Path(lab.hands.folder).iterdir()) == (["10", "5"] if restored else [])


def test_without_shrinking_nothing_is_brought_back(lab: Lab) -> None:
    copies = Copies()
    lab.make(copies=copies)
    lab.start_attempt(resume=10)
    assert (copies.restored, len(copies.begun)) == ([], 2)


# --- the end --------------------------------------------------------------------------------------------------------


def test_the_end_of_the_run_undoes_what_lasts(lab: Lab) -> None:
    lab.make(network=Network())
    lab.inject("link", 2, rate=0.0, seconds=100.0)
    lab.inject("stop", 1, event=5)
    lab.said.clear()
    lab.agent.state["ended"] = "cancelled"
    lab.turn(1.0)
    assert lab.agent.network.changes[-1] == (2, None, 0.0)
    assert lab.signals[-1] == (101, CONTINUE)
    assert [(word["event"], word["is_over"]) for word in lab.said] == [(4, True), (5, True)]
    assert lab.done == []  # nobody waits for another attempt


def test_the_guard_ends_with_the_hands(lab: Lab) -> None:
    lab.make()
    lab.finish()
    assert os.read(lab.guard, 10) == b""
