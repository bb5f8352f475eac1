"""MNIST in its own format (idx, https://yann.lecun.com/exdb/mnist), plain or gzipped, from a folder, or its like.

The folder, or one of PLACES in it, may hold the four files; if it has none of them, they are downloaded.
"""

import gzip
import re
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

from task_images.cache import Say, hold_lock, writable_folder
from task_images.contract import EnvironmentUnfitError
from task_images.data import Bytes, Labels
from task_images.fetch import Archive, fetch
from task_images.images import named_folders
from task_images.report import DataIdentity, compare_data, digest_arrays, find_other_means, made_up

CLASSES, SIDE = 10, 28
OFFICIAL = {"training images": 60_000, "validation images": 10_000}
OFFICIAL_MEANS = (0.1306605,)  # of the training images
LOCK = "mnist.lock"
PLACES = "data|mnist.*|raw"  # torchvision's is MNIST/raw; not FashionMNIST, whose files have the same names
_ALIKE = re.compile(r"(train|t10k|test|val).*(image|label)", re.IGNORECASE)  # whatever somebody has called the files
MEAN, DEVIATION = 0.1307, 0.3081
FILES = {
    "training": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "validation": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
# The authors' own site no longer hands them out; this is the mirror that the frameworks use.
_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"
_PUBLISHED = {
    "train-images-idx3-ubyte": (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    "train-labels-idx1-ubyte": (28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
    "t10k-images-idx3-ubyte": (1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
    "t10k-labels-idx1-ubyte": (4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
}
ARCHIVES = tuple(
    Archive(f"{name}.gz", f"{_MIRROR}/{name}.gz", size, f"md5:{digest}") for name, (size, digest) in _PUBLISHED.items()
)


class Mnist(NamedTuple):
    """Images [n, 1, 28, 28] of bytes and labels [n] from 0 to 9."""

    training: tuple[Bytes, Labels]
    validation: tuple[Bytes, Labels]
    generated: bool = False

    @property
    def identity(self) -> DataIdentity:
        """Counts and digest held against the official data."""
        counts = {"training images": len(self.training[1]), "validation images": len(self.validation[1])}
        if self.generated:
            return made_up(counts)
        find_difference = partial(find_other_means, self.training[0], OFFICIAL_MEANS)
        digest = digest_arrays(*self.training, *self.validation)
        return compare_data(counts, OFFICIAL, digest, find_difference=find_difference)


def load(folder: Path | str, part: str) -> TensorDataset:
    """Images [n, 1, 28, 28] (mean 0, deviation 1) and labels [n] of "training" or "validation".

    Raises EnvironmentUnfitError naming the file that is damaged, DownloadError if a download fails.
    """
    images, labels = read_part(find(Path(folder), print), part)
    return TensorDataset((torch.from_numpy(images).float() / 255 - MEAN) / DEVIATION, torch.from_numpy(labels))


def read(folder: Path, say: Say, archives: tuple[Archive, ...] = ARCHIVES) -> Mnist:
    """Both parts of the data set in `folder`. Raises as `load`."""
    place = find(folder, say, archives)
    return Mnist(read_part(place, "training"), read_part(place, "validation"))


def validation_arrays(folder: Path) -> tuple[Bytes, Labels]:
    """Images [n, 1, 28, 28] of bytes and labels [n] of the validation set. Raises as `load`."""
    return read_part(find(folder, print), "validation")


def find(folder: Path, say: Say, archives: tuple[Archive, ...] = ARCHIVES) -> Path:
    """The folder that has the four files: `folder`, its sub-folder, or where the first rank that comes downloads them.

    An archive of the published size is checked against its published checksum.
    """
    names = [name for pair in FILES.values() for name in pair]
    places = list(named_folders(folder, PLACES))
    place = next((place for place in places if any(_file(place, name).exists() for name in names)), None)
    if place is None and (alike := [path for where in places for path in _list(where) if _ALIKE.search(path.name)]):
        raise EnvironmentUnfitError(
            f"{alike[0]} is not one of MNIST's own files, {', '.join(names)}",
            "Rename the four files to these names (.gz may follow); into an empty folder, they are downloaded.",
        )
    missing = [] if place is None else [name for name in names if not _file(place, name).exists()]
    # Beside the lock file a missing one is still to be downloaded, by another rank or after a run that was killed.
    if place is not None and missing and not (place / LOCK).exists():
        raise EnvironmentUnfitError(
            f"{place} has no {missing[0]}.gz", "All four files are needed; into an empty folder, they are downloaded."
        )
    if place is None or missing:
        return _download(writable_folder(place or folder), say, archives)
    for archive in archives:
        if (place / archive.name).exists() and (place / archive.name).stat().st_size == archive.bytes:
            fetch(archive, place, say)  # it is there: only checked
    return place


def _download(place: Path, say: Say, archives: tuple[Archive, ...]) -> Path:
    with hold_lock(place / LOCK):
        for archive in archives:
            if not (place / archive.name).exists():
                say(f"{archive.name}: downloading {archive.bytes / 1e6:.1f} MB to {place}")
            fetch(archive, place, say)
    return place


def read_part(folder: Path, part: str) -> tuple[Bytes, Labels]:
    """Images [n, 1, 28, 28] of bytes and labels [n] of "training" or "validation".

    Raises EnvironmentUnfitError, with what to do, if the files do not fit.
    """
    images, labels = (_read(_file(folder, name)) for name in FILES[part])
    if images.shape[1:] != (SIDE, SIDE) or labels.ndim != 1 or len(images) != len(labels) or not len(labels):
        raise EnvironmentUnfitError(
            f"{folder}: the {part} images have the shape {list(images.shape)}, the labels {list(labels.shape)}",
            f"One label is needed for every image of {SIDE}x{SIDE}; download the data set again.",
        )
    if labels.max() >= CLASSES:
        raise EnvironmentUnfitError(f"{folder}: there are {part} labels up to {labels.max()}, not up to {CLASSES - 1}")
    return images[:, None], labels.astype(np.int64)


def _file(folder: Path, name: str) -> Path:
    """The file in one of its spellings: some tools unpack train-images-idx3-ubyte.gz as train-images.idx3-ubyte, or
    into a folder of its own name."""
    dotted = name.replace("-idx", ".idx")
    spellings = (f"{name}.gz", name, f"{dotted}.gz", dotted)
    known = (path for each in spellings for path in (folder / each, folder / each / each))
    return next((path for path in known if path.is_file()), folder / name)


def _list(folder: Path) -> list[Path]:
    return sorted(filter(Path.is_file, folder.iterdir())) if folder.is_dir() else []


def _read(path: Path) -> Bytes:
    """Big-endian: two zero bytes, 8 for bytes, the number of dimensions, each length in 4 bytes, the values."""
    try:
        raw = path.read_bytes()  # browsers unpack a .gz and keep its name
        raw = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
    except (EOFError, OSError, zlib.error) as error:
        raise EnvironmentUnfitError(f"{path} cannot be read: {error}", "Download the data set again.") from None
    dimensions = raw[3] if len(raw) > 3 else 0
    shape = np.frombuffer(raw, ">u4", dimensions, 4).tolist() if len(raw) >= 4 + 4 * dimensions else []
    values = 1
    for length in shape:
        values *= length
    if raw[:3] != b"\0\0\x08" or not shape or len(raw) != 4 + 4 * dimensions + values:
        raise EnvironmentUnfitError(f"{path} is not a complete idx file of bytes", "Download the data set again.")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Fetch the four files, once for all runs."""
    return read(folder, print).identity
