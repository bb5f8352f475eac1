"""JPEG files decoded, scaled and cut where the model is, by torchvision: nvJPEG on a GPU, libjpeg-turbo on a CPU.

What else lies among the images (in ImageNet a PNG and some CMYK files) is decoded by Pillow. The squares are those of
`jpeg`, but for rounding and the outermost pixels: Pillow scales in 8 bits and sees what lies beside the box, which is
cut out here first. `draft` has no effect. Not run on a GPU yet.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from task_images.errors import EnvironmentUnfitError
from task_images.imagenet_resnet.folders import ImageFolders
from task_images.imagenet_resnet.jpeg import Cut, Place, Window, read_square

_JPEG = b"\xff\xd8\xff"


def load_decoder() -> ModuleType:
    """torchvision's `io`. Raises EnvironmentUnfitError if it is not installed, or not made for this torch."""
    try:
        from torchvision import io
    except (ImportError, OSError, RuntimeError) as error:
        raise EnvironmentUnfitError(
            f"decoders=device needs torchvision: {error}", "Install the extra nvjpeg, or use --set decoders=processes."
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
