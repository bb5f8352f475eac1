"""Bringing results home: digests of growing files, room on the disk, and what an archive may write where."""

import hashlib
from pathlib import Path
from typing import BinaryIO

import pytest

from mlbench_cli.engines.fetch import Digest, FetchError, download, read_fetched


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"files": 3, "bytes": 70}', (3, 70)),
        ('{"files": 0, "bytes": 0}', (0, 0)),
        ('{"files": 3}', None),
        ('{"files": null, "bytes": 0}', None),
        ("[]", None),
        ("{", None),
    ],
)
def test_what_was_fetched_before_is_read_from_its_marker(
    tmp_path: Path, text: str, found: tuple[int, int] | None
) -> None:
    assert read_fetched(tmp_path / "nothing") is None
    (tmp_path / "marker").write_text(text)
    assert read_fetched(tmp_path / "marker") == found


# --- unpacking -------------------------------------------------------------------------------------------------------


# --- folders of ranks, and what workers hold -------------------------------------------------------------------------


def test_a_download_is_what_was_announced_or_refused(tmp_path: Path) -> None:
    attempts = iter([b"damaged", b"results"])

    def receive(file: BinaryIO, digest: Digest) -> None:
        file.write(next(attempts, b"DAMAGED"))

    part, digest = tmp_path / "part", hashlib.sha256(b"results").hexdigest()
    download(part, 7, digest, receive, source="it", place="the node")
    assert part.read_bytes() == b"results"
    part.unlink()
    with pytest.raises(FetchError):
        download(part, 7, digest, receive, source="it", place="the node")
    assert not part.exists()
