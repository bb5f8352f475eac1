"""Crops, loading ahead, and generated images."""

import itertools
from pathlib import Path

import numpy as np
import torch

from task_images.contract import Contract
from task_images.data import ArrayData, generator
from task_images.images import Crops, ImageData, synthetic_images
from task_images.train import Samples
from task_images.world import World

ROOT = Path(__file__).parents[3]
MEAN, DEVIATION = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def one_of(rank: int, size: int) -> World:
    """A rank's view of the world; nothing here communicates."""
    contract = Contract({"RANK": str(rank), "WORLD_SIZE": str(size)})
    return World(contract, torch.device("cpu"), threads=1, grouped=False)


CPU = torch.device("cpu")


def data(
    rank: int = 0, size: int = 1, batch_size: int = 8, loaders: int = 0, number: int = 30, resident: bool = False
) -> ImageData:
    images = synthetic_images(number, 10, 8, 1, "training")
    return ImageData(
        one_of(rank, size), images, images, batch_size, 7,
        mean=MEAN, deviation=DEVIATION, padding=2, mirror=True, loaders=loaders, validation_batch=7, resident=resident,
    )  # fmt: skip


def test_a_crop_is_what_it_says_image_by_image() -> None:
    images, _ = synthetic_images(20, 10, 8, 3, "training")
    rows = np.array([3, 0, 19, 7, 12, 5])
    crops = Crops(20, 8, 4, True, generator(1, "x"), CPU)
    cut = crops.cut(torch.from_numpy(images[rows]), torch.from_numpy(rows))
    found = []
    for row, crop in zip(rows, cut.numpy(), strict=True):
        padded = np.pad(images[row], ((0, 0), (4, 4), (4, 4)))
        found += [
            (down, across, is_mirrored)
            for down, across, is_mirrored in itertools.product(range(9), range(9), (False, True))
            if np.array_equal(crop, padded[:, down : down + 8, across : across + 8][:, :, :: -1 if is_mirrored else 1])
        ]
    assert len(found) == len(set(found)) == len(rows)
    assert {is_mirrored for _, _, is_mirrored in found} == {True, False}


def test_without_padding_and_mirror_images_stay_as_they_are() -> None:
    images, _ = synthetic_images(9, 10, 8, 3, "training")
    crops = Crops(9, 8, 0, False, generator(1, "x"), CPU)
    np.testing.assert_array_equal(crops.cut(torch.from_numpy(images), torch.arange(9)).numpy(), images)


def test_the_ranks_share_one_epoch_whatever_their_number_and_threads() -> None:
    """Every global batch holds the same images, cut in the same way."""
    alone = [(batch.inputs, batch.targets) for batch in data(batch_size=8).training(3)]
    shared = [data(rank, 4, batch_size=2, loaders=rank).training(3) for rank in range(4)]
    for (inputs, targets), *parts in zip(alone, *shared, strict=True):
        assert torch.equal(torch.cat([part.inputs for part in parts]), inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), targets)
        assert {part.total for part in parts} == {len(targets)}
    shown = [sum(int(batch.inputs.sum()) for batch in data().training(epoch)) for epoch in (1, 2, 3)]
    assert len(set(shown)) == 3  # other parts of each image in every epoch


def test_images_that_are_kept_on_the_device_give_the_same_batches() -> None:
    loaded, resident = data(1, 2, loaders=2), data(1, 2, loaders=2, resident=True)
    for one, other in (
        *zip(loaded.training(2), resident.training(2), strict=True),
        *zip(loaded.validation(), resident.validation(), strict=True),
    ):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        assert one.total == other.total
        for here, there in zip(loaded.prepare(one, True), resident.prepare(other, True), strict=True):
            assert torch.equal(here, there)


def test_an_epoch_that_is_resumed_has_the_same_batches() -> None:
    features = np.arange(120, dtype=np.float32).reshape(30, 4)
    rows = ArrayData(one_of(0, 1), (features, np.arange(30)), (features, np.arange(30)), 8, 7, loaders=1)
    for source in (data(loaders=2), rows):
        remaining = list(source.training(2))[2:]
        assert remaining
        for one, other in zip(remaining, source.training(2, begin=2), strict=True):
            assert torch.equal(one.inputs, other.inputs)
            assert torch.equal(one.targets, other.targets)
            assert one.total == other.total


def test_validation_covers_every_image_once_and_untouched() -> None:
    images, labels = synthetic_images(30, 10, 8, 1, "training")
    batches = [batch for rank in range(4) for batch in data(rank, 4, loaders=2).validation()]
    np.testing.assert_array_equal(torch.cat([batch.inputs for batch in batches]).numpy(), images)
    np.testing.assert_array_equal(torch.cat([batch.targets for batch in batches]).numpy(), labels)


def test_validation_covers_every_row_of_an_array_once() -> None:
    rows, targets = np.arange(60, dtype=np.float32).reshape(30, 2), np.arange(30)
    ranks = [
        ArrayData(one_of(rank, 4), (rows, targets), (rows, targets), 2, 7, validation_batch=3) for rank in range(4)
    ]
    found = torch.cat([batch.targets for one in ranks for batch in one.validation()])
    assert found.tolist() == targets.tolist()
    alone = ArrayData(one_of(0, 1), (rows, targets), (rows, targets), 2, 7, validation_batch=20)
    work = Samples(alone, one_of(0, 1), torch.nn.Identity(), lambda outputs, _: outputs.mean())
    assert work.validate(1)["loss"] == rows.mean()  # each row counts the same, also those of a last batch of 10


def test_normalization() -> None:
    source = data()
    [batch, *_] = source.validation()
    values, targets = source.prepare(batch, training=False)
    expected = (batch.inputs / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)
    torch.testing.assert_close(values, expected)
    assert torch.equal(targets, batch.targets)


def test_generated_images_are_the_seeds_and_can_be_told_apart() -> None:
    images, labels = synthetic_images(500, 10, 32, 5, "training")
    again, _ = synthetic_images(500, 10, 32, 5, "training")
    other, _ = synthetic_images(500, 10, 32, 5, "validation")
    np.testing.assert_array_equal(images, again)
    assert not np.array_equal(images, other)
    assert np.bincount(labels).tolist() == [50] * 10
    # The mean image of a class is nearer to its images than another class's: most of the time, for they are shifted.
    means = np.stack([images[labels == label].mean(0) for label in range(10)])
    distances = ((images[:, None] - means) ** 2).mean((2, 3, 4))
    assert 0.5 < (distances.argmin(1) == labels).mean() < 1.0
