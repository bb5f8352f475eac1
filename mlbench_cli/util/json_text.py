"""JSON as an archive and its evidence hold it: documents, the rows of .jsonl files, and foreign values made strict."""

import json
import math
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1  # of an archive's documents
MAX_VALUES = 1_000_000  # of one document: as many as 4,096 ranks report 200 facts of themselves


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
# Made once: json.dumps with arguments makes an encoder per call, which takes longer than the encoding.
_ROW_ENCODER = json.JSONEncoder(separators=(",", ":"))


def format_document(value: Mapping[str, Any]) -> bytes:
    """A JSON document of an archive: readable, key order as given, ASCII, ends with a newline."""
    return format_parsed({"schema_version": SCHEMA_VERSION, **value})


def format_parsed(document: Mapping[str, Any]) -> bytes:
    """The one form in which a document is written that reads as `document`, its schema version included."""
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()


def format_row(row: Mapping[str, Any]) -> bytes:
    """A row of a .jsonl file: one line of JSON in UTF-8, with its line end."""
    return _ROW_ENCODER.encode(row).encode() + b"\n"


def parse_document(data: bytes) -> dict[str, object]:
    """The JSON object in `data`. Raises ValueError with the reason; NaN and Infinity are refused.

    An empty object of two bytes takes 64 bytes of memory, so that the number of values is bounded, not only the size.
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


def make_strict(value: Any, depth: int = 24) -> Any:
    """A parsed JSON value as strict JSON can hold it: non-finite numbers become texts, and nesting has an end."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict | list) and depth == 0:
        return "…"
    if isinstance(value, dict):
        return {key: make_strict(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [make_strict(item, depth - 1) for item in value]
    return value
