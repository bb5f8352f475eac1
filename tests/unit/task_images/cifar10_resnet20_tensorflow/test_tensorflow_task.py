"""How the task in TensorFlow opens its ranks, loads its images, and what it gives to the training."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from task_images.cifar10_resnet20.data import Cifar
from task_images.contract import Contract
from task_images.harness.loop import Plan, Unit
from tests.unit.task_images.cifar10_resnet20_tensorflow.tensorflow_in_torch import PACKAGE, load

SMALL = {"data": "synthetic", "training_images": 40, "validation_images": 12, "batch_size": 8, "depth": 8}


@pytest.fixture(scope="module")
def modules() -> Any:
    return load()


class Opened(list[Any]):
    """What happened, in order; `given` and `by_name` are what the trainer got."""

    given: Any = ()
    by_name: Any = None
    trainer = ""


@pytest.fixture
def opened(modules: Any, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The task between ranks that are not there, whose trainer notes what it is given."""
    events, task = Opened(), modules.task
    for name in ("servers", "training"):
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", getattr(modules, name))

    def make(name: str) -> Any:
        def trainer(*given: Any, **by_name: Any) -> Any:
            events.given, events.by_name, events.trainer = given, by_name, name
            return SimpleNamespace(run=lambda: events.append("run"))

        return trainer

    monkeypatch.setattr(modules.training, "TensorFlowTrainer", make("collective"))
    monkeypatch.setattr(modules.servers, "ServerTrainer", make("served"))

    class Cluster:
        """The ranks of a parameter server."""

        def __init__(self, contract: Contract) -> None:
            self.rank, self.is_first = contract.rank, contract.rank == 0
            events.append("open cluster")

        def serve(self) -> None:
            events.append("serve")

        def close(self) -> None:
            events.append("close")

    monkeypatch.setattr(modules.servers, "Cluster", Cluster)
    monkeypatch.setattr(modules.servers, "open_cluster", Cluster)

    def open_world(contract: Contract, tf32: bool) -> Any:
        events.append(f"open {tf32}")
        return SimpleNamespace(rank=contract.rank, is_first=not contract.rank, close=lambda: events.append("close"))

    def make_report(world: Any, name: str, synthetic: bool) -> Any:
        events.append((name, synthetic))
        return SimpleNamespace(
            environment=lambda: events.append("environment"),
            phase=events.append,
            data_identity=lambda identity: events.append(dict(identity.counts)),
        )

    def load_images(settings: Any, contract: Contract) -> Cifar:
        images = [
            np.zeros((size, 3, 32, 32), np.uint8) for size in (settings.training_images, settings.validation_images)
        ]
        labels = [np.arange(len(one)) % 10 for one in images]
        return Cifar((images[0], labels[0]), (images[1], labels[1]), "sha256:0")

    monkeypatch.setattr(task, "open_world", open_world)
    monkeypatch.setattr(task, "Reporter", make_report)
    monkeypatch.setattr(task.cifar, "load_images", load_images)
    return events


def run(modules: Any, size: int, rank: int = 0, **parameters: Any) -> None:
    contract = Contract(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MLBENCH_SEED": "5",
            "MLBENCH_GOAL": "light",
            "MLBENCH_PARAMETERS": json.dumps({**SMALL, **parameters}),
        }
    )
    with torch.no_grad():
        modules.task.main(contract)


COUNTS = {"training images": 40, "validation images": 12}


def test_ranks_share_every_batch_of_a_training_with_collectives(modules: Any, opened: Opened) -> None:
    run(modules, 4, epochs=7, budget_seconds=9.0, checkpoint=True, resume="x.npz", tf32=True, loaders=0, goal_full=91.0)
    assert opened == [
        *("open True", ("images like CIFAR-10, generated", True), "environment", "loading"),
        *(COUNTS, "run", "close"),
    ]
    assert opened.trainer == "collective"
    _, _, batches, schedule, plan = opened.given
    own = opened.by_name
    assert batches.count(1) == 2  # 40 images in batches of 32
    assert plan == Plan(7, 9.0, checkpoint=True, resume="x.npz", protocol=plan.protocol)
    assert own["details"] == {
        "parameters": own["network"].model.count,
        "global_batch": 32,
        "images": [40, 12],
        "options": {"loaders": 0, "strategy": "collective", "tf32": True},
    }
    assert own["identity"] == {"depth": 8, "seed": 5, "global_batch": 32}
    assert (own["name"], own["unit"]) == ("cifar10_resnet20_tensorflow", Unit("images"))
    goal = own["goal"]
    assert (goal.metric, goal.comparison, goal.thresholds["full"], goal.chosen) == ("Prec@1", ">=", 91.0, "light")
    assert own["validate"].network is own["network"]
    assert "settings" not in own
    # From the rate of one worker to four times as much, in log2(4) epochs.
    rates = [schedule.rate(0)]
    for loss in (1.0, 0.5, 0.25):
        schedule.after_epoch(loss)
        rates.append(schedule.rate(0))
    assert rates == pytest.approx([0.02, 0.05, 0.08, 0.08])


def test_every_update_of_a_parameter_server_is_a_batch_of_one_worker(modules: Any, opened: Opened) -> None:
    run(modules, 4, strategy="parameter-server", loaders=0)
    assert opened == [
        *("open cluster", ("images like CIFAR-10, generated", True), "environment", "loading"),
        *(COUNTS, "run", "close"),
    ]
    assert opened.trainer == "served"
    _, _, batches, schedule, _ = opened.given
    assert batches.count(1) == 5
    assert opened.by_name["details"]["global_batch"] == 8
    assert opened.by_name["identity"]["global_batch"] == 8
    assert opened.by_name["settings"].strategy == "parameter-server"
    schedule.after_epoch(1.0)
    assert schedule.rate(0) == pytest.approx(0.02)


def test_other_ranks_of_a_parameter_server_load_no_images(modules: Any, opened: Opened) -> None:
    run(modules, 4, 2, strategy="parameter-server")
    assert opened == ["open cluster", ("images like CIFAR-10, generated", True), "environment", "serve"]


def test_the_real_images_have_their_name(modules: Any, opened: Opened) -> None:
    run(modules, 1, data="cifar10", loaders=0)
    assert opened[1] == ("CIFAR-10", False)
