"""How an image classification ends that diverges, or misses its goal: seen from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run

TINY = ["--task", "cifar10_resnet20", "--preset", "tiny", "--yes", "-o", "json"]
SMALL = ["--set", "training_images=64", "--set", "validation_images=10", "--set", "epochs=2"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "home"


def ended(capsys: pytest.CaptureFixture[str], *more: str, code: int) -> dict[str, Any]:
    assert run(["run", "x", "1", *TINY, *SMALL, *more]) == code
    [only] = json.loads(capsys.readouterr().out)["runs"]
    return only


def test_a_loss_that_is_not_finite_is_a_finding_and_never_a_goal(capsys: pytest.CaptureFixture[str]) -> None:
    """Any accuracy at all would do for this goal."""
    wild = ("--set", "goal_full=0", "--set", "goal_light=0", "--set", "rate=100", "--set", "weight_decay=1")
    one = ended(capsys, *wild, "--set", "batch_size=2", code=7)
    assert one["outcome"] == "failed"
    folder = Path(one["folder"])
    [finding] = json.loads((folder / "findings.json").read_text())["findings"]
    assert (finding["code"], finding["retryable"]) == ("rank_crashed", False)
    assert any("the training has diverged" in line for line in finding["evidence"]["log"])
    assert json.loads((folder / "result.json").read_text())["outcome"] == "failed"


def test_a_missed_goal_fails_only_where_it_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    one = ended(capsys, "--set", "goal_full=100", "--require-goal", code=7)
    assert (one["outcome"], one["exit_code"]) == ("goal_missed", 7)
    assert one["result"]["goal"]["value"] < 100
