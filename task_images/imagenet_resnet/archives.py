"""ImageNet's official archives (ILSVRC 2012): checked, unpacked into one folder per class, once per machine.

Training images come as a tar of tars, one per class; validation images lie in one tar, and which class each belongs to
is in the development kit. Interrupted unpacking resumes after the last complete class.
"""

import io
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from task_images.cache import Say, as_task_error
from task_images.contract import EnvironmentUnfitError
from task_images.fetch import Archive, ProgressLines, check_archive, check_space

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

    Raises EnvironmentUnfitError for an archive that is not the official one or damaged, and for a disk that is full.
    """
    for part in parts:
        for archive in official.of(part):
            say(f"{place / archive.name}: checking {archive.bytes / 1e9:.1f} GB")
            check_archive(
                archive, place / archive.name, f"{GET_AGAIN} Folders that you unpacked yourself are used as they are."
            )
        target = place / part
        partial = place / f"{part}.partial"
        with as_task_error(target):
            if not partial.exists():
                check_space(place, official.of(part)[0].bytes, f"what is in {official.of(part)[0].name}")
            partial.mkdir(exist_ok=True)
            unpacked = _Unpacked(f"unpacking {part}", official.of(part)[0].bytes, say)
            if part == "train":
                _unpack_training(place / official.training.name, partial, unpacked)
            else:
                classes = read_kit(place / official.kit.name)
                _unpack_validation(place / official.validation.name, classes, partial, unpacked)
            partial.rename(target)
        say(f"{target}: {unpacked.images} images unpacked")


def read_kit(path: Path) -> list[str]:
    """The class (WordNet number, as n01440764) of every validation image, in the order of their numbers from 1."""
    truth, synsets = b"", b""
    with _readable(path), tarfile.open(path) as kit:
        for member in kit:
            name = Path(member.name).name
            if name in (GROUND_TRUTH, SYNSETS):
                content = _content(kit, member).read()
                truth, synsets = (content, synsets) if name == GROUND_TRUTH else (truth, content)
    if not truth or not synsets:
        raise EnvironmentUnfitError(f"{path} has no {SYNSETS if truth else GROUND_TRUTH}", GET_AGAIN)
    names = _read_synsets(path, synsets)
    try:
        return [names[int(line)] for line in truth.split()]
    except (ValueError, KeyError) as error:
        raise EnvironmentUnfitError(
            f"{GROUND_TRUTH} in {path} has a line that is not a class: {error}", GET_AGAIN
        ) from None


def _read_synsets(path: Path, raw: bytes) -> dict[int, str]:
    """Number of a class in the ground truth -> its name. The table is MATLAB's, and has groups of classes, too."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise EnvironmentUnfitError(
            f"{SYNSETS} in {path} is a file of MATLAB's, which needs the package scipy", "pip install scipy"
        ) from None
    try:
        table = loadmat(io.BytesIO(raw), squeeze_me=True)["synsets"]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table if int(row["num_children"]) == 0}
    except Exception as error:  # a damaged file may raise anything
        raise EnvironmentUnfitError(f"{SYNSETS} in {path} cannot be read: {error}"[:300], GET_AGAIN) from None


class _Unpacked(ProgressLines):
    """How many images there are, and how much of the archive that is."""

    images = 0

    def count(self, size: int, images: int = 1, is_old: bool = False) -> None:
        """`images` of `size` bytes together."""
        self.images += images
        self.add(size, is_old)


def _unpack_training(path: Path, partial: Path, unpacked: _Unpacked) -> None:
    with _readable(path), tarfile.open(path) as outer:
        for member in outer:
            target = partial / _safe(path, member, r"(n\d+)\.tar")
            if target.is_dir():
                unpacked.count(member.size, sum(1 for _ in target.iterdir()), is_old=True)
                continue
            begun = partial / f".{target.name}"
            shutil.rmtree(begun, ignore_errors=True)
            begun.mkdir()
            with tarfile.open(fileobj=_content(outer, member)) as inner:
                for image in inner:
                    _write(inner, image, begun / _safe(path, image, r"(n\d+_\d+\.\w+)"))
                    unpacked.count(image.size)
            begun.rename(target)


def _unpack_validation(path: Path, classes: list[str], partial: Path, unpacked: _Unpacked) -> None:
    with _readable(path), tarfile.open(path) as archive:
        for member in archive:
            name = _safe(path, member, r"(ILSVRC2012_val_\d+\.\w+)")
            number = int(re.findall(r"\d+", name)[1])
            if not 1 <= number <= len(classes):
                raise EnvironmentUnfitError(
                    f"{name} in {path} is none of the {len(classes)} of {GROUND_TRUTH}", GET_AGAIN
                )
            folder = partial / classes[number - 1]
            folder.mkdir(exist_ok=True)
            _write(archive, member, folder / name)
            unpacked.count(member.size)
    if unpacked.images != len(classes):
        raise EnvironmentUnfitError(f"{path} has {unpacked.images} images, {GROUND_TRUTH} {len(classes)}", GET_AGAIN)


def _safe(path: Path, member: tarfile.TarInfo, form: str) -> str:
    """The name of a member, which must be a file at the top and look as it should: nothing leads elsewhere."""
    match = re.fullmatch(form, member.name.removeprefix("./"))
    if not member.isfile() or not match:
        raise EnvironmentUnfitError(f"{path} holds {member.name[:100]!r}, which is not one of its images", GET_AGAIN)
    return match[1]


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    content = _content(archive, member)
    with path.open("wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
    if path.stat().st_size != member.size:
        raise tarfile.ReadError(f"{member.name} is truncated")


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = archive.extractfile(member)
    if content is None:
        raise tarfile.ReadError(f"{member.name} is not a file")
    return content


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise EnvironmentUnfitError(f"{path} cannot be read: {error}", GET_AGAIN) from None
