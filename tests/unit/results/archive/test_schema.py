"""The schemas of an archive's documents: published as they are enforced, and refusing what they must."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.archive.schema import PUBLISHED, publish, validate

FOLDER = Path(__file__).parents[4] / "docs" / "schemas"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_published_schema_is_the_one_that_is_enforced(name: str) -> None:
    path = FOLDER / f"{name.removesuffix('.json')}.schema.json"
    text = json.dumps(publish(name), indent=2) + "\n"
    assert path.read_text("utf-8") == text, f"write json.dumps(publish({name!r}), indent=2) to {path}"


@pytest.mark.parametrize(
    ("value", "schema", "found"),
    [
        ({"a": 1}, {"type": "object", "properties": {"a": {"type": "string"}}}, ['"a" is 1, which it cannot be']),
        ({}, {"type": "object", "required": ["a"]}, ['"a" is missing']),
        ([1, "x"], {"type": "array", "items": {"type": "integer"}}, ["\"[1]\" is 'x', which it cannot be"]),
        (True, {"type": "integer"}, ["the document is True, which it cannot be"]),
        (float("nan"), {"type": "number"}, ["the document is nan, which it cannot be"]),
        (-1, {"type": "number", "minimum": 0}, ["the document is -1, which it cannot be"]),
        ("now", {"type": "string", "format": "date-time"}, ["the document is 'now', not a time as RFC 3339"]),
        (None, {"type": ["string", "null"], "enum": ["a", None]}, []),
        ({"x": 1}, {"type": "object", "additionalProperties": {"type": "number"}}, []),
    ],
)
def test_what_violates_a_schema_is_named(value: Any, schema: dict[str, object], found: list[str]) -> None:
    assert list(validate(value, schema)) == found
