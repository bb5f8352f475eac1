"""What verification says about an archive: each problem with its file and values, in order, and what is only noted."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.schema import brief
from mlbench_cli.results.archive.verify import (
    Problem,
    Verification,
    verify,
)
from mlbench_cli.util.json_text import format_parsed
from tests.unit.results.runs import sealed_run

# --- problems ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        (Verification(()), True),
        (Verification((), (), ("a note",)), True),
        (Verification((), ("a doubt",)), False),
        (Verification((Problem("changed", "x", "y"),)), False),
    ],
)
def test_an_archive_is_right_without_problems_and_doubts(found: Verification, ok: bool) -> None:
    assert found.ok is ok


@pytest.mark.parametrize(("sealed", "claimed"), [(True, 1), (1, True), (False, 0), (0.0, False)])
def test_a_boolean_is_no_number(tmp_path: Path, sealed: Any, claimed: Any) -> None:
    """In Python True == 1, but other readers of the document tell them apart."""
    folder = sealed_run(tmp_path / "a", details={"x": sealed})
    document = json.loads((folder / "result.json").read_bytes())
    assert verify(folder).ok
    document["details"]["x"] = claimed
    (folder / "result.json").write_bytes(format_parsed(document))
    (folder / "SHA256SUMS").unlink()
    layout.write_sums(folder)
    assert [str(problem) for problem in verify(folder).problems] == [
        f"result.json: details.x is {claimed}, but the evidence gives {sealed}"
    ]


@pytest.mark.parametrize(("length", "shown"), [(78, f"'{'x' * 78}'"), (79, f"'{'x' * 76}..."), (0, "''")])
def test_a_value_is_cut_beyond_eighty_characters(length: int, shown: str) -> None:
    assert brief("x" * length) == shown
    assert len(shown) <= 80


# --- what cannot be derived -------------------------------------------------------------------------------------------


# --- folders ----------------------------------------------------------------------------------------------------------


# --- opening ----------------------------------------------------------------------------------------------------------


# --- schemas ----------------------------------------------------------------------------------------------------------
