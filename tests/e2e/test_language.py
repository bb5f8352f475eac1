"""The tiny presets of the language tasks, through the command line on this machine: two ranks reach the light goal."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Mlbench

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("task", ["wikitext2_awd_lstm", "wmt16_gnmt", "wmt17_transformer"])
def test_tiny_reaches_its_light_goal(task: str, tmp_path: Path) -> None:
    mlbench = Mlbench(tmp_path / "home")
    mlbench("run", "tiny", "2", "--task", task, "--preset", "tiny", "--light", "--require-goal", "--yes", timeout=500)
    assert mlbench.json("status", "tiny-2")["outcome"] == "goal_reached"
    mlbench("download", "tiny-2", "--output", str(tmp_path / "tiny.zip"))
    mlbench("verify", str(tmp_path / "tiny.zip"))
