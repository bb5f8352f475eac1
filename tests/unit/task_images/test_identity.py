"""Data of the published size are not the published data yet."""

import numpy as np
import pytest

from task_images.cifar10_resnet20 import data as cifar
from task_images.data import Bytes, Labels
from task_images.mnist import data as mnist
from task_images.report import compare_data, find_other_means


def make_gray(number: int, *shape: int) -> tuple[Bytes, Labels]:
    """Images and labels without memory of their own."""
    return np.broadcast_to(np.uint8(125), (number, *shape)), np.zeros(number, np.int64)


def test_as_many_images_that_are_made_up_are_not_the_official_ones() -> None:
    colors, digits = (3, 32, 32), (1, 28, 28)
    found = [
        cifar.Cifar(make_gray(50_000, *colors), make_gray(10_000, *colors), "sha256:0").identity,
        mnist.Mnist(make_gray(60_000, *digits), make_gray(10_000, *digits)).identity,
    ]
    assert [one.official for one in found] == [False, False]
    assert found[0].reason == (
        "not the official data: the mean of their pixels is 0.490196, 0.490196, 0.490196 instead of "
        "0.491400, 0.482158, 0.446531"
    )


def test_what_else_is_different_is_asked_when_the_numbers_are_right() -> None:
    images = np.array([[[[10, 20]], [[30, 41]]]], np.uint8)
    assert find_other_means(images, (15 / 255, 35.5 / 255)) is None
    assert find_other_means(images, (15 / 255, 35 / 255)) is not None
    assert compare_data({"images": 1}, {"images": 1}, None, find_difference=lambda: None).official
    assert not compare_data({"images": 1}, {"images": 1}, None, find_difference=lambda: "color").official
    part = compare_data({"images": 1}, {"images": 2}, None, find_difference=lambda: "color")
    assert part.reason == "a part of the official data: 1 images instead of 2"
    for counts in ({"images": 0}, {"images": 3}, {}):
        reason = str(compare_data(counts, {"images": 2}, None).reason)
        assert reason.startswith("not the official data: ")


@pytest.mark.parametrize(("off", "is_other"), [(1.5e-6, False), (-1.5e-6, False), (3e-6, True), (-3e-6, True)])
def test_published_means_differ_in_their_seventh_digit(off: float, is_other: bool) -> None:
    images = np.full((4, 1, 2, 2), 51, np.uint8)  # 0.2 of 255
    assert (find_other_means(images, (0.2 + off,)) is not None) is is_other
