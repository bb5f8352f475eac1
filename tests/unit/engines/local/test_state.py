"""What the state that a local agent wrote means for its run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent.processes import boot_id
from mlbench_cli.engines.local.state import (
    Watch,
    observation,
)
from mlbench_cli.model.run import Ending, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.util.times import timestamp

NOW = 1_800_000_000.0
SPEC = RunSpec("x-2", "local", "local", "custom", "custom", ("true",), "gloo", 2)


def a_run(folder: Path, age: float = 0.0) -> Run:
    folder = folder / "runs" / "abc"
    (folder / ".state").mkdir(parents=True, exist_ok=True)
    return Run("abc", SPEC, folder, timestamp(NOW - age))


def rank(number: int, phase: str = "running", **more: Any) -> dict[str, Any]:
    return {
        "rank": number,
        "phase": phase,
        "pid": 100 + number,
        "started": 5.0,
        "finished": None,
        "exit_code": None,
        "signal": None,
        "stopped": False,
        "start_error": None,
        "out_of_memory": None,
        **more,
    }


def write_state(run: Run, *ranks: dict[str, Any], **more: Any) -> None:
    state = {
        "name": "x-2",
        "ranks": ranks or (rank(0), rank(1)),
        "ended": None,
        "stopping": None,
        "first_failed": None,
        "boot_id": boot_id(),
        "host": os.uname().nodename,
        **more,
    }
    path = run.folder / ".state" / "state.json"
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(state))


def look(run: Run) -> Watch:
    watch = Watch(run)
    watch.look()
    return watch


# --- liveness --------------------------------------------------------------------------------------------------------


# --- before there is a state -----------------------------------------------------------------------------------------


# --- with a state ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "state", "phase", "reason"),
    [
        ({"phase": "failed", "exit_code": 3}, {}, "failed", "exited with 3"),
        ({"phase": "failed", "exit_code": 139, "signal": 11}, {}, "failed", "was killed by SIGSEGV"),
        ({"phase": "failed", "start_error": "no file"}, {}, "failed", "could not be started: no file"),
        ({"phase": "failed", "stopped": True}, {"first_failed": 1}, "failed", "stopped: rank 1 failed"),
        ({"phase": "failed", "stopped": True}, {"ended": "deadline"}, "failed", "stopped: deadline"),
        ({"phase": "succeeded", "exit_code": 0}, {}, "succeeded", None),
        ({"pid": None}, {}, "running", "only rank 0 runs the command"),
    ],
)
def test_why_a_rank_ended(
    tmp_path: Path, facts: dict[str, Any], state: dict[str, Any], phase: str, reason: str | None
) -> None:
    run = a_run(tmp_path)
    other = rank(1, "failed", exit_code=3)
    write_state(run, rank(0, **facts), other, **{"ended": "failed", **state})
    worker = observation(run, look(run)).workers[0]
    assert (worker.phase, worker.reason) == (phase, reason)


@pytest.mark.parametrize("ended", ["exited", "failed", "cancelled", "deadline"])
def test_an_end_is_what_the_agent_wrote(tmp_path: Path, ended: str) -> None:
    run = a_run(tmp_path)
    write_state(run, rank(0, "failed", exit_code=3), rank(1), ended=ended, first_failed=0)
    found = observation(run, look(run))
    assert (found.ended, found.first_failed, look(run).rank_ended(1)) == (Ending(ended), 0, True)


# --- clocks and workers ----------------------------------------------------------------------------------------------
