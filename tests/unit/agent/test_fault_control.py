"""How node 0 leads a run through faults and attempts: what it tells the other node, and what it writes down."""

import json
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent import machine, processes
from mlbench_cli.agent.faults import EXIT_LOST, MAX_BARREN, FaultControl
from tests.fakes.clock import Clock

KILLED = 128 + signal.SIGKILL
ALL_PARTS = ["main.pt", "rank-0.pt", "rank-1.pt", "rank-2.pt", "rank-3.pt"]


class Clocks(Clock):
    """The wall clock shows 4000 s more than the monotonic one."""

    def time(self) -> float:
        return self.now + 4000.12345


class Double:
    """The agent of node 0 of two, with ranks 0 and 1; ranks 2 and 3 are on node 1. `sent` is what node 1 was told."""

    def __init__(self, folder: Path, count: int = 2, batch_size: int = 8) -> None:
        (folder / ".state").mkdir(exist_ok=True)
        self.folder = str(folder)
        self.node, self.count, self.token = 0, count, "secret"
        self.copies: Any = None
        self.network: Any = None
        self.state: dict[str, Any] = {"ended": None}
        self.ranks = [
            SimpleNamespace(number=number, pid=100 + number, running=True, environment={"NODE_RANK": str(number)})
            for number in range(4)
            if self.find_node(rank=number) == 0
        ]
        parameters = json.dumps({"batch_size": batch_size})
        self.plan = {"environment": {"MLBENCH_PARAMETERS": parameters, "MLBENCH_HOSTS": "a,b,c,d"}}
        self.sent: list[tuple[int, Mapping[str, Any]]] = []
        self.done: list[Any] = []

    def find_node(self, *, rank: int | None = None, worker: int | None = None) -> int:
        number = rank if rank is not None else worker
        assert number is not None
        return number * self.count // 4

    def find_holder(self, lost: object) -> None:
        return None

    def send_faults(self, node: int, message: Mapping[str, Any]) -> None:
        self.sent.append((node, message))

    def set_port(self, port: int) -> None:
        self.done.append(("port", port))

    def start_again(self, rank: Any) -> None:
        rank.running = True
        self.done.append(("start", rank.number))

    def leave_out(self, rank: Any) -> None:
        self.done.append(("leave out", rank.number))

    def fail(self, number: int, code: int) -> None:
        self.state["ended"] = "failed"
        self.done.append(("fail", number, code))

    def abandon_ranks(self) -> None:
        self.done.append("abandon")

    def on_write_error(self, error: OSError) -> None:
        self.done.append(("write error", error.errno))


class Lab:
    """A control and its agent, at a time that the test says."""

    def __init__(self, folder: Path, clock: Clocks) -> None:
        self.folder, self.clock = folder, clock

    def make(
        self,
        policy: str = "restart",
        script: str | None = None,
        *,
        from_start: bool = True,
        nodes: int = 2,
        batch_size: int = 8,
        **plan: Any,
    ) -> FaultControl:
        self.agent = Double(self.folder, nodes, batch_size)
        document = {
            "script": script,
            "seed": 1,
            "ranks": 4,
            "workers": 4,
            "policy": policy,
            "checkpoint_every": "5",
            "detect_seconds": None,
            "from_start": from_start,
            **plan,
        }
        agent: Any = self.agent
        self.control = FaultControl(agent, document)
        self.control.begin()
        self.turn(0)
        return self.control

    def turn(self, seconds: float) -> None:
        """Let so many seconds pass, and do what is due."""
        self.clock.now += seconds
        self.control.on_time(self.clock.now)

    def hear(self, **message: Any) -> None:
        """Node 1 says something."""
        self.control.take(1, message)

    def end_ranks(self, code: int = KILLED) -> None:
        """The ranks of node 0 that run end."""
        for rank in self.agent.ranks:
            if rank.running:
                rank.running = False
                self.control.take_end(rank, code, 9 if code == KILLED else None)

    def write_checkpoint(self, update: int, *names: str) -> None:
        place = Path(self.control.folder, str(update))
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            (place / name).touch()

    def restart(self, checkpoints: Mapping[str, list[str]] | None = None) -> Any:
        """A rank of node 1 is killed, and everything halts; what node 1 is told then, if it is told anything."""
        self.hear(end=3, code=KILLED, why="killed", is_final=False)
        self.hear(idle=checkpoints or {})
        self.end_ranks()
        self.agent.sent.clear()
        self.turn(0.5)
        return self.agent.sent[-1][1].get("attempt") if self.agent.sent else None

    def read(self) -> Any:
        return json.loads((self.folder / "faults.json").read_text())


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    clock = Clocks(1000.0)
    monkeypatch.setattr("mlbench_cli.agent.faults.time", clock)
    monkeypatch.setattr(processes, "signal_group", lambda pid, number: None)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    monkeypatch.setattr(resource, "prlimit", lambda pid, what, limits: None)
    monkeypatch.setattr(machine, "start_guard", lambda work: -1)
    monkeypatch.setattr(machine, "free_port", lambda: 15001)
    return Lab(tmp_path, clock)


def attempt(number: int, **facts: Any) -> dict[str, Any]:
    """An attempt as it is written down, if nothing has become of it."""
    empty = {"training": None, "ended": None, "resumed_update": None, "rank": None, "exit_code": None, "why": None}
    return {"number": number, "started": 0.0, "ranks": 4, **empty, **facts}


# --- a whole run ----------------------------------------------------------------------------------------------------


def test_the_record_of_a_run_that_was_restarted_once_says_all_that_happened(lab: Lab) -> None:
    control = lab.make(script="at 10s kill rank 3")
    lab.turn(10.25)
    planned = {"kind": "kill", "at": 10.0, "target": 3}
    assert lab.agent.sent == [(1, {"inject": planned, "event": 0})]
    assert lab.read()["events"] == [
        {"planned": planned, "at": 10.25, "until": None, "problem": "its machine has not confirmed it"}
    ]
    lab.hear(event=0, facts={"problem": None})
    lab.clock.now += 0.25
    lab.hear(end=3, code=KILLED, why="killed", is_final=False)
    assert lab.agent.sent[1:] == [(1, {"halt": True})]
    lab.hear(idle={"5": ["rank-2.pt", "rank-3.pt"], "10": ["rank-3.pt"]})
    lab.write_checkpoint(5, "main.pt", "rank-0.pt", "rank-1.pt")
    lab.write_checkpoint(10, "main.pt", "rank-0.pt", "rank-1.pt")
    lab.end_ranks()
    lab.turn(1.5)
    again = {"number": 1, "gone": [], "lost": [], "resume": 5, "resumed_size": 4, "port": 15001}
    assert lab.agent.sent[2:] == [(1, {"attempt": again})]
    assert lab.agent.done == [("port", 15001), ("start", 0), ("start", 1)]
    lab.turn(3.0)
    lab.end_ranks(0)
    assert lab.agent.sent[3:] == []
    lab.hear(done=1)
    assert lab.agent.sent[3:] == [(1, {"over": True})]
    assert not control.waits
    control.finish()
    assert lab.read() == {
        "schema_version": 1,
        "script": "at 10s kill rank 3",
        "seed": 1,
        "policy": "restart",
        "checkpoint_every": "5",
        "detect_seconds": None,
        "began": 5000.123,
        "zero": 0.0,
        "ended": 15.0,
        "attempts": [
            attempt(0, training=0.0, ended=10.5, rank=3, exit_code=KILLED, why="killed"),
            attempt(1, started=12.0, training=12.0, ended=15.0, resumed_update=5),
        ],
        "events": [{"planned": planned, "at": 10.25, "until": None, "problem": None}],
        "missed": None,
        "never_trained": False,
    }


def test_done_of_an_attempt_before_this_one_does_not_count(lab: Lab) -> None:
    """A machine may have said it while another one was failing."""
    lab.make()
    lab.hear(done=0)
    lab.restart()
    lab.end_ranks(0)
    lab.hear(done=0)
    assert lab.control.waits
    lab.hear(done=1)
    assert not lab.control.waits


def test_the_run_is_over_only_when_every_machine_is_done(lab: Lab) -> None:
    lab.make()
    lab.hear(done=0)
    lab.hear(done=0)
    assert (lab.agent.sent, lab.control.waits) == ([], True)
    lab.end_ranks(0)
    assert (lab.agent.sent, lab.control.waits) == ([(1, {"over": True})], False)


# --- when faults come -----------------------------------------------------------------------------------------------


def test_faults_count_from_the_first_update_by_the_clock_of_rank_0(lab: Lab) -> None:
    lab.make(script="at 2s kill rank 3", from_start=False)
    lab.turn(5.0)
    assert (lab.agent.sent, lab.control.document["zero"]) == ([], None)
    Path(lab.control.folder, "clock-0.json").write_text(json.dumps({"monotonic": 1004.5}))
    Path(lab.control.folder, "training-0-0").touch()
    lab.turn(1.0)
    assert (lab.read()["zero"], lab.read()["attempts"][0]["training"]) == (4.5, 6.0)
    lab.turn(0.25)
    assert lab.agent.sent == []
    lab.turn(0.25)
    assert lab.agent.sent == [(1, {"inject": {"kind": "kill", "at": 2.0, "target": 3}, "event": 0})]


def test_the_clock_of_faults_does_not_begin_again_with_another_attempt(lab: Lab) -> None:
    lab.make(script="at 30s kill rank 3", from_start=False)
    Path(lab.control.folder, "clock-0.json").write_text(json.dumps({"monotonic": 1001.0}))
    Path(lab.control.folder, "training-0-0").touch()
    lab.turn(2.0)
    lab.restart()
    lab.turn(40.0)
    assert not any("inject" in message for _, message in lab.agent.sent)  # its ranks do not train yet
    Path(lab.control.folder, "clock-0.json").write_text(json.dumps({"monotonic": 1042.0}))
    Path(lab.control.folder, "training-1-0").touch()
    lab.turn(1.0)
    assert lab.read()["zero"] == 1.0
    assert [event["at"] for event in lab.read()["events"]] == [43.5]


def test_a_fault_waits_until_the_attempt_before_it_has_been_replaced(lab: Lab) -> None:
    lab.make(script="at 3s kill rank 2; at 3.2s kill rank 3")
    lab.turn(3.1)
    lab.hear(end=2, code=KILLED, why="killed", is_final=False)
    lab.turn(5.0)
    assert len(lab.read()["events"]) == 1
    lab.hear(idle={})
    lab.end_ranks()
    lab.turn(1.0)  # all start again, and train
    assert [event["planned"]["target"] for event in lab.read()["events"]] == [2, 3]


@pytest.mark.parametrize(
    ("script", "after", "missed"),
    [
        ("at 10s kill rank 3", 10.9, None),
        ("at 10s kill rank 3", 11.0, None),
        ("at 10s kill rank 3", 11.1, {"kind": "kill", "at": 10.0, "target": 3}),
        (None, 100.0, None),
    ],
)
def test_a_fault_that_was_due_for_more_than_a_second_was_missed(
    lab: Lab, script: str | None, after: float, missed: object
) -> None:
    """Without it the run was milder than its script says."""
    lab.make(script=script)
    lab.clock.now += after
    lab.control.finish()
    assert lab.read()["missed"] == missed


def test_faults_of_a_run_that_never_trained_were_not_missed(lab: Lab) -> None:
    lab.make(script="at 1s kill rank 3", from_start=False)
    lab.turn(100.0)
    lab.control.finish()
    assert (lab.read()["missed"], lab.read()["never_trained"], lab.read()["zero"]) == (None, True, None)


def test_the_next_moment_is_that_of_the_next_look_or_fault(lab: Lab) -> None:
    lab.make(script="at 3s stop rank 2; at 4s kill rank 3", from_start=False)
    assert lab.control.next_moment() == pytest.approx(1000.05)  # whether the ranks train
    Path(lab.control.folder, "clock-0.json").write_text(json.dumps({"monotonic": 1000.0}))
    Path(lab.control.folder, "training-0-0").touch()
    lab.turn(1.0)
    assert lab.control.next_moment() == 1003.0
    lab.turn(2.0)
    assert lab.control.next_moment() == 1004.0
    lab.turn(1.0)
    assert lab.control.next_moment() == 1005.0  # whether a rank is stopped: five seconds after the first look


def test_nothing_is_waited_for_once_all_machines_have_halted(lab: Lab) -> None:
    lab.make()
    lab.hear(end=3, code=KILLED, why="killed", is_final=False)
    lab.end_ranks()
    assert lab.control.next_moment() == 0.0  # nothing runs here
    lab.turn(0.1)
    assert lab.control.next_moment() > lab.clock.now  # but on the other machine
    lab.hear(idle={})
    assert lab.control.next_moment() == 0.0


# --- where faults go ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "nodes"),
    [
        ("at 1s kill rank 1", []),
        ("at 1s kill rank 2", [1]),
        ("at 1s for 1s link 3 down", [1]),
        ("at 1s for 1s link 1 down", []),
        ("at 1s node 2 gone", [1]),
        ("at 1s for 1s disk full", [1]),
    ],
)
def test_a_fault_goes_to_the_machine_of_its_target_or_to_all(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, script: str, nodes: list[int]
) -> None:
    own: list[Any] = []
    lab.make(script=script)
    monkeypatch.setattr(lab.control, "obey", own.append)
    lab.turn(1.0)
    assert [node for node, _ in lab.agent.sent] == nodes
    assert len(own) == (0 if nodes and "disk" not in script else 1)


def test_a_target_is_looked_for_as_what_it_is(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks may share a worker."""
    lab.make(script="at 1s kill rank 3; at 1s for 1s link 3 down; at 1s node 3 gone; at 1s for 1s stop rank 3")
    asked: list[Any] = []

    def find_node(**target: int) -> int:
        asked.append(target)
        return 1

    monkeypatch.setattr(lab.agent, "find_node", find_node)
    lab.turn(1.0)
    assert asked == [{"rank": 3}, {"worker": 3}, {"worker": 3}, {"rank": 3}]


def test_an_event_ends_when_its_machine_says_so(lab: Lab) -> None:
    lab.make(script="at 1s for 2s slow rank 3 to 50% cpu")
    lab.turn(1.0)
    lab.hear(event=0, facts={"problem": None})
    assert lab.read()["events"][0]["until"] is None
    lab.clock.now += 2.5
    lab.hear(event=0, facts={"stopped_share": 0.5}, is_over=True)
    (event,) = lab.read()["events"]
    assert (event["until"], event["stopped_share"], event["problem"]) == (3.5, 0.5, None)


def test_of_several_machines_the_first_problem_stays(lab: Lab) -> None:
    """A full disk is for all of them."""
    lab.make(script="at 1s for 2s disk full")
    lab.turn(1.0)
    lab.hear(event=0, facts={"problem": "none of its processes is running"})
    lab.hear(event=0, facts={"problem": None, "more": 1})
    (event,) = lab.read()["events"]
    assert (event["problem"], event["more"]) == ("none of its processes is running", 1)


def test_a_fault_for_a_machine_that_is_lost_says_so(lab: Lab) -> None:
    lab.make("shrink", script="at 5s for 1s link 3 down")
    lab.turn(1.0)
    assert lab.control.lose(1)
    lab.end_ranks()
    lab.turn(0.5)
    lab.turn(10.0)
    assert lab.read()["events"][0]["problem"] == "its machine is lost"


# --- how attempts end -----------------------------------------------------------------------------------------------


def test_the_first_reason_of_an_end_stays(lab: Lab) -> None:
    lab.make()
    lab.turn(1.0)
    lab.hear(end=3, code=KILLED, why="killed", is_final=False)
    lab.turn(1.0)
    lab.hear(end=2, code=EXIT_LOST, why="failed", is_final=False)
    (found,) = lab.read()["attempts"]
    assert (found["ended"], found["rank"], found["exit_code"], found["why"]) == (1.0, 3, KILLED, "killed")
    assert lab.agent.sent == [(1, {"halt": True})]  # once


def test_a_stopped_rank_ends_its_attempt_before_it_has_an_exit_code(lab: Lab) -> None:
    lab.make()
    lab.turn(1.0)
    lab.hear(end=3, code=None, why="stopped")
    (found,) = lab.read()["attempts"]
    assert (found["rank"], found["exit_code"], found["why"], lab.agent.sent) == (3, None, "stopped", [])
    lab.turn(1.0)
    lab.hear(end=3, code=KILLED, why="killed", is_final=False)
    (found,) = lab.read()["attempts"]
    assert (found["ended"], found["exit_code"], found["why"]) == (1.0, KILLED, "stopped")
    assert lab.agent.sent == [(1, {"halt": True})]


def test_a_final_failure_starts_nothing(lab: Lab) -> None:
    lab.make()
    lab.hear(end=3, code=64, why="failed", is_final=True)
    assert lab.agent.sent == []
    assert lab.read()["attempts"][0]["exit_code"] == 64


def test_a_checkpoint_that_cannot_be_brought_back_ends_the_run(lab: Lab) -> None:
    lab.make()
    lab.hear(end=3, code=9, why="failed", is_final=False)
    lab.hear(broken="No space left on device")
    assert lab.agent.done == [("fail", 3, 9)]
    lab.control.finish()
    assert lab.read()["problem"] == "No space left on device"


def test_a_record_that_cannot_be_written_is_the_agents_trouble(lab: Lab) -> None:
    lab.make()
    (lab.folder / "faults.json").unlink()
    (lab.folder / "faults.json").mkdir()
    lab.control.write()
    assert [word for word, _ in lab.agent.done] == ["write error"]


def test_the_attempt_that_runs_at_the_end_ends_with_the_run(lab: Lab) -> None:
    lab.make()
    lab.clock.now += 7.0
    lab.control.finish()
    assert (lab.read()["attempts"][0]["ended"], lab.read()["ended"]) == (7.0, 7.0)


# --- which checkpoint -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "resume"),
    [
        ({}, {}, None),
        ({5: ["main.pt", "rank-0.pt", "rank-1.pt"]}, {"5": ["rank-2.pt", "rank-3.pt"]}, 5),
        ({5: ["main.pt", "rank-0.pt", "rank-1.pt"]}, {"5": ["rank-2.pt"]}, None),
        ({5: ["rank-0.pt", "rank-1.pt"]}, {"5": ["rank-2.pt", "rank-3.pt"]}, None),  # without the model
        ({}, {"5": ALL_PARTS, "10": ALL_PARTS, "15": ALL_PARTS[1:]}, 10),
        ({}, {"9": ALL_PARTS, "10": ALL_PARTS}, 10),  # as numbers
        ({10: ALL_PARTS}, {"5": [*ALL_PARTS, "another file"]}, 10),
    ],
)
def test_an_attempt_resumes_from_the_last_checkpoint_that_all_ranks_have_written(
    lab: Lab, here: Mapping[int, list[str]], there: Mapping[str, list[str]], resume: int | None
) -> None:
    lab.make()
    for update, names in here.items():
        lab.write_checkpoint(update, *names)
    found = lab.restart(there)
    assert (found["resume"], found["resumed_size"]) == (resume, 4)
    assert lab.read()["attempts"][1]["resumed_update"] == resume


def test_a_run_that_makes_no_new_checkpoint_is_given_up(lab: Lab) -> None:
    lab.make()
    checkpoints = {"5": ALL_PARTS}
    assert lab.restart(checkpoints)["number"] == 1  # the first one is new
    for number in range(2, MAX_BARREN + 1):
        assert lab.restart(checkpoints)["number"] == number
    assert lab.restart(checkpoints) is None
    assert lab.agent.done[-1] == ("fail", 3, KILLED)
    lab.control.finish()
    assert lab.read()["problem"] == "3 attempts in a row made no new checkpoint"
    assert len(lab.read()["attempts"]) == MAX_BARREN + 1


def test_a_new_checkpoint_renews_the_patience(lab: Lab) -> None:
    lab.make()
    lab.restart()
    lab.restart()
    lab.restart({"5": ALL_PARTS})
    lab.restart({"5": ALL_PARTS})
    assert lab.restart({"5": ALL_PARTS})["number"] == 5
    assert "problem" not in lab.read()


# --- fewer ranks ----------------------------------------------------------------------------------------------------


def test_a_run_that_shrinks_loses_its_last_rank_first(lab: Lab) -> None:
    """Whichever failed: its machine can start a rank."""
    lab.make("shrink", batch_size=3)  # 12 samples in all
    first = lab.restart({"5": ALL_PARTS})
    assert (first["gone"], first["lost"], first["resumed_size"]) == ([3], [], 4)
    assert (lab.read()["attempts"][1]["ranks"], "members" in lab.read()["attempts"][1]) == (3, False)
    second = lab.restart({"5": ALL_PARTS, "10": ALL_PARTS[:4]})
    assert (second["gone"], second["resume"], second["resumed_size"]) == ([2, 3], 10, 3)
    assert lab.restart({"10": ALL_PARTS[:4]})["gone"] == [1, 2, 3]
    assert lab.restart({"10": ALL_PARTS[:4], "15": ["main.pt", "rank-0.pt"]}) is None
    lab.control.finish()
    assert lab.read()["problem"] == "the global batch of 12 samples cannot be divided evenly among 0 ranks"


def test_a_global_batch_that_cannot_be_divided_ends_the_run(lab: Lab) -> None:
    lab.make("shrink")
    assert lab.restart({"5": ALL_PARTS}) is None
    assert lab.agent.done[-1] == ("fail", 3, KILLED)
    lab.control.finish()
    assert lab.read()["problem"] == "the global batch of 32 samples cannot be divided evenly among 3 ranks"


def test_a_rank_that_leaves_is_left_out_and_the_others_start_again(lab: Lab) -> None:
    lab.make("shrink", nodes=1, batch_size=3)
    lab.turn(1.0)
    lab.agent.ranks[0].running = False
    lab.control.take_end(lab.agent.ranks[0], KILLED, 9)
    lab.end_ranks()
    lab.turn(0.5)
    assert lab.agent.done == [("port", 15001), ("start", 0), ("start", 1), ("start", 2), ("leave out", 3)]


def test_checkpoints_that_were_not_completed_are_dropped_when_ranks_get_other_numbers(lab: Lab) -> None:
    lab.make("shrink", batch_size=3)
    for update in (5, 10):
        lab.write_checkpoint(update, *ALL_PARTS[: 5 if update == 5 else 2])
    lab.restart()
    assert sorted(path.name for path in Path(lab.control.folder).iterdir()) == ["5"]


def test_without_shrinking_they_are_kept(lab: Lab) -> None:
    lab.make()
    lab.write_checkpoint(5, *ALL_PARTS)
    lab.write_checkpoint(10, *ALL_PARTS[:2])
    lab.restart()
    assert sorted(path.name for path in Path(lab.control.folder).iterdir()) == ["10", "5"]


# --- machines that are lost -----------------------------------------------------------------------------------------


def test_a_run_that_shrinks_goes_on_without_a_lost_machine(lab: Lab) -> None:
    lab.make("shrink")
    lab.turn(1.0)
    assert lab.control.lose(1) is True
    assert lab.agent.state["lost_nodes"] == [1]
    (found,) = lab.read()["attempts"]
    assert (found["rank"], found["exit_code"], found["why"], found["ended"]) == (2, EXIT_LOST, "lost", 1.0)
    lab.end_ranks()
    lab.write_checkpoint(5, *ALL_PARTS[:3])  # what ranks 2 and 3 wrote is lost
    lab.write_checkpoint(10, *ALL_PARTS[:2])  # rank 1 was not done
    lab.turn(0.5)
    again = lab.read()["attempts"][1]
    assert (again["ranks"], again["resumed_update"]) == (2, 5)
    assert lab.control._attempt["gone"] == [2, 3]
    assert (lab.control._attempt["lost"], lab.control._attempt["resumed_size"]) == ([1], 4)
    lab.end_ranks(0)
    assert not lab.control.waits  # nobody waits for the lost machine


def test_a_whole_checkpoint_is_better_than_a_later_one_that_lacks_parts(lab: Lab) -> None:
    lab.make("shrink")
    lab.turn(1.0)
    lab.control.lose(1)
    lab.end_ranks()
    lab.write_checkpoint(5, *ALL_PARTS)
    lab.write_checkpoint(10, *ALL_PARTS[:3])
    lab.turn(0.5)
    assert lab.read()["attempts"][1]["resumed_update"] == 5


def test_parts_are_looked_for_under_the_numbers_that_their_ranks_had_then(lab: Lab) -> None:
    """After the loss of the machine of rank 1, rank 3 writes the third part."""
    lab.make("shrink", nodes=4, batch_size=3)
    lab.control.lose(1)
    lab.end_ranks()
    for node in (2, 3):
        lab.control.take(node, {"idle": {}})
    lab.turn(0.5)
    assert lab.read()["attempts"][1]["members"] == [0, 2, 3]
    lab.control.lose(3)
    lab.end_ranks()
    lab.control.take(2, {"idle": {"10": ["rank-1.pt"]}})
    lab.write_checkpoint(10, "main.pt", "rank-0.pt")
    lab.turn(0.5)
    assert lab.read()["attempts"][2]["resumed_update"] == 10
    assert (lab.control._attempt["gone"], lab.control._attempt["resumed_size"]) == ([1, 3], 3)


def test_a_rank_that_lost_its_connections_was_only_faster_than_the_news_of_the_machine(lab: Lab) -> None:
    lab.make("shrink")
    lab.turn(1.0)
    lab.hear(end=0, code=EXIT_LOST, why="failed", is_final=False)
    lab.control.lose(1)
    (found,) = lab.read()["attempts"]
    assert (found["rank"], found["why"], found["exit_code"]) == (2, "lost", EXIT_LOST)


def test_a_rank_that_failed_by_itself_stays_the_reason_although_a_machine_is_lost(lab: Lab) -> None:
    lab.make("shrink")
    lab.turn(1.0)
    lab.hear(end=0, code=1, why="failed", is_final=False)
    lab.control.lose(1)
    (found,) = lab.read()["attempts"]
    assert (found["rank"], found["why"], found["exit_code"]) == (0, "failed", 1)


@pytest.mark.parametrize("policy", ["fail", "restart", "replace"])
def test_only_a_run_that_may_shrink_outlives_a_machine(lab: Lab, policy: str) -> None:
    lab.make(policy)
    assert lab.control.lose(1) is False
    assert "lost_nodes" not in lab.agent.state


@pytest.mark.parametrize("reason", ["ended", "over"])
def test_a_machine_that_is_lost_after_the_end_starts_nothing(lab: Lab, reason: str) -> None:
    lab.make("shrink")
    if reason == "ended":
        lab.agent.state["ended"] = "cancelled"
    else:
        lab.hear(done=0)
        lab.end_ranks(0)
    assert lab.control.lose(1) is False


def test_the_loss_of_a_machine_without_ranks_changes_nothing_but_who_is_waited_for(lab: Lab) -> None:
    lab.make("shrink", batch_size=3)
    assert lab.restart({"5": ALL_PARTS})["gone"] == [3]
    assert lab.restart({"5": ALL_PARTS, "10": ALL_PARTS[:4]})["gone"] == [2, 3]
    lab.agent.done.clear()
    assert lab.control.lose(1) is True
    assert lab.agent.done == []
    assert lab.read()["attempts"][-1]["ended"] is None
    lab.end_ranks(0)
    assert not lab.control.waits


def test_the_update_that_others_hold_of_a_machine_only_rises(lab: Lab) -> None:
    lab.make("shrink")
    lab.hear(held=10, of=0)
    lab.hear(held=5, of=0)
    lab.hear(held=7, of=1)
    assert lab.read()["attempts"][0]["copied"] == {"0": 10, "1": 7}


# --- messages -------------------------------------------------------------------------------------------------------


def test_all_other_machines_hear_of_it_before_this_one_does_it(lab: Lab) -> None:
    """What this machine does may end the run, and nobody would tell the others any more."""
    lab.make(nodes=3)
    order: list[Any] = []
    lab.agent.send_faults = lambda node, message: order.append(node)  # type: ignore[method-assign]
    lab.control.obey = lambda message: order.append("own")  # type: ignore[method-assign]
    lab.control._tell(None, {"halt": True})
    assert order == [2, 1, "own"]


@pytest.mark.parametrize("message", [{"halt": True}, {"over": True}, {"inject": {}, "event": 0}])
def test_after_the_end_nothing_is_obeyed(lab: Lab, message: Mapping[str, Any]) -> None:
    lab.make()
    lab.agent.state["ended"] = "cancelled"
    lab.control.obey(message)
    assert (lab.agent.sent, lab.agent.done, lab.control.waits) == ([], [], True)
