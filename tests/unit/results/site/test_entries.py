"""What people may say beside an archive on a results site."""

import json
from pathlib import Path

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.results.site.entries import ENTRY_FIELDS, parse_said

PATH = Path("entry.json")


def test_an_entry_has_texts_in_known_fields() -> None:
    field = next(iter(ENTRY_FIELDS))
    assert parse_said(PATH, json.dumps({field: "a\nb"}).encode()) == {field: "a b"}
    assert parse_said(PATH, b"{}") == {}


def test_people_say_who_they_are_what_they_used_and_what_they_replace() -> None:
    said = {"submitter": "ann", "hardware": "a laptop", "note": "at night", "supersedes": "0f0f"}
    assert parse_said(PATH, json.dumps(said).encode()) == said


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[]", "it is not a JSON object"),
        (b"{", "is not a valid entry"),
        (b'{"seconds": "1"}', 'unknown field "seconds"; known: '),
        (json.dumps({next(iter(ENTRY_FIELDS)): 1}).encode(), "is not a text"),
        (b"\xff", "is not a valid entry"),
        (b"[" * 100_000, "is not a valid entry"),
    ],
)
def test_an_entry_with_anything_else_is_refused_with_its_file(data: bytes, reason: str) -> None:
    """Numbers come from archives alone."""
    with pytest.raises(UsageError) as caught:
        parse_said(PATH, data)
    assert caught.value.message.startswith("entry.json is not a valid entry")
    assert reason in caught.value.message


def test_an_entry_may_have_as_many_bytes_as_are_read() -> None:
    data = b"{}".ljust(64 * 1024)
    assert parse_said(PATH, data) == {}
    with pytest.raises(UsageError, match="more than 65536 bytes"):
        parse_said(PATH, data + b" ")
