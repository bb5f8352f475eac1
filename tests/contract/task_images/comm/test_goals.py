"""Convergence: the presets' defaults train the digits to their goal on two ranks, except those that say why not."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.comm.presets import PRESETS, resolve
from tests import NIGHTLY
from tests.contract.task_images.ranks import RankServer

TASK = "task_images.digits_resnet"
INEXACT = (
    *("fp16", "bf16", "ef-signsgd", "gtopk", "randomk", "qsgd", "powersgd"),
    *("localsgd", "postlocalsgd", "dpsgd", "choco", "async-ps", "ssp-ps"),
)


def train(ranks: RankServer, folder: Path, name: str, axes: dict[str, str] | None = None, **changes: Any) -> Any:
    """The result of the digits' preset `tiny` with a method on two ranks."""
    method = resolve(name, axes)
    folder.mkdir()
    parameters = load_task("digits_resnet").resolve("tiny", changes)
    variables = {"MLBENCH_METHOD": json.dumps(method.to_dict())}
    started = ranks.start(TASK, 2, folder, parameters, variables, servers=method.server_count)
    ended = ranks.wait(started)
    assert [one.code for one in ended] == [0] * len(ended), (name, [one.stderr[-1000:] for one in ended])
    return ended[0].result


@pytest.mark.slow
@pytest.mark.parametrize("name", INEXACT if NIGHTLY else ("qsgd",))
def test_what_is_not_the_exact_mean_reaches_the_goal_all_the_same(ranks: RankServer, tmp_path: Path, name: str) -> None:
    """Codecs, drifting replicas and asynchronous servers; the exact mean gives the same training as DDP does, see
    checks.py. `benchmarks/goals.py` trains with every preset. By day the updates of each kind are checked in checks.py
    and server_checks.py."""
    assert PRESETS[name].goal
    result = train(ranks, tmp_path / name, name)
    assert result["outcome"] == "goal_reached", result["goal"]


def test_presets_that_are_not_meant_to_reach_a_goal_say_why() -> None:
    assert {name for name, preset in PRESETS.items() if not preset.goal} == {"noop", "signsgd-mv", "topk"}
    assert all(preset.goal or preset.note for preset in PRESETS.values())


@pytest.mark.nightly
@pytest.mark.slow
def test_topk_reaches_the_goal_with_error_feedback_and_not_without(ranks: RankServer, tmp_path: Path) -> None:
    """One number in a thousand: what is left out is needed. Feedback takes 8 epochs; without it 58 % after all 20."""
    density = {"codec": "topk:0.001"}
    with_feedback = train(ranks, tmp_path / "with", "eftopk", density)
    without = train(ranks, tmp_path / "without", "topk", density)
    assert with_feedback["outcome"] == "goal_reached"
    assert without["outcome"] == "goal_missed"
    assert without["epochs"] == 20 > with_feedback["epochs"]
