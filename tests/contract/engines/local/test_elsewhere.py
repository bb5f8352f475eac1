"""The same folder seen from another PID namespace or host: nothing is taken for dead that may be alive."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.errors import UsageError
from mlbench_cli.results.archive.verify import find_problems
from mlbench_cli.runs import supervise
from tests.contract.local_runs import SLEEP, Lab

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc"]


def elsewhere(lab: Lab, *argv: str) -> "subprocess.CompletedProcess[str]":
    """A command in a PID namespace of its own, as in a container that mounts the same folder."""
    return subprocess.run(
        [*UNSHARE, sys.executable, "-m", "mlbench_cli", *argv],
        env={**os.environ, "MLBENCH_HOME": str(lab.store.folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_running_run_is_running_in_another_pid_namespace(lab: Lab) -> None:
    if not shutil.which("unshare") or subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a PID namespace cannot be made here: it needs root")
    run = lab.start(SLEEP)
    shown = json.loads(elsewhere(lab, "status", run.name, "-o", "json").stdout)
    assert (shown["state"], shown["outcome"], shown["ended"]) == ("submitted", None, None)
    assert [rank["phase"] for rank in shown["ranks"]] == ["running"]
    assert not (run.folder / "observation.json").exists()
    finished = supervise.cancel(run, lab.engine, lab.store)
    assert finished is not None
    assert finished.outcome == "canceled"
    assert find_problems(run.folder) == []


def test_from_another_host_nothing_is_known_nothing_decided_and_no_process_signaled(lab: Lab) -> None:
    run = lab.start(SLEEP)
    path = run.folder / ".state" / "state.json"
    state = path.read_bytes()
    with subprocess.Popen(["sleep", "600"]) as bystander:
        foreign = {"host": "login-2", "boot_id": "that of login-2", "pid": bystander.pid, "deadline": 0.0}
        path.write_text(json.dumps({**json.loads(state), **foreign}))
        observation = lab.engine.look(run)
        assert observation.ended is None
        assert [finding.code for finding in observation.findings] == ["unknown_from_here"]
        assert "login-2" in observation.findings[0].summary
        with pytest.raises(UsageError, match="cannot be reached"):
            lab.engine.cancel(run)
        head = LocalEngine().head(run)
        head.print_stacks()
        head.wait(0.0)
        time.sleep(0.1)
        assert bystander.poll() is None
        bystander.kill()
    path.write_bytes(state)
