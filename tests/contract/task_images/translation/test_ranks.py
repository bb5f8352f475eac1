"""The same training on one rank, with accumulation, and on two: step by step, through a checkpoint, to the end."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from task_images.contract import parse_event
from tests.contract.task_images.ranks import RankServer

pytestmark = pytest.mark.slow

# By day, the Transformer alone.
TASKS = {task: pytest.param(task, marks=pytest.mark.nightly) for task in ("awd_lstm", "gnmt")}
TASKS["transformer"] = pytest.param("transformer")


@dataclass
class Trained:
    losses: dict[int, float] = field(default_factory=dict)  # by update
    metrics: dict[str, list[float]] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def train(ranks: RankServer, task: str, size: int, folder: Path, *checkpoints: Path) -> list[Trained]:
    """The training, and with checkpoints the resumed one."""
    variables = {"FOLDERS": json.dumps([str(path) for path in (folder, *checkpoints)]), "TASK": task}
    ended = ranks.run("tests.contract.task_images.translation.ranks", size, folder, {}, **variables)
    assert [one.code for one in ended] == [0] * size, [one.stderr[-3000:] for one in ended]
    found: list[Trained] = []
    for line in ended[0].stdout.splitlines():
        if line.startswith("# "):
            found.append(Trained(parameters=torch.load(folder / f"{line[2:]}.pt")))
        elif found and (event := parse_event(line)):  # the network is measured before the first training
            take(found[-1], event)
    return found


def take(trained: Trained, event: dict[str, Any]) -> None:
    if event["event"] == "result":
        trained.result = event
    elif event["event"] == "metric" and event["name"] == "train_loss":
        trained.losses[event["step"]] = event["value"]
    elif event["event"] == "metric":
        trained.metrics.setdefault(event["name"], []).append(event["value"])


@dataclass
class Runs:
    task: str
    alone: Trained
    together: Trained
    resumed: Trained


@pytest.fixture(scope="module", params=TASKS.values())
def runs(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    [alone] = train(ranks, request.param, 1, one)
    return Runs(request.param, alone, *train(ranks, request.param, 2, two, one))


def of(*tasks: str) -> pytest.MarkDecorator:
    """Of these tasks only."""
    return pytest.mark.parametrize("runs", [TASKS[task] for task in tasks], indirect=True)


def test_two_ranks_train_as_one_with_accumulation_does_dropout_included(runs: Runs) -> None:
    alone, together = runs.alone, runs.together
    assert len(alone.losses) >= 10
    assert list(alone.losses) == list(together.losses)
    assert list(together.losses.values()) == pytest.approx(list(alone.losses.values()), rel=2e-4)
    for name, parameter in alone.parameters.items():
        torch.testing.assert_close(together.parameters[name], parameter, rtol=1e-2, atol=2e-3, msg=name)
    assert together.metrics["val_global_loss"] == pytest.approx(alone.metrics["val_global_loss"], rel=2e-4)
    assert together.result["samples"] == alone.result["samples"]


def test_training_changes_the_model(runs: Runs) -> None:
    losses = list(runs.alone.losses.values())
    assert len(set(losses)) == len(losses)
    if runs.task != "awd_lstm":  # whose text is random numbers
        assert sum(losses[-3:]) < sum(losses[:3]) - 0.05
        assert runs.alone.result["details"]["updates_skipped"] == 0


@pytest.mark.nightly
def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(runs: Runs) -> None:
    """The checkpoint is one rank's, from the middle of an epoch; those that go on are two."""
    whole, resumed = runs.together, runs.resumed
    at = resumed.result["details"]["resumed"]["updates"]
    steps = len(whole.losses) // len(whole.metrics["val_global_loss"])
    assert at % steps != 0, "the checkpoint is from the end of an epoch"
    expected = {step: loss for step, loss in whole.losses.items() if step > at}
    assert list(resumed.losses) == list(expected)
    assert list(resumed.losses.values()) == pytest.approx(list(expected.values()), rel=2e-4)
    # The clock goes on, and so do the counts: a resumed run takes no less than what it resumes had taken.
    assert resumed.result["updates"] == whole.result["updates"]
    assert resumed.result["samples"] == whole.result["samples"]


@of("awd_lstm")
def test_averaged_sgd_survives_a_checkpoint(runs: Runs) -> None:
    whole, resumed = runs.together, runs.resumed
    assert whole.result["details"]["averaged_from_epoch"] == resumed.result["details"]["averaged_from_epoch"] <= 3
    assert resumed.metrics["val_global_loss"][-1] == pytest.approx(whole.metrics["val_global_loss"][-1], rel=1e-4)


@of("gnmt", "transformer")
def test_bleu_is_of_the_whole_test_set(runs: Runs) -> None:
    for trained in (runs.alone, runs.together):
        details = trained.result["details"]
        assert details["bleu_signature"].startswith("nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:2")
        assert details["bleu_cased"] <= details["bleu_lowercased"]
        assert details["test_pairs"] == 6
        assert details["reference"].endswith(".de")
        assert len(details["samples"]) == 5
    assert runs.together.metrics["val_global_BLEU-Score"] == pytest.approx(
        runs.alone.metrics["val_global_BLEU-Score"], abs=5.0
    )
