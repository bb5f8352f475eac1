"""An agent that somebody stops does not keep its client waiting for ever, and is seen in the result."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from mlbench_cli.agent import processes
from tests.contract.local_runs import Lab, processes_of, shell, until


def agent_of(lab: Lab) -> int:
    (run,) = lab.runs
    pid: int = json.loads((run.folder / ".state/state.json").read_bytes())["pid"]
    return pid


def test_a_stopped_agent_is_woken_and_ends_its_run(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "OVERDUE_SECONDS", 1.0)
    run = lab.start(shell("exec sleep 300"), timeout=2.0)
    os.kill(agent_of(lab), signal.SIGSTOP)
    assert lab.end(run).ended in ("deadline", "canceled", "lost")
    until(lambda: not processes_of(run))


SLOW_SPY = "#!/bin/sh\nsleep 3\necho the stacks"
WITHOUT_OURS = ("python", "-I", "-c", "import time; time.sleep(300)")  # imports nothing of mlbench's


def test_an_agent_that_prints_many_stacks_at_its_deadline_is_not_killed(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = tmp_path / "bin/py-spy"
    spy.parent.mkdir()
    spy.write_text(SLOW_SPY)
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{spy.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(processes, "OVERDUE_SECONDS", 2.0)  # as if there were more ranks
    run = lab.start(WITHOUT_OURS, workers=2, timeout=1.0)
    assert lab.end(run).ended == "deadline"
    assert b"the stacks" in lab.log(run, 1)


def test_cancel_wakes_a_stopped_agent(lab: Lab) -> None:
    run = lab.start(shell("exec sleep 300"))
    os.kill(agent_of(lab), signal.SIGSTOP)
    lab.engine.cancel(run)
    assert lab.end(run).ended == "canceled"


def test_a_run_whose_agent_was_stopped_for_a_while_says_so(lab: Lab) -> None:
    run = lab.start(shell("exec sleep 9"))
    agent = agent_of(lab)
    os.kill(agent, signal.SIGSTOP)
    time.sleep(7.5)
    os.kill(agent, signal.SIGCONT)
    assert "agent_stalled" in [finding.code for finding in lab.end(run).findings]
