"""One image file -> the square of bytes that the network sees, as the field cuts it (Szegedy et al. 2014; torchvision).

Pillow's decoder and scaler let go of the interpreter's lock while they work, so threads are enough to load ahead: what
keeps it is a quarter of a millisecond an image, and leaves room for some thousand images a second and rank. With
`draft` the decoder leaves out what a smaller image does not need: a JPEG is decoded at 1/2, 1/4 or 1/8 of its size
where that still has every pixel of the result (a scaled cosine transform in place of part of the averaging).

`decode_batch` does it where the model is, by torchvision: nvJPEG on a GPU, libjpeg-turbo on a CPU. What else lies among
the images (in ImageNet a PNG and some CMYK files) is decoded by Pillow. The squares are the same but for rounding and
the outermost pixels: Pillow scales in 8 bits and sees what lies beside the box, which is cut out here first. `draft`
has no effect. Not run on a GPU yet.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from task_images.contract import EnvironmentUnfitError, install_hint
from task_images.data import Bytes, numpy_generator
from task_images.imagenet_resnet.folders import ImageFolders

RATIOS = (3 / 4, 4 / 3)
TRIES = 10

Place = tuple[int, int]  # epoch from 1, or 0 for validation; number of the image
ImageFile = Path | BytesIO
Box = tuple[float, float, float, float]  # left, upper, right, lower


@dataclass(frozen=True)
class Window:
    """What of an image becomes the square: `box`, scaled to `size` (width, height), of that the square whose corner is
    at `left` and `upper`, perhaps mirrored."""

    box: Box
    size: tuple[int, int]
    left: int = 0
    upper: int = 0
    mirrored: bool = False


Choose = Callable[[int, int], Window]  # from the width and height of an image


def training_window(width: int, height: int, side: int, least: float, stream: np.random.Generator) -> Window:
    """A random part of `least` to all of the image's area, 3:4 to 4:3, scaled to `side` x `side`, every other mirrored.

    All that is random comes from `stream`.
    """
    return Window(random_box(width, height, least, stream), (side, side), mirrored=stream.random() < 0.5)


def validation_window(width: int, height: int, side: int, shorter: int) -> Window:
    """The middle `side` x `side` of the image, its shorter side scaled to `shorter`."""
    factor = shorter / min(width, height)
    size = max(side, int(width * factor)), max(side, int(height * factor))
    left, upper = (round((length - side) / 2) for length in size)
    return Window((0, 0, width, height), size, left, upper)


def read_square(path: ImageFile, choose: Choose, side: int, draft: bool) -> Bytes:
    """The square [side, side, 3] that `choose` takes from an image. Raises EnvironmentUnfitError for a damaged file."""
    try:
        with Image.open(path) as image:
            window = choose(*image.size)
            pixels = _scale(image, window.box, window.size, draft)
    except FileNotFoundError:
        raise EnvironmentUnfitError(f"{path} is gone", "It existed when the folders were listed.") from None
    except Exception as error:  # a damaged file may raise anything
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise EnvironmentUnfitError(
            f"{path} cannot be read as an image: {why}", "Download the file again, or remove it."
        ) from None
    square = pixels[window.upper : window.upper + side, window.left : window.left + side]
    return square[:, ::-1] if window.mirrored else square


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


def _scale(image: Image.Image, box: Box, size: tuple[int, int], draft: bool) -> Bytes:
    """The part `box` of the image, scaled to `size` (bilinear, averaging if it gets smaller); [height, width, 3]."""
    width, height = image.size
    if draft:
        # The size of the whole at which the box is just as large as wanted; the decoder takes a power of two above.
        image.draft(None, (round(width * size[0] / (box[2] - box[0])), round(height * size[1] / (box[3] - box[1]))))
    across, down = image.width / width, image.height / height
    colors = image if image.mode == "RGB" else image.convert("RGB")  # gray ones, CMYK, PNGs with transparency
    inside = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    return np.asarray(colors.resize(size, Image.Resampling.BILINEAR, inside))


@dataclass(frozen=True)
class Cut:
    """How images are cut, as `data.FileData` says. Equal arguments give equal bytes."""

    seed: int
    side: int
    shorter: int
    least_crop: float
    draft: bool

    def fill(self, target: Bytes, images: ImageFolders, places: Sequence[Place]) -> float:
        """Decode images into target [n, side, side, 3]; returns the seconds that it took."""
        begin = time.perf_counter()
        for row, place in zip(target, places, strict=True):
            row[:] = read_square(*self.choose(images, place), self.side, self.draft)
        return time.perf_counter() - begin

    def choose(self, images: ImageFolders, place: Place) -> tuple[ImageFile, Choose]:
        """The file of an image, and what of it is cut out."""
        epoch, index = place
        if not epoch:
            return images.validation.path(index), partial(validation_window, side=self.side, shorter=self.shorter)
        stream = numpy_generator(self.seed, "crop", epoch, index)
        choose = partial(training_window, side=self.side, least=self.least_crop, stream=stream)
        return images.training.path(index), choose


_JPEG = b"\xff\xd8\xff"


def load_decoder() -> ModuleType:
    """torchvision's `io`. Raises EnvironmentUnfitError if it is not installed, or not made for this torch."""
    try:
        from torchvision import io
    except (ImportError, OSError, RuntimeError) as error:
        raise EnvironmentUnfitError(
            f"decoders=device needs torchvision: {error}", f"{install_hint('torchvision')}, or --set decoders=threads"
        ) from None
    return io  # type: ignore[no-any-return]


def decode_batch(cut: Cut, images: ImageFolders, places: Sequence[Place], device: torch.device) -> tuple[Tensor, float]:
    """The squares of these images, uint8 [n, 3, side, side] on `device`, and the seconds that it took the host.

    Raises EnvironmentUnfitError for a damaged file.
    """
    begin = time.perf_counter()
    batch = torch.empty((len(places), 3, cut.side, cut.side), dtype=torch.uint8, device=device)
    chosen = [cut.choose(images, place) for place in places]
    contents = [file.read_bytes() if isinstance(file, Path) else file.getvalue() for file, _ in chosen]
    pictures = _decode([content for content in contents if content.startswith(_JPEG)], device)
    for square, (file, choose), content in zip(batch, chosen, contents, strict=True):
        picture = pictures.pop(0) if content.startswith(_JPEG) else None
        if picture is None:
            square.copy_(torch.from_numpy(read_square(file, choose, cut.side, cut.draft).copy()).permute(2, 0, 1))
        else:
            square.copy_(_take(picture, choose(picture.shape[2], picture.shape[1]), cut.side))
    return batch, time.perf_counter() - begin


def _decode(contents: Sequence[bytes], device: torch.device) -> list[Tensor | None]:
    """Pixels [3, height, width] of each file; None for what torchvision cannot decode."""
    io = load_decoder()
    files = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    options = {"mode": io.ImageReadMode.RGB, "device": device}
    try:
        return list(io.decode_jpeg(files, **options)) if files else []
    except RuntimeError:  # it does not say which file it was
        return [_try(io, file, options) for file in files]


def _try(io: ModuleType, file: Tensor, options: dict[str, object]) -> Tensor | None:
    try:
        return io.decode_jpeg(file, **options)  # type: ignore[no-any-return]
    except RuntimeError:
        return None


def _take(picture: Tensor, window: Window, side: int) -> Tensor:
    """The square of a window [3, side, side], uint8."""
    left, upper, right, lower = (int(edge) for edge in window.box)
    part = picture[None, :, upper:lower, left:right].float()
    width, height = window.size
    scaled = interpolate(part, (height, width), mode="bilinear", antialias=True)[0].round_().clamp_(0, 255)
    square = scaled[:, window.upper : window.upper + side, window.left : window.left + side]
    return square.flip(-1) if window.mirrored else square
