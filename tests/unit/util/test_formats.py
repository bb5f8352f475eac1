"""CSV, the JSON of archives, and moments, as strangers may write them."""

import csv
import io
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.util import csv_text, json_text
from mlbench_cli.util.durations import parse_duration, parse_since


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "  ="])  # OWASP, CSV injection
def test_a_spreadsheet_evaluates_no_cell(start: str) -> None:
    found = csv_text.format_csv([[f"{start}SUM(A1)", "plain"]])
    [row] = csv.reader(io.StringIO(found, newline=""))
    assert row == [f"'{start}SUM(A1)".replace("\r", "\n"), "plain"]


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"])
def test_no_cell_begins_a_row(end: str) -> None:
    found = csv_text.format_csv([[f"one{end}two,three", 4]])
    assert list(csv.reader(io.StringIO(found, newline=""))) == [["one\ntwo,three", "4"]]


def test_numbers_stay_numbers() -> None:
    found = csv_text.format_csv([[-1.5, "-1.5", "+2e3", None, True]])
    assert found == "-1.5,-1.5,+2e3,,True\n"


def test_lines_about_the_origin_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("# from there\na,b\n1,2\n# more\n3,4\n")
    assert list(csv_text.read_table(tmp_path / "x.csv")) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]


def test_a_document_has_its_version_first_and_ends_a_line() -> None:
    assert json_text.format_document({"a": "ü"}) == b'{\n  "schema_version": 1,\n  "a": "\\u00fc"\n}\n'
    assert json_text.format_row({"a": [1, 2.5, None]}) == b'{"a":[1,2.5,null]}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text.format_document({"a": float("nan")})


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


def test_as_many_values_as_allowed_are_read() -> None:
    data = b'{"a": [' + b",".join([b"0"] * 999_998) + b"]}"
    found: Any = json_text.parse_document(data)["a"]
    assert len(found) == 999_998


@pytest.mark.parametrize("version", [b"2", b"true", b"null", b'"1"', b"0"])
def test_another_version_is_named(version: bytes) -> None:
    with pytest.raises(ValueError, match="this mlbench reads 1"):
        json_text.parse_versioned(b'{"schema_version": ' + version + b"}")


def test_what_is_no_document_at_all_is_said_as_such() -> None:
    assert json_text.parse_versioned(b'{"schema_version": 1, "a": 2}')["a"] == 2
    with pytest.raises(ValueError, match="no valid JSON: it is not a JSON object"):
        json_text.parse_versioned(b"7")


def test_values_become_strict_down_to_a_depth() -> None:
    assert json_text.make_strict({"a": [float("nan"), float("-inf"), 1.5, "x"]}) == {"a": ["nan", "-inf", 1.5, "x"]}
    assert json_text.make_strict([[[1]]], depth=2) == [["…"]]
    assert json_text.make_strict([[1]], depth=2) == [[1]]
    assert json_text.make_strict({"a": {"b": 1}}, depth=1) == {"a": "…"}


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


@pytest.mark.parametrize(("length", "shown"), [(60, "x" * 60), (61, "x" * 59 + "…")])
def test_a_long_duration_is_quoted_in_part(length: int, shown: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_duration("x" * length, "--wait")
    assert caught.value.message == f'--wait "{shown}" is not a duration.'


def test_a_moment_is_a_duration_ago_or_a_time() -> None:
    assert parse_since("10m") == pytest.approx(time.time() - 600, abs=60)
    assert parse_since("1970-01-01T00:01:00Z") == 60
    assert parse_since("1970-01-01T01:01:00+01:00") == 60
    assert parse_since("2026-01-31T10:00:00") == datetime(2026, 1, 31, 10).astimezone().timestamp()


@pytest.mark.parametrize("text", ["2026-13-01", "2026-", "-5m", "yesterday"])
def test_other_moments_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_since(text)
