"""The batches of one rank: image files decoded ahead, generated files of the same form, or no files."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from task_images import Lazy
from task_images.cache import cached_folder
from task_images.contract import EnvironmentUnfitError
from task_images.data import Batch, Bytes, Indices, Partition, ahead, generator, numpy_generator, pin, shard
from task_images.imagenet_resnet.folders import ImageFolders, Part, load
from task_images.images import Normalize, synthetic_images
from task_images.report import DataIdentity
from task_images.world import World

if TYPE_CHECKING:
    from PIL import Image
else:  # random images, as of the preset `throughput`, need no decoder
    Image = Lazy("PIL.Image")

# --- one image file -> the square of bytes that the network sees ------------------------------------------------------
# As the field cuts it (Szegedy et al. 2014; torchvision). Pillow's decoder and scaler let go of the interpreter's lock
# while they work, so threads are enough to load ahead. With `draft` the decoder leaves out what a smaller image does
# not need: a JPEG is decoded at 1/2, 1/4 or 1/8 of its size where that still has every pixel of the result.

RATIOS = (3 / 4, 4 / 3)
TRIES = 10

Box = tuple[int, int, int, int]  # left, upper, right, lower


def crop_for_training(path: Path, side: int, least: float, stream: np.random.Generator, draft: bool) -> Bytes:
    """A random part of `least` to all of the image's area, 3:4 to 4:3, scaled to [side, side, 3], every other mirrored.

    All that is random comes from `stream`. Raises EnvironmentUnfitError for a damaged file.
    """
    with _open(path) as image:
        box, is_mirrored = random_box(*image.size, least, stream), stream.random() < 0.5
        square = _scale(image, box, (side, side), draft)
    return square[:, ::-1] if is_mirrored else square


def crop_for_validation(path: Path, side: int, shorter: int, draft: bool) -> Bytes:
    """The middle [side, side, 3] of the image, its shorter side scaled to `shorter`. Raises as `crop_for_training`."""
    with _open(path) as image:
        width, height = image.size
        # Multiplied first: the shorter side must not become 255 by rounding.
        size = max(side, shorter * width // min(width, height)), max(side, shorter * height // min(width, height))
        left, upper = (round((length - side) / 2) for length in size)
        return _scale(image, (0, 0, width, height), size, draft)[upper : upper + side, left : left + side]


def random_box(width: int, height: int, least: float, stream: np.random.Generator) -> Box:
    """A box inside the image: share of its area uniform in [least, 1], logarithm of width / height uniform in that of
    RATIOS. After ten tries that did not fit, the greatest box in the middle with the nearest ratio."""
    low, high = (math.log(ratio) for ratio in RATIOS)
    for _ in range(TRIES):
        area = width * height * stream.uniform(least, 1.0)
        ratio = math.exp(stream.uniform(low, high))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, upper = int(stream.integers(width - across + 1)), int(stream.integers(height - down + 1))
            return left, upper, left + across, upper + down
    ratio = min(max(width / height, RATIOS[0]), RATIOS[1])
    across, down = min(width, round(height * ratio)), min(height, round(width / ratio))
    left, upper = (width - across) // 2, (height - down) // 2
    return left, upper, left + across, upper + down


@contextmanager
def _open(path: Path) -> "Iterator[Image.Image]":
    """The image, which is decoded within the context."""
    try:
        with Image.open(path) as image:
            yield image
    except FileNotFoundError:
        raise EnvironmentUnfitError(f"{path} is gone", "It existed when the folders were listed.") from None
    except Exception as error:  # a damaged file may raise anything
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise EnvironmentUnfitError(
            f"{path} cannot be read as an image: {why}", "Download the file again, or remove it."
        ) from None


def _scale(image: "Image.Image", box: Box, size: tuple[int, int], draft: bool) -> Bytes:
    """The part `box` of the image, scaled to `size` (bilinear, averaging if it gets smaller); [height, width, 3]."""
    width, height = image.size
    if draft:
        # The size of the whole at which the box is just as large as wanted; the decoder takes a power of two above.
        image.draft(None, (round(width * size[0] / (box[2] - box[0])), round(height * size[1] / (box[3] - box[1]))))
    across, down = image.width / width, image.height / height
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range nobody knows")
    if image.mode.startswith("I"):  # 16 bits, which convert() would not scale but cut off at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    colors = image if image.mode == "RGB" else image.convert("RGB")  # gray ones, CMYK, PNGs with transparency
    inside = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    return np.asarray(colors.resize(size, Image.Resampling.BILINEAR, inside))


# --- batches ----------------------------------------------------------------------------------------------------------


# Per channel, of the training images, as everybody has them.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_BLOCK = 256
_QUALITY = 90
_GENERATED = 1  # version of what `generate` makes


class FileData:
    """Images in folders; `data.Data` for a training loop. How each is cut depends on seed, epoch and image alone.

    `least` is the number of images in the smallest training batch of any rank.

    side            of what the network sees, pixels
    shorter         in validation, the shorter side before the middle is cut out
    least_crop      in training, the least share of an image's area that is cut out
    loaders         threads that decode ahead, a batch each; 0: decode when asked
    draft           whether JPEGs are decoded no larger than needed, see jpeg
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
    ) -> None:
        self._world, self._images, self._seed = world, images, seed
        self._side, self._shorter, self._least_crop, self._draft = side, shorter, least_crop, draft
        self._loaders, self._validation_batch = loaders, validation_batch
        self._normalize = Normalize(world.device, MEAN, DEVIATION, channels_last)
        self._partition = Partition(len(images.training), batch_size, world.size, seed)
        self.steps = self._partition.steps
        last = len(images.training) - (self.steps - 1) * self._partition.global_batch
        self.least = min(batch_size, last // world.size)

    def training(self, epoch: int, begin: int = 0) -> Iterator[Batch]:
        """The epoch's batches from number `begin` on, decoded ahead."""
        part = self._images.training

        def crop(index: int) -> Bytes:
            stream = numpy_generator(self._seed, "crop", epoch, index)
            return crop_for_training(part.path(index), self._side, self._least_crop, stream, self._draft)

        shares = self._partition.shares(epoch, self._world.rank, begin)
        return ahead(self._loaders, (partial(self._load, part, crop, *share) for share in shares))

    def validation(self) -> Iterator[Batch]:
        """This rank's part of the validation images, decoded ahead."""
        part = self._images.validation

        def crop(index: int) -> Bytes:
            return crop_for_validation(part.path(index), self._side, self._shorter, self._draft)

        own = shard(len(part), self._world.size, self._world.rank)
        starts = range(own.start, own.stop, self._validation_batch)
        rows = (np.arange(start, min(start + self._validation_batch, own.stop)) for start in starts)
        return ahead(self._loaders, (partial(self._load, part, crop, some, len(part)) for some in rows))

    def prepare(self, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        """Normalized images [n, 3, side, side] and labels [n], on the device."""
        return self._normalize(batch.inputs), batch.targets.to(self._world.device, non_blocking=True)

    def _load(self, part: Part, crop: Callable[[int], Bytes], rows: Indices, total: int) -> Batch:
        """The images `rows` as a batch of an update with `total` images of all ranks."""
        device = self._world.device
        images = torch.empty(
            (len(rows), self._side, self._side, 3), dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        for target, index in zip(images.numpy(), rows, strict=True):
            target[:] = crop(int(index))
        return Batch(images.permute(0, 3, 1, 2), pin(torch.from_numpy(part.labels[rows]), device), total)


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

    def training(self, epoch: int, begin: int = 0) -> Iterator[Batch]:
        """The same batch, `steps` times less `begin`."""
        return (self._batch for _ in range(begin, self.steps))

    def validation(self) -> Iterator[Batch]:
        """Nothing."""
        return iter(())

    def prepare(self, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        """The batch, which is on the device already."""
        return batch.inputs, batch.targets


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
