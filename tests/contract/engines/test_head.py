"""A run's head and the couriers of its nodes: nothing is lost through cut connections, killed heads and late starts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from mlbench_cli.agent import link
from mlbench_cli.engines.follow import read_log
from mlbench_cli.engines.placement import NodeShare
from mlbench_cli.engines.plan import make_plan
from mlbench_cli.model.cluster_details import MachineDetails
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.verify import find_problems
from mlbench_cli.runs import supervise
from tests import NIGHTLY
from tests.contract.engines.labs import EngineLab, install_commands
from tests.contract.local_runs import PATIENCE, SLEEP, shell, until
from tests.fakes.cutting_proxy import CuttingProxy

RANKS, LINES = 4, 10_000
SPEC = RunSpec("far-4", "c", "hosts", "custom", "custom", ("true",), "gloo", RANKS)
START = "import sys; from mlbench_cli.agent.{} import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLab]:
    for name, value in install_commands(tmp_path / "commands").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "home").mkdir()
    with closing(EngineLab("hosts", tmp_path / "home")) as lab:
        yield lab


def start(module: str, folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", START.format(module), str(folder)])


def head_of(folder: Path) -> int:
    """The process that serves this folder."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(folder) in words and any(b"agent.head" in word for word in words):
            return int(name)
    return 0


@pytest.mark.parametrize("seed", range(3 if NIGHTLY else 1))
def test_logs_and_output_arrive_exactly_through_random_cuts(tmp_path: Path, seed: int) -> None:
    here, there = tmp_path / "head", tmp_path / "node"
    script = f'seq -f "$RANK %.0f" {LINES}; head -c 1000000 /dev/urandom > $MLBENCH_OUTPUT_DIR/f; printf end'
    spec = replace(SPEC, argv=shell(script))
    details = MachineDetails(folder=str(tmp_path), python=sys.executable, interface="lo")
    plan = make_plan(spec, details, [NodeShare(tuple(range(RANKS)), address="127.0.0.1")], lock="share")
    for folder in (here, there):
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(plan))
    with start("head", here) as head:
        note = until(lambda: link.read_note(str(here), link.HEAD))
        with CuttingProxy("127.0.0.1", note["port"], least=1000, most=700_000, seed=seed) as proxy:
            link.write_note(str(there), link.HEAD, ["127.0.0.1"], proxy.port, note["token"])
            (there / "nodes/0").mkdir(parents=True)
            node = start("node", there / "nodes/0")
            assert node.wait(3 * PATIENCE) == 0
            assert proxy.cuts >= 3
        assert head.wait(PATIENCE) == 0  # once all have handed over
    own = [f"{rank} {number}\n" for rank in range(RANKS) for number in range(1, LINES + 1)]
    for rank in range(RANKS):
        log = (here / f"nodes/0/logs/rank-{rank}.log").read_text()
        assert log == "".join(own[rank * LINES : (rank + 1) * LINES]) + "end"
    results = json.loads((here / "nodes/0/.state/results.json").read_text())
    archive = here / "nodes/0/.state/archive.tar"
    assert archive.stat().st_size == results["archive"]["size"] > RANKS * 1_000_000
    assert archive.read_bytes() == (there / "nodes/0/.state/archive.tar").read_bytes()


@pytest.mark.slow
def test_a_node_whose_head_went_silent_turns_to_the_next_one(tmp_path: Path) -> None:
    """A machine that lost its power closes no connection, and what is sent to it seems to arrive."""
    first, second, there = (tmp_path / name for name in ("first", "second", "node"))
    gate = tmp_path / "gate"
    spec = replace(SPEC, argv=shell(f"echo before; while [ ! -e {gate} ]; do sleep 0.05; done; echo after"), workers=1)
    details = MachineDetails(folder=str(tmp_path), python=sys.executable, interface="lo")
    plan = make_plan(spec, details, [NodeShare((0,), address="127.0.0.1")], lock="share")
    for folder in (first, second, there):
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(plan))
    (there / "nodes/0").mkdir(parents=True)
    logs = [folder / "nodes/0/logs/rank-0.log" for folder in (first, second)]
    with start("head", first) as head:
        note = until(lambda: link.read_note(str(first), link.HEAD))
        with CuttingProxy("127.0.0.1", note["port"]) as proxy, start("node", there / "nodes/0") as node:
            link.write_note(str(there), link.HEAD, ["127.0.0.1"], proxy.port, note["token"])
            until(lambda: logs[0].exists() and logs[0].read_text() == "before\n")
            head.send_signal(signal.SIGSTOP)
            link.write_note(str(second), link.HEAD, ["127.0.0.1"], 0, note["token"])
            with start("head", second) as other:
                port = until(lambda: (link.read_note(str(second), link.HEAD) or {}).get("port"))
                proxy.upstream = ("127.0.0.1", port)
                until(lambda: logs[1].exists() and logs[1].read_text() == "before\n")
                gate.touch()
                assert node.wait(PATIENCE) == 0
                assert other.wait(PATIENCE) == 0
        head.kill()
    assert logs[1].read_text() == "before\nafter\n"


def test_a_head_that_is_killed_starts_again_and_loses_nothing(lab: EngineLab, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"seq 5000; while [ ! -e {gate} ]; do sleep 0.05; done; seq 5000; echo $RANK > $MLBENCH_OUTPUT_DIR/f"
    run = lab.start(shell(script), workers=3)
    folder = lab.places(run)[0].parent
    assert next(read_log(lab.engine, run, 2, follow=True)).text == b"1\n"
    os.kill(until(lambda: head_of(folder)), signal.SIGKILL)
    gate.touch()
    finished = supervise.follow(run, lab.engine, lab.store)
    assert finished.outcome == "completed"
    whole = b"".join(b"%d\n" % number for _ in range(2) for number in range(1, 5001))
    assert [(run.folder / f"logs/rank-{rank}.log").read_bytes() for rank in range(3)] == [whole] * 3
    assert [(run.folder / f"output/rank-{rank}/f").read_text() for rank in range(3)] == ["0\n", "1\n", "2\n"]
    assert find_problems(run.folder) == []
    until(lambda: not head_of(folder))


def test_a_courier_that_is_killed_ends_its_ranks_and_a_stranger_is_not_listened_to(lab: EngineLab) -> None:
    run = lab.start(SLEEP, workers=2)
    until(lambda: len(lab.processes(run)) == 2)
    note = link.read_note(str(lab.places(run)[0].parent), link.HEAD)
    assert note is not None
    talk = link.Link(link.connect(note["addresses"], note["port"], 5.0))
    talk.send({"do": "hello", "token": "guessed", "node": 0, "names": []})
    with pytest.raises(OSError, match="closed"):
        talk.receive(PATIENCE)
    agent = lab.agents(run)[1]
    courier = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(courier, signal.SIGKILL)
    until(lambda: not lab.processes(run))
