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


SERVED = {"strategy": "parameter-server"}


@pytest.mark.nightly
def test_two_workers_reach_the_goal_with_a_parameter_server(tmp_path: Path) -> None:
    first, second = run(tmp_path, 2, **SERVED)
    result = first.result
    assert result["outcome"] == "goal_reached"
    assert result["goal"]["value"] >= 80.0
    # An update is one batch of one worker: the data set once per epoch in batches of 32.
    assert (result["updates"], result["samples"]) == (19 * result["epochs"], 600 * result["epochs"])
    details = result["details"]
    assert (details["global_batch"], details["options"]["strategy"]) == (32, "parameter-server")
    found = details["communication"]
    assert found["updates"] == result["updates"]
    assert 0 < found["staleness"]["mean"] <= found["staleness"]["max"] <= 14
    assert [event["world_size"] for event in second.events("environment")] == [2]
    assert not second.events("result")
    assert "Traceback" not in second.stderr  # TensorFlow prints notices of its own


@pytest.mark.nightly
def test_one_worker_with_a_parameter_server_trains_as_plain_sgd(tmp_path: Path) -> None:
    (plain,) = run(tmp_path / "plain", 1, **SMALL, epochs=3, nesterov=True)
    (served,) = run(tmp_path / "served", 1, **SMALL, epochs=3, nesterov=True, **SERVED)
    for name in ("train_loss", "loss"):
        expected = [point[name] for point in plain.result["details"]["curve"]]
        assert [point[name] for point in served.result["details"]["curve"]] == pytest.approx(expected, rel=1e-4)
    assert served.result["details"]["communication"]["staleness"] == {"mean": 0.0, "max": 0.0}


@pytest.mark.nightly
def test_each_worker_of_a_parameter_server_makes_the_updates_of_the_protocol(tmp_path: Path) -> None:
    protocol = {"blocks_after": 1, "blocks": 2, "block_updates": 2}
    result = run(tmp_path, 2, **SMALL, **SERVED, **protocol)[0].result
    assert (result["outcome"], result["goal"], result["updates"]) == ("completed", None, 8)
    assert [len(times) for times in result["details"]["throughput_protocol"]["seconds"]] == [1, 1]
    assert result["samples"] == 8 * 16


@pytest.mark.nightly
def test_workers_of_a_parameter_server_end_when_rank_0_is_gone(tmp_path: Path) -> None:
    with started(tmp_path, epochs=100_000, **SERVED) as processes:
        os.kill(processes[0].pid, signal.SIGKILL)
        assert processes[1].wait(SECONDS) == 75
        said = (tmp_path / "err-1").read_text()
        assert "rank 1: lost rank 0" in said
        assert "Traceback" not in said
