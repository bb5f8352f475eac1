"""The preset `tiny` of each task, as an engine starts it: two ranks, to the light goal."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.contract import parse_event
from tests.sampling import sampled

TASKS = ("wikitext2_awd_lstm", "wmt16_gnmt", "wmt17_transformer")
ROOT = Path(__file__).parents[5]


@pytest.mark.parametrize("name", sampled(TASKS, keep=TASKS[:1]))
def test_tiny_reaches_its_light_goal_on_two_ranks(name: str, tmp_path: Path) -> None:
    task = load_task(name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "MLBENCH_GOAL": "light",
        "MLBENCH_OUTPUT_DIR": str(tmp_path),
        "MLBENCH_PARAMETERS": json.dumps(task.resolve("tiny")),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *task.command[1:]],
            cwd=ROOT,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][-2000:] + outputs[1][-2000:]
    events = [event for line in outputs[0].splitlines() if (event := parse_event(line))]
    [result] = [event for event in events if event["event"] == "result"]
    assert result["outcome"] == "goal_reached"
    assert result["synthetic"] == (name != "wikitext2_awd_lstm")
    assert result["goal"]["kind"] == "light"
    assert task.goal is not None
    assert result["goal"]["metric"] == task.goal.metric
    assert result["details"]["communication"]["bytes"] > 0
    assert sum(timing["rank0"] for timing in result["timings"].values()) == pytest.approx(
        result["wall_seconds"], rel=1e-3
    )
    others = [event["event"] for line in outputs[1].splitlines() if (event := parse_event(line))]
    assert set(others) == {"environment"}
