"""Parallel text out of archives: what is missing or not parallel."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from task_images.contract import EnvironmentUnfitError
from task_images.translation.corpora import Part, join_parts


def pack(path: Path, files: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


PARTS = (Part("one.tgz", ("a.en", "a.de")), Part("two.tgz", ("test.en.sgm", "test.de.sgm")))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.en": b"one\ntwo\n", "a.de": b"eins\n"}, "a.en has 2 lines and a.de has 1"),
        ({"a.en": b"", "a.de": b""}, "a.en has 0 lines and a.de has 0"),
        ({"a.en": b"one\n"}, "has no a.de"),
        ({}, "has no a.en"),
        (None, "cannot be read"),
    ],
)
def test_a_part_that_is_not_parallel_or_not_there_leaves_no_file(
    tmp_path: Path, files: Mapping[str, bytes] | None, words: str
) -> None:
    if files is None:
        (tmp_path / "one.tgz").write_bytes(b"no archive")
    else:
        pack(tmp_path / "one.tgz", files)
    with pytest.raises(EnvironmentUnfitError, match=words) as caught:
        join_parts(tmp_path, PARTS[:1], tmp_path / "out", "train", lambda line: None)
    assert "prepare the data again" in str(caught.value.hint)
    assert not (tmp_path / "out" / "train.en").exists()
    assert not (tmp_path / "out" / "train.de").exists()
