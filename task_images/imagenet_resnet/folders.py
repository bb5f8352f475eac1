"""ImageNet on disk: `train` and `val`, each with one folder per class, listed once per machine.

What the data folder, or its sub-folder `imagenet`, may hold instead are the official archives; they are unpacked there.
"""

import io
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np
import numpy.typing as npt

from task_images.cache import Arrays, Say, as_task_error, cached_arrays
from task_images.contract import EnvironmentUnfitError, need
from task_images.data import Labels
from task_images.fetch import Archive, ProgressLines, check_archive, check_space
from task_images.report import DataIdentity, compare_data

# --- the official archives (ILSVRC 2012) ------------------------------------------------------------------------------
# Unpacked into one folder per class, once per machine, after their digests were checked. Training images come as a tar
# of tars, one per class; validation images lie in one tar, and which class each belongs to is in the development kit.
# Interrupted unpacking resumes after the last complete class.

PAGE = "https://image-net.org/download-images"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
SYNSETS = "meta.mat"
GET_AGAIN = f"Download it again from {PAGE}."


@dataclass(frozen=True)
class Official:
    """The three archives."""

    training: Archive
    validation: Archive
    kit: Archive

    def of(self, part: str) -> tuple[Archive, ...]:
        """The archives that `part` ("train", "val") is made from."""
        return (self.training,) if part == "train" else (self.validation, self.kit)

    def files(self, place: Path, part: str) -> list[Path]:
        """The same in `place`, if it has all of them."""
        paths = [place / archive.name for archive in self.of(part)]
        return paths if all(path.is_file() for path in paths) else []


# Names, sizes and digests as commonly known; not compared with the files themselves, which need an account.
OFFICIAL = Official(
    Archive("ILSVRC2012_img_train.tar", PAGE, 147_897_477_120, "md5:1d675b47d978889d74fa0da5fadfb00e"),
    Archive("ILSVRC2012_img_val.tar", PAGE, 6_744_924_160, "md5:29b22e2961454d5413ddabcf34fc5622"),
    Archive("ILSVRC2012_devkit_t12.tar.gz", PAGE, 2_568_145, "md5:fa75699e90414af021442c21a62c3abf"),
)


def unpack(place: Path, parts: Sequence[str], official: Official, say: Say) -> None:
    """Make the folders `parts` ("train", "val") in `place` from the archives there. Not for two callers at once.

    Raises EnvironmentUnfitError for an archive that is not the official one, and for a disk that is full.
    """
    for part in parts:
        archives = [place / archive.name for archive in official.of(part)]
        for archive, path in zip(official.of(part), archives, strict=True):
            say(f"{path}: checking {archive.bytes / 1e9:.1f} GB")
            check_archive(archive, path, f"{GET_AGAIN} Folders that you unpacked yourself are used as they are.")
        target, partial, size = place / part, place / f"{part}.partial", official.of(part)[0].bytes
        with as_task_error(target):
            if not partial.exists():
                check_space(place, size, f"what is in {archives[0].name}")
            partial.mkdir(exist_ok=True)
            try:
                classes = read_kit(archives[1]) if part == "val" else []
                _unpack(archives[0], classes, partial, ProgressLines(f"unpacking {part}", size, say))
            except (tarfile.TarError, EOFError, zlib.error, LookupError, ValueError) as error:
                names = " or ".join(map(str, archives))
                raise EnvironmentUnfitError(f"{names} cannot be read: {error}", GET_AGAIN) from None
            partial.rename(target)
        say(f"{target}: unpacked")


def _unpack(path: Path, classes: list[str], partial: Path, progress: ProgressLines) -> None:
    """Images in folders by their class; a class that is complete is not unpacked again."""
    with tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name)
            if classes:  # ILSVRC2012_val_00000001.JPEG
                member.name = f"{classes[int(name.stem[-8:]) - 1]}/{name.name}"
                archive.extract(member, partial, filter="data")
            elif not (partial / name.stem).is_dir():
                begun = partial / f".{name.stem}"
                shutil.rmtree(begun, ignore_errors=True)
                with tarfile.open(fileobj=archive.extractfile(member)) as images:
                    images.extractall(begun, filter="data")
                begun.rename(partial / name.stem)
            progress.add(member.size)


def read_kit(path: Path) -> list[str]:
    """The class (WordNet number, as n01440764) of every validation image, in the order of their numbers from 1. The
    table of classes is MATLAB's, and has groups of classes, too."""
    need("scipy", extra="images")
    from scipy.io import loadmat

    with tarfile.open(path) as kit:
        members = {Path(member.name).name: kit.extractfile(member) for member in kit if member.isfile()}
        truth, table = (io.BytesIO(cast("IO[bytes]", members[name]).read()) for name in (GROUND_TRUTH, SYNSETS))
    rows = loadmat(table, squeeze_me=True)["synsets"]
    names = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows if int(row["num_children"]) == 0}
    return [names[int(line)] for line in truth]


# --- folders ----------------------------------------------------------------------------------------------------------


PARTS = ("train", "val")
ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")  # as torchvision's ImageFolder
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
            if not entry.name.lower().endswith(ENDINGS) or entry.name.startswith("."):
                continue
            if entry.is_file():
                yield entry.name
            elif not entry.is_dir():
                raise EnvironmentUnfitError(
                    f"{entry.path} is a link to {os.readlink(entry.path)}, which does not exist",
                    "Remove the link, or make what it names available on this machine, at the same path.",
                )
