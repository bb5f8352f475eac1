"""Images in a few large files instead of a million small ones, made once by `mlbench data prepare imagenet_resnet`.

The folder `imagenet-packed` has, for `train` and `val`, files PART-NNN.pack: the image files as they are, one behind
the other, about a gibibyte each. index.npz has labels, class names, the end of each image, and the first image of each
file; it is written last, so a folder that has it is complete. Interrupted work resumes with the first
missing file.
Ranks map the files. A shared file system is then asked for a few hundred files instead of a million.
"""

import io
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from task_images.harness.arrays import Bytes, Labels
from task_images.harness.cache import Say, as_task_error, hold_lock
from task_images.harness.datasets import check_space
from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.files import replace_file
from task_images.harness.progress import ProgressLines

FOLDER, INDEX = "imagenet-packed", "index.npz"
FORM = 1
MAX_FILE_BYTES = 1 << 30

Numbers = npt.NDArray[np.int64]


class PackedImage(io.BytesIO):
    """The bytes of one image file, with a name for messages."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self._name = name

    def __str__(self) -> str:
        return self._name


@dataclass(frozen=True)
class PackedPart:
    """The images of `train` or `val`: label [n] of each, `ends` [n] of each in all files put together, and the number
    of the first image of each file."""

    name: str
    folder: Path
    classes: list[str]
    labels: Labels
    ends: Numbers
    firsts: Numbers
    files: Sequence[Bytes]

    def __len__(self) -> int:
        return len(self.labels)

    def open(self, index: int) -> PackedImage:
        """The image file number `index`."""
        file = int(np.searchsorted(self.firsts, index, side="right")) - 1
        begin = self._end(int(self.firsts[file]) - 1)
        content = self.files[file][self._end(index - 1) - begin : self._end(index) - begin]
        return PackedImage(content.tobytes(), f"image {index} in {self.folder / _file_name(self.name, file)}")

    def _end(self, index: int) -> int:
        return int(self.ends[index]) if index >= 0 else 0


def find_packed(folder: Path) -> Path | None:
    """The folder of packed images below `folder`, if it is complete."""
    places = (place / FOLDER for place in (folder, folder / "imagenet"))
    return next((place for place in places if (place / INDEX).is_file()), None)


def read_packed(place: Path) -> tuple[PackedPart, PackedPart, str]:
    """Both parts and the digest of what they were made from. Raises EnvironmentUnfitError if a file is damaged."""
    try:
        with np.load(place / INDEX, allow_pickle=False) as stored:
            if int(stored["form"]) != FORM:
                raise ValueError(f"its form is {int(stored['form'])}, not {FORM}")
            classes = str(stored["classes"]).split("\n")
            training, validation = (_read_part(place, name, classes, stored) for name in ("train", "val"))
            return training, validation, str(stored["digest"])
    except (OSError, ValueError, LookupError, zipfile.BadZipFile) as error:
        raise EnvironmentUnfitError(
            f"{place} has no readable packed images: {error}", "Delete the folder and prepare the data again."
        ) from None


def _read_part(place: Path, name: str, classes: list[str], stored: "np.lib.npyio.NpzFile") -> PackedPart:
    labels, ends, firsts = (stored[f"{name}_{what}"] for what in ("labels", "ends", "firsts"))
    files = [np.memmap(place / _file_name(name, number), np.uint8, mode="r") for number in range(len(firsts))]
    if sum(map(len, files)) != int(ends[-1]):
        raise ValueError(f"its files of {name} have {sum(map(len, files))} bytes instead of {int(ends[-1])}")
    return PackedPart(name, place, classes, labels, ends, firsts, files)


@dataclass(frozen=True)
class Source:
    """The files to pack, in order, with labels."""

    name: str
    labels: Labels
    paths: Sequence[Path]


def pack(
    folder: Path, sources: Sequence[Source], classes: list[str], digest: str, say: Say, limit: int = MAX_FILE_BYTES
) -> Path:
    """Write the packed images below `folder`; what an earlier attempt completed is kept. Returns their folder.

    Raises EnvironmentUnfitError if the disk has too little room.
    """
    place = folder / FOLDER
    with as_task_error(place):
        place.mkdir(exist_ok=True)
    with hold_lock(folder / f"{FOLDER}.lock", say), as_task_error(place):
        if (place / INDEX).is_file():
            return place
        index: dict[str, npt.ArrayLike] = {"form": FORM, "digest": digest, "classes": "\n".join(classes)}
        plans = [(source, *_plan_files(source, limit)) for source in sources]
        total = sum(int(ends[-1]) for _, ends, _ in plans)
        progress = ProgressLines("packing", total, say)
        present = sum(path.stat().st_size for path in place.glob("*.pack"))
        check_space(place, total - present, "packing")
        for source, ends, firsts in plans:
            for number in range(len(firsts)):
                _write_file(place, source, ends, firsts, number, progress)
            index |= {f"{source.name}_{what}": value for what, value in
                      (("labels", source.labels), ("ends", ends), ("firsts", firsts))}  # fmt: skip
        with replace_file(place / INDEX) as file:
            np.savez(file, **index)  # type: ignore[arg-type]
    return place


def _plan_files(source: Source, limit: int) -> tuple[Numbers, Numbers]:
    """Where each image ends, and the first image of each file."""
    sizes = np.array([path.stat().st_size for path in source.paths], np.int64)
    ends, firsts, size = np.cumsum(sizes), [0], 0
    for number, own in enumerate(sizes.tolist()):
        if size and size + own > limit:
            firsts.append(number)
            size = 0
        size += own
    return ends, np.array(firsts, np.int64)


def _write_file(
    place: Path, source: Source, ends: Numbers, firsts: Numbers, number: int, progress: ProgressLines
) -> None:
    first = int(firsts[number])
    stop = int(firsts[number + 1]) if number + 1 < len(firsts) else len(source.paths)
    size = int(ends[stop - 1]) - (int(ends[first - 1]) if first else 0)
    target = place / _file_name(source.name, number)
    if target.is_file() and target.stat().st_size == size:
        progress.add(size, is_old=True)
        return
    with replace_file(target) as file:
        for path in source.paths[first:stop]:
            with open(path, "rb") as image:
                shutil.copyfileobj(image, file, 1 << 20)
                progress.add(image.tell())


def _file_name(part: str, number: int) -> str:
    return f"{part}-{number:03d}.pack"
