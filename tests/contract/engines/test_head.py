"""A run's head and the couriers of its nodes: nothing is lost through cut connections, killed heads and late starts."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.agent import link, wire
from mlbench_cli.agent.head import Head
from mlbench_cli.engines.follow import read_log
from mlbench_cli.engines.hosts.engine import HostsEngine
from mlbench_cli.engines.placement import NodeShare
from mlbench_cli.engines.plan import make_plan
from mlbench_cli.model.cluster_details import MachineDetails
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.verify import find_problems
from mlbench_cli.runs import supervise
from mlbench_cli.util.files import remove_folder
from tests import CUT_RUNS, NIGHTLY
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


def start(module: str, folder: Path, **options: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", START.format(module), str(folder)], **options)


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


@pytest.mark.parametrize("seed", range(CUT_RUNS or (3 if NIGHTLY else 1)))
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


def test_results_that_are_on_their_way_are_no_orphans(lab: EngineLab) -> None:
    run = lab.start(shell("echo $RANK > $MLBENCH_OUTPUT_DIR/f; sleep 2"), workers=2)
    agent, head = lab.agents(run)[1], head_of(lab.places(run)[0].parent)
    until(lambda: len(lab.processes(run)) >= 2)  # the nodes have met, by what the head passes on
    os.kill(head, signal.SIGSTOP)
    until(lambda: not Path(f"/proc/{agent}").exists())
    assert isinstance(lab.engine, HostsEngine)
    assert lab.engine.list_orphans() == []
    lab.engine.end_orphans()
    os.kill(head, signal.SIGCONT)
    assert lab.end(run).ended == "exited"
    assert lab.engine.head(run).fetch().complete
    assert (run.folder / "output/rank-1/f").read_text() == "1\n"


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


def put_plan(folder: Path, script: str = "true", nodes: int = 1) -> None:
    """A run of so many nodes, whose head serves `folder`."""
    folder.mkdir(exist_ok=True)
    details = MachineDetails(folder=str(folder), python=sys.executable, interface="lo")
    spec = replace(SPEC, argv=shell(script), workers=nodes)
    shares = [NodeShare((node,), address="127.0.0.1") for node in range(nodes)]
    plan = make_plan(spec, details, shares, lock="share")
    (folder / "plan.json").write_text(json.dumps(plan))


def test_a_node_whose_head_is_gone_for_good_ends(tmp_path: Path) -> None:
    put_plan(tmp_path)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({**json.loads(plan.read_bytes()), "hold_seconds": 1.0}))
    link.write_note(str(tmp_path), link.HEAD, ["127.0.0.1"], 1, "token")
    (tmp_path / "nodes/0").mkdir(parents=True)
    node = [sys.executable, "-c", START.format("node"), str(tmp_path / "nodes/0")]
    assert subprocess.run(node, timeout=PATIENCE, check=False).returncode == 0


@pytest.mark.slow
def test_what_a_node_sent_before_it_connected_again_does_not_replace_what_it_sent_since(tmp_path: Path) -> None:
    """The head stood still, and its node has given up a connection in which much is still to be read."""
    put_plan(tmp_path)
    with start("head", tmp_path) as head:
        note = until(lambda: link.read_note(str(tmp_path), link.HEAD))
        hello = wire.encode({"token": note["token"], "node": 0, "names": []})
        pieces = [
            wire.encode({"do": "append", "name": "logs/rank-0.log", "offset": number}, b"x") for number in range(15_000)
        ]
        with link.connect(note["addresses"], note["port"], 5.0) as old:
            old.sendall(hello)
            assert old.recv(1000) == b'{"do": "have", "sizes": {}}\n'
            head.send_signal(signal.SIGSTOP)
            old.sendall(b"".join((*pieces, wire.encode({"do": "replace", "name": ".state/state.json"}, b"old"))))
            with link.connect(note["addresses"], note["port"], 5.0) as new:
                new.sendall(hello)
                head.send_signal(signal.SIGCONT)
                assert new.recv(1000) == b'{"do": "have", "sizes": {}}\n'
                new.sendall(
                    wire.encode({"do": "replace", "name": ".state/state.json"}, b"new") + wire.encode({"do": "beat"})
                )
                assert new.recv(1000) == b'{"do": "beat"}\n'
            with suppress(ConnectionError):  # or it has been closed
                old.sendall(wire.encode({"do": "beat"}))
                old.recv(1000)
        assert (tmp_path / "nodes/0/.state/state.json").read_bytes() == b"new"
        head.kill()


def test_a_node_of_a_deleted_run_ends_and_writes_nothing_for_the_next_one_by_its_name(tmp_path: Path) -> None:
    """Slurm's nodes share the folder, and a job that is killed may take half a minute to end."""
    run, state = tmp_path / "run", tmp_path / "run/nodes/0/.state"
    put_plan(run, "trap '' TERM; echo begun; while :; do sleep 0.05; done")
    with start("node", run / "nodes/0") as node:
        log = run / "nodes/0/logs/rank-0.log"
        until(lambda: log.exists() and log.read_text() == "begun\n")
        remove_folder(run)
        for folder in (state, log.parent):
            folder.mkdir(parents=True)
        node.wait(PATIENCE)
    assert [path.name for path in run.rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_a_head_serves_more_nodes_than_a_process_may_usually_have_open_files(tmp_path: Path) -> None:
    put_plan(tmp_path, nodes=100)
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with start("head", tmp_path, preexec_fn=few) as head, ExitStack() as opened:
        note = until(lambda: link.read_note(str(tmp_path), link.HEAD))
        for node in range(100):
            talk = opened.enter_context(link.connect(note["addresses"], note["port"], 5.0))
            talk.sendall(wire.encode({"token": note["token"], "node": node, "names": []}))
            assert talk.recv(1000) == b'{"do": "have", "sizes": {}}\n'
        head.kill()


def test_a_node_gives_signs_of_life_while_it_hands_over_a_large_output(tmp_path: Path) -> None:
    """Which may take longer than a node without them is waited for."""
    here, there, size = tmp_path / "head", tmp_path / "node", 6_000_000
    for folder in (here, there):
        put_plan(folder, f"head -c {size} /dev/urandom > $MLBENCH_OUTPUT_DIR/f")
    archive, beat = (here / f"nodes/0/.state/{name}" for name in ("archive.tar", "beat"))
    with start("head", here) as head:
        note = until(lambda: link.read_note(str(here), link.HEAD))
        with CuttingProxy("127.0.0.1", note["port"]) as proxy:
            proxy.pause = 0.03
            link.write_note(str(there), link.HEAD, ["127.0.0.1"], proxy.port, note["token"])
            (there / "nodes/0").mkdir(parents=True)
            with start("node", there / "nodes/0") as node:
                until(lambda: archive.exists())
                begun = beat.stat().st_mtime
                assert node.wait(PATIENCE) == 0
        head.kill()
    assert archive.stat().st_size > size
    assert beat.stat().st_mtime > begun + 1


@pytest.mark.slow
def test_a_node_is_not_lost_while_the_disk_of_its_head_is_full(tmp_path: Path, small_disk: Path) -> None:
    there = tmp_path / "node"
    script = "head -c 2000000 /dev/zero; sleep 4; echo end"
    for folder in (small_disk, there):
        put_plan(folder, script)
    with start("head", small_disk) as head:
        note = until(lambda: link.read_note(str(small_disk), link.HEAD))
        link.write_note(str(there), link.HEAD, ["127.0.0.1"], note["port"], note["token"])
        (there / "nodes/0").mkdir(parents=True)
        with start("node", there / "nodes/0") as node:
            until(lambda: shutil.disk_usage(small_disk).free == 0)
            beat = small_disk / "nodes/0/.state/beat"
            begun = time.time() + 1
            until(lambda: beat.stat().st_mtime > begun)
            subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
            assert node.wait(PATIENCE) == 0
        head.kill()
    assert (small_disk / "nodes/0/logs/rank-0.log").read_bytes() == bytes(2_000_000) + b"end\n"


def test_a_node_hears_of_the_end_and_of_stacks_that_somebody_wants(tmp_path: Path) -> None:
    head = Head(str(tmp_path), 1, "token", 60.0)
    for name in ("cancel", "stacks", "plan.json"):
        (tmp_path / name).write_text(name)
    head.look_for_notes()
    assert head.notes == {"cancel": b"cancel", "stacks": b"stacks"}
