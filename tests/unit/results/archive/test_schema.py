"""The schemas of an archive's documents: published as they are enforced, and refusing what they must."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.archive.documents import PUBLISHED, publish
from mlbench_cli.results.archive.files import check_document

FOLDER = Path(__file__).parents[4] / "docs" / "schemas"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_published_schema_is_the_one_that_is_enforced(name: str) -> None:
    path = FOLDER / f"{name.removesuffix('.json')}.schema.json"
    text = json.dumps(publish(name), indent=2) + "\n"
    assert path.read_text("utf-8") == text, f"write json.dumps(publish({name!r}), indent=2) to {path}"


RUN: dict[str, Any] = {
    "id": "7f",
    "name": "demo-2",
    "created": "2025-10-09T08:53:19.000Z",
    "spec_hash": "0",
    "spec": {},
    "task": None,
    "mlbench": "4",
    "provenance": None,
}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": 1}, "$.name"),
        ({"spec": []}, "$.spec"),
        ({"repeats": -1}, "$.repeats"),
        ({"repeats": True}, "$.repeats"),
        ({"created": "now"}, "$.created"),
        ({"created": "2025-13-09T08:53:19.000Z"}, "$.created"),
        ({"created": "2025-10-09T08:53:19+00:00"}, "$.created"),
        ({"more": "of a stranger"}, "$.more"),
    ],
)
def test_what_violates_a_schema_is_named(change: dict[str, Any], field: str) -> None:
    check_document("run.json", {"schema_version": 1, **RUN, "repeats": 3, "spec": {"any": {"thing": [1]}}})
    with pytest.raises(ValueError, match=re.escape(field)):
        check_document("run.json", {**RUN, **change})


def test_a_number_that_no_float_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"."):
        check_document("observation.json", {"time": 10**400, "workers": [], "findings": [], "ended": "exited"})
