"""The batches of one rank: image files decoded ahead, generated files of the same form, or no files."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from task_images.cache import cached_folder
from task_images.data import Batch, BufferPool, Labels, Partition, ahead, generator, pin, shard
from task_images.imagenet_resnet.folders import ImageFolders, load
from task_images.imagenet_resnet.jpeg import Cut, Place, decode_batch, load_decoder
from task_images.images import Normalize, synthetic_images
from task_images.report import DataIdentity
from task_images.world import World

# Per channel, of the training images, as everybody has them.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_CHUNK = 8  # images that a thread decodes at a time
_BATCHES_AHEAD = 2
_BLOCK = 256
_QUALITY = 90
_GENERATED = 1  # version of what `generate` makes


class Wanted(NamedTuple):
    """The images of a batch: epoch and number of each, the numbers, and how many samples all ranks have."""

    places: list[Place]
    rows: npt.NDArray[np.int64]
    total: int


class Decoding:
    """Images decoded, and the seconds of all threads together that it took."""

    def __init__(self) -> None:
        self._images, self._seconds = 0, 0.0

    def add(self, images: int, seconds: float) -> None:
        self._images += images
        self._seconds += seconds

    def facts(self) -> dict[str, float]:
        rate = self._images / self._seconds if self._seconds else 0.0
        return {"images": self._images, "thread_seconds": self._seconds, "images_per_second_and_thread": rate}


class FileData:
    """Images in folders; `data.Data` for a training loop. How each is cut depends on seed, epoch and image alone.

    `least` is the number of images in the smallest training batch of any rank.

    side            of what the network sees, pixels
    shorter         in validation, the shorter side before the middle is cut out
    least_crop      in training, the least share of an image's area that is cut out
    loaders         threads that decode ahead; 0: decode when asked
    draft           whether JPEGs are decoded no larger than needed, see jpeg
    decoders        threads, or device: JPEGs are decoded where the model is, by a thread if there are `loaders`
    """

    def __init__(
        self,
        world: World,
        images: ImageFolders,
        batch_size: int,
        seed: int,
        *,
        side: int,
        shorter: int,
        least_crop: float,
        loaders: int,
        draft: bool,
        channels_last: bool,
        validation_batch: int = 64,
        decoders: str = "threads",
    ) -> None:
        self._world = world
        self._images = images
        self._side = side
        self._loaders = loaders
        self._cut = Cut(seed, side, shorter, least_crop, draft)
        self._decoders = decoders
        if decoders == "device":
            load_decoder()
        self._validation_batch = validation_batch
        self._batch_size = batch_size
        self._next: tuple[int, Generator[Batch, None, None] | None] = (0, None)
        self._decoding = Decoding()
        self._normalize = Normalize(world.device, MEAN, DEVIATION, channels_last)
        self._partition = Partition(len(images.training), batch_size, world.size, seed)
        self.steps = self._partition.steps
        last = len(images.training) - (self.steps - 1) * self._partition.global_batch
        self.least = min(batch_size, last // world.size)
        self._largest = -(-max(last, self._partition.global_batch) // world.size)

    def training(self, epoch: int) -> Iterator[Batch]:
        """The epoch's batches. The next epoch's first ones are decoded while the last ones are in use, and during
        validation: the pipeline runs on from epoch to epoch, unless one ends early."""
        expected, stream = self._next
        if expected != epoch or stream is None:
            stream = self._decode_epochs(epoch)
        self._next = (0, None)
        try:
            for _ in range(self.steps):
                yield next(stream)
            self._next = (epoch + 1, stream)
        finally:
            if self._next[1] is not stream:
                stream.close()

    def _decode_epochs(self, first: int) -> Generator[Batch, None, None]:
        """Batches of epoch after epoch, without end."""
        wanted = (
            Wanted([(epoch, int(index)) for index in share.indices], share.indices, share.total)
            for epoch in itertools.count(first)
            for share in self._partition.shares(epoch, self._world.rank)
        )
        return self._ahead(self._images.training.labels, wanted, self._batch_size, self._largest)

    def validation(self) -> Iterator[Batch]:
        """This rank's part of the validation images, decoded ahead."""
        part = self._images.validation
        own = shard(len(part), self._world.size, self._world.rank)
        starts = range(own.start, own.stop, self._validation_batch)
        rows = (np.arange(start, min(start + self._validation_batch, own.stop)) for start in starts)
        wanted = (Wanted([(0, int(index)) for index in some], some, len(part)) for some in rows)
        return self._ahead(part.labels, wanted, self._validation_batch, self._validation_batch)

    def prepare(self, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        """Normalized images [n, 3, side, side] and labels [n], on the device."""
        return self._normalize(batch.inputs), batch.targets.to(self._world.device, non_blocking=True)

    def facts(self) -> dict[str, object]:
        """For the result: what decoding took on this rank."""
        return {"decoders": self._decoders, "decoded": self._decoding.facts()}

    def _ahead(self, labels: Labels, wanted: Iterator[Wanted], usual: int, most: int) -> Generator[Batch, None, None]:
        """The batches wanted, of `usual` images each, and of `most` at most. Every few images are decoded by another
        thread into their place in the batch."""
        if self._decoders == "device":
            yield from self._decode_on_device(labels, wanted)
            return
        shape = (most, self._side, self._side, 3)
        buffers = BufferPool(partial(np.empty, shape, np.uint8))
        is_pinned = self._world.device.type == "cuda"
        parts: deque[tuple[int, Batch | None]] = deque()  # images of each call; the batch that is whole after it

        def calls() -> Iterator[Callable[[], float]]:
            for places, rows, total in wanted:
                # torch uses pinned memory again by itself.
                whole = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if is_pinned else buffers.take()
                images = whole[: len(rows)]
                targets = pin(torch.from_numpy(labels[rows]), self._world.device)
                batch = Batch(images.permute(0, 3, 1, 2), targets, total)
                for start in range(0, len(rows), _CHUNK):
                    some = places[start : start + _CHUNK]
                    parts.append((len(some), batch if start + _CHUNK >= len(rows) else None))
                    yield partial(self._cut.fill, images.numpy()[start : start + _CHUNK], self._images, some)

        # In order, so that a batch is whole when its last part is. Two batches are decoded beforehand, however large.
        window = _BATCHES_AHEAD * -(-usual // _CHUNK)
        for seconds in ahead(self._loaders, calls(), window):
            number, finished = parts.popleft()
            self._decoding.add(number, seconds)
            if finished is not None:
                yield finished

    def _decode_on_device(self, labels: Labels, wanted: Iterator[Wanted]) -> Iterator[Batch]:
        """The batches wanted, their images on the device, two of them made ahead."""

        def make(places: list[Place], rows: npt.NDArray[np.int64], total: int) -> Batch:
            images, seconds = decode_batch(self._cut, self._images, places, self._world.device)
            self._decoding.add(len(rows), seconds)
            return Batch(images, pin(torch.from_numpy(labels[rows]), self._world.device), total)

        return ahead(min(self._loaders, 1), (partial(make, *one) for one in wanted), _BATCHES_AHEAD)


class FakeData:
    """One batch of random numbers, made once where the model is, `steps` times an epoch: throughput without loading."""

    def __init__(
        self, world: World, batch_size: int, steps: int, classes: int, side: int, seed: int, channels_last: bool
    ) -> None:
        stream = generator(seed, "fake", world.rank)
        images = torch.randn(batch_size, 3, side, side, generator=stream)
        memory = torch.channels_last if channels_last else torch.contiguous_format
        targets = torch.randint(classes, (batch_size,), generator=stream)
        self._batch = Batch(
            images.to(world.device, memory_format=memory), targets.to(world.device), batch_size * world.size
        )
        self.steps = steps
        self.least = batch_size

    def training(self, epoch: int) -> Iterator[Batch]:
        """The same batch, `steps` times."""
        return (self._batch for _ in range(self.steps))

    def validation(self) -> Iterator[Batch]:
        """Nothing."""
        return iter(())

    def prepare(self, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        """The batch, which is on the device already."""
        return batch.inputs, batch.targets

    def facts(self) -> dict[str, object]:
        return {}


def generate(folder: Path, classes: int, sizes: dict[str, int], side: int, seed: int) -> Path:
    """JPEG files of images that a network can tell apart, in the folders that ImageNet has: `sizes` of `train` and
    `val`, each `side` x `side`. Made by the first rank of the machine that comes; the same for equal arguments.

    Returns the folder that holds `train` and `val`.
    """
    from PIL import Image

    name = f"imagenet-generated-{classes}x{sizes['train']}+{sizes['val']}-{side}-{seed}"

    def build(place: Path) -> None:
        for part, number in sizes.items():
            for start in range(0, number, _BLOCK):
                block = synthetic_images(min(_BLOCK, number - start), classes, side, seed, f"{part}-{start}")
                for index, (image, label) in enumerate(zip(*block, strict=True), start):
                    path = place / part / f"class-{label:04d}" / f"{index:06d}.jpeg"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(image.transpose(1, 2, 0)).save(path, quality=_QUALITY)

    return cached_folder(folder, name, _GENERATED, list, build).folder


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Unpack the archives if there are any, and list the images, once for all runs."""
    return load(folder, int(str(parameters["classes"])), print).identity


def validation_arrays(folder: Path) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.int64]]:
    """Paths of the validation images [50000], which are files of several sizes, and their labels [50000]."""
    part = load(folder, len(list((folder / "val").iterdir())), print).validation
    return np.array([str(part.path(index)) for index in range(len(part))]), np.asarray(part.labels, np.int64)
