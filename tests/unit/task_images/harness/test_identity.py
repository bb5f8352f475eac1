"""Data of the published size are not the published data yet."""

import hashlib
from typing import Any

import numpy as np
import pytest

from task_images.cifar10_resnet20 import data as cifar
from task_images.harness.arrays import Bytes, Labels
from task_images.harness.identity import DataIdentity, compare_data, digest_arrays, find_other_means, made_up
from task_images.mnist import data as mnist


def make_gray(number: int, *shape: int) -> tuple[Bytes, Labels]:
    """Images and labels without memory of their own."""
    return np.broadcast_to(np.uint8(125), (number, *shape)), np.zeros(number, np.int64)


def test_as_many_images_that_are_made_up_are_not_the_official_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "digest_arrays", lambda *arrays: "sha256:0")
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


def test_a_digest_is_of_types_shapes_and_values() -> None:
    numbers = np.array([[1, 2], [3, 4]], "<i4")
    text = b"<i4 (2, 2)\n" + b"".join(value.to_bytes(4, "little") for value in (1, 2, 3, 4))
    label = b"|u1 (1,)\n\x07"
    found = digest_arrays(numbers, np.array([7], np.uint8))
    assert found == f"sha256:{hashlib.sha256(text + label).hexdigest()}"
    assert digest_arrays(numbers.T.copy().T, np.array([7], np.uint8)) == found  # another order in memory
    others = [(numbers.T,), (numbers.reshape(4),), (numbers.astype("<i8"),), (numbers, numbers)]
    assert len({digest_arrays(*one) for one in others} | {digest_arrays(numbers)}) == 5


@pytest.mark.parametrize(
    ("counts", "digest", "official", "reason"),
    [
        ({"images": 60, "labels": 60}, "sha256:a", True, None),
        ({"images": 60, "labels": 60, "more": 1}, "sha256:a", True, None),
        ({"images": 60, "labels": 60}, "sha256:b", False, "not the official data: their digest differs"),
        (
            {"images": 50, "labels": 40},
            "sha256:a",
            False,
            "a part of the official data: 50 images instead of 60, 40 labels instead of 60",
        ),
        ({"images": 60, "labels": 59}, "sha256:a", False, "a part of the official data: 59 labels instead of 60"),
        ({"images": 61, "labels": 60}, "sha256:a", False, "not the official data: 61 images instead of 60"),
        ({"images": 60, "labels": 0}, "sha256:a", False, "not the official data: 0 labels instead of 60"),
        ({"images": 60}, "sha256:a", False, "not the official data: 0 labels instead of 60"),
    ],
)
def test_what_data_are_held_against_their_published_counts(
    counts: dict[str, int], digest: str, official: bool, reason: str | None
) -> None:
    found = compare_data(counts, {"images": 60, "labels": 60}, digest, "sha256:a")
    assert found == DataIdentity(counts, digest, official, reason)
    assert found.to_dict() == {"counts": counts, "digest": digest, "official": official, "reason": reason}


def test_without_a_published_digest_the_counts_decide() -> None:
    assert compare_data({"pairs": 3}, {"pairs": 3}, "sha256:any") == DataIdentity(
        {"pairs": 3}, "sha256:any", True, None
    )


def test_generated_data_are_not_official_and_unreported_ones_unknown() -> None:
    assert made_up({"images": 3}).to_dict() == {
        "counts": {"images": 3},
        "digest": None,
        "official": False,
        "reason": "the data were generated",
    }
    unknown: Any = DataIdentity().to_dict()
    assert (unknown["counts"], unknown["official"]) == ({}, None)
    assert "does not report" in unknown["reason"]


@pytest.mark.parametrize(("off", "is_other"), [(1.5e-6, False), (-1.5e-6, False), (3e-6, True), (-3e-6, True)])
def test_published_means_differ_in_their_seventh_digit(off: float, is_other: bool) -> None:
    images = np.full((4, 1, 2, 2), 51, np.uint8)  # 0.2 of 255
    assert (find_other_means(images, (0.2 + off,)) is not None) is is_other
