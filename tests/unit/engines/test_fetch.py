"""Bringing results home: digests of growing files, room on the disk, and what an archive may write where."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.fetch import read_fetched
from mlbench_cli.engines.kubernetes.fetch import HeldArchive, parse_held_archive


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


@pytest.mark.parametrize(
    ("summary", "held"),
    [
        ({"held": True, "archive": {"size": "7", "sha256": "ab"}}, HeldArchive(7, "ab")),
        ({"held": False, "archive": {"size": 7, "sha256": "ab"}}, None),
        ({"archive": {"size": 7, "sha256": "ab"}}, None),
        ({"held": True, "archive": None}, None),
        ({"held": True}, None),
        ({}, None),
        (None, None),
    ],
)
def test_what_a_worker_holds_is_in_its_last_word(summary: dict[str, Any] | None, held: HeldArchive | None) -> None:
    assert parse_held_archive(summary) == held
