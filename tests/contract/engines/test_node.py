"""Supervisors of a run's machines, as real processes here, each with a folder of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.machines.channel import Channel, RemoteError, Target
from mlbench_cli.engines.machines.details import MachineDetails
from mlbench_cli.engines.machines.observe import NodeReport, Snapshot, observe
from mlbench_cli.engines.machines.plan import make_plan, pack_code, start_command
from mlbench_cli.model import Ending, Observation
from mlbench_cli.spec import RunSpec

SPEC = RunSpec(
    name="demo-3", cluster="c", engine="hosts", task="custom", preset="custom", argv=("true",), backend="gloo",
    workers=3, timeout=60.0,
)  # fmt: skip


class Machines:
    """Three machines in folders of their own; node 0's rendezvous is copied to the others as a client does."""

    def __init__(self, folder: Path) -> None:
        self.channel = Channel(Target(None, sys.executable))
        data, sha256 = pack_code()
        self.channel.call("install", folder=str(folder / "code"), sha256=sha256)
        answer = self.channel.call("install", data, folder=str(folder / "code"), sha256=sha256)
        self.command = start_command(sys.executable, str(answer["folder"]))
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def run_folder(self, node: int) -> Path:
        return self.folder / f"machine-{node}" / "runs" / "demo-3"

    def start(self, script: str, nodes: tuple[int, ...] = (0, 1, 2), **changes: Any) -> None:
        spec = replace(SPEC, argv=("sh", "-c", script))
        details = MachineDetails(folder=str(self.folder), python=sys.executable)
        plan = {**make_plan(spec, details, [(f"m{node}", None, [node]) for node in range(3)]), **changes}
        for node in range(3):
            self.run_folder(node).mkdir(parents=True)
            (self.run_folder(node) / "plan.json").write_text(json.dumps(plan))
        for node in nodes:
            words = [*self.command, str(self.run_folder(node) / "nodes" / str(node))]
            self.processes[node] = subprocess.Popen(words, start_new_session=True, stdin=subprocess.DEVNULL)
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
    found = Machines(tmp_path)
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
