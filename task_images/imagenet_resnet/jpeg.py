"""One image file -> the square of bytes that the network sees, as the field cuts it (Szegedy et al. 2014; torchvision).

Pillow's decoder and scaler let go of the interpreter's lock while they work, so threads are enough to load ahead: what
keeps it is a quarter of a millisecond an image, and leaves room for some thousand images a second and rank. With
`draft` the decoder leaves out what a smaller image does not need: a JPEG is decoded at 1/2, 1/4 or 1/8 of its size
where that still has every pixel of the result (a scaled cosine transform in place of part of the averaging).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from task_images import Lazy
from task_images.contract import EnvironmentUnfitError
from task_images.data import Bytes

if TYPE_CHECKING:
    from PIL import Image
else:  # random images, as of the preset `throughput`, need no decoder
    Image = Lazy("PIL.Image")

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
        factor = shorter / min(width, height)
        size = max(side, int(width * factor)), max(side, int(height * factor))
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
    colors = image if image.mode == "RGB" else image.convert("RGB")  # gray ones, CMYK, PNGs with transparency
    inside = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    return np.asarray(colors.resize(size, Image.Resampling.BILINEAR, inside))
