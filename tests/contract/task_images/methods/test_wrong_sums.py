"""Communication that gives wrong sums ends a run with exit code 7 and a finding: shown with a copy that gives them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PACKAGES = ("mlbench_cli", "providers", "templates", "task_images")
RIGHT = "        return self.link.start_all_reduce(message.flat).wait\n"
# One number of every message, on one rank.
WRONG = "        message.flat[-1] += self.world.rank\n" + RIGHT


@pytest.mark.nightly
def test_a_failed_self_check_ends_the_run_with_a_finding(tmp_path: Path) -> None:
    """By day the parts: the check finds it (checks.py), such an error is exit code 70 (test_collective_runs.py), which
    is this finding (engines/local/test_endings.py)."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name)
    source = tmp_path / "task_images" / "methods" / "buckets.py"
    text = source.read_text("utf-8")
    assert RIGHT in text
    source.write_text(text.replace(RIGHT, WRONG), "utf-8")
    home = tmp_path / "home"
    words = ["run", "wrong", "2", "--task", "digits_resnet", "--preset", "tiny", "--method", "fusion"]
    environment = {**os.environ, "MLBENCH_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mlbench_cli", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert "communication between ranks gives wrong results" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    [findings] = home.rglob("findings.json")
    [finding] = json.loads(findings.read_text("utf-8"))["findings"]
    assert (finding["code"], finding["retryable"]) == ("wrong_result", False)
    assert "the self-check of the method fusion failed" in " ".join(finding["evidence"]["log"])
    result = json.loads(findings.with_name("result.json").read_text("utf-8"))
    assert (result["outcome"], result["exit_code"], result["goal"]["reached"]) == ("failed", 70, False)
    assert "Method of communication: fusion" in findings.with_name("official_result.txt").read_text("utf-8")
