"""Names of images: from a registry and a task, and read by Docker's own rules."""

import pytest

from mlbench_cli.tasks.images import ImageReference, name_image, parse_image

DIGEST = "sha256:" + "ab" * 32
ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/mlbench-test-4:"


@pytest.mark.parametrize(
    ("registry", "name"),
    [
        ("ghcr.io/me", "ghcr.io/me/mnist:1.0"),
        ("ghcr.io/me/", "ghcr.io/me/mnist:1.0"),
        ("localhost:5000", "localhost:5000/mnist:1.0"),
        (ECR, f"{ECR}mnist-1.0"),
        (f"{ECR}/", f"{ECR}mnist-1.0"),
    ],
)
def test_an_image_is_tagged_with_its_version(registry: str, name: str) -> None:
    assert name_image(registry, "mnist", "1.0") == name
    assert name_image(registry, "mnist", "1.0", {"mnist:2.0": DIGEST, "other:1.0": DIGEST}) == name


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("busybox", ("", "busybox", "latest", "")),
        ("busybox:1.36", ("", "busybox", "1.36", "")),
        ("me/busybox:1.36", ("", "me/busybox", "1.36", "")),
        ("ghcr.io/me/mnist:1.0", ("ghcr.io", "me/mnist", "1.0", "")),
        ("ghcr.io/me/mnist", ("ghcr.io", "me/mnist", "latest", "")),
        ("localhost/mnist:1.0", ("localhost", "mnist", "1.0", "")),
        ("localhost:5000/mnist", ("localhost:5000", "mnist", "latest", "")),
        ("registry:5000/a/b/c:d", ("registry:5000", "a/b/c", "d", "")),
        (f"ghcr.io/me/mnist@{DIGEST}", ("ghcr.io", "me/mnist", "latest", DIGEST)),
        (f"ghcr.io/me/mnist:1.0@{DIGEST}", ("ghcr.io", "me/mnist", "1.0", DIGEST)),
        ("registry.example:5000", ("", "registry.example", "5000", "")),
    ],
)
def test_a_reference_is_read_as_docker_reads_it(name: str, parts: tuple[str, str, str, str]) -> None:
    assert parse_image(name) == ImageReference(*parts)


@pytest.mark.parametrize(
    "name", ["busybox:1", "me/busybox:1", "ghcr.io/me/mnist:1.0", f"ghcr.io/me/mnist@{DIGEST}", f"busybox@{DIGEST}"]
)
def test_a_reference_is_written_as_it_was_read(name: str) -> None:
    assert parse_image(name).name == name
