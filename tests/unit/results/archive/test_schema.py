"""The schemas of an archive's documents: published as they are enforced, and refusing what they must."""

import json
from pathlib import Path

import pytest

from mlbench_cli.results.archive.documents import PUBLISHED, publish

FOLDER = Path(__file__).parents[4] / "docs" / "schemas"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_published_schema_is_the_one_that_is_enforced(name: str) -> None:
    path = FOLDER / f"{name.removesuffix('.json')}.schema.json"
    text = json.dumps(publish(name), indent=2) + "\n"
    assert path.read_text("utf-8") == text, f"write json.dumps(publish({name!r}), indent=2) to {path}"
