"""The images of a run, loaded ahead and augmented without torch.

Which images a step sees, and how each of them is cropped and mirrored, are functions of seed, epoch and image alone.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from task_images.arrays import Bytes, Labels, Partition, ahead, shard
from task_images.cifar10_resnet20.data import SIDE, Cifar, prepare_data
from task_images.seeds import numpy_generator

__all__ = ["Batch", "Images", "cut", "prepare_data"]

PADDING = 4
VALIDATION_BATCH = 500


class Batch(NamedTuple):
    """Images [n, 32, 32, 3] of bytes, labels [n], and how many samples all ranks have in this step."""

    images: Bytes
    labels: Labels
    total: int

    @property
    def size(self) -> int:
        """How many images this rank has in the step."""
        return len(self.labels)


class Images:
    """Batches for rank `rank` of `size`; all ranks get equally many training batches, none of them empty."""

    def __init__(self, images: Cifar, batch_size: int, rank: int, size: int, seed: int, loaders: int) -> None:
        self._images = images
        self._rank, self._size = rank, size
        self._seed = seed
        self._loaders = loaders
        self._partition = Partition(len(images.training[1]), batch_size, size, seed)
        self.steps = self._partition.steps

    def training(self, epoch: int) -> Iterator[Batch]:
        """Half of the images mirrored, each cut from where it stands in a black border of four pixels."""
        images, labels = self._images.training
        stream = numpy_generator(self._seed, "augmentation", epoch)
        offsets = stream.integers(0, 2 * PADDING + 1, (2, len(labels), 1))
        mirrored = stream.random((len(labels), 1)) < 0.5

        def load(rows: npt.NDArray[np.int64], total: int) -> Batch:
            return Batch(cut(images[rows], offsets[:, rows], mirrored[rows]), labels[rows], total)

        shares = self._partition.shares(epoch, self._rank)
        return ahead(self._loaders, (partial(load, share.indices, share.total) for share in shares))

    def validation(self) -> Iterator[Batch]:
        """This rank's shard; it may be empty."""
        images, labels = self._images.validation
        own = shard(len(labels), self._size, self._rank)

        def load(start: int) -> Batch:
            rows = slice(start, min(start + VALIDATION_BATCH, own.stop))
            return Batch(images[rows].transpose(0, 2, 3, 1), labels[rows], len(labels))

        return ahead(self._loaders, (partial(load, start) for start in range(own.start, own.stop, VALIDATION_BATCH)))


def cut(images: Bytes, offsets: npt.NDArray[np.int64], mirrored: npt.NDArray[np.bool_]) -> Bytes:
    """Crops [n, 32, 32, 3] of images [n, 3, 32, 32] at offsets [2, n, 1] in their padded forms."""
    padded = np.pad(images, ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    place = np.arange(SIDE)
    down = offsets[0] + place
    across = offsets[1] + np.where(mirrored, SIDE - 1 - place, place)
    number = np.arange(len(images))
    return padded[number[:, None, None], :, down[:, :, None], across[:, None, :]]
