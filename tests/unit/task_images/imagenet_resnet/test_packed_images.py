"""ImageNet's files in detail: how images are packed into large files, listed, and missed; windows of an image."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from task_images.harness.errors import EnvironmentUnfitError
from task_images.imagenet_resnet import packed
from task_images.imagenet_resnet.archives import OFFICIAL, read_kit
from task_images.imagenet_resnet.data import Decoding, validation_arrays
from task_images.imagenet_resnet.folders import ImageFolders, Part, load, pack_images
from task_images.imagenet_resnet.jpeg import Window, training_window, validation_window
from task_images.imagenet_resnet.packed import Source, find_packed, pack, read_packed
from tests.unit.task_images.imagenet_resnet.imagenet_files import CLASSES, NUMBERS, TRUTH, kit, write, write_folders


def quiet(_: str) -> None:
    pass


def make_source(folder: Path, name: str, *sizes: int) -> Source:
    paths = []
    for number, size in enumerate(sizes):
        path = folder / f"{name}-{number}"
        path.write_bytes(bytes([number + 1]) * size)
        paths.append(path)
    return Source(name, np.arange(len(sizes)), paths)


# --- packed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "files"),
    [
        ([5, 5, 5], [10, 5]),  # just as much as fits
        ([5, 6, 5], [5, 6, 5]),
        ([3, 3, 3, 3], [9, 3]),
        ([25, 1, 1], [25, 2]),  # an image larger than a file is allowed has its own
        ([1, 25, 1], [1, 25, 1]),
        ([10], [10]),
    ],
)
def test_files_hold_whole_images_up_to_their_limit(tmp_path: Path, sizes: list[int], files: list[int]) -> None:
    source, other = make_source(tmp_path, "train", *sizes), make_source(tmp_path, "val", 4, 4)
    place = pack(tmp_path, [source, other], ["a", "b"], "sha256:x", quiet, limit=10)
    assert [path.stat().st_size for path in sorted(place.glob("train-*.pack"))] == files
    assert [path.name for path in sorted(place.glob("val-*.pack"))] == ["val-000.pack"]
    training, validation, digest = read_packed(place)
    assert (digest, training.classes, len(training)) == ("sha256:x", ["a", "b"], len(sizes))
    for index, size in enumerate(sizes):
        image = training.open(index)
        assert image.read() == bytes([index + 1]) * size
        file = int(np.searchsorted(training.firsts, index, side="right")) - 1
        assert str(image) == f"image {index} in {place / f'train-{file:03d}.pack'}"
    assert [validation.open(index).read() for index in (0, 1)] == [b"\x01" * 4, b"\x02" * 4]
    assert training.labels.tolist() == list(range(len(sizes)))


def test_what_is_complete_is_not_packed_again(tmp_path: Path) -> None:
    source, other = make_source(tmp_path, "train", 3, 3), make_source(tmp_path, "val", 2)
    place = pack(tmp_path, [source, other], ["a"], "one", quiet)
    assert pack(tmp_path, [source, other], ["b"], "two", quiet) == place
    assert read_packed(place)[2] == "one"
    (place / "val-000.pack").write_bytes(b"\x09\x09")  # the size is right: it is kept
    (place / "train-000.pack").write_bytes(b"\x09")
    (place / "index.npz").unlink()
    assert find_packed(tmp_path) is None
    pack(tmp_path, [source, other], ["b"], "two", quiet)
    training, validation, digest = read_packed(place)
    assert (digest, training.open(0).read(), validation.open(0).read()) == ("two", b"\x01" * 3, b"\x09\x09")


def test_packed_images_are_in_the_folder_or_below(tmp_path: Path) -> None:
    assert find_packed(tmp_path) is None
    write(tmp_path / "imagenet" / "imagenet-packed", {"index.npz": b""})
    assert find_packed(tmp_path) == tmp_path / "imagenet" / "imagenet-packed"
    write(tmp_path / "imagenet-packed", {"index.npz": b""})
    assert find_packed(tmp_path) == tmp_path / "imagenet-packed"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda place: (place / "train-000.pack").write_bytes(b"12345"),
            "its files of train have 5 bytes instead of 6",
        ),
        (lambda place: (place / "val-000.pack").unlink(), "No such file"),
        (lambda place: (place / "index.npz").write_bytes(b"PK\x03\x04 no zip"), "no readable packed images"),
        (lambda place: np.savez(place / "index.npz", form=packed.FORM + 1), "its form is 2, not 1"),
        (lambda place: np.savez(place / "index.npz", form=packed.FORM), "no readable packed images"),
    ],
)
def test_damaged_packs_are_named(tmp_path: Path, damage: Any, words: str) -> None:
    place = pack(tmp_path, [make_source(tmp_path, "train", 3, 3), make_source(tmp_path, "val", 2)], ["a"], "x", quiet)
    damage(place)
    with pytest.raises(EnvironmentUnfitError, match=words) as caught:
        read_packed(place)
    assert str(caught.value).startswith(f"{place} has no readable packed images")
    assert caught.value.hint == "Delete the folder and prepare the data again."


# --- folders --------------------------------------------------------------------------------------------------------


def test_packed_images_are_preferred_and_have_as_many_classes_as_expected(tmp_path: Path) -> None:
    write_folders(tmp_path)
    images = pack_images(tmp_path, 3, quiet)
    assert isinstance(images.training, packed.PackedPart)
    assert images.identity.counts == {"training images": 9, "validation images": 6, "classes": 3}
    assert images.training.classes == CLASSES
    with pytest.raises(EnvironmentUnfitError, match="has 3 classes, the run expects 4"):
        load(tmp_path, 4, quiet)
    said: list[str] = []
    assert pack_images(tmp_path, 3, said.append).digest == images.digest
    assert said == []


@pytest.mark.parametrize("name", ["x.JPEG", "x.jpg", "x.PnG", "x.webp", "x.bmp"])
def test_images_are_told_by_their_endings(tmp_path: Path, name: str) -> None:
    write_folders(tmp_path)
    write(tmp_path / "train" / CLASSES[1], {name: b"", ".hidden.jpg": b"", "x.gif": b"", "jpeg": b""})
    part = load(tmp_path, 3, quiet).training
    assert isinstance(part, Part)
    assert len(part) == 10
    names = [part.path(index).name for index in range(10) if part.labels[index] == 1]
    assert name in names
    assert names == sorted(names)
    assert part.path(0).parent == tmp_path / "train" / CLASSES[0]


def test_hidden_folders_and_files_are_no_classes(tmp_path: Path) -> None:
    write_folders(tmp_path)
    write(tmp_path / "train" / ".cache", {"x.jpg": b""})
    write(tmp_path / "train", {"readme.txt": b""})
    assert load(tmp_path, 3, quiet).training.classes == CLASSES


def test_only_the_archives_of_the_missing_part_are_asked_for(tmp_path: Path) -> None:
    write_folders(tmp_path / "imagenet")
    (tmp_path / "imagenet" / "val").rename(tmp_path / "aside")
    with pytest.raises(EnvironmentUnfitError) as caught:
        load(tmp_path, 3, quiet)
    assert str(caught.value) == (
        f"ImageNet is missing: {tmp_path / 'imagenet'} has no val/ (or ILSVRC2012_img_val.tar with"
        " ILSVRC2012_devkit_t12.tar.gz)"
    )
    hint = str(caught.value.hint)
    assert "ILSVRC2012_img_val.tar (6744924160 bytes, md5 29b22e2961454d5413ddabcf34fc5622); ILSVRC2012_devkit" in hint
    assert "--import ILSVRC2012_img_val.tar --import ILSVRC2012_devkit_t12.tar.gz (paths" in hint
    assert "img_train" not in hint
    assert OFFICIAL.files(tmp_path, "val") == []


def test_a_class_that_one_part_lacks_is_named_with_that_part(tmp_path: Path) -> None:
    write_folders(tmp_path)
    (tmp_path / "train" / CLASSES[2]).rename(tmp_path / "train" / "n09999999")
    with pytest.raises(EnvironmentUnfitError) as caught:
        load(tmp_path, 3, quiet)
    assert str(caught.value) == f"2 classes are not in both parts: {tmp_path / 'train'} has no {CLASSES[2]}"


def test_official_counts_are_those_of_2012() -> None:
    def count(training: int, validation: int, classes: int) -> bool | None:
        class Many:
            def __init__(self, size: int) -> None:
                self.size, self.classes = size, ["x"] * classes

            def __len__(self) -> int:
                return self.size

        return ImageFolders(Many(training), Many(validation), "sha256:x").identity.official  # type: ignore[arg-type]

    assert count(1_281_167, 50_000, 1000) is True
    assert count(1_281_166, 50_000, 1000) is False
    assert count(1_281_167, 50_001, 1000) is False
    assert count(1_281_167, 50_000, 999) is False


def test_validation_images_are_paths_with_labels(tmp_path: Path) -> None:
    write_folders(tmp_path)
    paths, labels = validation_arrays(tmp_path)
    assert len(paths) == 6
    assert [Path(path).parent.name for path in paths] == [CLASSES[label] for label in labels]
    assert all(Path(path).is_file() for path in paths)


def test_the_kit_names_classes_in_the_order_of_the_ground_truth(tmp_path: Path) -> None:
    """The kit also numbers groups of classes, above the classes themselves; no image belongs to one directly."""
    (tmp_path / "kit.tar.gz").write_bytes(kit())
    assert read_kit(tmp_path / "kit.tar.gz") == [NUMBERS[number] for number in TRUTH]
    (tmp_path / "kit.tar.gz").write_bytes(kit([4]))
    with pytest.raises(EnvironmentUnfitError, match="has a line that is not a class: 4"):
        read_kit(tmp_path / "kit.tar.gz")


# --- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "side", "shorter", "window"),
    [
        ((500, 375), 224, 256, Window((0, 0, 500, 375), (341, 256), 58, 16)),
        ((375, 500), 224, 256, Window((0, 0, 375, 500), (256, 341), 16, 58)),
        ((100, 100), 32, 32, Window((0, 0, 100, 100), (32, 32), 0, 0)),
        ((7, 1000), 32, 32, Window((0, 0, 7, 1000), (32, 4571), 0, 2270)),
        ((3, 3), 32, 32, Window((0, 0, 3, 3), (32, 32), 0, 0)),
    ],
)
def test_the_middle_of_a_scaled_image(size: tuple[int, int], side: int, shorter: int, window: Window) -> None:
    assert validation_window(*size, side, shorter) == window


def test_half_of_the_training_windows_are_mirrored_and_all_fill_the_square() -> None:
    stream = np.random.default_rng(1)
    windows = [training_window(60, 40, 32, 0.3, stream) for _ in range(400)]
    assert {window.size for window in windows} == {(32, 32)}
    assert {(window.left, window.upper) for window in windows} == {(0, 0)}
    assert sum(window.mirrored for window in windows) == pytest.approx(200, abs=40)
    shares = [(box[2] - box[0]) * (box[3] - box[1]) / 2400 for box in (window.box for window in windows)]
    assert min(shares) > 0.27
    assert max(shares) <= 1.0
    assert 0.5 < np.mean(shares) < 0.7  # uniform from 0.3 to 1, but for those that do not fit
    assert max(box[2] for box in (window.box for window in windows)) == 60
    assert max(box[3] for box in (window.box for window in windows)) == 40


def test_decoding_is_measured_by_images_and_seconds() -> None:
    decoding = Decoding()
    assert decoding.facts() == {"images": 0, "thread_seconds": 0.0, "images_per_second_and_thread": 0.0}
    decoding.add(6, 1.5)
    decoding.add(2, 0.5)
    assert decoding.facts() == {"images": 8, "thread_seconds": 2.0, "images_per_second_and_thread": 4.0}
