"""ImageNet on disk: `train` and `val`, each with one folder per class, listed once per machine.

What the data folder, or its sub-folder `imagenet`, may hold instead are the official archives; they are unpacked there.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from task_images.cache import Arrays, Say, cached_arrays
from task_images.contract import EnvironmentUnfitError
from task_images.data import Labels
from task_images.imagenet_resnet.archives import OFFICIAL, PAGE, Official, unpack
from task_images.report import DataIdentity, compare_data

PARTS = ("train", "val")
ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
OFFICIAL_COUNTS = {"training images": 1_281_167, "validation images": 50_000, "classes": 1000}
FORM = 2


@dataclass(frozen=True)
class Part:
    """The images of `train` or `val`: label [n] of each, and where its file is. Classes are numbered in the order of
    their names."""

    root: Path
    classes: list[str]
    labels: Labels
    names: npt.NDArray[np.bytes_]  # of files [n]

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        """The file of an image."""
        return self.root / self.classes[int(self.labels[index])] / os.fsdecode(self.names[index])


@dataclass(frozen=True)
class ImageFolders:
    training: Part
    validation: Part
    digest: str  # of classes, labels and file names; the pixels are not read for it

    @property
    def identity(self) -> DataIdentity:
        """Counts and digest of names held against the official data; pixels are not read."""
        sizes = {"training images": len(self.training), "validation images": len(self.validation)}
        return compare_data({**sizes, "classes": len(self.training.classes)}, OFFICIAL_COUNTS, self.digest)


def load(folder: Path, classes: int, say: Say, official: Official = OFFICIAL) -> ImageFolders:
    """The images in `folder`, whose archives the first rank of the machine that comes has unpacked.

    Raises EnvironmentUnfitError that says what is missing, or which folder is not as it should be.
    """
    place = _place(folder, official)

    def build() -> Arrays:
        unpack(place, [part for part in PARTS if not (place / part).is_dir()], official, say)
        say(f"{place}: listing the images")
        return _list(place, classes)

    def sources() -> list[Path]:
        return [path for part in PARTS for path in (_class_folders(place / part) or official.files(place, part))]

    arrays, entry = cached_arrays(place, "imagenet", FORM, sources, build)
    names = os.fsdecode(arrays["classes"].tobytes()).split("\n")
    _check_count(place, names, classes)
    training, validation = (
        Part(place / part, names, *(arrays[f"{part}_{what}"] for what in ("labels", "names")))  # type: ignore[arg-type]
        for part in PARTS
    )
    return ImageFolders(training, validation, entry.digest)


def _place(folder: Path, official: Official) -> Path:
    places = (folder, folder / "imagenet")
    for place in places:
        if all((place / part).is_dir() or official.files(place, part) for part in PARTS):
            return place
    place = next((place for place in places if any((place / part).is_dir() for part in PARTS)), folder)
    missing = [part for part in PARTS if not (place / part).is_dir() and not official.files(place, part)]
    wanted = " and ".join(f"{part}/ (or {' with '.join(item.name for item in official.of(part))})" for part in missing)
    needed = [item for part in missing for item in official.of(part)]
    files = "; ".join(f"{item.name} ({item.bytes} bytes, {item.digest.replace(':', ' ')})" for item in needed)
    raise EnvironmentUnfitError(
        f"ImageNet is missing: {place} has no {wanted}",
        "image-net.org gives it to registered users only, so it is not downloaded automatically. Get"
        f" {files} from {PAGE}, and import them: mlbench data prepare imagenet_resnet --data-dir DIR "
        + " ".join(f"--import {item.name}" for item in needed)
        + " (paths, or addresses such as s3://BUCKET/FILE). Without: --set data=generated, or --set data=fake.",
    )


def _list(place: Path, classes: int) -> Arrays:
    """Labels and names of all images, the classes' names, after a look at whether they can be right."""
    names = {part: [folder.name for folder in _class_folders(place / part)] for part in PARTS}
    for part in PARTS:
        if not names[part]:
            raise EnvironmentUnfitError(
                f"{place / part} has no folders, one per class",
                "If it holds the unsorted images of the archive, delete it and put the archives next to it:"
                " they are unpacked and sorted.",
            )
    _check_count(place, names["train"], classes)
    different = sorted({*names["train"]} ^ {*names["val"]})
    if different:
        where = next(part for part in PARTS if different[0] not in names[part])
        raise EnvironmentUnfitError(
            f"{len(different)} classes are not in both parts: {place / where} has no {different[0]}",
            "Both must have the same folders.",
        )
    arrays: Arrays = {"classes": np.frombuffer("\n".join(names["train"]).encode(), np.uint8)}
    for part in PARTS:
        files = [sorted(_images(place / part / name)) for name in names[part]]
        empty = [name for name, found in zip(names[part], files, strict=True) if not found]
        if empty:
            raise EnvironmentUnfitError(f"{place / part / empty[0]} has no images", f"Looked for {', '.join(ENDINGS)}.")
        arrays[f"{part}_labels"] = np.repeat(np.arange(len(files)), [len(found) for found in files])
        arrays[f"{part}_names"] = np.array([os.fsencode(name) for found in files for name in found])
    return arrays


def _check_count(place: Path, names: list[str], classes: int) -> None:
    if len(names) != classes:
        raise EnvironmentUnfitError(
            f"{place / PARTS[0]} has {len(names)} classes, the run expects {classes}",
            f"Complete it, or train on the existing classes: --set classes={len(names)}.",
        )


def _class_folders(part: Path) -> list[Path]:
    if not part.is_dir():
        return []
    with os.scandir(part) as entries:
        return sorted(part / entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _images(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.lower().endswith(ENDINGS) and not entry.name.startswith("."):
                yield entry.name
