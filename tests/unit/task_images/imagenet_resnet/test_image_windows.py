"""ImageNet's files in detail: how images are listed; windows of an image."""

from pathlib import Path

import numpy as np
import pytest

from task_images.imagenet_resnet.folders import load
from task_images.imagenet_resnet.jpeg import Window, training_window, validation_window
from tests.unit.task_images.imagenet_resnet.imagenet_files import CLASSES, write, write_folders


def quiet(_: str) -> None:
    pass


# --- folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.JPEG", "x.jpg", "x.PnG", "x.webp", "x.bmp"])
def test_images_are_told_by_their_endings(tmp_path: Path, name: str) -> None:
    write_folders(tmp_path)
    write(tmp_path / "train" / CLASSES[1], {name: b"", ".hidden.jpg": b"", "x.gif": b"", "jpeg": b""})
    part = load(tmp_path, 3, quiet).training
    assert len(part) == 10
    names = [part.path(index).name for index in range(10) if part.labels[index] == 1]
    assert name in names
    assert names == sorted(names)
    assert part.path(0).parent == tmp_path / "train" / CLASSES[0]


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
