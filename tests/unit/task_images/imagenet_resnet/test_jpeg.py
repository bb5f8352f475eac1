"""What is cut out of ImageNet's images: for training and validation, of every kind of image, and of damaged ones."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision import transforms

from task_images.contract import EnvironmentUnfitError
from task_images.data import Bytes, numpy_generator
from task_images.imagenet_resnet.data import crop_for_training, crop_for_validation, random_box
from tests.unit.task_images.imagenet_resnet.imagenet_files import jpeg, ramp


def training_crop(path: Path, least: float, number: int, draft: bool) -> Bytes:
    return crop_for_training(path, 32, least, numpy_generator(number), draft)


def validation_crop(path: Path, shorter: int, draft: bool) -> Bytes:
    return crop_for_validation(path, 32, shorter, draft)


def test_a_training_crop_is_a_part_of_the_image_scaled(tmp_path: Path) -> None:
    path = tmp_path / "ramp.png"
    ramp(400, 300).save(path)
    mirrored = set()
    for number in range(20):
        box = random_box(400, 300, 0.25, numpy_generator(number))
        left, upper, right, lower = box
        assert 0 <= left < right <= 400
        assert 0 <= upper < lower <= 300
        assert 0.24 < (right - left) * (lower - upper) / 120_000 <= 1
        assert 0.74 < (right - left) / (lower - upper) < 1.35
        crop = training_crop(path, 0.25, number, draft=False)
        assert crop.shape == (32, 32, 3)
        middle = crop[:, ::-1] if crop[0, 0, 0] > crop[0, -1, 0] else crop
        mirrored.add(middle is not crop)
        # The value in the middle of every pixel: what a ramp has there.
        across = (left + (np.arange(32) + 0.5) * (right - left) / 32 - 0.5) / 399 * 255
        down = (upper + (np.arange(32) + 0.5) * (lower - upper) / 32 - 0.5) / 299 * 255
        np.testing.assert_allclose(middle[16, 2:-2, 0], across[2:-2], atol=1.5)
        np.testing.assert_allclose(middle[2:-2, 16, 1], down[2:-2], atol=1.5)
    assert mirrored == {True, False}
    chance = numpy_generator(1)
    boxes = [random_box(400, 400, 0.25, chance) for _ in range(4000)]
    ratios = [(right - left) / (lower - upper) for left, upper, right, lower in boxes]
    assert abs(np.log(ratios).mean()) < 0.01  # wide and high ones are as likely


def test_a_long_image_is_cut_in_the_middle_when_nothing_fits() -> None:
    assert random_box(1000, 10, 1.0, numpy_generator(1)) == (493, 0, 506, 10)
    assert random_box(10, 1000, 1.0, numpy_generator(1)) == (0, 493, 10, 506)


def test_a_validation_crop_is_the_middle_of_the_scaled_image(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    noise = np.random.default_rng(0).integers(0, 256, (90, 130, 3), np.uint8)
    Image.fromarray(noise).save(path)
    scaled = Image.fromarray(noise).resize((57, 40), Image.Resampling.BILINEAR)
    expected = np.asarray(scaled)[4:36, 12:44]
    np.testing.assert_array_equal(validation_crop(path, 40, draft=True), expected)


@pytest.mark.parametrize("size", [(374, 500), (499, 375), (640, 491), (300, 300)])
def test_a_validation_crop_is_that_of_torchvision(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "x.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)).save(path)
    reference = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])
    with Image.open(path) as image:
        expected = np.asarray(reference(image))
    np.testing.assert_array_equal(crop_for_validation(path, 224, 256, draft=False), expected)


@pytest.mark.parametrize("factor", [1, 2, 5, 9])
def test_draft_changes_little_and_sees_the_same_part(tmp_path: Path, factor: int) -> None:
    path = tmp_path / "x.jpeg"
    path.write_bytes(jpeg(ramp(40 * factor + 3, 36 * factor + 1)))
    for number in range(5):
        full, draft = (training_crop(path, 0.5, number, draft) for draft in (False, True))
        assert np.abs(full.astype(int) - draft).max() <= 6
    full, draft = (validation_crop(path, 36, draft) for draft in (False, True))
    assert np.abs(full.astype(int) - draft).max() <= 6


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "RGBA", "1"])
def test_every_kind_of_image_becomes_three_colors(tmp_path: Path, mode: str) -> None:
    """The official data set has gray images, some with four inks, and a PNG under another name."""
    path = tmp_path / "x.JPEG"
    ramp(50, 40).convert(mode).save(path, "JPEG" if mode in ("L", "CMYK") else "PNG")
    assert validation_crop(path, 36, draft=True).shape == (32, 32, 3)


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    """And not cut off at 255, which makes nearly every image white; floating-point numbers are refused."""
    gray = ramp(50, 40).convert("L")
    gray.save(tmp_path / "8.png")
    wide = Image.fromarray(np.asarray(gray).astype(np.uint16) * 256)
    for name in ("16.png", "16.tif"):
        wide.save(tmp_path / name)
        found, expected = (validation_crop(tmp_path / each, 36, draft=True) for each in (name, "8.png"))
        np.testing.assert_array_equal(found, expected)
    Image.fromarray(np.ones((40, 50), np.float32)).save(tmp_path / "real.tif")
    with pytest.raises(EnvironmentUnfitError, match=r"real\.tif cannot be read as an image: .*floating-point"):
        validation_crop(tmp_path / "real.tif", 36, draft=True)


@pytest.mark.parametrize("content", [b"", b"no image", jpeg(ramp(300, 300))[:2000], None])
def test_a_damaged_image_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "n1_7.JPEG"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EnvironmentUnfitError, match=r"n1_7\.JPEG"):
        training_crop(path, 0.08, 1, draft=True)


@pytest.mark.parametrize("size", [(7, 1000), (3, 3), (100, 100)])
def test_an_image_of_any_form_fills_the_square(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "x.png"
    ramp(*size).save(path)
    assert (
        validation_crop(path, 32, draft=False).shape == training_crop(path, 0.08, 1, draft=False).shape == (32, 32, 3)
    )
