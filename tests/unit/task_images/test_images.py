"""Crops, loading ahead, and generated images."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from task_images.arrays import ahead, synthetic_images
from task_images.contract import Contract
from task_images.data import Crops, ImageData, Normalize
from task_images.errors import TaskUsageError
from task_images.seeds import generator
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
    rows = np.array([3, 0, 19, 7])
    crops = Crops(20, 8, 4, True, generator(1, "x"), CPU)
    cut = crops.cut(torch.from_numpy(images[rows]), torch.from_numpy(rows))
    for place, row in enumerate(rows):
        padded = np.zeros((3, 16, 16), np.uint8)
        padded[:, 4:12, 4:12] = images[row]
        down, across = (int(crops._offsets[axis, row]) for axis in range(2))
        expected = padded[:, down : down + 8, across : across + 8]
        if crops._mirrored[row]:
            expected = expected[:, :, ::-1]
        np.testing.assert_array_equal(cut[place].numpy(), expected)
    assert len({(int(a), int(b)) for a, b in zip(*crops._offsets[..., 0], strict=True)}) > 10
    assert set(crops._mirrored[:, 0].tolist()) == {True, False}


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


def test_epochs_differ_and_an_epoch_repeats_itself() -> None:
    first, again, second = (next(iter(data().training(epoch))).inputs for epoch in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_validation_covers_every_image_once_and_untouched() -> None:
    images, labels = synthetic_images(30, 10, 8, 1, "training")
    batches = [batch for rank in range(4) for batch in data(rank, 4, loaders=2).validation()]
    np.testing.assert_array_equal(torch.cat([batch.inputs for batch in batches]).numpy(), images)
    np.testing.assert_array_equal(torch.cat([batch.targets for batch in batches]).numpy(), labels)


def test_normalization() -> None:
    source = data()
    [batch, *_] = source.validation()
    values, targets = source.prepare(batch, training=False)
    expected = (batch.inputs / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)
    torch.testing.assert_close(values, expected)
    assert torch.equal(targets, batch.targets)


def test_more_ranks_than_images_are_refused() -> None:
    with pytest.raises(TaskUsageError, match="3 samples cannot be shared among 4 ranks"):
        data(0, 4, number=3)


def test_a_batch_larger_than_the_data_is_all_of_it() -> None:
    [batch] = data(batch_size=64).training(1)
    assert batch.size == batch.total == 30


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_results_come_in_order_and_not_too_far_ahead(threads: int) -> None:
    made: list[int] = []

    def make(number: int) -> int:
        time.sleep(0.002 * (number % 3))
        made.append(number)
        return number

    got = []
    for number in ahead(threads, (partial(make, number) for number in range(20))):
        got.append(number)
        assert len(made) <= len(got) + 2 * threads + 1
    assert got == list(range(20))


def test_an_error_in_a_thread_reaches_the_reader_and_leaving_early_ends_the_threads() -> None:
    def calls() -> Iterator[partial[float]]:
        yield partial(float, 1)
        yield partial(float, "nonsense")

    with pytest.raises(ValueError, match="nonsense"):
        list(ahead(2, calls()))
    endless = ahead(2, (partial(float, number) for number in range(10**9)))
    next(endless)
    endless.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


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


def test_loaders_make_no_teams_of_threads() -> None:
    """Each would compute with as many threads as the model, and compete with it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert list(ahead(2, iter([torch.get_num_threads] * 4))) == [1] * 4
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.nightly
def test_threads_stay_alone_whatever_openmp_was_loaded_first() -> None:
    """scikit-learn brings an OpenMP of its own; torch's is the one that counts."""
    program = (
        "import sklearn.utils._openmp_helpers, torch\n"
        "from task_images.arrays import _find_openmp, ahead\n"
        "torch.set_num_threads(2)\n"
        "print(sorted('scikit' in one._name for one in _find_openmp()))\n"
        "print(list(ahead(2, iter([torch.get_num_threads] * 4))), torch.get_num_threads())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[False, True]", "[1, 1, 1, 1] 2"], done.stderr


def test_black_and_white_are_normalized_from_0_and_1() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 1, 1)
    black, white = Normalize(CPU, MEAN, DEVIATION, False)(images).flatten(1)
    mean, deviation = torch.tensor(MEAN), torch.tensor(DEVIATION)
    torch.testing.assert_close(black, -mean / deviation)
    torch.testing.assert_close(white, (1 - mean) / deviation)
    assert int(images.max()) == 255  # the bytes are not changed
