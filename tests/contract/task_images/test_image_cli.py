"""How an image classification that diverges ends, seen from the command line."""

import json
from pathlib import Path

import pytest

from mlbench_cli.app import run

SMALL = {"training_images": 64, "validation_images": 10, "epochs": 2}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "home"


@pytest.mark.usefixtures("forked_ranks")
def test_a_loss_that_is_not_finite_is_a_finding_and_never_a_goal(capsys: pytest.CaptureFixture[str]) -> None:
    """Any accuracy at all would do for this goal."""
    wild = {"learning_rate": 100, "weight_decay": 1, "batch_size": 2, "goal_full": 0, "goal_light": 0, **SMALL}
    changes = [word for name, value in wild.items() for word in ("--set", f"{name}={value}")]
    assert (
        run(["run", "x", "1", "--task", "cifar10_resnet20", "--preset", "tiny", "--yes", "-o", "json", *changes]) == 7
    )
    [one] = json.loads(capsys.readouterr().out)["runs"]
    assert one["outcome"] == "failed"
    folder = Path(one["folder"])
    [finding] = json.loads((folder / "findings.json").read_text())["findings"]
    assert (finding["code"], finding["retryable"]) == ("rank_crashed", False)
    assert any("the training has diverged" in line for line in finding["evidence"]["log"])
    assert json.loads((folder / "result.json").read_text())["outcome"] == "failed"
