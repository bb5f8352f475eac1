"""The JSON of archives: documents, rows of .jsonl files, and conversion of untrusted values to strict JSON."""

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1  # of an archive's documents
MAX_VALUES = 1_000_000  # of one document: 4,096 ranks with 200 facts each fit


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
# Created once: json.dumps with arguments creates an encoder per call, which takes longer than encoding a row.
_ROW_ENCODER = json.JSONEncoder(separators=(",", ":"))


def format_document(value: Mapping[str, Any]) -> bytes:
    """A JSON document of an archive: indented ASCII in the given key order, ending with a newline."""
    return format_parsed({"schema_version": SCHEMA_VERSION, **value})


def format_parsed(document: Mapping[str, Any]) -> bytes:
    """The canonical text of a parsed `document` that already has its schema version."""
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()


def format_row(row: Mapping[str, Any]) -> bytes:
    """A row of a .jsonl file: one line of JSON in UTF-8, including the newline."""
    return _ROW_ENCODER.encode(row).encode() + b"\n"


def parse_document(data: bytes) -> dict[str, object]:
    """The JSON object in `data`. Raises ValueError with the reason; NaN and Infinity are rejected.

    The number of values is limited as well as the size, because an empty object of 2 bytes takes 64 bytes of memory.
    """
    if len(data) > MAX_VALUES and sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES} values")
    try:
        value = _DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def parse_versioned(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`, a whole document with its schema version. Raises ValueError with the reason."""
    try:
        document = parse_document(data)
    except ValueError as error:
        raise ValueError(f"no valid JSON: {error}") from None
    version = document.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ValueError(f"schema version {version!r}; this mlbench reads {SCHEMA_VERSION}")
    return document


def make_strict(value: Any, depth: int = 24) -> Any:
    """A parsed JSON value as strict JSON: numbers that no finite float holds become strings, and deep nesting is cut
    off."""
    if type(value) is int and abs(value) >= 1 << 63:
        value = float(value) if abs(value) < sys.float_info.max else str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict | list) and depth == 0:
        return "…"
    if isinstance(value, dict):
        return {key: make_strict(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [make_strict(item, depth - 1) for item in value]
    return value
