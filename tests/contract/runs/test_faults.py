"""A training with faults ends with the loss curve of one without: real ranks, killed in the middle of an epoch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TASKS: dict[str, tuple[str, ...]] = {
    # Augmentation by a generator that goes on from batch to batch, BatchNorm, momentum, and a plateau schedule.
    "digits_resnet": ("--preset", "tiny", "--set", "goal_full=99.9", "--set", "epochs=2"),
    # Distributed checkpoints, to which each rank adds what only it has (powersgd: its residuals and factors).
    "gpt_pretraining": (
        "--preset",
        "tiny",
        "--set",
        "goal_full=0.1",
        "--set",
        "steps=60",
        "--set",
        "evaluate_every=10",
    ),
}
MOMENT = "at 0.2s kill rank 1"  # after the first update, so that some work is lost
TIMES = ("seconds", "samples_per_second", "tokens_per_second")


def run(home: Path, name: str, *options: str) -> dict[str, Any]:
    """The result of a run of two ranks in a store of its own."""
    words = [sys.executable, "-m", "mlbench_cli", "run", name, "2", "--share-machine", *options]
    environment = {**os.environ, "MLBENCH_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in home.glob("runs/*/result.json"):
        result: dict[str, Any] = json.loads(path.read_bytes())
        if result["run"] == f"{name}-2":
            return result
    raise AssertionError(f"{name} has no result")


@pytest.mark.nightly
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(
    ("task", "method"),
    [
        *(("digits_resnet", method) for method in ("bsp", "powersgd", "localsgd")),
        *(("gpt_pretraining", method) for method in ("powersgd", "localsgd", "fsdp2")),
    ],
)
def test_the_loss_curve_is_that_of_a_run_without_faults(tmp_path: Path, task: str, method: str) -> None:
    options = ("--task", task, *TASKS[task], "--method", method, "--on-failure", "restart")
    every = ("--set", "run.checkpoint_every=5")
    calm = run(tmp_path, "calm", *options, *every)
    script = f"{MOMENT}; at 2s kill rank 0"
    if task == "gpt_pretraining":  # in the middle, after some checkpoints
        script = f"at {0.4 * calm['task_seconds']['wall']:.2f}s kill rank 1"
    faulted = run(tmp_path, "faulted", *options, *every, "--faults", script)
    assert faulted["faults"]["injected"] >= 1
    assert faulted["faults"]["attempts"] >= 2
    if task == "gpt_pretraining":
        records = [json.loads(path.read_bytes()) for path in tmp_path.glob("runs/*/faults.json")]
        assert max(each["resumed_update"] or 0 for record in records for each in record["attempts"]) >= 5
    for one, other in zip(calm["details"]["curve"], faulted["details"]["curve"], strict=True):
        assert {"update", "train_loss", "loss"} <= set(one)
        for name in set(one) - set(TIMES):
            assert one[name] == pytest.approx(other[name], rel=1e-6), name
    assert faulted["updates"] == calm["updates"]
    assert faulted["task_seconds"]["wall"] > calm["task_seconds"]["wall"]
