"""What a classification's settings become: the trainer's plan, goal, optimizer, facts and identity, and refusals."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from task_images.comm.allreduce import GradientAllReduce
from task_images.comm.choose import make_strategy
from task_images.comm.presets import resolve
from task_images.contract import Contract
from task_images.harness import classification, session
from task_images.harness.classification import check_settings, train_classifier
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError
from task_images.harness.identity import DataIdentity
from task_images.harness.loop import Plan, Unit
from task_images.harness.progress import INTERVAL_SECONDS, ProgressLines
from task_images.harness.settings import CheckpointedSettings, ClassifierSettings, Protocol, TranslationSettings
from task_images.harness.translation import program
from task_images.harness.translation.program import Source


class Made(Exception):
    """The trainer was asked to run."""


def make_trainer(
    monkeypatch: pytest.MonkeyPatch,
    settings: ClassifierSettings,
    *,
    size: int = 4,
    backend: str = "gloo",
    goal: str = "full",
    **more: Any,
) -> Any:
    """What is given to the trainer; `.ran` names which trainer has run, `.by_name` has what has a name."""
    found = SimpleNamespace(ran="", given=(), by_name={}, speed=[])

    def make(*given: Any, **by_name: Any) -> Any:
        found.given, found.by_name = given, by_name
        return SimpleNamespace(run=lambda: setattr(found, "ran", "torch"))

    def make_in_jax(trainer: Any, program: Any) -> Any:
        return SimpleNamespace(run=lambda: setattr(found, "ran", f"jax by {program}"))

    monkeypatch.setattr(classification, "make_sample_trainer", make)
    monkeypatch.setattr(classification, "train_in_jax", make_in_jax)
    monkeypatch.setattr(classification, "apply_speed", lambda settings, model: found.speed.append(settings.compile))
    monkeypatch.setattr(classification, "prepare_strategy", lambda world, own: own())
    contract = Contract({"MLBENCH_SEED": "7", "MLBENCH_GOAL": goal, "WORLD_SIZE": str(size)})
    world: Any = SimpleNamespace(device=torch.device("cpu"), contract=contract, size=size, backend=backend)
    nothing: Any = None
    train_classifier(world, nothing, settings, nn.Linear(3, 2), nothing, nothing, **more)
    return found


def test_a_plain_classification_has_no_checkpoints_and_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ClassifierSettings(
        batch_size=32, epochs=9, budget_seconds=5.0, goal_full=90.0, goal_light=60.0, momentum=0.5, nesterov=False
    )
    made = make_trainer(monkeypatch, settings, details={"images": [1, 2]}, identity={"depth": 8}, name="digits")
    own = made.by_name
    assert made.ran == "torch"
    assert made.given[6] is None  # the schedule is the task's
    assert made.given[7] == Plan(9, 5.0, checkpoint=False, resume="", protocol=settings.protocol)
    assert own["details"] == {"parameters": 8, "global_batch": 128, "images": [1, 2]}
    assert own["identity"] == {"depth": 8, "seed": 7, "global_batch": 128}
    assert (own["name"], own["unit"], own["compiled"], own["graphs"]) == ("digits", Unit("images"), False, None)
    assert isinstance(own["strategy"], GradientAllReduce)
    assert own["precision"].used == "fp32"
    assert own["arithmetic"] is settings
    assert made.speed == []
    goal = own["goal"]
    assert (goal.metric, goal.comparison, goal.thresholds) == ("Prec@1", ">=", {"full": 90.0, "light": 60.0})
    assert goal.threshold == 90.0


def test_the_optimizer_is_sgd_whose_rate_the_schedule_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ClassifierSettings(momentum=0.75, nesterov=True, weight_decay=0.125)
    model = nn.Linear(3, 2)
    optimizer = make_trainer(monkeypatch, settings).given[5](model)
    assert type(optimizer) is torch.optim.SGD
    [group] = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (0.0, 0.75, True, 0.125)
    assert group["fused"]
    assert [id(one) for one in group["params"]] == [id(one) for one in model.parameters()]

    def split(model: nn.Module, decay: float) -> Any:
        return [
            {"params": [model.get_parameter("weight")], "weight_decay": 2 * decay},
            {"params": [model.get_parameter("bias")]},
        ]

    optimizer = make_trainer(monkeypatch, settings, groups=split).given[5](model)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.125]


@pytest.mark.parametrize(
    ("classes", "names"), [(10, ["Prec@1", "Prec@5"]), (5, ["Prec@1", "Prec@5"]), (4, ["Prec@1"]), (2, ["Prec@1"])]
)
def test_the_first_five_are_counted_if_there_are_five_classes(
    monkeypatch: pytest.MonkeyPatch, classes: int, names: list[str]
) -> None:
    own = make_trainer(monkeypatch, ClassifierSettings(), classes=classes).by_name
    assert [metric.name for metric in own["metrics"]] == names
    assert [metric.name for metric in own["training_metrics"]] == ["Prec@1"]


def test_validation_has_the_cross_entropy_whatever_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_trainer(monkeypatch, ClassifierSettings(), loss=nn.functional.nll_loss)
    assert made.given[4] is nn.functional.nll_loss
    assert made.by_name["validation_loss"] is nn.functional.cross_entropy
    assert make_trainer(monkeypatch, ClassifierSettings()).given[4] is nn.functional.cross_entropy


def test_a_measurement_of_speed_has_neither_metrics_nor_a_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_trainer(monkeypatch, ClassifierSettings(), measure=True).by_name
    assert (own["metrics"], own["training_metrics"], own["goal"]) == ([], [], None)


@pytest.mark.parametrize(
    ("goal_on", "chosen", "metric", "threshold"),
    [("training", "light", "train_Prec@1", 60.0), ("validation", "light", "Prec@1", 60.0)],
)
def test_the_goal_is_the_chosen_one_on_the_chosen_samples(
    monkeypatch: pytest.MonkeyPatch, goal_on: str, chosen: str, metric: str, threshold: float
) -> None:
    settings = ClassifierSettings(goal_on=goal_on, goal_full=90.0, goal_light=60.0)
    goal = make_trainer(monkeypatch, settings, goal=chosen).by_name["goal"]
    assert (goal.metric, goal.threshold) == (metric, threshold)


@pytest.mark.parametrize(
    ("compiled", "is_compiled", "has_graphs"),
    [("no", False, False), ("blocks", True, False), ("whole", True, False), ("graphs", True, True)],
)
def test_a_long_classification_has_checkpoints_and_ways_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, compiled: str, is_compiled: bool, has_graphs: bool
) -> None:
    settings = CheckpointedSettings(
        epochs=3, checkpoint=True, resume="x.pt", compile=compiled, channels_last=False, loaders=5, precision="bf16"
    )
    made = make_trainer(monkeypatch, settings)
    own = made.by_name
    assert made.given[7] == Plan(3, settings.budget_seconds, checkpoint=True, resume="x.pt", protocol=settings.protocol)
    assert own["details"]["options"] == {"channels_last": False, "compile": compiled, "loaders": 5}
    assert (own["compiled"], own["graphs"] is not None, made.speed) == (is_compiled, has_graphs, [compiled])
    assert own["precision"].used == "bf16"


@pytest.mark.parametrize(
    ("backend", "in_jax", "ran"),
    [("jax", "program", "jax by program"), ("jax", None, "torch"), ("gloo", "program", "torch")],
)
def test_the_backend_jax_trains_tasks_that_have_a_program_for_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, in_jax: Any, ran: str
) -> None:
    assert make_trainer(monkeypatch, ClassifierSettings(), backend=backend, in_jax=in_jax).ran == ran


def test_nesterovs_momentum_needs_a_momentum() -> None:
    check_settings(ClassifierSettings(momentum=0.0, nesterov=False))
    check_settings(ClassifierSettings(momentum=0.1, nesterov=True))
    with pytest.raises(TaskUsageError, match="nesterov needs a momentum above 0") as error:
        check_settings(ClassifierSettings(momentum=0.0, nesterov=True))
    assert "--set momentum=0.9" in str(error.value.hint)


@pytest.mark.parametrize(
    ("name", "compiled", "is_possible"),
    [
        ("bsp", "graphs", True),
        ("eftopk", "graphs", True),
        ("dear", "graphs", False),
        ("localsgd", "graphs", False),
        ("async-ps", "graphs", False),
        ("localsgd", "whole", True),
        ("dear", "no", True),
    ],
)
def test_methods_that_use_single_layers_are_not_replayed_as_a_graph(
    monkeypatch: pytest.MonkeyPatch, name: str, compiled: str, is_possible: bool
) -> None:
    settings = CheckpointedSettings(compile=compiled)
    strategy = make_strategy(resolve(name))
    if is_possible:
        assert make_trainer(monkeypatch, settings, strategy=strategy).by_name["strategy"] is strategy
        return
    with pytest.raises(TaskUsageError, match="compile=graphs replays the whole model, but this method") as error:
        make_trainer(monkeypatch, settings, strategy=strategy)
    assert "--set compile=blocks" in str(error.value.hint)


def test_a_calibration_times_layers_that_a_graph_does_not_have() -> None:
    classification._check_graphs(CheckpointedSettings(compile="blocks"), GradientAllReduce(), True)
    classification._check_graphs(CheckpointedSettings(compile="graphs"), GradientAllReduce(), False)
    with pytest.raises(TaskUsageError, match="--calibrate times its layers"):
        classification._check_graphs(CheckpointedSettings(compile="graphs"), GradientAllReduce(), True)


# --- sessions and translations --------------------------------------------------------------------------------------


def test_a_session_reports_before_data_are_loaded_and_ends_only_after_success(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    world = SimpleNamespace(close=lambda: events.append("close"))

    def open_world(contract: object, collective_seconds: float) -> Any:
        events.append(("open", collective_seconds))
        return world

    def make_reporter(world: object, data: str, synthetic: bool) -> Any:
        events.append((data, synthetic))
        return SimpleNamespace(environment=lambda: events.append("environment"), phase=events.append)

    monkeypatch.setattr(session, "open_world", open_world)
    monkeypatch.setattr(session, "Reporter", make_reporter)
    found: Any
    with session.training_session(Contract({}), "MNIST", True) as (found, _):
        assert found is world
        events.append("train")
    assert events == [("open", 600.0), ("MNIST", True), "environment", "loading", "train", "close"]
    events.clear()
    with pytest.raises(Made), session.training_session(Contract({}), "MNIST", collective_seconds=5.0):
        raise Made
    assert events == [("open", 5.0), ("MNIST", False), "environment", "loading"]


SOURCE = Source(
    "WMT16",
    lambda folder, seed: folder / f"sample-{seed}",
    lambda files, cache: {"files": files, "cache": cache},
    lambda corpus: DataIdentity({"pairs": 3}),
)


def test_generated_sentences_are_in_a_folder_that_is_gone_afterwards() -> None:
    found = SOURCE.load(True, Contract({"MLBENCH_SEED": "4", "MLBENCH_DATA_DIR": "/data"}))
    assert found["files"] == found["cache"] / "sample-4"
    assert not found["cache"].exists()


def test_real_sentences_are_in_the_data_folder() -> None:
    assert SOURCE.load(False, Contract({"MLBENCH_DATA_DIR": "/data"})) == {
        "files": Path("/data"),
        "cache": Path("/data"),
    }
    with pytest.raises(EnvironmentUnfitError, match="no folder with WMT16 was given") as error:
        SOURCE.load(False, Contract({}))
    assert "--data-dir FOLDER" in str(error.value.hint)


@pytest.mark.parametrize(
    ("data", "title", "generated"),
    [("sample", "made-up English-German", True), ("wmt16", "WMT16 English-German", False)],
)
def test_a_translation_is_trained_to_its_bleu(
    monkeypatch: pytest.MonkeyPatch, data: str, title: str, generated: bool, tmp_path: Path
) -> None:
    events: list[Any] = []

    @contextmanager
    def open_session(contract: object, name: str, synthetic: bool) -> Iterator[Any]:
        events.append((name, synthetic))
        report = SimpleNamespace(data_identity=lambda identity: events.append(dict(identity.counts)))
        yield "world", report

    def train(world: object, report: object, task: object, goal: Any) -> None:
        events.append((world, task, goal.metric, goal.comparison, goal.thresholds, goal.threshold))

    monkeypatch.setattr(program, "training_session", open_session)
    monkeypatch.setattr(program, "train_translation", train)
    monkeypatch.setattr(program, "seed_all", lambda seed: events.append(f"seed {seed}"))
    settings = replace(TranslationSettings(), data=data, goal_full=24.0, goal_light=20.0)
    contract = Contract({"MLBENCH_SEED": "4", "MLBENCH_DATA_DIR": str(tmp_path), "MLBENCH_GOAL": "light"})

    def make_task(own: Any, world: Any, corpus: Any) -> Any:
        assert own is settings
        return "task", corpus["cache"] == tmp_path

    program.train(contract, settings, SOURCE, make_task)
    goal = ("BLEU-Score", ">=", {"full": 24.0, "light": 20.0}, 20.0)
    assert events == [(title, generated), {"pairs": 3}, "seed 4", ("world", ("task", not generated), *goal)]


# --- progress -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "done", "seconds", "line"),
    [
        (1_000_000_000, 250_000_000, 33.0, "x: 25% of 1.0 GB, 99 seconds left"),
        (1_000_000_000, 250_000_000, 40.0, "x: 25% of 1.0 GB, 2 minutes left"),
        (999_000_000, 499_500_000, 50.0, "x: 50% of 999 MB, 50 seconds left"),
        (10_000_000, 15_000_000, 20.0, "x: 100% of 10 MB, 0 seconds left"),
    ],
)
def test_progress_names_sizes_and_times_as_people_do(total: int, done: int, seconds: float, line: str) -> None:
    lines: list[str] = []
    now = [0.0]
    progress = ProgressLines("x", total, lines.append, clock=lambda: now[0])
    now[0] = seconds
    progress.reach(done)
    assert lines == [line]


def test_progress_is_told_at_most_once_per_interval() -> None:
    lines: list[str] = []
    now = [100.0]
    progress = ProgressLines("x", 100, lines.append, clock=lambda: now[0])
    for seconds in (INTERVAL_SECONDS - 0.1, INTERVAL_SECONDS, 2 * INTERVAL_SECONDS - 0.1, 2 * INTERVAL_SECONDS):
        now[0] = 100.0 + seconds
        progress.add(10)
    assert [line.split(" of ")[0] for line in lines] == ["x: 20%", "x: 40%"]


def test_a_protocol_without_blocks_is_off() -> None:
    assert [Protocol(blocks=blocks).is_on for blocks in (0, 1)] == [False, True]
