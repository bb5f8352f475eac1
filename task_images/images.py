"""Images of bytes with labels: batches for a training loop, cropped, flipped and prefetched; and synthetic ones.

An image's crop and flip depend only on seed, epoch and sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from task_images.data import Batch, Bytes, Labels, Partition, ahead, generator, numpy_generator, pin, shard
from task_images.methods import torch

if TYPE_CHECKING:
    from task_images.world import World


def named_folders(folder: Path, names: str, depth: int = 3) -> Iterator[Path]:
    """`folder`, and those in it, one in another, whose names match the expression `names` in any case: tools unpack
    archives into a folder of their names, and libraries make more."""
    yield folder
    if depth and folder.is_dir():
        for path in sorted(folder.iterdir()):
            if re.fullmatch(names, path.name, re.IGNORECASE) and path.is_dir():
                yield from named_folders(path, names, depth - 1)


def synthetic_images(
    number: int, classes: int, side: int, seed: int, part: str, *, channels: int = 3, noise: float = 0.25
) -> tuple[Bytes, Labels]:
    """`number` synthetic images [n, channels, side, side] that a convolutional network can learn, and their labels.

    Each class has a smooth color pattern with left-right symmetry. An image is its class's pattern, shifted by up to an
    eighth of its side, with random brightness and noise of standard deviation `noise`. Equal `seed` and `part` give
    equal images on all ranks; all parts of a seed share the patterns.
    """
    patterns = _patterns(classes, side, channels, seed)
    stream = numpy_generator(seed, "images", part)
    labels = stream.permutation(np.arange(number) % classes)
    shifts = stream.integers(-(side // 8), side // 8 + 1, (2, number))
    brightness = stream.uniform(0.6, 1.0, (number, 1, 1, 1)).astype(np.float32)
    place = np.arange(side)
    down, across = (place + shift[:, None] for shift in shifts)
    moved = patterns[labels[:, None, None], :, down[:, :, None] % side, across[:, None, :] % side].transpose(0, 3, 1, 2)
    images = moved * brightness + noise * stream.standard_normal(moved.shape, np.float32)
    return np.clip(255 * images, 0, 255).astype(np.uint8), labels


def _patterns(classes: int, side: int, channels: int, seed: int) -> npt.NDArray[np.float32]:
    """Patterns [classes, channels, side, side] from 0 to 1, each made of a few low frequencies."""
    stream = numpy_generator(seed, "patterns")
    angles = np.arange(side) * (2 * np.pi / side)
    waves = np.stack([np.cos(frequency * angles + phase) for frequency in (1, 2, 3) for phase in (0, np.pi / 2)])
    weights = stream.standard_normal((classes, channels, len(waves), len(waves)))
    raw = np.einsum("kcab,ah,bw->kchw", weights, waves, waves)
    raw = raw + raw[..., ::-1]
    low, high = raw.min((2, 3), keepdims=True), raw.max((2, 3), keepdims=True)
    patterns: npt.NDArray[np.float32] = ((raw - low) / (high - low)).astype(np.float32)
    return patterns


class ImageData:
    """Images [n, channels, height, width] of bytes with labels [n]; `data.Data` for a training loop.

    mean, deviation    per channel, for values from 0 to 1
    padding            black border added before a random crop of the original size; 0: no crop
    mirror             whether to flip half of the images horizontally, at random
    loaders            prefetching threads; 0: load on demand
    channels_last      memory format of the model's input
    resident           keep all images on the device, and augment them there, without loaders
    """

    def __init__(
        self,
        world: World,
        training: tuple[Bytes, Labels],
        validation: tuple[Bytes, Labels],
        batch_size: int,
        seed: int,
        *,
        mean: Sequence[float],
        deviation: Sequence[float],
        padding: int = 0,
        mirror: bool = False,
        loaders: int = 2,
        channels_last: bool = False,
        validation_batch: int = 500,
        resident: bool = False,
    ) -> None:
        self._world = world
        self._place = world.device if resident else torch.device("cpu")
        self._training = self._keep(training) if resident else training
        self._validation = self._keep(validation) if resident else validation
        self._validation_batch = validation_batch
        self._seed = seed
        self._padding = padding
        self._mirror = mirror
        self._loaders = 0 if resident else loaders
        self._normalize = Normalize(world.device, mean, deviation, channels_last)
        self._partition = Partition(len(training[1]), batch_size, world.size, seed)
        self.steps = self._partition.steps

    def training(self, epoch: int, begin: int = 0) -> Iterator[Batch]:
        """The batches of an epoch (from 1) for this rank from number `begin` on, augmented and prefetched."""
        images, labels = self._training
        side = images.shape[-1]
        stream = generator(self._seed, "augmentation", epoch)
        crops = Crops(len(labels), side, self._padding, self._mirror, stream, self._place)
        shares = self._partition.shares(epoch, self._world.rank, begin)

        def load(rows: npt.NDArray[np.int64], total: int) -> Batch:
            numbers = self._number(rows)
            chosen, targets = self._choose(images, numbers), self._choose(labels, numbers)
            return Batch(self._pin(crops.cut(chosen, numbers)), self._pin(targets), total)

        return ahead(self._loaders, (partial(load, share.indices, share.total) for share in shares))

    def validation(self) -> Iterator[Batch]:
        """This rank's part of the validation set, in batches, prefetched."""
        images, labels = self._validation
        own = shard(len(labels), self._world.size, self._world.rank)

        def load(start: int) -> Batch:
            numbers = self._number(np.arange(start, min(start + self._validation_batch, own.stop)))
            return Batch(self._pin(self._choose(images, numbers)), self._pin(self._choose(labels, numbers)), 0)

        starts = range(own.start, own.stop, self._validation_batch)
        return ahead(self._loaders, (partial(load, start) for start in starts))

    def prepare(self, batch: Batch, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalized images in float32 [n, channels, height, width] and labels [n], on the device."""
        return self._normalize(batch.inputs), batch.targets.to(self._world.device, non_blocking=True)

    def _keep(self, part: tuple[Bytes, Labels]) -> tuple[torch.Tensor, torch.Tensor]:
        """A part's images and labels on the device."""
        images, labels = (torch.tensor(array, device=self._place) for array in part)
        return images, labels

    def _number(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Sample indices as a tensor on the data's device, transferred asynchronously."""
        return pin(torch.from_numpy(rows), self._place).to(self._place, non_blocking=True)

    def _choose(self, source: Bytes | Labels | torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Copies of the samples, on the device for resident data."""
        return source[numbers] if isinstance(source, torch.Tensor) else torch.from_numpy(source[numbers.numpy()])

    def _pin(self, part: torch.Tensor) -> torch.Tensor:
        return pin(part, self._world.device)


class Normalize:
    """Images of bytes [n, channels, height, width] -> fp32 on `device`, normalized by `mean` and `deviation` (per
    channel, for values from 0 to 1), in the model's memory format. Bytes are transferred and converted on the
    device."""

    def __init__(
        self, device: torch.device, mean: Sequence[float], deviation: Sequence[float], channels_last: bool
    ) -> None:
        self._device = device
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        spread = torch.tensor(deviation, device=device).view(-1, 1, 1)
        self._factor = 1 / (255 * spread)
        self._shift = torch.tensor(mean, device=device).view(-1, 1, 1) / spread

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        there = images.to(self._device, non_blocking=True)
        return there.to(torch.float32, memory_format=self._format).mul_(self._factor).sub_(self._shift)


class Crops:
    """Random crops and flips of `images` square images of `side` pixels in one epoch.

    Drawn on the CPU, so that all devices use the same crops; applied on `device`.
    """

    def __init__(
        self, images: int, side: int, padding: int, mirror: bool, stream: torch.Generator, device: torch.device
    ) -> None:
        self._side = side
        self._padding = padding
        self._offsets = torch.randint(2 * padding + 1, (2, images, 1), generator=stream).to(device)
        self._mirrored = (torch.rand((images, 1), generator=stream) < (0.5 if mirror else 0.0)).to(device)

    def cut(self, chosen: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The crops of the images `chosen` [n, channels, side, side], bytes, with channels-last memory.

        `numbers` [n] are their indices among all images.
        """
        padded = torch.nn.functional.pad(chosen, (self._padding,) * 4)
        place = torch.arange(self._side, device=chosen.device)
        down = self._offsets[0, numbers] + place
        across = self._offsets[1, numbers] + torch.where(self._mirrored[numbers], self._side - 1 - place, place)
        number = torch.arange(len(numbers), device=chosen.device)
        # With indices on both sides of the slice, torch puts the sliced dimension last.
        return padded[number[:, None, None], :, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)
