"""The TensorFlow task in real processes. Skipped if TensorFlow is not installed: pip install -e '.[tensorflow]'."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.contract import CATEGORIES
from tests.contract.task_images.ranks import ROOT, Ended, environments, launch_within

# Importing TensorFlow and tracing its graphs takes most of the time, several times as long on a machine that is busy.
SECONDS = 900.0
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None,
        reason="TensorFlow, 1.2 GB, is not installed (extra: tensorflow)",
    ),
    pytest.mark.timeout(3 * SECONDS),
]
MODULE = "task_images.run cifar10_resnet20_tensorflow"
GRPC = {"MLBENCH_BACKEND": "grpc"}
SMALL = {"training_images": 64, "validation_images": 32, "batch_size": 16, "goal_full": 100.0}


def tiny(**changes: Any) -> dict[str, Any]:
    return load_task("cifar10_resnet20_tensorflow").resolve("tiny", changes)


def run(folder: Path, size: int, **changes: Any) -> list[Ended]:
    folder.mkdir(exist_ok=True)
    ended = launch_within(SECONDS, MODULE, size, folder, tiny(**changes), GRPC)
    assert [one.code for one in ended] == [0] * size, ended[0].stderr
    return ended


@pytest.mark.parametrize("size", [1, 2])
def test_tiny_reaches_its_goal(tmp_path: Path, size: int) -> None:
    ended = run(tmp_path, size)
    result = ended[0].result
    assert (result["outcome"], result["synthetic"]) == ("goal_reached", True)
    assert result["goal"]["value"] >= 80.0
    assert set(result["timings"]) == set(CATEGORIES)
    assert sum(times["rank0"] for times in result["timings"].values()) == pytest.approx(
        result["wall_seconds"], rel=0.01
    )
    # The data set once per epoch, whatever the number of ranks.
    assert result["samples"] == 600 * result["epochs"]
    assert result["details"]["global_batch"] == 32 * size
    steps = -(-600 // (32 * size))
    assert result["updates"] == steps * result["epochs"]
    sent = result["details"]["communication"]
    parameters = result["details"]["parameters"]
    assert parameters == 78106  # as the same model in torch has
    assert sent == {
        "messages": result["updates"] * (size > 1),
        "bytes": 4 * parameters * result["updates"] * (size > 1),
        "updates": result["updates"],
    }
    assert (result["timings"]["communication"]["rank0"] > 0) == (size > 1)
    assert ended[0].events("environment")[0]["framework"] == "tensorflow"
    assert ended[0].metric("val_global_Prec@1") == [point["Prec@1"] for point in result["details"]["curve"]]
    assert all(not one.events("result") and not one.events("metric") for one in ended[1:])
    assert {"loading", "training", "validation", "finished"} == {event["phase"] for event in ended[0].events("phase")}


def test_a_budget_ends_the_training(tmp_path: Path) -> None:
    result = run(tmp_path, 1, **SMALL, epochs=100_000, budget_seconds=1.0)[0].result
    assert (result["outcome"], result["budget_seconds"]) == ("budget_spent", 1.0)
    assert result["wall_seconds"] >= 1.0
    assert result["details"]["measured_at_seconds"] >= 1.0


def test_throughput_is_measured_by_the_protocol(tmp_path: Path) -> None:
    protocol = {"blocks_after": 1, "blocks": 2, "block_updates": 2}
    result = run(tmp_path, 2, **SMALL, **protocol)[0].result
    assert (result["outcome"], result["goal"], result["updates"]) == ("completed", None, 4)
    assert [len(times) for times in result["details"]["throughput_protocol"]["seconds"]] == [2, 2]


def test_a_training_that_diverges_is_no_result(tmp_path: Path) -> None:
    steep = tiny(**SMALL, learning_rate=100.0, weight_decay=1.0, epochs=9)
    (ended,) = launch_within(SECONDS, MODULE, 1, tmp_path, steep, GRPC)
    assert ended.code == 1
    assert "has diverged" in ended.stderr
    assert not ended.events("result")


def test_a_rank_that_dies_takes_the_others_with_it(tmp_path: Path) -> None:
    with started(tmp_path, epochs=100_000) as processes:
        os.kill(processes[1].pid, signal.SIGKILL)
        assert processes[0].wait(SECONDS) == 75
        assert "lost another rank" in (tmp_path / "err-0").read_text()


@contextmanager
def started(folder: Path, **changes: Any) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two ranks that train, after their first epoch."""
    processes = []
    for rank, given in enumerate(environments(2, folder, tiny(**SMALL, **changes), GRPC)):
        with open(folder / f"out-{rank}", "wb") as out, open(folder / f"err-{rank}", "wb") as err:
            processes.append(
                subprocess.Popen([sys.executable, "-m", *MODULE.split()], cwd=ROOT, env=given, stdout=out, stderr=err)
            )
    try:
        while "epoch 2/" not in (folder / "out-0").read_text():
            assert processes[0].poll() is None, (folder / "err-0").read_text()
            time.sleep(0.1)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
