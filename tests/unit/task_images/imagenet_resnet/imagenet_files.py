"""Small files of ImageNet's very formats: JPEGs in folders, and the three official archives with other contents."""

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from task_images.fetch import Archive
from task_images.imagenet_resnet.folders import GROUND_TRUTH, OFFICIAL, Official

CLASSES = ["n01440764", "n01443537", "n02102040"]
# As in the original, the numbers of the ground truth are in another order than the classes' names.
NUMBERS = {1: "n02102040", 2: "n01440764", 3: "n01443537"}
TRUTH = [2, 3, 1, 1, 2, 3]
PER_CLASS = 3


def ramp(width: int, height: int, blue: int = 0) -> Image.Image:
    """Red grows from left to right, green from top to bottom, from 0 to 255."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[..., 0] = np.rint(np.linspace(0, 255, width))
    pixels[..., 1] = np.rint(np.linspace(0, 255, height))[:, None]
    pixels[..., 2] = blue
    return Image.fromarray(pixels)


def jpeg(image: Image.Image) -> bytes:
    raw = io.BytesIO()
    image.save(raw, "JPEG", quality=95)
    return raw.getvalue()


def pack(files: dict[str, bytes], mode: Literal["w", "w:gz"] = "w") -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return raw.getvalue()


def training_images() -> dict[str, dict[str, bytes]]:
    """Class -> file name -> contents; blue tells the class."""
    return {
        name: {f"{name}_{index}.JPEG": jpeg(ramp(60 + index, 40, 80 * label)) for index in range(PER_CLASS)}
        for label, name in enumerate(CLASSES)
    }


def validation_images() -> dict[str, bytes]:
    labels = [CLASSES.index(NUMBERS[number]) for number in TRUTH]
    return {
        f"ILSVRC2012_val_{number:08d}.JPEG": jpeg(ramp(50, 50, 80 * label)) for number, label in enumerate(labels, 1)
    }


def kit(truth: list[int] | None = None) -> bytes:
    fields = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("num_children", object)]
    rows = [(number, name, "a fish, say", 0) for number, name in NUMBERS.items()]
    # Behind the classes come groups of them.
    rows.append((4, "n00001740", "entity", 3))
    meta = io.BytesIO()
    from scipy.io import savemat  # 0.4 s of a core, for every worker that collects

    savemat(meta, {"synsets": np.array(rows, fields)[:, None]})
    lines = "".join(f"{number}\n" for number in truth or TRUTH)
    folder = "ILSVRC2012_devkit_t12"
    return pack({f"{folder}/data/{GROUND_TRUTH}": lines.encode(), f"{folder}/data/meta.mat": meta.getvalue()}, "w:gz")


def archives() -> dict[str, bytes]:
    """File name -> contents."""
    return {
        OFFICIAL.training.name: pack({f"{name}.tar": pack(files) for name, files in training_images().items()}),
        OFFICIAL.validation.name: pack(validation_images()),
        OFFICIAL.kit.name: kit(),
    }


def as_official(contents: dict[str, bytes]) -> Official:
    """The official archives' names with the sizes and digests of other contents."""
    return Official(
        *(
            Archive(
                item.name, item.url, len(contents[item.name]), f"md5:{hashlib.md5(contents[item.name]).hexdigest()}"
            )
            for item in (OFFICIAL.training, OFFICIAL.validation, OFFICIAL.kit)
        )
    )


def write(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_folders(folder: Path) -> None:
    """train/ and val/ as they are after unpacking."""
    for name, files in training_images().items():
        write(folder / "train" / name, files)
    for number, (name, content) in zip(TRUTH, validation_images().items(), strict=True):
        write(folder / "val" / NUMBERS[number], {name: content})
