"""CSV, the JSON of archives, and moments, as strangers may write them."""

import time
from datetime import datetime

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.util import json_text
from mlbench_cli.util.durations import parse_duration, parse_since


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[1]", "it is not a JSON object"), (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"), (b'{"a": "\xff"}', "it is not UTF-8"),
        (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"a": [' + b"0," * 1_000_001, "more than 1000000 values"),
        (b'{"a": [' + b"{}{" * 500_001, "more than 1000000 values"),
    ],
)  # fmt: skip
def test_a_document_that_is_not_strict_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        json_text.parse_document(data)


@pytest.mark.parametrize("version", [b"2", b"true", b"null", b'"1"', b"0"])
def test_another_version_is_named(version: bytes) -> None:
    with pytest.raises(ValueError, match="this mlbench reads 1"):
        json_text.parse_versioned(b'{"schema_version": ' + version + b"}")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), (" 90s ", 90), ("15m", 900), ("1h30m", 5400), ("0.5h", 1800), ("1d1s", 86401)]
)
def test_durations_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5x", "-5s", "1.5", "m", "1h 30m", "٣s", "٣", "1e3s", "x" * 100])
def test_other_durations_are_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="--wait ") as caught:
        parse_duration(text, "--wait")
    assert len(caught.value.message) < 90


def test_a_moment_is_a_duration_ago_or_a_time() -> None:
    assert parse_since("10m") == pytest.approx(time.time() - 600, abs=60)
    assert parse_since("1970-01-01T00:01:00Z") == 60
    assert parse_since("1970-01-01T01:01:00+01:00") == 60
    assert parse_since("2026-01-31T10:00:00") == datetime(2026, 1, 31, 10).astimezone().timestamp()


@pytest.mark.parametrize("text", ["2026-13-01", "2026-", "-5m", "yesterday"])
def test_other_moments_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_since(text)
