"""What the agent of one machine of several says, notes and passes on, without other machines."""

import hashlib
import json
import os
import signal
import socket
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent import machine, node, processes, rendezvous
from mlbench_cli.agent.agent import GRACE, Agent
from mlbench_cli.agent.lock import NO_PROMISE, TAKE
from mlbench_cli.agent.node import BEAT_SECONDS, CLOCK_SECONDS, LOOK_SECONDS, NodeAgent, digest
from tests.fakes.clock import Clock


class Link:
    """A link to another node that keeps what is sent."""

    def __init__(self, number: int | None) -> None:
        self.node, self.name, self.lock_identity = number, f"m{number}", None
        self.clock_offset, self.is_open, self.has_left = 0.0, True, False
        self.sent: list[Mapping[str, Any]] = []
        self.ticks: list[float] = []
        self.connection = SimpleNamespace(
            getpeername=lambda: (f"192.0.2.{number}", 4000), getsockname=lambda: ("192.0.2.100", 4000)
        )

    def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(message)

    def tick(self, now: float) -> None:
        self.ticks.append(now)

    def close(self) -> None:
        self.is_open = False


Make = Callable[..., Any]
COPIES = {"checkpoint_copy": "peer"}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make the agent of a node of three with a rank each, linked with the others as `links[NODE]`."""
    made: list[NodeAgent] = []
    monkeypatch.setenv("MLBENCH_MACHINE_LOCK", str(tmp_path / "lock"))
    monkeypatch.setattr(node, "list_addresses", lambda interface: ["192.0.2.7", "127.0.0.1"])
    monkeypatch.setattr(node, "find_interface", lambda address: f"of {address}")
    monkeypatch.setattr(processes, "kill_descendants", lambda: None)

    def make(number: int = 0, *, count: int = 3, own: Mapping[str, Any] | None = None, **changes: Any) -> Any:
        place = tmp_path / f"run/nodes/{number}"
        (place / ".state").mkdir(parents=True)
        nodes: list[dict[str, Any]] = [
            {
                "name": f"m{other}",
                "address": None,
                "workers": [other],
                "ranks": [
                    {
                        "rank": other,
                        "argv": ["python", "{rank}", "{run_id}", "{backend}", "{hosts}"],
                        "environment": {"NODE_RANK": str(other), "MLBENCH_OUTPUT_DIR": f"output/rank-{other}"},
                    }
                ],
            }
            for other in range(count)
        ]
        nodes[number].update(own or {})
        plan = {
            "name": "demo-3",
            "spec_hash": "0",
            "timeout": 60.0,
            "gpus_per_worker": 0,
            "environment": {"MLBENCH_BACKEND": "gloo"},
            "defaults": {},
            "nodes": nodes,
            "python": "/opt/python/bin/python3",
            "installed_code_only": False,
            "launcher": [],
            "interface": None,
            "interface_variables": [],
            "meeting_seconds": 30.0,
            "lease_seconds": None,
            "grace": 5.0,
            "lock": NO_PROMISE,
            **changes,
        }
        agent: Any = NodeAgent(str(place), str(tmp_path / "run"), number, plan)
        others = [other for other in range(count) if other != number] if number == 0 else [0]
        agent.links = [Link(other) for other in others]
        agent.to = {link.node: link for link in agent.links}
        agent.token = "the-token"
        made.append(agent)
        return agent

    yield make
    for agent in made:
        if agent.server is not None:
            agent.server.close()
        agent.selector.close()


# --- the state ------------------------------------------------------------------------------------------------------


def test_the_state_of_a_node_says_which_it_is_and_what_it_may_use(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in node.SLURM_FACTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 1})
    state = make(1).state
    of_node = (
        "node node_name address interface started waits cpus gpus bound first clock_start clock_end slurm "
        "run_id name ended first_failed"
    )
    assert {key: state[key] for key in of_node.split()} == {
        "node": 1,
        "node_name": "m1",
        "address": None,
        "interface": None,
        "started": None,
        "waits": None,
        "cpus": [1, 3],
        "gpus": ["4", "5"],
        "bound": [],
        "first": None,
        "clock_start": None,
        "clock_end": None,
        "slurm": {"SLURM_JOB_ID": "77", "SLURM_NODEID": "1", "SLURM_RESTART_COUNT": "2"},
        "run_id": "demo-3",
        "name": "demo-3",
        "ended": None,
        "first_failed": None,
    }
    assert abs(state["began"] - time.time()) < 5


@pytest.mark.parametrize(("own", "addresses"), [(None, ["192.0.2.7", "127.0.0.1"]), ("192.0.2.9", ["192.0.2.9"])])
def test_node_0_can_be_reached_at_the_address_of_the_plan_or_all_that_it_has(
    make: Make, own: str | None, addresses: list[str]
) -> None:
    agent = make(0, own={"address": own})
    assert (agent.addresses, agent.state["address"]) == (addresses, addresses[0])


def test_a_machine_without_addresses_can_only_reach_itself(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "list_addresses", lambda interface: [])
    assert make().addresses == ["127.0.0.1"]


@pytest.mark.parametrize(("slurm", "name"), [("node-17", "node-17"), (None, os.uname().nodename)])
def test_a_machine_that_the_plan_does_not_name_knows_its_own_name(
    make: Make, monkeypatch: pytest.MonkeyPatch, slurm: str | None, name: str
) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    if slurm:
        monkeypatch.setenv("SLURMD_NODENAME", slurm)
    agent = make(1, own={"name": None})
    assert (agent.name, agent.state["node_name"]) == (name, name)


def test_the_machines_of_a_run_share_no_descriptor_of_a_lock_with_their_client(make: Make) -> None:
    agent = make(lock=TAKE)
    assert agent.lock_identity is not None
    assert agent.load.row(0.0)["lock"] == "unavailable"  # until all locks are taken


# --- the meeting ----------------------------------------------------------------------------------------------------


def test_ranks_get_what_is_known_only_when_all_are_there(make: Make) -> None:
    agent = make(1, launcher=["srun"], interface_variables=["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
    agent.plan["environment"]["GLOO_SOCKET_IFNAME"] = "users"
    agent.state["address"], agent.master, agent.port = "192.0.2.1", "192.0.2.7", 15001
    agent._take_hosts(["a", "b", "c"])
    assert agent.plan["environment"] == {
        "MLBENCH_BACKEND": "gloo",
        "MASTER_ADDR": "192.0.2.7",
        "MLBENCH_HOSTS": "a,b,c",
        "NCCL_SOCKET_IFNAME": "of 192.0.2.1",
        "GLOO_SOCKET_IFNAME": "users",
    }
    found = [agent.state[key] for key in ("interface", "master_address", "master_port")]
    assert found == ["of 192.0.2.1", "192.0.2.7", 15001]
    assert agent.ranks[0].argv == ["srun", "python", "1", "demo-3", "gloo", "a,b,c"]


def test_a_rank_without_a_command_gets_none(make: Make) -> None:
    ranks: list[Any] = [{"rank": 1, "argv": None, "environment": {}}]
    agent = make(1, own={"ranks": ranks}, launcher=["srun"])
    agent.master = "192.0.2.7"
    agent._take_hosts(["a", "b", "c"])
    assert agent.ranks[0].argv is None


@pytest.mark.parametrize(
    ("count", "given", "interface"),
    [(3, None, "of 192.0.2.7"), (1, None, "of 127.0.0.1"), (3, "eth1", "eth1"), (1, "eth1", "eth1")],
)
def test_ranks_talk_over_the_interface_of_the_plan_or_of_the_address(
    make: Make, count: int, given: str | None, interface: str
) -> None:
    agent = make(0, count=count, interface=given, interface_variables=["IF"])
    agent.master = "192.0.2.7"
    agent._take_hosts(["a"])
    assert (agent.state["interface"], agent.plan["environment"]["IF"]) == (interface, interface)


def test_an_unknown_interface_is_left_to_the_library(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "find_interface", lambda address: None)
    agent = make(0, interface_variables=["IF"])
    agent.master = "192.0.2.7"
    agent._take_hosts(["a"])
    assert (agent.state["interface"], "IF" in agent.plan["environment"]) == (None, False)


def test_the_address_of_node_0_is_the_one_at_which_the_others_have_reached_it(make: Make) -> None:
    agent = make()
    agent.copies = SimpleNamespace(port=4711)
    agent.holders["2"] = ["192.0.2.2", 4712]
    agent._go()
    assert (agent.master, agent.addresses, agent.state["address"]) == (
        "192.0.2.100",
        ["192.0.2.100", "127.0.0.1"],
        "192.0.2.100",
    )
    told = {
        "go": ["m0", "m1", "m2"],
        "port": agent.port,
        "holders": {"0": ["192.0.2.100", 4711], "2": ["192.0.2.2", 4712]},
    }
    assert (agent.to[1].sent, agent.to[2].sent) == ([told], [told])


def test_a_run_on_one_machine_of_many_stays_on_the_loopback(make: Make) -> None:
    agent = make(count=1)
    agent._go()
    assert (agent.master, agent.hosts, agent.holders) == ("127.0.0.1", ["m0"], {})
    assert agent.state["address"] == "192.0.2.7"


def test_the_meeting_of_one_machine_is_over_at_once(make: Make, tmp_path: Path) -> None:
    agent = make(count=1, lock=TAKE)
    agent.selector = Silent()
    assert agent._meet() is None
    assert agent.hosts == ["m0"]
    note = rendezvous.read_rendezvous(str(tmp_path / "run"))
    assert note == {
        "addresses": ["192.0.2.7", "127.0.0.1"],
        "port": agent.server.getsockname()[1],
        "token": agent.token,
    }
    assert [callback for _, callback in agent.selector.registered] == [agent._on_connection]
    assert agent.load.row(0.0)["lock_reason"] is None


class Silent:
    """A selector on which nothing ever happens; `waits` are the timeouts that it was given."""

    def __init__(self, agent: Any = None) -> None:
        self.waits: list[float] = []
        self.registered: list[Any] = []
        self._agent = agent

    def register(self, what: object, events: int, data: object) -> None:
        self.registered.append((what, data))

    def select(self, seconds: float) -> list[Any]:
        self.waits.append(seconds)
        if self._agent is not None and len(self.waits) == 3:
            self._agent.state["ended"] = "cancelled"
        return []

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("number", "links", "is_gathered", "wait"),
    [(0, 0, False, 0.1), (1, 0, False, 0.02), (1, 1, False, 0.1), (1, 0, True, 0.1)],
)
def test_node_0_is_looked_for_often_until_it_is_found(
    make: Make, number: int, links: int, is_gathered: bool, wait: float
) -> None:
    agent = make(number)
    agent.links, agent.is_gathered = agent.links[:links], is_gathered
    agent.selector = Silent(agent)
    assert agent._meet() is None
    assert agent.selector.waits == [wait] * 3


def test_a_meeting_lasts_as_long_as_the_run_once_all_are_there(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is another run that is waited for."""
    moments = iter(range(1000, 2000, 10))
    monkeypatch.setattr(
        "mlbench_cli.agent.node.time", SimpleNamespace(monotonic=lambda: float(next(moments)), time=time.time)
    )
    late, gathered = make(1), make(2)
    for agent in (late, gathered):
        agent.selector = Silent()
    assert late._meet() == "node 0 could not be reached"
    looks = len(late.selector.waits)
    gathered.is_gathered = True
    gathered.state["waits"] = "m1: another run is using it"
    assert gathered._meet() == "m1: another run is using it"
    assert looks < len(gathered.selector.waits) <= 2 * looks + 2  # 60 s and not 30 s


def test_a_node_says_who_it_is_and_asks_for_the_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make(1)
    agent.copies, agent.lock_identity = SimpleNamespace(port=4711), "boot:1:2"
    note = {"addresses": ["127.0.0.1"], "port": 1, "token": "of the hub"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname())
        hub, _ = server.accept()
    monkeypatch.setattr(rendezvous, "read_rendezvous", lambda folder: note)
    monkeypatch.setattr(rendezvous, "connect_to_hub", lambda found, seconds: own if found is note else None)
    with own, hub:
        agent._connect()
        hub.settimeout(5)
        lines = b""
        while lines.count(b"\n") < 2:
            lines += hub.recv(4096)
    hello, question = (json.loads(line) for line in lines.splitlines())
    assert abs(hello.pop("time") - time.time()) < 5
    assert hello == {"hello": "of the hub", "node": 1, "name": "m1", "lock": "boot:1:2", "copies": 4711}
    assert question.keys() == {"clock"}
    assert (agent.token, agent.master, agent.state["address"]) == ("of the hub", "127.0.0.1", "127.0.0.1")
    assert [link.node for link in agent.links] == [0]


@pytest.mark.parametrize("is_written", [False, True])
def test_node_0_that_is_not_there_yet_is_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    agent = make(1)
    agent.links = []
    monkeypatch.setattr(rendezvous, "read_rendezvous", lambda folder: {} if is_written else None)
    monkeypatch.setattr(rendezvous, "connect_to_hub", lambda note, seconds: None)
    before = time.monotonic()
    agent._connect()
    assert (agent.links, agent.token) == ([], "the-token")
    assert before < agent.next_connection < time.monotonic() + 0.5


def test_nodes_on_one_machine_take_one_lock(make: Make) -> None:
    agent = make()
    agent.lock_identity = agent.to[1].lock_identity = "a"
    agent.to[2].lock_identity = "b"
    assert agent._take_locks(0.0) is False
    assert (agent.turns, agent.to[1].sent) == ([2], [{"gathered": True}])
    assert agent.to[2].sent == [{"gathered": True}, {"lock": True}]
    assert agent._take_locks(0.0) is False
    assert len(agent.to[2].sent) == 2  # asked once


def test_a_busy_machine_is_reported_once_a_second(make: Make) -> None:
    agent = make(1, lock=TAKE)
    agent.lock = SimpleNamespace(acquire=lambda: False, read_holder=lambda: None)
    agent.is_asked_to_lock = True
    agent._answer_lock(1000.0)
    agent._answer_lock(1000.9)
    assert agent.to[0].sent == [{"waits": "m1: another run is using it"}]
    agent._answer_lock(1001.0)
    assert len(agent.to[0].sent) == 2
    agent.lock = SimpleNamespace(acquire=lambda: True)
    agent._answer_lock(1001.1)
    assert (agent.to[0].sent[2:], agent.is_asked_to_lock) == ([{"locked": True}], False)


def test_the_wait_for_a_machine_is_in_the_state_that_clients_read(make: Make, tmp_path: Path) -> None:
    agent = make()
    agent.turns = [0, 1]
    agent._on_lock({"waits": "m0: another run is using it"})
    state = json.loads((tmp_path / "run/nodes/0/.state/state.json").read_text())
    assert state["waits"] == "m0: another run is using it"
    agent._on_lock({"locked": True})
    assert (agent.state["waits"], agent.turns, agent.to[1].sent) == (None, [1], [{"lock": True}])


# --- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "found"), [("2,3", ["2", "3"]), (None, []), ("", [])])
def test_what_a_rank_is_bound_to_is_in_the_state(
    make: Make, monkeypatch: pytest.MonkeyPatch, gpus: str | None, found: list[str]
) -> None:
    agent = make(1)
    monkeypatch.setattr(Agent, "_start", lambda self, rank: setattr(rank, "pid", 4711))
    monkeypatch.setattr(
        Agent, "_environment", lambda self, rank: {"CUDA_VISIBLE_DEVICES": gpus} if gpus is not None else {}
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 1} if pid == 4711 else set())
    agent._start(agent.ranks[0])
    assert agent.state["bound"] == [{"rank": 1, "cpus": [1, 3], "gpus": found}]


def test_a_rank_that_has_ended_already_is_bound_to_nothing_that_is_known(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> None:
        raise ProcessLookupError

    agent = make(1)
    monkeypatch.setattr(Agent, "_start", lambda self, rank: setattr(rank, "pid", 4711))
    monkeypatch.setattr(Agent, "_environment", lambda self, rank: {})
    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    agent._start(agent.ranks[0])
    assert agent.state["bound"] == [{"rank": 1, "cpus": None, "gpus": []}]


def test_a_rank_that_was_not_started_is_not_noted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make(1)
    monkeypatch.setattr(Agent, "_start", lambda self, rank: None)
    agent._start(agent.ranks[0])
    assert agent.state["bound"] == []


def test_what_srun_was_told_to_export_is_not_passed_on_to_ranks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that starts srun itself would export NONE, too."""
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    agent = make(1)
    found = agent._environment(agent.ranks[0])
    assert ("SLURM_EXPORT_ENV" in found, found["SLURM_JOB_ID"]) == (False, "77")


@pytest.mark.parametrize(
    ("ended", "was_cancelled", "is_signaled", "comes", "reason"),
    [
        (None, False, True, True, "cancelled"),  # the batch system signals ranks and agents alike
        (None, False, True, False, None),
        (None, False, False, True, None),
        (None, True, False, False, "cancelled"),
        ("failed", False, True, True, "failed"),
    ],
)
def test_a_rank_that_ends_with_a_signal_to_its_agent_has_not_failed(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    ended: str | None,
    was_cancelled: bool,
    is_signaled: bool,
    comes: bool,
    reason: str | None,
) -> None:
    agent = make(1)
    agent.state["ended"], agent.cancelled = ended, was_cancelled
    exits: list[str | None] = []

    def sleep(seconds: float) -> None:
        agent.cancelled = comes

    monkeypatch.setattr(
        "mlbench_cli.agent.node.time", SimpleNamespace(sleep=sleep, time=time.time, monotonic=time.monotonic)
    )
    monkeypatch.setattr(node, "is_signaled", lambda pid: is_signaled)
    monkeypatch.setattr(Agent, "_on_exit", lambda self, rank: exits.append(self.state["ended"]))
    agent._on_exit(agent.ranks[0])
    assert exits == [reason]


# --- time -----------------------------------------------------------------------------------------------------------


def test_links_and_the_clock_have_their_turn(make: Make) -> None:
    agent = make(1)
    agent._on_time(1000.0)
    assert agent.to[0].ticks == [1000.0]
    assert [message.keys() for message in agent.to[0].sent] == [{"clock"}]
    assert time.monotonic() < agent.next_clock <= time.monotonic() + CLOCK_SECONDS
    assert agent.next_beat == 1000.0 + BEAT_SECONDS
    assert agent.next_look == 1000.0 + LOOK_SECONDS


def test_node_0_asks_nobody_for_the_time(make: Make) -> None:
    agent = make()
    agent._on_time(1000.0)
    assert [agent.to[number].sent for number in (1, 2)] == [[], []]


@pytest.mark.parametrize(
    ("started", "finished", "ended"), [(None, None, None), (5.0, None, "deadline"), (5.0, 6.0, None)]
)
def test_the_deadline_counts_while_ranks_run(
    make: Make, started: float | None, finished: float | None, ended: str | None
) -> None:
    agent = make(1)
    agent.state.update(started=started, finished=finished)
    agent.deadline = 999.0
    agent._on_time(1000.0)
    assert agent.state["ended"] == ended


@pytest.mark.parametrize(("hosts", "ended"), [(None, "cancelled"), (["a"], None)])
def test_a_signal_between_meeting_and_start_is_heeded_by_the_watch(
    make: Make, hosts: list[str] | None, ended: str | None
) -> None:
    agent = make(1)
    agent.cancelled, agent.hosts = True, hosts
    agent._on_time(1000.0)
    assert agent.state["ended"] == ended


def test_only_node_0_looks_at_the_lease(make: Make, tmp_path: Path) -> None:
    agent = make(1, lease_seconds=10.0)
    (tmp_path / "run/lease").touch()
    os.utime(tmp_path / "run/lease", (1000, 1000))
    agent._on_time(1000.0)
    assert agent.state["ended"] is None


# --- the end --------------------------------------------------------------------------------------------------------


def test_the_first_end_is_told_with_node_and_rank(make: Make) -> None:
    agent = make()
    agent.state["first_failed"] = 0
    agent._stop("failed", GRACE)
    (message,) = agent.to[2].sent
    assert abs(message["time"] - time.time()) < 5
    assert {**message, "time": 0.0} == {"stop": True, "why": "failed", "node": 0, "rank": 0, "time": 0.0}
    assert agent.to[1].sent == [message]


@pytest.mark.parametrize("known", ["ended", "first"])
def test_a_later_end_is_not_told(make: Make, known: str) -> None:
    agent = make()
    agent.state[known] = "failed" if known == "ended" else {"why": "failed", "node": 1, "rank": 1, "time": 5.0}
    agent._stop("failed", GRACE)
    assert agent.to[1].sent == []
    assert agent.state["ended"] == "failed"


@pytest.mark.parametrize(("asked", "grace"), [(GRACE, 2.0), (1.0, 1.0), (0, 0.0)])
def test_the_grace_is_that_of_the_plan_at_most_and_none_if_there_is_to_be_none(
    make: Make, monkeypatch: pytest.MonkeyPatch, asked: float, grace: float
) -> None:
    agent = make(1, grace=2.0)
    monkeypatch.setattr("mlbench_cli.agent.agent.time", Clock(1000.0))
    agent._stop("failed", asked)
    assert agent.stop_at == 1000.0 + grace


def test_a_cause_without_rank_and_time_is_by_the_other_clock(make: Make) -> None:
    agent = make()
    agent._take_first({"why": "cancelled", "node": 2}, 7.5)
    assert agent.state["first"] == {"why": "cancelled", "node": 2, "rank": None, "time": 7.5}


def test_of_two_failures_at_the_same_moment_the_known_one_stays(make: Make) -> None:
    agent = make()
    for rank in (1, 2):
        agent._take_first({"why": "failed", "node": rank, "rank": rank, "time": 5.0}, 0.0)
    assert agent.state["first"]["rank"] == 1


def test_a_stop_of_another_node_ends_this_one_with_its_reason(make: Make) -> None:
    agent = make(1)
    agent._on_message(agent.to[0], {"stop": True, "why": "client_lost", "node": 0, "time": 5.0})
    assert (agent.state["ended"], agent.state["first"]["why"], agent.to[0].sent) == ("client_lost", "client_lost", [])


@pytest.mark.parametrize(
    ("loses", "started", "outlives", "goes_on"),
    [(True, 5.0, True, True), (False, 5.0, True, False), (True, None, True, False), (True, 5.0, False, False)],
)
def test_a_lost_node_ends_the_run_unless_its_faults_say_otherwise(
    make: Make, loses: bool, started: float | None, outlives: bool, goes_on: bool
) -> None:
    agent = make()
    agent.is_gathered, agent.state["started"], agent.outlives_nodes = True, started, outlives
    agent.faults = SimpleNamespace(lose=lambda number: loses and number == 1, waits=False)
    agent.to[1].is_open = False
    agent._on_link_end(agent.to[1])
    assert agent.gone == [1]
    assert (agent.state["ended"], agent.state["first"] is None) == ((None, True) if goes_on else ("failed", False))
    assert len(agent.to[2].sent) == (0 if goes_on else 1)


def test_the_loss_of_a_node_after_a_failure_is_not_the_reason(make: Make) -> None:
    agent = make()
    agent.is_gathered = True
    agent.state["first"] = first = {"why": "failed", "node": 2, "rank": 2, "time": 5.0}
    agent._on_link_end(agent.to[1])
    assert agent.state["first"] == first
    assert agent.to[2].sent == [{"stop": True, **first}]


def test_a_node_that_lost_node_0_tells_nobody(make: Make) -> None:
    agent = make(1)
    agent.is_gathered = True
    agent._on_link_end(agent.to[0])
    assert agent.to[0].sent == []
    assert agent.state["first"]["why"] == "lost"


def test_faults_of_other_nodes_reach_the_control(make: Make) -> None:
    agent, heard = make(), []
    agent._on_message(agent.to[1], {"faults": {"done": 0}})  # the run has none
    agent.faults = SimpleNamespace(take=lambda number, message: heard.append((number, message)), waits=False)
    agent._on_message(agent.to[1], {"faults": {"done": 0}})
    assert heard == [(1, {"done": 0})]


def test_who_says_good_bye_has_left(make: Make) -> None:
    agent = make()
    agent._on_message(agent.to[1], {"bye": True})
    assert (agent.to[1].has_left, agent.to[1].is_open) == (True, False)


def test_what_a_node_knows_of_a_wait_is_not_believed_out_of_turn(make: Make) -> None:
    agent = make()
    agent._on_message(agent.to[1], {"locked": True})
    agent._on_message(agent.to[1], {"waits": "m1"})
    assert (agent.turns, agent.state["waits"]) == ([], None)


# --- conduct --------------------------------------------------------------------------------------------------------


class Steps(NodeAgent):
    """An agent whose parts only note that they had their turn."""

    steps: list[str]
    problem: str | None = None

    def prepare(self) -> None:
        self.steps.append("prepare")

    def _meet(self) -> str | None:
        self.steps.append("meet")
        return self.problem

    def start(self) -> str | None:
        self.steps.append("start")
        return None

    def watch(self) -> None:
        self.steps.append("watch")

    def _await_clock(self) -> None:
        self.steps.append("clock")

    def finish(self) -> None:
        self.steps.append("finish")

    def _pack(self) -> None:
        self.steps.append("pack")

    def _linger(self) -> None:
        self.steps.append("linger")


def test_a_node_is_started_once_and_a_second_start_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch job may be started again; its exit code is that of a temporary failure."""
    ranks = [{"environment": {"MLBENCH_OUTPUT_DIR": f"output/rank-{rank}"}} for rank in (2, 3)]
    (tmp_path / "plan.json").write_text(json.dumps({"nodes": [{"ranks": []}, {"ranks": ranks}]}))
    made: list[Any] = []

    def make_agent(*words: Any) -> Any:
        made.append(words[:3])
        return SimpleNamespace(conduct=lambda: 9)

    monkeypatch.setattr(machine, "keep_only", lambda *descriptors: None)
    monkeypatch.setattr(node, "NodeAgent", make_agent)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    place = tmp_path / "nodes/1"
    assert node.main([str(place)]) == 9
    assert made == [(str(place), str(tmp_path), 1)]
    assert (place / ".state").stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in (place / "output").iterdir()) == ["rank-2", "rank-3"]
    assert (place / "logs").is_dir()
    assert [node.main([str(place)]) for _ in range(2)] == [os.EX_TEMPFAIL] * 2
    lines = (tmp_path / "refused").read_text().splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == ["node 1 job 77 at"] * 2
    assert len(made) == 1


@pytest.mark.parametrize(("codes", "code"), [((None,), 0), ((0, 3, 1), 3), ((0, 0), 0)])
def test_a_node_conducts_its_ranks_and_ends_with_their_highest_code(
    make: Make, codes: tuple[int | None, ...], code: int
) -> None:
    agent = make(1)
    agent.__class__, agent.steps = Steps, []
    agent.ranks = [SimpleNamespace(facts={"exit_code": number}, running=False) for number in codes]
    before = time.monotonic()
    assert agent.conduct() == code
    assert json.loads(Path(agent.folder, ".state/state.json").read_text())["node"] == 1  # before the meeting
    assert agent.steps == ["prepare", "meet", "start", "watch", "clock", "finish", "pack", "linger"]
    assert before + 60 <= agent.deadline <= time.monotonic() + 60  # from the start of the ranks
    assert abs(agent.state["started"] - time.time()) < 5


def test_a_run_that_was_cancelled_in_the_meeting_starts_nothing(make: Make) -> None:
    agent = make(1)
    agent.__class__, agent.steps = Steps, []
    agent.state["ended"] = "cancelled"
    assert agent.conduct() == 0
    assert agent.steps == ["prepare", "meet", "finish", "pack", "linger"]


def test_a_meeting_that_failed_is_the_reason_why_nothing_started(make: Make) -> None:
    agent = make(1)
    agent.__class__, agent.steps, agent.problem = Steps, [], "node 0 could not be reached"
    agent.conduct()
    assert agent.steps == ["prepare", "meet", "finish", "pack", "linger"]
    assert (agent.state["start_problem"], agent.state["ended"]) == ("node 0 could not be reached", "never_started")
    assert agent.state["started"] is None
    assert agent.to[0].sent[0]["why"] == "never_started"


def test_what_an_agent_leaves_is_killed_and_only_that(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard outlives the agent, whose ranks write below its output folder."""
    killed: list[Any] = []
    agent = make(1)
    reader, writer = os.pipe()
    monkeypatch.setattr(machine, "prctl", lambda option, value: killed.append((option, value)))
    monkeypatch.setattr(os, "read", lambda descriptor, size: killed.append(descriptor == reader))
    monkeypatch.setattr(node, "kill_processes", lambda folder, seconds: killed.append((folder, seconds)))
    agent._kill_leftovers(reader)
    for descriptor in (reader, writer):
        os.close(descriptor)
    assert killed == [(machine.PR_SET_CHILD_SUBREAPER, 0), True, (f"{agent.folder}/output", 60.0)]


def test_the_last_state_of_node_0_has_a_reason_that_came_late(make: Make, tmp_path: Path) -> None:
    """Another node may fail after the ranks of this one have ended."""
    agent = make()
    agent.state["finished"] = 5.0
    first = {"why": "failed", "node": 2, "rank": 2, "time": 5.0}

    class Late(Silent):
        def select(self, seconds: float) -> list[Any]:
            for link in agent.links:
                link.is_open = False
            agent.state["first"] = first
            return []

    agent.selector = Late()
    agent._linger()
    assert json.loads((tmp_path / "run/nodes/0/.state/state.json").read_text())["first"] == first


def test_what_node_0_lingers_for_is_only_nodes_that_said_who_they_are(make: Make) -> None:
    agent = make()
    agent.links = [Link(None)]
    agent.selector = Silent()
    agent._linger()
    assert agent.selector.waits == []


# --- what a client fetches ------------------------------------------------------------------------------------------


def test_the_archive_has_output_samples_faults_and_where_standard_error_is(make: Make, tmp_path: Path) -> None:
    agent = make(1)
    place = tmp_path / "run/nodes/1"
    (place / "output").mkdir()
    for name in ("resources.jsonl", "faults.json", ".state/stderr-1", ".state/stderr-2", "other"):
        (place / name).write_text(name)
    agent._pack()
    with tarfile.open(place / ".state/archive.tar") as archive:
        assert archive.getnames() == ["output", "resources.jsonl", "faults.json", "stderr-1"]
    results = json.loads((place / ".state/results.json").read_text())
    assert (results["schema_version"], results["logs"]) == (1, {})
    assert results["archive"]["size"] == (place / ".state/archive.tar").stat().st_size


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 24])
def test_a_digest_is_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(node, "BLOCK", 8)
    content = bytes(range(size))
    (tmp_path / "file").write_bytes(content)
    found = {"size": size, "sha256": hashlib.sha256(content).hexdigest()}
    assert digest(str(tmp_path / "file")) == found


def test_a_signal_to_stop_is_passed_to_the_rank_itself(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    agent = make(1)
    agent.ranks[0].begin(4711, 1.0, 2.0)
    agent._on_message(agent.to[0], {"stop": True, "why": "failed", "node": 0, "rank": 0, "time": 5.0})
    assert sent == [(4711, signal.SIGTERM)]
