"""The digits: how they are cut into training and validation, moved in training, and what the task trains with them."""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from task_images.contract import Contract
from task_images.digits_resnet import data, task
from task_images.digits_resnet.data import as_channels, identify, load_split, make_shift, prepare_data
from task_images.harness.data import ArrayData
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError
from task_images.harness.models.resnet_jax import make_resnet
from task_images.harness.seeds import generator, lasting_generator
from tests.unit.task_images.harness.test_images import one_of

# 40 images of four classes that tell their number in the first pixel. The last two pixels are 0 and 1 before they are
# normalized.
LABELS = np.arange(40) % 4
IMAGES = np.zeros((40, 8, 8), np.float32)
IMAGES[:, 0, 0], IMAGES[:, 7, 7] = np.arange(40), 1.0


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_load", lambda: (IMAGES, LABELS))


def read_numbers(images: Any) -> list[int]:
    """Which of the 40 images these are."""
    found = np.rint((images[:, 0, 0] - images[:, 7, 6]) / (images[:, 7, 7] - images[:, 7, 6]))
    return [int(number) for number in found]


@pytest.mark.parametrize(
    ("share", "hold_out", "training", "validation"),
    [
        (0.2, 0.0, 8, 2),
        (0.26, 0.0, 7, 3),  # 2.6 images of 10 are 3
        (0.24, 0.0, 8, 2),
        (0.2, 0.5, 4, 4),  # the 2 of every class are left out, and half of the other 8 take their place
        (0.5, 0.2, 4, 1),
    ],
)
def test_every_class_gives_its_share(few: None, share: float, hold_out: float, training: int, validation: int) -> None:
    split = load_split(1, share, hold_out)
    assert np.bincount(split.training[1]).tolist() == [training] * 4
    assert np.bincount(split.validation[1]).tolist() == [validation] * 4


def test_what_is_held_out_was_never_in_the_validation_set(few: None) -> None:
    """So a search by the held-out images says nothing of the images that the run is judged by."""
    plain, searched = load_split(3, 0.2), load_split(3, 0.2, 0.25)
    judged, tuned = set(read_numbers(plain.validation[0])), set(read_numbers(searched.validation[0]))
    assert len(judged) == len(tuned) == 8
    assert not judged & tuned
    assert tuned | set(read_numbers(searched.training[0])) == set(read_numbers(plain.training[0]))


def test_images_keep_their_labels_and_order_and_have_the_training_images_mean(few: None) -> None:
    split = load_split(2, 0.3)
    for images, labels in split:
        found = read_numbers(images)
        assert found == sorted(found)
        assert [number % 4 for number in found] == labels.tolist()
    chosen = IMAGES[read_numbers(split.training[0])]
    np.testing.assert_allclose(split.training[0], (chosen - chosen.mean()) / chosen.std(), rtol=1e-5)
    others = IMAGES[read_numbers(split.validation[0])]
    np.testing.assert_allclose(split.validation[0], (others - chosen.mean()) / chosen.std(), rtol=1e-5)


def test_the_digits_are_those_of_scikit_learn(tmp_path: Any) -> None:
    found = identify()
    assert (found.counts, found.official, found.reason) == ({"images": 1797}, True, None)
    assert found == prepare_data(tmp_path, {})


def test_other_digits_are_not_the_official_ones(few: None) -> None:
    found = identify()
    assert (found.counts, found.official) == ({"images": 40}, False)


@pytest.mark.parametrize(
    "found",
    [None, SimpleNamespace(submodule_search_locations=None), SimpleNamespace(submodule_search_locations=["/no"])],
)
def test_without_scikit_learn_the_way_to_install_it_is_told(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(EnvironmentUnfitError, match="comes with scikit-learn") as caught:
        load_split(1, 0.2)
    assert caught.value.hint == 'Install it: pip install "scikit-learn>=1.4,<2"'


@pytest.mark.parametrize("pixels", [0, 1, 2, 4])
def test_a_shift_is_a_crop_of_the_image_with_a_border_of_background(pixels: int) -> None:
    images = torch.arange(5.0 * 64).view(5, 8, 8) - 3
    moved, labels = make_shift(pixels, generator(1, "x"))(images, torch.arange(5))
    padded = np.pad(images.numpy(), ((0, 0), (pixels,) * 2, (pixels,) * 2), constant_values=-3.0)
    assert labels.tolist() == [0, 1, 2, 3, 4]
    assert moved.shape == (5, 3, 8, 8)
    for before, after in zip(padded, moved, strict=True):
        places = [
            (row, column)
            for row in range(2 * pixels + 1)
            for column in range(2 * pixels + 1)
            if np.array_equal(before[row : row + 8, column : column + 8], after[0])
        ]
        assert len(places) == 1


@pytest.mark.parametrize("pixels", [1, 3])
def test_every_shift_up_to_the_greatest_occurs_in_both_directions_independently(pixels: int) -> None:
    images = torch.zeros(2000, 8, 8)
    images[:, 4, 4] = 1.0
    moved, _ = make_shift(pixels, generator(1, "x"))(images, torch.zeros(2000))
    rows, columns = np.divmod(moved[:, 0].flatten(1).argmax(1).numpy(), 8)
    counts = np.histogram2d(rows, columns, bins=[np.arange(9), np.arange(9)])[0]
    inside = counts[4 - pixels : 5 + pixels, 4 - pixels : 5 + pixels]
    assert inside.sum() == 2000
    assert inside.min() > 0.5 * 2000 / (2 * pixels + 1) ** 2


def test_gray_images_become_three_equal_channels() -> None:
    images, labels = torch.randn(2, 8, 8), torch.tensor([4, 5])
    channels, same = as_channels(images, labels)
    assert same is labels
    assert torch.equal(channels, torch.stack([images] * 3, 1))


# --- the task -------------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, rank: int = 0, size: int = 1, **parameters: Any) -> dict[str, Any]:
    """What the task gives to the training, with a rank that has nobody to talk to."""
    given: dict[str, Any] = {}
    world: Any = one_of(rank, size)

    @contextmanager
    def session(contract: Contract, name: str) -> Iterator[Any]:
        given["name"] = name
        yield world, SimpleNamespace(data_identity=lambda identity: given.update(identity=identity))

    def train(*words: Any, **options: Any) -> None:
        given.update(settings=words[2], same=words[0] is world, **options)

    monkeypatch.setattr(task, "training_session", session)
    monkeypatch.setattr(task, "train_classifier", train)
    monkeypatch.setattr(task, "seed_all", lambda seed: given.update(seed=seed))
    task.main(Contract({"MLBENCH_SEED": "5", "MLBENCH_PARAMETERS": json.dumps(parameters)}))
    return given


def test_the_task_trains_a_resnet_on_its_split(monkeypatch: pytest.MonkeyPatch, few: None) -> None:
    given = run(monkeypatch, depth=8, batch_size=7, validation_share=0.3)
    assert (given["name"], given["seed"], given["same"]) == ("scikit-learn digits", 5, True)
    assert given["identity"].counts == {"images": 40}
    assert given["in_jax"] is make_resnet
    assert given["model"](torch.zeros(1, 3, 8, 8)).shape == (1, 10)
    assert sum(parameter.numel() for parameter in given["model"].parameters()) < 100_000  # depth 8, not 20
    images: ArrayData = given["data"]
    split = load_split(5, 0.3)
    batches = list(images.training(1))
    assert [len(batch.targets) for batch in batches] == [7, 7, 7, 7]
    assert sorted(int(label) for batch in batches for label in batch.targets) == sorted(split.training[1])
    validation = torch.cat([batch.targets for batch in images.validation()])
    assert sorted(validation.tolist()) == sorted(split.validation[1])


def test_images_move_in_training_only_by_a_stream_of_their_rank(monkeypatch: pytest.MonkeyPatch, few: None) -> None:
    given = run(monkeypatch, rank=1, size=2, shift=2, batch_size=4)
    batch = next(iter(given["data"].training(1)))
    moved, _ = given["data"].prepare(batch, training=True)
    own = make_shift(2, lasting_generator(5, "augmentation", 1))(batch.inputs, batch.targets)[0]
    assert torch.equal(moved, own)
    kept, _ = given["data"].prepare(batch, training=False)
    assert torch.equal(kept[:, 1], batch.inputs)


def test_held_out_images_replace_the_validation_set(monkeypatch: pytest.MonkeyPatch, few: None) -> None:
    given = run(monkeypatch, validation_share=0.2, hold_out=0.25, batch_size=4)
    assert sum(len(batch.targets) for batch in given["data"].validation()) == 8
    assert sum(len(batch.targets) for batch in given["data"].training(1)) == 24


@pytest.mark.parametrize(("size", "epochs"), [(1, 0), (4, 2), (6, 2)])
def test_the_rate_grows_to_that_of_all_workers_in_log2_epochs(
    monkeypatch: pytest.MonkeyPatch, few: None, size: int, epochs: int
) -> None:
    schedule = run(monkeypatch, size=size, learning_rate=0.1, batch_size=4)["schedule"]
    rates = []
    for epoch in range(4):
        rates.append(schedule.rate(0))
        schedule.after_epoch(10.0 - epoch)
    shares = [min(1.0, epoch / epochs) if epochs else 1.0 for epoch in range(4)]
    assert rates == pytest.approx([0.1 + share * 0.1 * (size - 1) for share in shares])


def test_nesterov_without_momentum_is_refused_before_the_digits_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "load_split", lambda *_: pytest.fail("read"))
    with pytest.raises(TaskUsageError, match="nesterov needs a momentum above 0"):
        run(monkeypatch, momentum=0.0, nesterov=True)
