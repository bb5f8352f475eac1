"""What takes long is waited for, and ends when it shall: slow disks, runs of many hours, jobs that are suspended."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from mlbench_cli.engines.follow import read_log
from mlbench_cli.engines.placement import NodeShare
from mlbench_cli.engines.plan import make_plan
from mlbench_cli.model.cluster_details import MachineDetails
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs import supervise
from tests.contract.engines.labs import EngineLab, install_commands
from tests.contract.local_runs import PATIENCE, shell, until

WRITES = "echo $RANK | tee $MLBENCH_OUTPUT_DIR/a > $MLBENCH_OUTPUT_DIR/b; echo written; "


@pytest.fixture(params=["hosts", pytest.param("slurm", marks=pytest.mark.nightly)])
def lab(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLab]:
    monkeypatch.setenv("LAB_SETUP", "seq 20000")  # of a Slurm job
    for name, value in install_commands(tmp_path / "commands").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "home").mkdir()
    with closing(EngineLab(request.param, tmp_path / "home")) as lab:
        yield lab


@contextmanager
def hold_up(*paths: Path) -> Iterator[Callable[[], bool]]:
    """Whoever opens one of these files waits until the end of the block, but at most 45 s for each: see F_SETLEASE in
    fcntl(2). Gives what says whether somebody waits."""
    usual = signal.signal(signal.SIGIO, signal.SIG_IGN)
    held = [os.open(path, os.O_RDWR) for path in paths]
    try:
        for descriptor in held:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield lambda: any(fcntl.fcntl(descriptor, fcntl.F_GETLEASE) != fcntl.F_WRLCK for descriptor in held)
    finally:
        for descriptor in held:
            os.close(descriptor)
        signal.signal(signal.SIGIO, usual)


def output_of(lab: EngineLab, run: Run, rank: int) -> list[Path]:
    """What a rank has written on its machine, once it has."""
    assert next(read_log(lab.engine, run, rank, follow=True)).text == b"written\n"
    place = lab.places(run)[rank if lab.kind == "hosts" else 0]
    return [place / f"{rank}/output/rank-{rank}/{name}" for name in "ab"]


@pytest.mark.slow
@pytest.mark.parametrize("lab", ["hosts"], indirect=True)  # Slurm itself kills what has not ended after its KillWait
def test_a_node_that_packs_its_output_is_not_killed_when_its_run_is_canceled(lab: EngineLab) -> None:
    run = lab.start(shell(f"{WRITES} exec sleep 600"), workers=2)
    with hold_up(*output_of(lab, run, 1)):
        lab.engine.cancel(run)
        assert lab.engine.look(run).ended is None
    assert lab.end(run).ended == "canceled"
    assert lab.engine.head(run).fetch().complete
    assert (run.folder / "output/rank-1/b").read_text() == "1\n"


@pytest.mark.parametrize("lab", ["hosts"], indirect=True)
def test_a_file_that_vanishes_while_a_node_packs_is_named_and_the_others_are_kept(lab: EngineLab) -> None:
    run = lab.start(shell(f"{WRITES} exec sleep 600"))
    first, last = output_of(lab, run, 0)
    with hold_up(first) as is_waited_for:
        Path(lab.places(run)[0].parent, "cancel").touch()
        until(is_waited_for)
        last.unlink()
    end = lab.end(run)
    assert lab.engine.head(run).fetch().complete
    assert (run.folder / "output/rank-0/a").read_text() == "0\n"
    (found,) = [finding.summary for finding in end.findings if finding.code == "output_incomplete"]
    assert "could not pack all of its output: output/rank-0/b (No such file or directory)" in found


@pytest.mark.nightly
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_packs_its_output_for_more_than_a_minute_is_not_lost(
    lab: EngineLab, tmp_path: Path, node: int
) -> None:
    gate = tmp_path / "gate"
    script = f"{WRITES} if test $RANK = {node}; then until test -e {gate}; do sleep 0.05; done; else sleep 70; fi"
    run = lab.start(shell(script), workers=2)
    paths = output_of(lab, run, node)
    with hold_up(*paths):
        gate.touch()
        end = lab.end(run)
    assert end.ended == "exited"
    assert lab.engine.head(run).fetch().complete
    assert (run.folder / f"output/rank-{node}/b").read_text() == f"{node}\n"


@pytest.mark.slow
def test_a_node_gives_signs_of_life_and_is_canceled_however_long_its_run_has_taken(tmp_path: Path) -> None:
    """Samples get rarer as time passes: after ten hours there is one a minute."""
    details = MachineDetails(folder=str(tmp_path), python=sys.executable, interface="lo")
    spec = RunSpec("long-1", "c", "hosts", "custom", "custom", shell("exec sleep 600"), "gloo", 1)
    plan = make_plan(spec, details, [NodeShare((0,), address="127.0.0.1")], lock="share")
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    state, beat = (tmp_path / f"nodes/0/.state/{name}" for name in ("state.json", "beat"))
    late = "import sys; from mlbench_cli.agent import agent, node; agent.SAMPLES = 1e-6; node.main(sys.argv[1:])"
    with subprocess.Popen([sys.executable, "-c", late, str(tmp_path / "nodes/0")]) as node:
        until(lambda: state.exists() and json.loads(state.read_text())["started"])
        begun = time.time() + 6
        until(lambda: beat.stat().st_mtime > begun)
        (tmp_path / "cancel").touch()
        node.wait(PATIENCE)
    assert json.loads(state.read_text())["ended"] == "canceled"


def test_an_agent_that_was_stopped_ends_its_run_soon_after_its_deadline(tmp_path: Path) -> None:
    details = MachineDetails(folder=str(tmp_path), python=sys.executable, interface="lo")
    spec = RunSpec("long-1", "c", "hosts", "custom", "custom", shell("exec sleep 600"), "gloo", 1, timeout=2.0)
    plan = make_plan(spec, details, [NodeShare((0,), address="127.0.0.1")], lock="share")
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    soon = "import sys; from mlbench_cli.agent import node, processes; processes.OVERDUE_SECONDS = 1.0; "
    with subprocess.Popen([sys.executable, "-c", f"{soon}node.main(sys.argv[1:])", str(tmp_path / "nodes/0")]) as node:
        state = tmp_path / "nodes/0/.state/state.json"
        until(lambda: state.exists() and json.loads(state.read_text())["started"])
        node.send_signal(signal.SIGSTOP)
        node.wait(PATIENCE)
    assert json.loads(state.read_text())["ended"] in ("deadline", "canceled")
    assert (tmp_path / "nodes/0/.state/results.json").exists()


def test_the_time_until_a_run_gives_up_a_missing_node_is_not_part_of_its_timeout(tmp_path: Path) -> None:
    details = MachineDetails(folder=str(tmp_path), python=sys.executable, interface="lo")
    spec = RunSpec(
        "late-2", "c", "hosts", "custom", "custom", shell("sleep 1"), "gloo", 2, timeout=3.0, absent_seconds=4.0
    )
    shares = [NodeShare((worker,), address="127.0.0.1") for worker in range(2)]
    (tmp_path / "plan.json").write_text(json.dumps(make_plan(spec, details, shares, lock="share")))
    with subprocess.Popen([sys.executable, "-m", "mlbench_cli.agent.node", str(tmp_path / "nodes/0")]) as node:
        node.wait(PATIENCE)
    assert json.loads((tmp_path / "nodes/0/.state/state.json").read_text())["ended"] == "exited"


def change_job(state: str) -> None:
    """The state of the only job, as squeue gives it."""
    (path,) = Path(os.environ["SLURM_CONF"]).parent.glob("job-*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "state": state}))


@pytest.mark.nightly
def test_a_run_whose_agents_were_all_stopped_for_a_while_goes_on(lab: EngineLab) -> None:
    run = lab.start(shell("exec sleep 75"), workers=2)
    agents = lab.agents(run)
    until(lambda: len(lab.processes(run)) == 2)
    for agent in agents:
        os.kill(agent, signal.SIGSTOP)
    time.sleep(65)
    for agent in agents:
        os.kill(agent, signal.SIGCONT)
    assert lab.end(run).ended == "exited"


@pytest.mark.parametrize("lab", ["slurm"], indirect=True)
def test_a_run_goes_on_when_slurm_suspends_its_job_and_when_its_controller_is_silent(
    lab: EngineLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PENDING_POLL", "RUNNING_POLL"):
        monkeypatch.setattr(f"mlbench_cli.engines.slurm.engine.{name}", 0.0)
    gate = tmp_path / "gate"
    run = lab.start(shell(f"until test -e {gate}; do sleep 0.02; done"))

    def codes() -> list[str]:
        seen = lab.engine.look(run)
        return [str(seen.ended), *(finding.code for finding in seen.findings)]

    until(lambda: lab.processes(run))
    (state,) = lab.states(run)
    kept, squeue = state.read_text(), tmp_path / "commands/bin/squeue"
    # as from a node, whose processes the login node does not see, and which has been stopped for a while
    state.write_text(json.dumps({**json.loads(kept), "host": "n1", "boot_id": "its own"}))
    (agent,) = lab.agents(run)
    os.kill(agent, signal.SIGSTOP)
    os.utime(state.with_name("beat"), (0, 0))
    change_job("SUSPENDED")
    assert codes() == ["None", "job_suspended"]
    change_job("RUNNING")
    os.kill(agent, signal.SIGCONT)
    until(lambda: codes() == ["None"])
    state.write_text(kept)
    usual = squeue.read_text()
    squeue.write_text("#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n")
    assert codes() == ["None", "controller_silent"]
    squeue.write_text(usual)
    assert codes() == ["None"]
    gate.touch()
    assert supervise.follow(run, lab.engine, lab.store).outcome == "completed"
    assert (run.manifests / "batch.log").read_text().endswith("19999\n20000\n")
