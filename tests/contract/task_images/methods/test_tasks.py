"""Every task in torch with methods of every kind: what is legal trains on two ranks, the rest is refused with why."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import LOCAL
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.launch import Machine, resolve
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import Task, load_catalog, load_task
from tests import NIGHTLY, slow
from tests.contract.task_images.ranks import RankServer

# One method of each kind: forward gates, a codec with feedback, local steps, an outer step, torch's own.
METHODS = ("dear", "eftopk", "localsgd", "slowmo", "zero1", "fsdp2")
# Parameters for a training of a few updates and one validation, on top of the preset `tiny`.
BUDGET = 4.0  # seconds, of which an update takes a tenth on a quiet machine
IMAGES = {"training_images": 64, "validation_images": 32, "epochs": 1, "batch_size": 16}
STEPS = {"steps": 3, "evaluate_every": 3, "warmup_steps": 1, "validation_sequences": 16}
SHORT: Mapping[str, Mapping[str, Any]] = {
    "cifar10_resnet20": IMAGES,
    "cifar10_resnet20_ddp": IMAGES,
    "digits_resnet": {"epochs": 1, "batch_size": 256},
    "epsilon_logistic_regression": {"training_rows": 400, "epochs": 1},
    "imagenet_resnet": {"training_images": 64, "validation_images": 32, "steps": 2, "epochs": 1, "warmup_epochs": 0},
    "mnist": IMAGES,
    "gpt_pretraining": STEPS,
    "bert_pretraining": STEPS,
    "wikitext2_awd_lstm": {"epochs": 1, "budget_seconds": BUDGET},
    "wmt16_gnmt": {"epochs": 1, "budget_seconds": BUDGET, "beam": 1},
    "wmt17_transformer": {"epochs": 1, "budget_seconds": BUDGET, "beam": 1},
}
# The reason, by the task and the method that it cannot take.
CLIPS = "layers are updated one by one"
WRAPS = "calls parts of its model"
GATES = "clips gradients by their norm"
REFUSED = {
    **{(task, "dear"): CLIPS for task in ("gpt_pretraining", "bert_pretraining")},
    **{
        (task, method): reason
        for task in ("wikitext2_awd_lstm", "wmt16_gnmt", "wmt17_transformer")
        for method, reason in (("dear", GATES), ("zero1", WRAPS), ("fsdp2", WRAPS))
    },
}


def list_tasks() -> list[Task]:
    return [task for task in load_catalog().values() if task.method is not None]


def make_spec(task: str, method: str) -> RunSpec:
    request = Request(name="x", workers=(2,), task=task, preset="tiny", method=method, set=dict(SHORT[task]))
    [spec] = resolve(request, LOCAL, Machine(cores=16, gpus=0))
    return spec


def test_the_table_names_every_task() -> None:
    assert set(SHORT) == {task.name for task in list_tasks()}


@pytest.mark.parametrize(("task", "method"), REFUSED, ids=lambda value: str(value))
def test_what_a_task_cannot_take_is_refused_before_anything_starts(task: str, method: str) -> None:
    with pytest.raises(UsageError, match=REFUSED[task, method]) as error:
        make_spec(task, method)
    assert error.value.exit_code == 2
    assert "--method " in (error.value.hint or "")


TRAINED = [(name, method) for name in SHORT for method in METHODS if (name, method) not in REFUSED]
# By day each method with a task of another training loop; test_golden.py trains each task with its own method.
SAMPLE = [
    ("cifar10_resnet20", "eftopk"),
    ("epsilon_logistic_regression", "dear"),
    ("imagenet_resnet", "zero1"),
    ("mnist", "fsdp2"),
    ("gpt_pretraining", "slowmo"),
    ("wikitext2_awd_lstm", "localsgd"),
]


@pytest.mark.parametrize(("name", "method"), TRAINED if NIGHTLY else [SAMPLE[0], *slow(SAMPLE[1:])])
def test_every_task_trains_with_every_kind_of_method(ranks: RankServer, tmp_path: Path, name: str, method: str) -> None:
    spec = make_spec(name, method)
    environment = {"MLBENCH_METHOD": json.dumps(dict(spec.method))}
    ended = ranks.run(" ".join(load_task(name).command[2:]), 2, tmp_path, spec.parameters, **environment)
    assert [one.code for one in ended] == [0, 0], (ended[0].stderr[-2000:], ended[1].stderr[-2000:])
    assert f"method: {method}; its self-check passed" in ended[0].stdout
    result = ended[0].result
    assert result["updates"] >= 2
    assert result["details"]["communication"]["updates"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "mixed"),
    [
        pytest.param("ddp", {"backward"}, marks=pytest.mark.nightly),  # by day, test_mixed_phases.py has it
        pytest.param("zero1", {"backward", "optimizer"}, marks=pytest.mark.nightly),
        ("fsdp2", {"forward", "backward"}),
        ("wfbp", set()),
    ],
)
def test_messages_inside_a_pass_have_no_time_of_their_own(
    ranks: RankServer, tmp_path: Path, method: str, mixed: set[str]
) -> None:
    environment = {"MLBENCH_METHOD": json.dumps({"name": method})}
    given = load_task("digits_resnet").resolve("tiny", {"epochs": 1})
    first, _ = ranks.run("task_images.run digits_resnet", 2, tmp_path, given, **environment)
    found = first.result["timings"]
    assert ("communication" in found) == (not mixed)
    assert {name for name in ("forward", "backward", "optimizer") if name not in found} == mixed
    assert all(found[f"{name}_and_communication"]["rank0"] > 0 for name in mixed)
    assert sum(each["rank0"] for each in found.values()) == pytest.approx(first.result["wall_seconds"], rel=0.01)


@pytest.mark.slow
def test_a_logistic_regression_in_parts_or_with_hooks_has_the_same_curve(ranks: RankServer, tmp_path: Path) -> None:
    """Norms that weigh much are summed over the parts, and their gradient counts once."""
    curves = []
    for method in ("bsp", "fsdp2", "zero1", "fusion"):
        given = {"training_rows": 400, "validation_rows": 100, "epochs": 2, "l1": 0.001, "l2": 0.1, "goal_full": 100.0}
        parameters = load_task("epsilon_logistic_regression").resolve("tiny", given)
        folder = tmp_path / method
        folder.mkdir()
        environment = {"MLBENCH_METHOD": json.dumps({"name": method})}
        ended = ranks.run("task_images.run epsilon_logistic_regression", 2, folder, parameters, **environment)
        assert [one.code for one in ended] == [0, 0], (method, ended[0].stderr[-2000:])
        curve = ended[0].result["details"]["curve"]
        curves.append([point[name] for point in curve for name in ("train_loss", "loss", "Prec@1")])
    for other in curves[1:]:
        assert other == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.slow
def test_the_tasks_own_method_has_its_line_too(ranks: RankServer, tmp_path: Path) -> None:
    spec = make_spec("mnist", "bsp")
    ended = ranks.run("task_images.run mnist", 2, tmp_path, spec.parameters)
    assert "method: the task's own\n" in ended[0].stdout
    assert "method:" not in ended[1].stdout
