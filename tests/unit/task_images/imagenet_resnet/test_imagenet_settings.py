"""The settings of ImageNet's task: which go together, at their bounds, and what each of them becomes in a training."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from task_images.comm.ddp import DdpAllReduce
from task_images.contract import Contract
from task_images.harness.decay import split_decay
from task_images.harness.errors import TaskUsageError
from task_images.harness.identity import DataIdentity, made_up
from task_images.harness.models.imagenet import imagenet_model
from task_images.imagenet_resnet import task
from task_images.imagenet_resnet.data import FakeData
from task_images.imagenet_resnet.folders import load_silently
from task_images.imagenet_resnet.settings import Settings
from task_images.imagenet_resnet.task import check, check_batches, make_data
from tests.unit.task_images.harness.test_images import one_of

TINY = {"data": "generated", "classes": 10, "training_images": 10, "validation_images": 10}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"decoders": "threads", "loaders": 0},
        {"decoders": "device", "loaders": 0},
        {"decoders": "processes", "loaders": 1},
        TINY,  # an image of every class in both parts
        {"data": "imagenet", "training_images": 1, "validation_images": 1},  # only generated images have a number
        {"data": "fake", "training_images": 1},
        {"model": "inception3", "side": 75},
        {"model": "inception4", "side": 75},
        {"model": "resnet18", "side": 32, "shorter": 32},
        {"model": "vgg11", "side": 74},
        {"side": 256},  # as large as the scaled image
        {"momentum": 0.0, "nesterov": False},
    ],
)
def test_settings_go_together_up_to_their_bounds(changes: dict[str, Any]) -> None:
    check(Settings(**changes), 1)


@pytest.mark.parametrize(
    ("changes", "words", "hint"),
    [
        ({"decoders": "processes", "loaders": 0}, "decoders=processes needs --set loaders above 0", "--set loaders=4"),
        (
            {**TINY, "training_images": 9},
            "9 and 10 images are too few for 10 classes",
            "--set classes=9, or more images",
        ),
        (
            {**TINY, "validation_images": 3},
            "10 and 3 images are too few for 10 classes",
            "--set classes=3, or more images",
        ),
        (
            {"model": "inception3", "side": 74},
            "images of 74 pixels are too small for inception3",
            "--set side=299",
        ),
        (
            {"side": 257},
            "the middle 257 pixels cannot be cut out of images scaled to 256",
            "--set shorter=293",  # ImageNet's usual 256 for 224 is 8 for 7
        ),
        ({"side": 224, "shorter": 223}, "cannot be cut out of images scaled to 223", "--set shorter=256"),
        ({"momentum": 0.0}, "nesterov needs a momentum above 0", "--set momentum=0.9, or --set nesterov=false"),
        ({"warmup_epochs": 90.0}, "90 epochs of warm-up, 90 in all", "--set warmup_epochs=0 leaves the warm-up out."),
    ],
)
def test_settings_that_do_not_go_together_say_what_to_change(changes: dict[str, Any], words: str, hint: str) -> None:
    with pytest.raises(TaskUsageError, match=words) as caught:
        check(Settings(**changes), 1)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("norm", "side", "least", "is_valid"),
    [
        ("batch", 63, 1, False),
        ("batch", 32, 1, False),
        ("batch", 64, 1, True),
        ("batch", 63, 2, True),
        ("group", 63, 1, True),
    ],
)
def test_a_single_small_image_has_no_batch_statistics(norm: str, side: int, least: int, is_valid: bool) -> None:
    settings = Settings(norm=norm, side=side)
    if is_valid:
        check_batches(settings, least)
        return
    with pytest.raises(TaskUsageError, match=f"no batch statistics for images of {side} pixels") as caught:
        check_batches(settings, least)
    assert caught.value.hint == "--set norm=group, side=64, or another batch_size"


@pytest.mark.parametrize("model", ["resnet18", "vgg11_bn"])
def test_a_single_image_of_64_pixels_has_batch_statistics_in_every_layer(model: str) -> None:
    """Networks halve an image five times, so 32 pixels end as a single one."""
    made = imagenet_model(model, 3, width=0.125)
    assert made(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    assert made(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    if model == "resnet18":
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            made(torch.zeros(1, 3, 32, 32))


class Report:
    def __init__(self) -> None:
        self.identities: list[DataIdentity] = []

    def data_identity(self, identity: DataIdentity) -> None:
        self.identities.append(identity)


def test_fake_data_are_made_up_and_decode_nothing() -> None:
    report: Any = Report()
    settings = Settings(data="fake", batch_size=3, steps=5, classes=7, side=32)
    data, details = make_data(one_of(1, 2), settings, report)
    assert isinstance(data, FakeData)
    assert (data.steps, data.least, details) == (5, 3, {"decoding": False})
    batch = next(data.training(1))
    assert (batch.inputs.shape, batch.total) == ((3, 3, 32, 32), 6)
    assert report.identities == [made_up({"training images": 15})]
    plain, last = (
        make_data(one_of(0, 1), Settings(data="fake", batch_size=2, side=32, channels_last=order), report)[0]
        for order in (False, True)
    )
    for source, is_last in ((plain, False), (last, True)):
        assert next(source.training(1)).inputs.is_contiguous(memory_format=torch.channels_last) is is_last


IDENTITY = DataIdentity({"training images": 9}, "sha256:a", True, None)


@pytest.mark.parametrize("kind", ["imagenet", "generated"])
@pytest.mark.parametrize("decoders", ["threads", "processes", "device"])
def test_images_in_files_are_found_or_generated_and_cut_as_the_settings_say(
    kind: str, decoders: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: dict[str, Any] = {}
    images = SimpleNamespace(training=range(9), validation=range(4), identity=IDENTITY)

    def generate(*words: Any) -> Path:
        made["generated"] = words
        return tmp_path / "made"

    monkeypatch.setattr(task, "generate", generate)
    monkeypatch.setattr(task, "load", lambda *words: made.update(loaded=words) or images)
    monkeypatch.setattr(task, "FileData", lambda *words, **options: made.update(words=words, options=options) or "data")
    report: Any = Report()
    world = one_of(0, 1)
    world.contract = Contract({"MLBENCH_DATA_DIR": str(tmp_path), "MLBENCH_SEED": "6"})
    settings = Settings(
        data=kind, classes=3, training_images=9, validation_images=4, batch_size=2, side=40, shorter=50,
        least_crop=0.3, loaders=2, draft=False, decoders=decoders, channels_last=True,
    )  # fmt: skip
    found: Any = make_data(world, settings, report)
    folder = tmp_path / "made" if kind == "generated" else tmp_path
    assert found == ("data", {"decoding": "full", "images": [9, 4]})
    assert made.get("generated") == ((tmp_path, 3, {"train": 9, "val": 4}, 50, 6) if kind == "generated" else None)
    assert made["loaded"] == (folder, 3, print)
    assert made["words"] == (world, images, 2, 6)
    reload = made["options"].pop("reload")
    assert made["options"] == {
        "side": 40,
        "shorter": 50,
        "least_crop": 0.3,
        "loaders": 2,
        "draft": False,
        "channels_last": True,
        "on_device": decoders == "device",
    }
    if decoders == "processes":
        assert isinstance(reload, partial)
        assert (reload.func, reload.args) == (load_silently, (folder, 3))
    else:
        assert reload is None
    assert report.identities == [IDENTITY if kind == "imagenet" else made_up({"training images": 9})]
    assert make_data(world, Settings(data=kind, classes=3), report)[1]["decoding"] == "draft"


def run(monkeypatch: pytest.MonkeyPatch, **parameters: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"order": []}
    world = one_of(0, 2)

    @contextmanager
    def session(contract: Contract, name: str, synthetic: bool) -> Iterator[Any]:
        given.update(name=name, synthetic=synthetic)
        yield world, "report"

    def make_data(*words: Any) -> Any:
        given["order"].append("data")
        return SimpleNamespace(steps=50, least=given.get("least", 2), facts="facts"), {"decoding": "draft"}

    def make_model(*words: Any, **options: Any) -> str:
        given["order"].append("model")
        given["network"] = (*words, options)
        return "model"

    def train(*words: Any, **options: Any) -> None:
        assert words[:2] == (world, "report")
        given.update(options)

    monkeypatch.setattr(task, "training_session", session)
    monkeypatch.setattr(task, "make_data", make_data)
    monkeypatch.setattr(task, "imagenet_model", make_model)
    monkeypatch.setattr(task, "train_classifier", train)
    monkeypatch.setattr(task, "seed_all", lambda seed: given["order"].append(seed))
    contract = Contract({"WORLD_SIZE": "2", "MLBENCH_SEED": "9", "MLBENCH_PARAMETERS": json.dumps(parameters)})
    task.main(contract)
    return given


def test_a_training_has_the_chosen_network_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given = run(
        monkeypatch, model="vgg11_bn", classes=20, width=0.5, norm="group", zero_init=False, label_smoothing=0.2,
        bucket_mb=3.0, batch_size=64, learning_rate=0.1,
    )  # fmt: skip
    assert (given["name"], given["closing"], given["measure"]) == ("imagenet_resnet", "facts", False)
    assert given["synthetic"] is False
    # Random numbers begin anew after the data, so that these do not change the initial weights.
    assert given["order"] == ["data", 9, "model"]
    assert given["network"] == ("vgg11_bn", 20, {"width": 0.5, "norm": "group", "zero_init": False})
    assert (given["model"], given["classes"], given["data"].steps) == ("model", 20, 50)
    assert (given["loss"].func, given["loss"].keywords) == (cross_entropy, {"label_smoothing": 0.2})
    assert given["groups"] is split_decay
    assert isinstance(given["strategy"], DdpAllReduce)
    assert given["identity"] == {
        "network": "vgg11_bn", "width": 0.5, "norm": "group", "classes": 20, "decoding": "draft",
    }  # fmt: skip
    assert given["details"] == {"model": "vgg11_bn", "decoding": "draft"}
    # The rate of two ranks of 64 images is half that of 256, from the first of 50 updates of an epoch on.
    assert given["schedule"].rate(10 * 50) < 0.05 == pytest.approx(given["schedule"].rate(5 * 50))


@pytest.mark.parametrize(
    ("data", "name", "synthetic"),
    [
        ("imagenet", "ImageNet (ILSVRC 2012)", False),
        ("generated", "images in the folders of ImageNet, generated", True),
        ("fake", "one batch of random numbers, no files and no decoding", True),
    ],
)
def test_only_the_real_images_are_not_synthetic(
    data: str, name: str, synthetic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    @contextmanager
    def session(contract: Contract, *words: Any) -> Iterator[Any]:
        seen.append(words)
        yield one_of(0, 1), "report"

    monkeypatch.setattr(task, "make_data", lambda *_: (SimpleNamespace(steps=1, least=2, facts=dict), {}))
    monkeypatch.setattr(task, "imagenet_model", lambda *_, **__: None)
    monkeypatch.setattr(task, "train_classifier", lambda *_, **options: seen.append(options["measure"]))
    monkeypatch.setattr(task, "training_session", session)
    monkeypatch.setattr(task, "seed_all", lambda seed: None)
    task.main(Contract({"MLBENCH_PARAMETERS": json.dumps({"data": data})}))
    assert seen == [(name, synthetic), data == "fake"]


def test_everything_may_decay_and_gradients_travel_in_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    given = run(monkeypatch, decay_all=True, reduction="flat")
    assert (given["groups"], given["strategy"]) == (None, None)
