"""Convergence: the defaults train the digits to their goal on two ranks, except those that say why not."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.methods import FILES
from task_images.methods.catalog import find_class
from tests.contract.task_images.ranks import RankServer

TASK = "task_images.run digits_resnet"


def train(ranks: RankServer, folder: Path, name: str, **options: str) -> Any:
    """The result of the digits' preset `tiny` with a method on two ranks."""
    folder.mkdir()
    variables = {"MLBENCH_METHOD": json.dumps({"name": name, **options})}
    ended = ranks.run(TASK, 2, folder, load_task("digits_resnet").resolve("tiny", {}), **variables)
    assert [one.code for one in ended] == [0] * len(ended), (name, [one.stderr[-1000:] for one in ended])
    return ended[0].result


@pytest.mark.slow
def test_methods_that_are_not_meant_to_reach_a_goal_say_why() -> None:
    methods = [find_class(name) for name in FILES]
    assert {method.name for method in methods if not method.reaches_goals} == {"noop", "signsgd-mv", "topk"}
    assert all(method.reaches_goals or method.note for method in methods)


@pytest.mark.nightly
def test_topk_reaches_the_goal_with_error_feedback_and_not_without(ranks: RankServer, tmp_path: Path) -> None:
    """One number in a thousand: what is left out is needed. Feedback takes 8 epochs; without it 58 % after all 20."""
    with_feedback = train(ranks, tmp_path / "with", "eftopk", density="0.001")
    without = train(ranks, tmp_path / "without", "topk", density="0.001")
    assert with_feedback["outcome"] == "goal_reached"
    assert without["outcome"] == "goal_missed"
    assert without["epochs"] == 20 > with_feedback["epochs"]
