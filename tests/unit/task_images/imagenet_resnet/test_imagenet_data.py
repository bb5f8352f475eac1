"""ImageNet's files: in folders, in the official archives, whole and damaged; who gets what."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from task_images.contract import EnvironmentUnfitError
from task_images.data import Partition
from task_images.imagenet_resnet.data import DEVIATION, MEAN, FakeData, FileData, crop_for_validation, generate
from task_images.imagenet_resnet.folders import OFFICIAL, ImageFolders, load
from tests.contract.task_images.ranks import ROOT
from tests.unit.task_images.imagenet_resnet.imagenet_files import (
    CLASSES,
    PER_CLASS,
    TRUTH,
    archives,
    as_official,
    pack,
    training_images,
    write,
    write_folders,
)
from tests.unit.task_images.test_images import one_of


def check(images: ImageFolders) -> None:
    """Every image is there once, under the label that its blue tells."""
    assert images.training.classes == images.validation.classes == CLASSES
    assert len(images.training) == PER_CLASS * len(CLASSES)
    assert len(images.validation) == len(TRUTH)
    for part in (images.training, images.validation):
        for index, label in enumerate(part.labels):
            with Image.open(part.path(index)) as image:
                assert abs(int(np.asarray(image)[5, 5, 2]) - 80 * label) < 20
    assert len({images.training.path(index) for index in range(len(images.training))}) == len(images.training)
    assert images.identity.official is False


def quiet(_: str) -> None:
    pass


@pytest.mark.parametrize("below", ["", "imagenet"])
def test_folders_are_listed_and_remembered(tmp_path: Path, below: str) -> None:
    write_folders(tmp_path / below)
    said: list[str] = []
    check(load(tmp_path, 3, said.append))
    check(load(tmp_path, 3, said.append))
    assert len(said) == 1
    # Another image in a folder is seen; hidden files and notes are none.
    write(tmp_path / below / "train" / CLASSES[0], {"one.PNG": b"", ".x.jpg": b"", "readme.txt": b""})
    assert len(load(tmp_path, 3, said.append).training) == PER_CLASS * len(CLASSES) + 1
    assert len(said) == 2


@pytest.mark.parametrize("name", ["x.JPEG", "x.jpg", "x.PnG", "x.webp", "x.bmp", "x.tif"])
def test_images_are_told_by_their_endings(tmp_path: Path, name: str) -> None:
    write_folders(tmp_path)
    write(tmp_path / "train" / CLASSES[1], {name: b"", ".hidden.jpg": b"", "x.gif": b"", "jpeg": b""})
    part = load(tmp_path, 3, quiet).training
    assert len(part) == 10
    names = [part.path(index).name for index in range(10) if part.labels[index] == 1]
    assert name in names
    assert names == sorted(names)
    assert part.path(0).parent == tmp_path / "train" / CLASSES[0]


def test_links_are_images_if_they_lead_to_one(tmp_path: Path) -> None:
    write_folders(tmp_path)
    place = tmp_path / "train" / CLASSES[1]
    (place / "x.jpg").symlink_to(tmp_path / "train" / CLASSES[0])  # a folder is no image
    (place / "y.jpg").symlink_to(next((tmp_path / "val").rglob("*.JPEG")))
    assert len(load(tmp_path, 3, quiet).training) == 10
    (place / "z.jpg").symlink_to("/nowhere/z.jpg")
    assert f"{place / 'z.jpg'} is a link to /nowhere/z.jpg, which does not exist" in str(refusal_of(tmp_path))


def test_the_official_archives_are_unpacked_once(tmp_path: Path) -> None:
    contents = archives()
    write(tmp_path, contents)
    said: list[str] = []
    for _ in range(2):
        check(load(tmp_path, 3, said.append, as_official(contents)))
    assert sum("unpacked" in line for line in said) == 2
    assert {path.name for path in tmp_path.iterdir()} == {
        *contents, "train", "val", "imagenet.cache", "imagenet.lock",
    }  # fmt: skip


def test_only_the_missing_part_is_unpacked(tmp_path: Path) -> None:
    contents = archives()
    write_folders(tmp_path)
    for path in sorted((tmp_path / "val").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (tmp_path / "val").rmdir()
    write(tmp_path, {name: contents[name] for name in (OFFICIAL.validation.name, OFFICIAL.kit.name)})
    check(load(tmp_path, 3, quiet, as_official(contents)))


def test_who_was_killed_while_unpacking_goes_on(tmp_path: Path) -> None:
    contents = archives()
    write(tmp_path, contents)
    images = training_images()[CLASSES[0]]
    write(tmp_path / "train.partial" / CLASSES[0], images)
    write(tmp_path / "train.partial" / f".{CLASSES[1]}", {"half.JPEG": b"x", f"{CLASSES[1]}_0.JPEG": b"half"})
    kept = (tmp_path / "train.partial" / CLASSES[0] / next(iter(images))).stat()
    check(load(tmp_path, 3, quiet, as_official(contents)))
    now = (tmp_path / "train" / CLASSES[0] / next(iter(images))).stat()
    assert (now.st_ino, now.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)


def refusal_of(folder: Path, contents: dict[str, bytes] | None = None, classes: int = 3) -> EnvironmentUnfitError:
    with pytest.raises(EnvironmentUnfitError) as caught:
        load(folder, classes, quiet, as_official(contents) if contents else OFFICIAL)
    return caught.value


def test_a_wrong_archive_is_not_unpacked(tmp_path: Path) -> None:
    contents = archives()
    write(tmp_path, contents)
    (tmp_path / OFFICIAL.training.name).write_bytes(contents[OFFICIAL.training.name][:-512])
    error = refusal_of(tmp_path, contents)
    assert "md5" in str(error)
    assert "image-net.org" in str(error.hint)
    assert not (tmp_path / "train.partial").exists()


@pytest.mark.parametrize("name", [OFFICIAL.training.name, OFFICIAL.kit.name])
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    contents = archives()
    contents[name] = contents[name][:300]
    write(tmp_path, contents)
    error = refusal_of(tmp_path, contents)
    assert f"{name} cannot be read" in str(error)
    assert error.hint
    assert not (tmp_path / "imagenet.cache").exists()
    assert not (tmp_path / "val").exists()


@pytest.mark.slow
def test_a_full_disk_while_unpacking_is_named(tmp_path: Path) -> None:
    """A limit on the size of files takes the part of the disk."""
    contents = archives()
    contents[OFFICIAL.training.name] = pack({f"{CLASSES[0]}.tar": pack({f"{CLASSES[0]}_1.JPEG": bytes(200_000)})})
    write(tmp_path, contents)
    program = """
import resource, sys
from pathlib import Path
from task_images.contract import TaskError
from task_images.imagenet_resnet.folders import load
from tests.unit.task_images.imagenet_resnet.imagenet_files import as_official
folder = Path(sys.argv[1])
official = as_official({path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith("ILSVRC")})
resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
try:
    load(folder, 3, print, official)
except TaskError as error:
    sys.exit((sys.stderr.write(f"{error} {error.hint}"), error.exit_code)[1])
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 78
    assert "File too large" in ended.stderr
    assert "--data-dir" in ended.stderr


def test_folders_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    assert "train/ (or ILSVRC2012_img_train.tar) and val/ (or" in str(refusal_of(tmp_path))
    hint = str(refusal_of(tmp_path).hint)
    for words in ("image-net.org", "--data-dir", "--set data=generated", "--set data=fake"):
        assert words in hint
    write_folders(tmp_path)
    error = refusal_of(tmp_path, classes=1000)
    assert "has 3 classes, the run expects 1000" in str(error)
    assert error.hint == "Complete it, or train on the existing classes: --set classes=3."
    (tmp_path / "val" / CLASSES[2]).rename(tmp_path / "val" / "other")
    assert f"val has no {CLASSES[2]}" in str(refusal_of(tmp_path))
    (tmp_path / "val" / "other").rename(tmp_path / "val" / CLASSES[2])
    (tmp_path / "train" / CLASSES[1]).rename(tmp_path / "aside")
    (tmp_path / "train" / CLASSES[1]).mkdir()
    assert f"{CLASSES[1]} has no images" in str(refusal_of(tmp_path))


def test_images_beside_each_other_are_no_classes(tmp_path: Path) -> None:
    write_folders(tmp_path)
    for path in list((tmp_path / "val").rglob("*.JPEG")):
        path.rename(tmp_path / "val" / path.name)
    for name in CLASSES:
        (tmp_path / "val" / name).rmdir()
    error = refusal_of(tmp_path)
    assert "val has no folders, one per class" in str(error)
    assert "put the archives next to it" in str(error.hint)


def test_a_list_of_folders_that_are_gone_is_not_believed(tmp_path: Path) -> None:
    write_folders(tmp_path)
    load(tmp_path, 3, quiet)
    (tmp_path / "train").rename(tmp_path / "elsewhere")
    assert "has no train/" in str(refusal_of(tmp_path))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageFolders:
    folder = tmp_path_factory.mktemp("generated")
    return load(generate(folder, 3, {"train": 41, "val": 13}, 36, 5), 3, quiet)


def data(
    images: ImageFolders,
    rank: int = 0,
    size: int = 1,
    batch_size: int = 12,
    loaders: int = 0,
    draft: bool = True,
) -> FileData:
    return FileData(
        one_of(rank, size), images, batch_size, 7,
        side=32, shorter=36, least_crop=0.3, loaders=loaders, draft=draft, channels_last=True, validation_batch=5,
    )  # fmt: skip


def receive_batches(source: FileData, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Inputs, labels and total of every batch, as they are when it arrives."""
    return [(batch.inputs.clone(), batch.targets, batch.total) for batch in source.training(epoch)]


@pytest.mark.parametrize("size", [2, 3])
def test_the_ranks_share_one_epoch_whatever_their_number_and_threads(images: ImageFolders, size: int) -> None:
    """Every global batch holds the same images, cut in the same way."""
    alone = receive_batches(data(images, batch_size=8 * size), 3)
    shared = [receive_batches(data(images, rank, size, batch_size=8, loaders=rank), 3) for rank in range(size)]
    assert len(alone) == data(images, batch_size=8 * size).steps > 1
    for (inputs, targets, total), *parts in zip(alone, *shared, strict=True):
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[1] for part in parts]), targets)
        assert {part[2] for part in parts} == {total} == {len(targets)}


def test_a_resumed_epoch_does_not_open_what_came_before(images: ImageFolders) -> None:
    whole = receive_batches(data(images), 2)
    source = data(images, loaders=2)
    first, _ = next(Partition(len(images.training), 12, 1, 7).shares(2, 0))
    contents = {images.training.path(int(index)): images.training.path(int(index)).read_bytes() for index in first}
    try:
        for path in contents:
            path.write_bytes(b"no image")
        rest = list(source.training(2, begin=1))
    finally:
        for path, content in contents.items():
            path.write_bytes(content)
    assert len(rest) == len(whole) - 1 > 0
    for batch, (inputs, targets, total) in zip(rest, whole[1:], strict=True):
        assert torch.equal(batch.inputs, inputs)
        assert torch.equal(batch.targets, targets)
        assert batch.total == total


def test_an_image_is_cut_in_another_way_in_every_epoch(images: ImageFolders) -> None:
    epochs = [torch.cat([inputs for inputs, _, _ in receive_batches(data(images), epoch)]) for epoch in (1, 2)]
    assert not any(torch.equal(first, second) for first in epochs[0] for second in epochs[1])


def test_validation_covers_every_image_once(images: ImageFolders) -> None:
    batches = [batch for rank in range(3) for batch in data(images, rank, 3, loaders=2).validation()]
    assert torch.cat([batch.targets for batch in batches]).tolist() == images.validation.labels.tolist()
    expected = np.stack([crop_for_validation(images.validation.path(index), 32, 36, True) for index in range(13)])
    np.testing.assert_array_equal(torch.cat([batch.inputs for batch in batches]).permute(0, 2, 3, 1).numpy(), expected)


def test_batches_are_normalized_with_channels_last(images: ImageFolders) -> None:
    source = data(images)
    batch = next(iter(source.training(1)))
    values, targets = source.prepare(batch, training=True)
    expected = (batch.inputs / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    assert values.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(targets, batch.targets)


def test_a_damaged_file_reaches_the_reader_through_the_threads(images: ImageFolders) -> None:
    path = images.training.path(7)
    content = path.read_bytes()
    path.write_bytes(content[:100])
    with pytest.raises(EnvironmentUnfitError, match=path.name):
        list(data(images, loaders=2).training(1))
    path.write_bytes(content)


def test_generated_files_are_the_seeds_and_made_once(tmp_path: Path) -> None:
    sizes = {"train": 6, "val": 3}
    first = generate(tmp_path / "a", 3, sizes, 32, 1)
    files = sorted(path.relative_to(first) for path in first.rglob("*.jpeg"))
    assert len(files) == 9
    before = {path: (first / path).stat().st_mtime_ns for path in files}
    assert generate(tmp_path / "a", 3, sizes, 32, 1) == first
    assert {path: (first / path).stat().st_mtime_ns for path in files} == before
    again, other = generate(tmp_path / "b", 3, sizes, 32, 1), generate(tmp_path / "b", 3, sizes, 32, 2)
    assert [(again / path).read_bytes() for path in files] == [(first / path).read_bytes() for path in files]
    assert {path.name: path.read_bytes() for path in other.rglob("*.jpeg")} != {
        path.name: (first / path).read_bytes() for path in files
    }


def test_fake_data_are_one_batch_again_and_again() -> None:
    source = FakeData(one_of(1, 4), 5, 3, 10, 32, 1, channels_last=True)
    batches = list(source.training(1))
    assert len(batches) == source.steps == 3
    assert {(batch.size, batch.total) for batch in batches} == {(5, 20)}
    inputs, targets = source.prepare(batches[0], training=True)
    assert inputs is source.prepare(batches[2], training=True)[0]
    assert inputs.shape == (5, 3, 32, 32)
    assert not torch.equal(inputs, next(FakeData(one_of(0, 4), 5, 3, 10, 32, 1, True).training(1)).inputs)
    assert int(targets.max()) < 10
    assert list(source.validation()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_archives_in_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    contents = archives()
    write(tmp_path, contents)
    tmp_path.chmod(0o555)
    assert "train.partial" in str(refusal_of(tmp_path, contents))
