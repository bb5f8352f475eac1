"""CIFAR-10's tasks: settings that do not go together, and what the others become in a training."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from task_images.cifar10_resnet20 import task
from task_images.cifar10_resnet20.data import DEVIATION, MEAN
from task_images.cifar10_resnet20_ddp import task as ddp_task
from task_images.comm.ddp import DdpAllReduce
from task_images.contract import Contract
from task_images.harness.errors import TaskUsageError
from tests.unit.task_images.harness.test_images import one_of

LABELS = np.arange(12) % 10
IMAGES = np.zeros((12, 3, 32, 32), np.uint8)


def run(monkeypatch: pytest.MonkeyPatch, main: Any = task.main, size: int = 2, **parameters: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"order": []}
    world = one_of(0, size)

    @contextmanager
    def session(contract: Contract, *words: Any) -> Iterator[Any]:
        given["session"] = words
        yield world, SimpleNamespace(data_identity=lambda identity: given.update(shown=identity))

    def load(settings: Any, contract: Contract) -> Any:
        given["order"].append("data")
        return SimpleNamespace(training=(IMAGES, LABELS), validation=(IMAGES[:5], LABELS[:5]), identity="identity")

    def make_model(*words: Any, **options: Any) -> str:
        given["order"].append("model")
        given["network"] = (*words, options)
        return "model"

    def make_data(*words: Any, **options: Any) -> str:
        given["images"] = (words, options)
        return "images"

    def train(*words: Any, **options: Any) -> None:
        assert words[0] is world
        given.update(options)

    monkeypatch.setattr(task, "training_session", session)
    monkeypatch.setattr(task.cifar, "load_images", load)  # type: ignore[attr-defined]
    monkeypatch.setattr(task, "resnet", make_model)
    monkeypatch.setattr(task, "ImageData", make_data)
    monkeypatch.setattr(task, "train_classifier", train)
    monkeypatch.setattr(task, "seed_all", lambda seed: given["order"].append(seed))
    main(Contract({"MLBENCH_SEED": "9", "WORLD_SIZE": str(size), "MLBENCH_PARAMETERS": json.dumps(parameters)}))
    return given


def test_settings_become_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    given = run(
        monkeypatch, depth=32, version=2, norm="group", batch_size=6, loaders=3, channels_last=True, resident=True,
        learning_rate=0.5,
    )  # fmt: skip
    assert (given["session"], given["shown"]) == (("CIFAR-10", False), "identity")
    # Random numbers begin anew after the data, so that these do not change the initial weights.
    assert given["order"] == ["data", 9, "model"]
    assert given["network"] == (32, 2, {"norm": "group"})
    words, options = given["images"]
    assert words[1][0] is IMAGES
    assert (words[2][1].tolist(), *words[3:]) == (LABELS[:5].tolist(), 6, 9)
    # He et al. 2015, section 4.2: crops of images with a border of four pixels, and their mirror images.
    assert options == {
        "mean": MEAN,
        "deviation": DEVIATION,
        "padding": 4,
        "mirror": True,
        "loaders": 3,
        "channels_last": True,
        "resident": True,
    }
    assert (given["model"], given["data"], given["name"]) == ("model", "images", "cifar10_resnet20")
    assert given["identity"] == {"depth": 32, "version": 2, "norm": "group"}
    assert given["details"] == {"images": [12, 5], "resident": True}
    assert given["strategy"] is None
    assert given["schedule"].rate(0) == 0.5  # that of one worker, before the warm-up to that of two
    given["schedule"].after_epoch(1.0)
    assert given["schedule"].rate(0) == 1.0


def test_generated_images_are_synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    given = run(monkeypatch, data="synthetic")
    assert given["session"] == ("images like CIFAR-10, generated", True)


def test_the_other_task_reduces_in_buckets_and_has_the_originals_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []

    def reduce(size: float) -> DdpAllReduce:
        made.append(size)
        return DdpAllReduce(size)

    monkeypatch.setattr(ddp_task, "DdpAllReduce", reduce)
    given = run(monkeypatch, ddp_task.main, bucket_mb=3.0)
    assert isinstance(given["strategy"], DdpAllReduce)
    assert made == [3.0]
    rates = []
    for _ in range(110):
        rates.append(given["schedule"].rate(0))
        given["schedule"].after_epoch(1.0)
    # 0.1 whatever the number of workers, and a tenth of it from epochs 82 and 109 on.
    assert [rates[epoch] for epoch in (0, 1, 81, 82, 108, 109)] == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.01, 0.001])


@pytest.mark.parametrize(
    ("parameters", "words", "hint"),
    [
        ({"depth": 19}, "the depth 19 is not of the form 6n\\+2", "--set depth=20, 32, 44, 56 or 110"),
        ({"depth": 21}, "the depth 21 is not of the form 6n\\+2", "--set depth=20, 32, 44, 56 or 110"),
        ({"momentum": 0.0}, "nesterov needs a momentum above 0", "--set momentum=0.9, or --set nesterov=false"),
        ({"schedule": "multistep", "warmup_epochs": 82}, "82 epochs of warm-up", None),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_a_session_begins(
    monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any], words: str, hint: str | None
) -> None:
    monkeypatch.setattr(task, "training_session", lambda *_: pytest.fail("a session began"))
    contract = Contract({"MLBENCH_PARAMETERS": json.dumps(parameters)})
    with pytest.raises(TaskUsageError, match=words) as caught:
        task.main(contract)
    assert caught.value.hint == hint


@pytest.mark.parametrize("depth", [8, 14, 20, 110, 1202])
def test_depths_of_6n_plus_2_are_taken(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, depth=depth)["network"][0] == depth
