"""The images that a released wheel names by digest."""

import json
from pathlib import Path

import pytest

from mlbench_cli.tasks.images import name_released_image
from tools import release

DIGEST = f"sha256:{'1' * 64}"


def test_a_release_names_its_images_by_digest_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "images.json").write_text(json.dumps({"registry": "ghcr.io/me", "digests": {"mnist:4.0.0": DIGEST}}))
    file = tmp_path / "tasks/released.json"
    assert name_released_image("mnist", "4.0.0", file) is None
    release.write_release("a" * 40, tmp_path / "images.json", tmp_path)
    assert name_released_image("mnist", "4.0.0", file) == f"ghcr.io/me/mnist@{DIGEST}"
    assert name_released_image("mnist", "4.0.1", file) is None
    assert name_released_image("allreduce", "4.0.0", file) is None
    release.clean(tmp_path)
    assert not file.exists()


def test_what_is_no_commit_or_no_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no commit"):
        release.write_release("main", None, tmp_path)
    (tmp_path / "images.json").write_text(json.dumps({"registry": "ghcr.io/me", "digests": {"mnist:4.0.0": "latest"}}))
    with pytest.raises(ValueError, match="has no digest"):
        release.write_release("a" * 40, tmp_path / "images.json", tmp_path)
