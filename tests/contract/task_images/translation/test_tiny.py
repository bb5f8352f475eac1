"""The preset `tiny` of each task, as an engine starts it: two ranks, to the light goal."""

from pathlib import Path

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.contract import parse_event
from tests.contract.task_images.ranks import RankServer

TASKS = ("wikitext2_awd_lstm", "wmt16_gnmt", "wmt17_transformer")


@pytest.mark.nightly
@pytest.mark.parametrize("name", TASKS)
def test_tiny_reaches_its_light_goal_on_two_ranks(ranks: RankServer, name: str, tmp_path: Path) -> None:
    task = load_task(name)
    ended = ranks.run(" ".join(task.command[2:]), 2, tmp_path, task.resolve("tiny"), MLBENCH_GOAL="light")
    assert [one.code for one in ended] == [0, 0], ended[0].stderr[-2000:] + ended[1].stderr[-2000:]
    result = ended[0].result
    assert result["outcome"] == "goal_reached"
    assert result["synthetic"] == (name != "wikitext2_awd_lstm")
    assert result["goal"]["kind"] == "light"
    assert task.goal is not None
    assert result["goal"]["metric"] == task.goal.metric
    assert result["details"]["communication"]["bytes"] > 0
    assert sum(timing["rank0"] for timing in result["timings"].values()) == pytest.approx(
        result["wall_seconds"], rel=1e-3
    )
    others = [event["event"] for line in ended[1].stdout.splitlines() if (event := parse_event(line))]
    assert set(others) == {"environment"}
