"""Agents of a run's machines, as real processes here, each with a folder of its own."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent.channel import Channel, ChannelRequest, RemoteError, Target
from mlbench_cli.agent.lock import TAKE, open_lock, write_holder
from mlbench_cli.agent.node import NodeAgent
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


def test_a_machine_that_is_lost_before_its_turn_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 2's connection ends in the same moment in which node 1 says that it has its lock."""
    monkeypatch.setenv("MLBENCH_MACHINE_LOCK", str(tmp_path / "lock"))
    place = tmp_path / "run/nodes/0"
    (place / ".state").mkdir(parents=True)
    shares = [NodeShare((node,), name=f"m{node}") for node in range(3)]
    plan = make_plan(SPEC, MachineDetails(folder=str(tmp_path), python=sys.executable), shares, lock=TAKE)
    agent = NodeAgent(str(place), str(tmp_path / "run"), 0, plan)
    with socket.create_server(("127.0.0.1", 0)) as server:
        others = [socket.create_connection(server.getsockname()) for _ in range(2)]
        own = [server.accept()[0] for _ in others]
    for node, connection in enumerate(own, 1):
        agent.links.append(RankLink(connection, agent.selector, agent._on_message, agent._on_link_end))
        agent.links[-1].node = node
    agent.is_gathered, agent.turns = True, [1, 2]
    agent.links[1].close()
    agent._on_message(agent.links[0], {"locked": True})
    assert (agent.state["ended"], agent.gone) == ("failed", [2])
    for connection in (*own, *others):
        connection.close()
    agent.selector.close()


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
