"""CIFAR-10's files, whole and damaged."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from task_images.cifar10_resnet20.data import Cifar, load, read
from task_images.contract import EnvironmentUnfitError
from task_images.fetch import DownloadError
from tests.fakes.file_server import FileServer, serving
from tests.unit.task_images.cifar10_resnet20.cifar_files import (
    PER_BATCH,
    archives,
    batches,
    binary_files,
    pack,
    python_files,
    unpack,
)


def check(images: Cifar) -> None:
    expected = batches()
    names = [f"data_batch_{number}" for number in range(1, 6)]
    assert images.training[0].shape == (5 * PER_BATCH, 3, 32, 32)
    np.testing.assert_array_equal(
        images.training[0].reshape(-1, 3072), np.concatenate([expected[name][0] for name in names])
    )
    np.testing.assert_array_equal(images.training[1], np.concatenate([expected[name][1] for name in names]))
    np.testing.assert_array_equal(images.validation[0].reshape(-1, 3072), expected["test_batch"][0])
    np.testing.assert_array_equal(images.validation[1], expected["test_batch"][1])
    assert images.identity.official is False


@pytest.mark.parametrize("files", [binary_files, python_files])
@pytest.mark.parametrize("below", ["", "cifar10", "cifar-10-binary"])
def test_what_is_in_the_archive_is_read(tmp_path: Path, files: Callable[[], dict[str, bytes]], below: str) -> None:
    unpack(files(), tmp_path / below)
    check(load(tmp_path, print))


@pytest.mark.parametrize("files", [binary_files, python_files])
@pytest.mark.parametrize("inner", [False, True])
def test_the_data_folder_may_be_that_of_the_archive(
    tmp_path: Path, files: Callable[[], dict[str, bytes]], inner: bool
) -> None:
    unpack(files(), tmp_path)
    [folder] = tmp_path.iterdir()
    check(load(folder if inner else folder.rename(tmp_path / "images"), print))


def test_both_archives_are_read_and_checked(tmp_path: Path) -> None:
    binary, python = pack(binary_files()), pack(python_files())
    for name, content in (("cifar-10-binary.tar.gz", binary), ("cifar-10-python.tar.gz", python)):
        folder = tmp_path / name[:10]
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        check(load(folder, print, archives(binary, python)))
        (folder / name).unlink()
        for left in folder.glob("*.cache"):
            left.rename(folder / "other")
        (folder / name).write_bytes(content)
        with pytest.raises(EnvironmentUnfitError, match="md5"):
            load(folder, print, archives(binary + b"x", python + b"x"))


def test_the_second_time_the_converted_images_are_mapped(tmp_path: Path) -> None:
    unpack(binary_files(), tmp_path)
    load(tmp_path, print)
    stored = tmp_path / "cifar10.cache" / "training_images.npy"
    before = stored.stat().st_mtime_ns
    assert isinstance(load(tmp_path, print).training[0], np.memmap)
    assert stored.stat().st_mtime_ns == before
    # Without the source they are still good; with another one they are not.
    (tmp_path / "cifar-10-batches-bin").rename(tmp_path / "elsewhere")
    check(load(tmp_path, print))
    unpack(binary_files(3), tmp_path)
    assert len(load(tmp_path, print).training[1]) == 15


def damaged_files(name: str) -> dict[str, bytes]:
    files = binary_files()
    return {
        "cut": files | {"cifar-10-batches-bin/data_batch_3.bin": files["cifar-10-batches-bin/data_batch_3.bin"][:-1]},
        "empty": files | {"cifar-10-batches-bin/data_batch_3.bin": b""},
        "label": files | {"cifar-10-batches-bin/data_batch_3.bin": b"\x0a" + bytes(3072)},
        "missing": {key: value for key, value in files.items() if "batch_3" not in key},
        "pickle cut": python_files() | {"cifar-10-batches-py/data_batch_3": b"\x80\x02}q"},
        "pickle of something": python_files() | {"cifar-10-batches-py/data_batch_3": pickle.dumps([1, 2], 2)},
        "pickle of other sizes": python_files()
        | {
            "cifar-10-batches-py/data_batch_3": pickle.dumps(
                {b"data": np.zeros((2, 3), np.uint8), b"labels": [1, 2]}, 2
            )
        },
    }[name]


@pytest.mark.parametrize(
    "name", ["cut", "empty", "label", "missing", "pickle cut", "pickle of something", "pickle of other sizes"]
)
def test_damage_is_named_by_file(tmp_path: Path, name: str) -> None:
    unpack(damaged_files(name), tmp_path)
    with pytest.raises(EnvironmentUnfitError, match="data_batch_3"):
        load(tmp_path, print)
    assert not (tmp_path / "cifar10.cache").exists()


@pytest.mark.parametrize("cut", [10, 1000, 20_000])
def test_a_truncated_archive_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(pack(binary_files())[:cut])
    with pytest.raises(EnvironmentUnfitError, match=r"cifar-10-binary\.tar\.gz"):
        read(path)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("/tmp/should-never-be-made",)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    unpack(python_files() | {"cifar-10-batches-py/data_batch_2": pickle.dumps({b"data": Evil()}, 2)}, tmp_path)
    with pytest.raises(EnvironmentUnfitError, match=r"posix\.mkdir"):
        load(tmp_path, print)
    assert not Path("/tmp/should-never-be-made").exists()


def test_the_archive_is_downloaded_once_and_read(tmp_path: Path) -> None:
    content = pack(binary_files())
    with serving(FileServer(content, break_off_after=[100])) as server:
        for _ in range(2):
            check(load(tmp_path, lambda line: None, archives(content, b"", server.url)))
    assert server.asked == [None, "bytes=100-"]


def test_without_data_the_place_to_put_them_is_named(tmp_path: Path) -> None:
    with serving(FileServer(b"", refuse_with=[404])) as server, pytest.raises(DownloadError) as caught:
        load(tmp_path, lambda line: None, archives(b"x", b"y", server.url))
    assert str(tmp_path) in str(caught.value.hint)
    assert "cifar-10-binary.tar.gz" in str(caught.value.hint)
