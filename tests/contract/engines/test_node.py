"""Agents of a run's machines, as real processes here, each with a folder of its own."""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent.channel import Channel, ChannelRequest, RemoteError, Target
from mlbench_cli.agent.lock import TAKE, open_lock, write_holder
from mlbench_cli.agent.node import BEAT_SECONDS, CLOCK_PATIENCE, EXIT_REFUSED, LOOK_SECONDS, NodeAgent, main
from mlbench_cli.agent.rendezvous import RankLink
from mlbench_cli.engines.machines.details import MachineDetails
from mlbench_cli.engines.machines.observe import NodeReport, Snapshot, observe
from mlbench_cli.engines.machines.placement import NodeShare
from mlbench_cli.engines.machines.plan import make_plan, pack_code, start_command
from mlbench_cli.model.run import Ending, Observation
from mlbench_cli.model.spec import RunSpec
from tests.fakes.clock_shift import ClockShift

SPEC = RunSpec(
    name="demo-3", cluster="c", engine="hosts", task="custom", preset="custom", argv=("true",), backend="gloo",
    workers=3, timeout=60.0,
)  # fmt: skip


class Machines:
    """Three machines in folders of their own; node 0's rendezvous is copied to the others as a client does."""

    def __init__(self, folder: Path, name: str = "demo-3", order: tuple[int, ...] = (0, 1, 2)) -> None:
        self.name, self.order = name, order
        self.channel = Channel(Target(None, sys.executable))
        data, sha256 = pack_code()
        self.channel.call("install", folder=str(folder / "code"), sha256=sha256)
        answer = self.channel.call("install", data, folder=str(folder / "code"), sha256=sha256)
        self.command = start_command(sys.executable, str(answer["folder"]))
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def run_folder(self, node: int) -> Path:
        return self.folder / f"machine-{node}" / "runs" / self.name

    def lock(self, node: int) -> Path:
        """The file that runs on this machine lock."""
        return self.folder.parent / f"lock-{self.order[node]}"

    def start(
        self,
        script: str,
        nodes: tuple[int, ...] = (0, 1, 2),
        variables: Mapping[int, Mapping[str, str]] | None = None,
        **changes: Any,
    ) -> None:
        """Start the agents of `nodes`; `variables` are more of them for a node's environment."""
        spec = replace(SPEC, argv=("sh", "-c", script))
        details = MachineDetails(folder=str(self.folder), python=sys.executable)
        plan = {
            **make_plan(spec, details, [NodeShare((node,), name=f"m{node}") for node in range(3)], lock=TAKE),
            **changes,
        }
        for node in range(3):
            self.run_folder(node).mkdir(parents=True)
            (self.run_folder(node) / "plan.json").write_text(json.dumps(plan))
        for node in nodes:
            words = [*self.command, str(self.run_folder(node) / "nodes" / str(node))]
            own = {"MLBENCH_MACHINE_LOCK": str(self.lock(node)), **(variables or {}).get(node, {})}
            self.processes[node] = subprocess.Popen(
                words, start_new_session=True, stdin=subprocess.DEVNULL, env={**os.environ, **own}
            )
            if node == 0:
                text = self.wait(lambda: (self.run_folder(0) / "rendezvous.json").exists())
                text = (self.run_folder(0) / "rendezvous.json").read_text()
            else:
                (self.run_folder(node) / "rendezvous.json").write_text(text)

    def look(self) -> Observation:
        nodes = {}
        for node in range(3):
            answer, _ = self.channel.exchange("sync", folder=str(self.run_folder(node)), nodes={str(node): {}})
            nodes[node] = NodeReport(**answer["nodes"][str(node)])
        return observe(SPEC, (), Snapshot(time.time(), nodes), lambda rank: [])

    def end(self) -> Observation:
        return self.wait(lambda: (found := self.look()).ended and found)  # type: ignore[no-any-return]

    def state(self, node: int) -> Any:
        path = self.run_folder(node) / "nodes" / str(node) / ".state" / "state.json"
        return json.loads(path.read_text()) if path.exists() else None

    def log(self, rank: int) -> str:
        return (self.run_folder(rank) / "nodes" / str(rank) / "logs" / f"rank-{rank}.log").read_text()

    def ranks(self) -> list[int]:
        folders = [str(self.run_folder(node)) for node in range(3)]
        found = [self.channel.call("end_processes", folder=folder, patience=0.0) for folder in folders]
        return [pid for answer in found for pid in answer["killed"]]

    def wait(self, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end
            time.sleep(0.05)
        return found

    def close(self) -> None:
        for node, process in self.processes.items():
            self.channel.call("end_processes", folder=str(self.run_folder(node)))
            process.wait()
        self.channel.close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path / "machines")
    yield found
    found.close()


def test_all_start_together_and_know_each_other(machines: Machines) -> None:
    machines.start("echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT with $MLBENCH_HOSTS")
    assert machines.end().ended is Ending.EXITED
    first = machines.log(0).split(" at ")[1]
    port = first.split(":")[1]
    for rank in range(3):
        assert machines.log(rank).startswith(f"{rank} of 3 at ")
        assert machines.log(rank).endswith(port)
    assert port.endswith(" with m0,m1,m2\n")
    assert machines.state(1)["interface"]
    assert machines.state(1)["bound"] == [{"rank": 1, "cpus": sorted(os.sched_getaffinity(0)), "gpus": []}]


def test_clocks_that_differ_or_are_set_are_measured_and_change_no_duration(machines: Machines, tmp_path: Path) -> None:
    shifts = []
    for node in (1, 2):
        (tmp_path / str(node)).mkdir()
        shifts.append(ClockShift(tmp_path / str(node)))
    shifts[0].step(-7200)
    machines.start(
        '[ $RANK = 2 ] && sleep 0.3 && ln -s 3600 "$CLOCK_SHIFT"; sleep 0.5',
        variables={node: shift.variables for node, shift in zip((1, 2), shifts, strict=True)},
    )
    found = machines.end()
    assert found.ended is Ending.EXITED
    first, behind, stepped = found.clocks
    assert (first.node, first.stepped_seconds, first.start_ahead, first.end_ahead) == ("m0", 0.0, None, None)
    assert behind.stepped_seconds == 0.0
    assert behind.error is not None
    assert stepped.error is not None
    assert behind.start_ahead == pytest.approx(-7200, abs=behind.error)
    assert behind.end_ahead == pytest.approx(-7200, abs=behind.error)
    assert stepped.stepped_seconds == pytest.approx(3600, abs=0.05)
    assert stepped.start_ahead == pytest.approx(0, abs=stepped.error)
    assert stepped.end_ahead == pytest.approx(3600, abs=stepped.error)
    seconds = [worker.seconds for worker in found.workers]
    assert all(value is not None and 0.5 <= value < 60 for value in seconds)
    assert found.seconds == max(value for value in seconds if value is not None)


def test_bound_ranks_know_all_cpus_of_their_machine(machines: Machines) -> None:
    machines.start("echo $RANK: $MLBENCH_PINNED_FROM", pin=True)
    assert machines.end().ended is Ending.EXITED
    cpus = sorted(os.sched_getaffinity(0))  # each machine has one rank, whose they all are
    assert machines.log(1) == f"1: {','.join(map(str, cpus))}\n"
    assert machines.state(1)["bound"] == [{"rank": 1, "cpus": cpus, "gpus": []}]
    plans = [
        make_plan(
            replace(SPEC, pin=pin), MachineDetails(folder="/x", python="python"), [NodeShare((0, 1, 2))], lock=TAKE
        )
        for pin in (False, True)
    ]
    assert [plan.get("pin") for plan in plans] == [None, True]


def test_a_failed_rank_ends_the_others_and_is_known_as_the_first(machines: Machines) -> None:
    machines.start("[ $RANK = 2 ] && exit 3; exec sleep 600")
    observation = machines.end()
    assert observation.ended is Ending.FAILED
    assert observation.first_failed == 2
    assert [worker.exit_code for worker in observation.workers] == [143, 143, 3]
    assert observation.findings[0].code == "rank_crashed"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_supervisor_takes_its_ranks_along_and_ends_the_others(machines: Machines, victim: int) -> None:
    machines.start("(trap '' TERM; sleep 600) & exec sleep 600")
    machines.wait(lambda: all((machines.state(node) or {}).get("started") for node in range(3)))
    os.kill(machines.processes[victim].pid, signal.SIGKILL)
    machines.processes[victim].wait()
    observation = machines.end()
    assert observation.ended is Ending.LOST
    assert "node_lost" in [finding.code for finding in observation.findings]
    for process in machines.processes.values():
        process.wait(timeout=60)
    machines.wait(lambda: not machines.ranks())


def test_one_that_does_not_come_leaves_the_others_never_started(machines: Machines) -> None:
    machines.start("echo never", nodes=(0, 1), meeting_seconds=1.0)
    machines.wait(lambda: all((machines.state(node) or {}).get("ended") == "never_started" for node in (0, 1)))
    assert "nodes 2" in machines.state(0)["start_problem"]


def test_a_stranger_cannot_take_a_place(machines: Machines) -> None:
    machines.start("exec sleep 600", nodes=(0,))
    note = json.loads((machines.run_folder(0) / "rendezvous.json").read_text())
    with socket.create_connection(("127.0.0.1", note["port"])) as stranger:
        stranger.sendall(b'{"hello": "guess", "node": 1, "name": "x"}\n{"stop": true, "why": "failed"}\n')
        stranger.settimeout(30)
        assert stranger.recv(100) == b""
    assert machines.state(0)["ended"] is None


def test_a_mark_cancels_and_a_lease_that_is_not_renewed_ends_the_run(machines: Machines) -> None:
    machines.start("exec sleep 600", lease_seconds=1.0)
    machines.wait(lambda: all((machines.state(node) or {}).get("started") for node in range(3)))
    (machines.run_folder(0) / "lease").touch()
    assert machines.end().ended is Ending.CLIENT_LOST


def test_a_cancelled_run_ends_on_all_machines(machines: Machines) -> None:
    machines.start("exec sleep 600")
    machines.wait(lambda: all((machines.state(node) or {}).get("started") for node in range(3)))
    (machines.run_folder(1) / "cancel").touch()
    assert machines.end().ended is Ending.CANCELLED


def test_a_run_waits_for_a_machine_that_has_another_run_and_then_has_all(machines: Machines) -> None:
    descriptor = open_lock(str(machines.lock(1)))
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    write_holder(descriptor, "other-2", 600.0)
    machines.start("exec sleep 600")
    machines.wait(lambda: (machines.state(0) or {}).get("waits"))
    observation = machines.look()
    assert observation.findings[0].code == "machine_busy"
    assert "m1: other-2 of user" in observation.findings[0].summary
    assert "other-2" in str(observation.workers[0].reason)
    os.close(descriptor)
    machines.wait(lambda: all((machines.state(node) or {}).get("started") for node in range(3)))
    assert not any(is_free(machines.lock(node)) for node in range(3))
    assert not machines.look().findings
    (machines.run_folder(0) / "cancel").touch()
    machines.end()
    for process in machines.processes.values():
        process.wait(timeout=60)
    assert all(is_free(machines.lock(node)) for node in range(3))
    rows = (machines.run_folder(1) / "nodes/1/resources.jsonl").read_text().splitlines()
    assert [json.loads(row)["lock"] for row in rows if '"lock"' in row] == ["held"]


def _waits(run: Machines) -> object:
    return (run.state(0) or {}).get("waits")


def test_runs_that_want_the_same_machines_in_another_order_do_not_block_each_other(tmp_path: Path) -> None:
    """Each has what it can have before the machine in the middle, which a third run has, is free for one of them.

    If each took the locks in the order of its own nodes, each would then have the last one that the other needs.
    """
    runs = [Machines(tmp_path / "first", "first-3"), Machines(tmp_path / "second", "second-3", (2, 1, 0))]
    third = open_lock(str(runs[0].lock(1)))
    fcntl.flock(third, fcntl.LOCK_EX)
    write_holder(third, "third-1", 600.0)
    try:
        for run in runs:
            run.start("echo $(date +%s.%N); sleep 0.5; date +%s.%N")
        for run in runs:
            run.wait(partial(_waits, run))
        os.close(third)
        ends = [run.end() for run in runs]
        assert [end.ended for end in ends] == [Ending.EXITED, Ending.EXITED]
        moments = [[[float(word) for word in run.log(rank).split()] for rank in range(3)] for run in runs]
        first, second = sorted((min(begun for begun, _ in ranks), max(end for _, end in ranks)) for ranks in moments)
        assert first[1] < second[0]
    finally:
        for run in runs:
            run.close()


def test_a_machine_that_stays_busy_ends_the_wait_at_the_timeout(machines: Machines) -> None:
    descriptor = open_lock(str(machines.lock(2)))
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    machines.start("echo never", timeout=2.0)
    assert machines.end().ended is Ending.NEVER_STARTED
    assert "m2" in machines.state(0)["start_problem"]
    os.close(descriptor)


# --- one agent, whose links end in the test --------------------------------------------------------------------------


class LinkedAgent(NodeAgent):
    """The agent of one of three nodes. `others` are the bare sockets at the other ends of its links, by node."""

    others: dict[int, socket.socket]

    def read_from(self, node: int) -> list[dict[str, Any]]:
        """What the agent has sent to a node and was not read yet."""
        data = b""
        self.others[node].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while piece := self.others[node].recv(1 << 16):
                data += piece
        return [json.loads(line) for line in data.splitlines()]

    def add_link(self, node: int | None) -> RankLink:
        """Link it with a node; None: with one that has not said who it is."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            other = socket.create_connection(server.getsockname())
            own, _ = server.accept()
        self.others[-1 if node is None else node] = other
        link = RankLink(own, self.selector, self._on_message, self._on_link_end)
        link.node = node
        self.links.append(link)
        return link


MakeAgent = Callable[..., LinkedAgent]


@pytest.fixture
def make_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeAgent]:
    """Make the agent of a node with links to the others, on a machine whose lock is free."""
    monkeypatch.setenv("MLBENCH_MACHINE_LOCK", str(tmp_path / "lock"))
    made: list[LinkedAgent] = []

    def make(node: int = 0, linked: tuple[int, ...] | None = None, **changes: Any) -> LinkedAgent:
        place = tmp_path / f"run/nodes/{node}"
        (place / ".state").mkdir(parents=True)
        shares = [NodeShare((other,), name=f"m{other}") for other in range(3)]
        plan = make_plan(SPEC, MachineDetails(folder=str(tmp_path), python=sys.executable), shares, lock=TAKE)
        agent = LinkedAgent(str(place), str(tmp_path / "run"), node, {**plan, **changes})
        agent.others = {}
        for other in linked if linked is not None else (1, 2) if node == 0 else (0,):
            agent.add_link(other)
        agent.token = "the-token"
        made.append(agent)
        return agent

    yield make
    for agent in made:
        for link in agent.links:
            link.connection.close()
        for other in agent.others.values():
            other.close()
        agent.selector.close()


def test_a_machine_that_is_lost_before_its_turn_ends_the_run(make_agent: MakeAgent) -> None:
    """Node 2's connection ends in the same moment in which node 1 says that it has its lock."""
    agent = make_agent()
    agent.is_gathered, agent.turns = True, [1, 2]
    agent.links[1].close()
    agent._on_message(agent.links[0], {"locked": True})
    assert (agent.state["ended"], agent.gone) == ("failed", [2])


def test_each_machine_is_asked_for_its_lock_when_the_one_before_has_its_own(make_agent: MakeAgent) -> None:
    """One that is not asked would wait for the others, and they for it, until the timeout of the run."""
    agent = make_agent()
    agent.lock_identity, agent.links[0].lock_identity, agent.links[1].lock_identity = "c", "b", "a"
    assert agent._take_locks(0.0) is False
    assert agent.read_from(2) == [{"gathered": True}, {"lock": True}]
    assert agent.read_from(1) == [{"gathered": True}]
    agent._on_message(agent.links[1], {"locked": True})
    assert agent.read_from(1) == [{"lock": True}]
    agent._on_message(agent.links[0], {"locked": True})
    assert agent._take_locks(0.0) is True  # its own was free
    assert (agent.read_from(1), agent.read_from(2)) == ([], [])


def test_only_the_machine_whose_turn_it_is_can_say_that_it_has_its_lock(make_agent: MakeAgent) -> None:
    agent = make_agent()
    agent.is_gathered, agent.turns = True, [1, 2]
    agent._on_message(agent.links[1], {"locked": True})
    assert agent.turns == [1, 2]
    agent._on_message(agent.links[1], {"waits": "m2: x-1"})
    assert not agent.state["waits"]
    agent._on_message(agent.links[0], {"waits": "m1: y-1"})
    assert [agent.state["waits"], agent.turns] == ["m1: y-1", [1, 2]]
    agent._on_message(agent.links[0], {"locked": True})
    assert [agent.state["waits"], agent.turns] == [None, [2]]
    assert agent.read_from(2) == [{"lock": True}]


@pytest.mark.parametrize(
    "said",
    [
        {"hello": "guess", "node": 1},
        {"node": 1},
        {"hello": "the-token", "node": 0},
        {"hello": "the-token", "node": 3},
        {"hello": "the-token", "node": "1"},
        {"hello": "the-token"},
        {"hello": "the-token", "node": 2},  # it is there already
        {"stop": True, "why": "failed", "node": 1},
    ],
)
def test_who_does_not_say_who_it_is_and_what_it_knows_is_no_node(make_agent: MakeAgent, said: dict[str, Any]) -> None:
    agent = make_agent(linked=(2,))
    stranger = agent.add_link(None)
    agent._on_message(stranger, said)
    assert (stranger.is_open, stranger.node) == (False, None)
    assert sorted(agent._present()) == [2]
    assert (agent.state["ended"], agent.state["first"]) == (None, None)


def test_a_node_that_reports_is_known_with_its_lock_and_how_far_its_clock_is_behind(make_agent: MakeAgent) -> None:
    agent = make_agent(linked=())
    link = agent.add_link(None)
    facts = {"node": 1, "name": "other", "lock": "its-lock", "copies": 4711, "time": time.time() - 100}
    agent._on_message(link, {"hello": "the-token", **facts})
    assert (link.node, link.name, link.lock_identity) == (1, "other", "its-lock")
    assert link.clock_offset == pytest.approx(100, abs=5)
    assert agent.holders == {"1": ["127.0.0.1", 4711]}


def test_a_machine_without_a_lock_reports_none(make_agent: MakeAgent) -> None:
    agent = make_agent(linked=())
    link = agent.add_link(None)
    agent._on_message(link, {"hello": "the-token", "node": 1, "lock": None})
    assert (link.node, link.lock_identity, agent.holders) == (1, None, {})


def test_a_node_that_is_lost_before_all_are_there_may_come_back(make_agent: MakeAgent) -> None:
    agent = make_agent()
    agent.links[0].close()
    assert (agent.state["ended"], agent.gone, sorted(agent._present())) == (None, [], [2])
    assert len(agent.links) == 1


def test_the_loss_of_a_node_is_told_to_the_others_as_a_failure(make_agent: MakeAgent) -> None:
    agent = make_agent()
    agent.is_gathered = True
    agent.links[0].close()
    first = agent.state["first"]
    assert first is not None
    assert (first["why"], first["node"], first["rank"]) == ("lost", 1, None)
    (message,) = agent.read_from(2)
    assert (message["stop"], message["why"], message["node"]) == (True, "failed", 1)


@pytest.mark.parametrize("ended", ["other", "own"])
def test_the_end_of_a_link_after_the_end_of_its_side_is_no_loss(make_agent: MakeAgent, ended: str) -> None:
    agent = make_agent(1)
    agent.is_gathered = True
    if ended == "other":
        agent._on_message(agent.links[0], {"bye": True})
    else:
        agent.state["finished"] = time.time()
        agent.links[0].close()
    assert not agent.links[0].is_open
    assert (agent.gone, agent.state["ended"], agent.state["first"]) == ([], None, None)


def cause(seconds: float, why: str = "failed", rank: int | None = 1) -> dict[str, Any]:
    return {"stop": True, "why": why, "node": 1, "rank": rank, "time": seconds}


def test_the_failure_that_came_first_by_the_clock_of_node_0_is_the_reason(make_agent: MakeAgent) -> None:
    agent = make_agent()
    agent._take_first(cause(100.0), 50.0)
    agent._take_first(cause(160.0, rank=2), 0.0)
    assert agent.state["first"] == {"why": "failed", "node": 1, "rank": 1, "time": 150.0}
    agent._take_first(cause(149.0, rank=2), 0.0)
    assert agent.state["first"] == {"why": "failed", "node": 1, "rank": 2, "time": 149.0}


@pytest.mark.parametrize(("known", "later"), [("lost", "failed"), ("failed", "cancelled"), ("cancelled", "failed")])
def test_only_a_failure_takes_the_place_of_a_failure(make_agent: MakeAgent, known: str, later: str) -> None:
    agent = make_agent()
    agent._take_first(cause(100.0, known), 0.0)
    agent._take_first(cause(50.0, later), 0.0)
    assert agent.state["first"] is not None
    assert (agent.state["first"]["why"], agent.state["first"]["time"]) == (known, 100.0)


def test_node_0_passes_a_stop_on_to_all_but_the_one_that_said_it(make_agent: MakeAgent) -> None:
    agent = make_agent()
    agent._on_message(agent.links[0], cause(100.0))
    assert (agent.read_from(1), len(agent.read_from(2)), agent.state["ended"]) == ([], 1, "failed")


def test_a_stop_of_another_node_is_not_sent_back(make_agent: MakeAgent) -> None:
    agent = make_agent(1)
    agent._on_message(agent.links[0], cause(100.0))
    assert (agent.read_from(0), agent.state["ended"]) == ([], "failed")


def test_an_own_end_is_told_once(make_agent: MakeAgent) -> None:
    agent = make_agent(1)
    agent.state["first_failed"] = 1
    agent._stop("failed", 5.0)
    agent._stop("cancelled", 5.0)
    (message,) = agent.read_from(0)
    assert (message["why"], message["node"], message["rank"]) == ("failed", 1, 1)


def test_the_grace_of_a_node_is_at_most_that_of_the_plan(make_agent: MakeAgent) -> None:
    agent = make_agent(1, grace=1.5)
    begun = time.monotonic()
    agent._stop("failed", 5.0)
    assert agent.stop_at is not None
    assert 1.5 <= agent.stop_at - begun < 4.5


@pytest.mark.parametrize(
    ("lease", "age", "is_over"), [(None, 1e6, False), (30.0, None, False), (30.0, 20.0, False), (30.0, 31.0, True)]
)
def test_a_lease_is_over_when_its_client_has_not_renewed_it(
    make_agent: MakeAgent, tmp_path: Path, lease: float | None, age: float | None, is_over: bool
) -> None:
    agent = make_agent(lease_seconds=lease)
    if age is not None:
        (tmp_path / "run/lease").touch()
        os.utime(tmp_path / "run/lease", (time.time() - age,) * 2)
    assert agent._lease_is_over() is is_over
    agent._on_time(time.monotonic())
    assert agent.state["ended"] == ("client_lost" if is_over else None)


@pytest.mark.parametrize("trouble", ["cancel", "removed"])
def test_a_mark_in_the_runs_folder_or_the_loss_of_the_folder_cancels(
    make_agent: MakeAgent, tmp_path: Path, trouble: str
) -> None:
    agent = make_agent(1)
    agent._on_time(1000.0)
    assert agent.state["ended"] is None
    if trouble == "cancel":
        (tmp_path / "run/cancel").touch()
    else:
        (tmp_path / "run").rename(tmp_path / "gone")
    agent._on_time(1000.0 + LOOK_SECONDS / 2)
    assert agent.state["ended"] is None  # it looks once in a while
    agent._on_time(1000.0 + LOOK_SECONDS)
    assert agent.state["ended"] == "cancelled"


def test_a_signal_before_all_are_there_cancels(make_agent: MakeAgent) -> None:
    agent = make_agent(1)
    agent.cancelled = True
    agent._on_time(1000.0)
    stops = [message for message in agent.read_from(0) if "stop" in message]
    assert (agent.state["ended"], [stop["why"] for stop in stops]) == ("cancelled", ["cancelled"])


def test_a_beat_is_written_once_in_a_while(make_agent: MakeAgent, tmp_path: Path) -> None:
    agent = make_agent(1)
    beat = tmp_path / "run/nodes/1/.state/beat"
    agent._beat(1000.0)
    assert abs(float(beat.read_text()) - time.time()) < 5
    beat.unlink()
    agent._beat(1000.0 + BEAT_SECONDS - 0.1)
    assert not beat.exists()
    agent._beat(1000.0 + BEAT_SECONDS)
    assert beat.exists()


def test_the_reason_why_a_run_cannot_start_names_who_is_missing(make_agent: MakeAgent) -> None:
    hub, other = make_agent(linked=(1,), meeting_seconds=90.0), make_agent(1, linked=())
    assert hub._explain_absence() == "nodes 2 did not report within 90 s"
    assert other._explain_absence() == "node 0 could not be reached"
    hub.is_gathered = other.is_gathered = True
    hub.state["waits"] = "m2: x-1 of user root"
    assert hub._explain_absence() == "m2: x-1 of user root"
    assert other._explain_absence() == "another machine is busy"


def test_a_meeting_that_nobody_comes_to_ends(make_agent: MakeAgent) -> None:
    agent = make_agent(1, linked=(), meeting_seconds=0.0)
    assert agent._meet() == "node 0 could not be reached"


def test_checkpoints_are_copied_to_the_next_machine_that_is_left(make_agent: MakeAgent) -> None:
    holders = {str(node): [f"192.0.2.{node}", 4700 + node] for node in range(3)}
    hub, first, last = make_agent(0), make_agent(1), make_agent(2)
    hub.holders = first.holders = last.holders = holders
    assert hub.find_holder([]) is None
    assert first.find_holder([]) == ("192.0.2.2", 4702)
    assert first.find_holder([2]) == ("192.0.2.0", 4700)
    assert last.find_holder([]) == ("192.0.2.0", 4700)


def test_a_node_that_is_lost_is_told_nothing_about_faults(make_agent: MakeAgent) -> None:
    agent = make_agent()
    agent.links[0].close()
    agent.send_faults(1, {"halt": True})
    agent.send_faults(2, {"halt": True})
    assert agent.read_from(2) == [{"faults": {"halt": True}}]


def test_the_nodes_of_ranks_and_workers_are_those_of_the_plan(make_agent: MakeAgent) -> None:
    agent = make_agent()
    assert (agent.find_node(rank=2), agent.find_node(worker=1)) == (2, 1)
    with pytest.raises(LookupError):
        agent.find_node(rank=3)


def test_a_failure_after_all_names_the_node_and_the_rank_everywhere(make_agent: MakeAgent) -> None:
    agent = make_agent()
    agent.fail(2, 3)
    for node in (1, 2):
        (message,) = agent.read_from(node)
        assert (message["why"], message["node"], message["rank"]) == ("failed", 2, 2)
    assert (agent.state["first_failed"], agent.state["ended"]) == (2, "failed")


def test_what_the_others_must_know_comes_from_node_0_in_the_order_of_workers(make_agent: MakeAgent) -> None:
    hub, other = make_agent(), make_agent(1)
    for link in hub.links:
        link.name = f"host-{link.node}"
    hub._go()
    (message,) = hub.read_from(2)
    assert message["go"] == ["m0", "host-1", "host-2"]
    assert message["port"] == hub.port
    other._on_message(other.links[0], message)
    assert (other.hosts, other.port) == (["m0", "host-1", "host-2"], hub.port)
    other._on_message(other.links[0], {**message, "go": ["x"], "port": 1})  # said again, it changes nothing
    assert (other.hosts, other.port) == (["m0", "host-1", "host-2"], hub.port)


def test_a_question_for_the_time_is_answered_with_the_question(make_agent: MakeAgent) -> None:
    agent = make_agent()
    agent._on_message(agent.links[0], {"clock": 12.5})
    (answer,) = agent.read_from(1)
    assert answer["clock_was"] == 12.5
    assert abs(answer["time"] - time.time()) < 5


def test_the_last_comparison_of_clocks_waits_for_nobody_who_is_gone(make_agent: MakeAgent) -> None:
    begun = time.monotonic()
    make_agent(0)._await_clock()
    gone = make_agent(1)
    gone.links[0].close()
    gone._await_clock()
    assert time.monotonic() - begun < CLOCK_PATIENCE


def test_what_a_client_fetches_is_named_with_size_and_digest(make_agent: MakeAgent, tmp_path: Path) -> None:
    agent = make_agent(1)
    place = tmp_path / "run/nodes/1"
    (place / "logs").mkdir()
    (place / "output").mkdir()
    (place / "output/answer").write_text("42")
    (place / "logs/rank-1.log").write_bytes(b"log")
    agent._pack()
    results = json.loads((place / ".state/results.json").read_text())
    archive = (place / ".state/archive.tar").read_bytes()
    assert results["archive"] == {"size": len(archive), "sha256": hashlib.sha256(archive).hexdigest()}
    assert results["logs"] == {"1": {"size": 3, "sha256": hashlib.sha256(b"log").hexdigest()}}
    assert results["problem"] is None
    with tarfile.open(place / ".state/archive.tar") as found:
        assert found.getnames() == ["output", "output/answer"]
    assert not (place / ".state/archive.tar.part").exists()


def test_nodes_take_their_leave_at_once_and_node_0_waits_for_them(make_agent: MakeAgent) -> None:
    other, hub = make_agent(1), make_agent()
    other._linger()
    assert other.read_from(0) == [{"bye": True}]
    for node in (1, 2):
        hub.others[node].sendall(b'{"bye": true}\n')
    hub._linger()
    assert hub.gone == []
    assert not any(link.is_open for link in hub.links)


def test_rows_about_the_machine_name_its_node_and_those_of_ranks_stay(make_agent: MakeAgent, tmp_path: Path) -> None:
    make_agent(1)._write_resources([{"kind": "machine"}, {"rank": 1}])
    rows = (tmp_path / "run/nodes/1/resources.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in rows] == [{"kind": "machine", "worker": 1}, {"rank": 1}]


def test_a_node_is_started_once_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system may start a job again; the results of the first start stay."""
    monkeypatch.setattr("mlbench_cli.agent.machine.keep_only", lambda *_: None)
    monkeypatch.setattr(LinkedAgent, "conduct", lambda self: 3)
    monkeypatch.setattr("mlbench_cli.agent.node.NodeAgent", LinkedAgent)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    shares = [NodeShare((node,), name=f"m{node}") for node in range(3)]
    plan = make_plan(SPEC, MachineDetails(folder=str(tmp_path), python=sys.executable), shares, lock=TAKE)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    place = tmp_path / "nodes/1"
    assert main([str(place)]) == 3
    assert (place / ".state").stat().st_mode & 0o777 == 0o700
    assert (place / "output/rank-1").is_dir()
    assert not (tmp_path / "refused").exists()
    assert main([str(place)]) == EXIT_REFUSED
    assert (tmp_path / "refused").read_text().startswith("node 1 job 77 at ")


def is_free(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_a_second_start_is_refused(machines: Machines) -> None:
    machines.start("echo once")
    machines.end()
    words = [*machines.command, str(machines.run_folder(0) / "nodes" / "0")]
    assert subprocess.run(words, check=False).returncode == 75
    assert machines.log(0) == "once\n"


def test_a_channel_names_what_a_machine_refuses(tmp_path: Path) -> None:
    channel = Channel(Target(None, sys.executable))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(RemoteError) as caught:
        channel.call("remove", folder=str(tmp_path / "mine"))
    assert "not the folder of a run" in str(caught.value)
    with pytest.raises(RemoteError):
        channel.call("install", b"other bytes", folder=str(tmp_path / "code"), sha256="0" * 64)
    channel.close()


def test_requests_in_sequence_stop_at_the_first_that_fails(tmp_path: Path) -> None:
    channel = Channel(Target(None, sys.executable))
    first, last = tmp_path / "first", tmp_path / "last"
    wrong = ChannelRequest("put", {"path": "/proc/none/file"}, b"x")
    with pytest.raises(RemoteError):
        channel.call_in_sequence([ChannelRequest("put", {"path": str(first)}, b"1"), wrong, _write(last)])
    assert first.read_bytes() == b"1"
    assert not last.exists()
    assert channel.call_in_sequence([_write(last), _write(first)]) == [{"written": True}, {"written": False}]
    channel.close()


def _write(path: Path) -> ChannelRequest:
    return ChannelRequest("put", {"path": str(path), "new": True}, b"2")
