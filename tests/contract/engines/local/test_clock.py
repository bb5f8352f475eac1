"""A wall clock that is set while a run goes on: no figure comes of it, and the archive says so."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent import clock
from mlbench_cli.agent.clock import ClockWatch
from mlbench_cli.model.spec import OPEN
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.archive.verify import verify
from tests.contract.local_runs import Lab, python
from tests.fakes.clock_shift import ClockShift

GOALS = {"goal_full": 80.0, "goal_light": 70.0}
SCRIPT = """
import os, time
def report(value):
    print('@mlbench {"v":1,"event":"metric","rank":0,"time":%r,"name":"val_global_Prec@1","value":%r}' % (
        time.time(), value), flush=True)
report(10)
time.sleep(0.2)
if STEP:
    os.symlink(str(STEP), os.environ["CLOCK_SHIFT"])
time.sleep(0.2)
report(90)
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 3600, -3600, 5, -5, 0.1, -0.1])
def test_a_set_clock_gives_no_official_line_and_changes_no_duration(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    for name, value in ClockShift(tmp_path).variables.items():
        monkeypatch.setenv(name, value)
    asked: dict[str, Any] = {"task": "cifar10_resnet20", "preset": OPEN, "parameters": GOALS}
    run = lab.start(python(SCRIPT.replace("STEP", str(step))), price={"per_hour": 36.0}, **asked)
    judgement = seal(run, lab.end(run))
    result = judgement.result
    observation = json.loads((run.folder / "observation.json").read_bytes())
    (worker,) = observation["workers"]
    assert 0.4 <= worker["seconds"] < 300
    assert worker["seconds"] == observation["seconds"] == result["wall_seconds"]
    assert result["price"] is not None
    assert result["price"]["amount"] == pytest.approx(36.0 * worker["seconds"] / 3600, abs=6e-5)  # four digits
    codes = [finding.code for finding in judgement.findings]
    if step:
        assert codes == ["clock_stepped"]
        assert result["official_line"] is None
        assert judgement.official_text.startswith("No official result: its evidence is in doubt (clock_stepped;")
        assert result["task_seconds"]["wall"] is None
        (found,) = observation["clocks"]
        assert found["stepped_seconds"] == pytest.approx(abs(step), abs=0.05)
    else:
        assert codes == []
        found = re.match(r"80% Top 1 Validation Accuracy reached in ([0-9.]+) s", str(result["official_line"]))
        assert found is not None
        assert float(found[1]) <= worker["seconds"]
    assert verify(run.folder).ok


def test_steps_add_up_and_slewing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter([(0.0, 100.0, 1e-5), (10.0, 100.004, 1e-5), (11.0, 95.0, 1e-5), (12.0, 95.1, 1e-5), (13.0, 95.2, 0.1)])
    monkeypatch.setattr(clock, "read_clocks", lambda: next(reads))
    watch = ClockWatch()
    assert [watch.check() for _ in range(4)] == [0.0, 5.004, 5.104, 5.104]  # the last was read with a pause between
