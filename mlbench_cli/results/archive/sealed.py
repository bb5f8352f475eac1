"""Reads single documents of a sealed folder, each checked by itself: fast enough for lists of many runs.

`verify` reads everything and judges again. This proves only that a document is the sealed one and has the required
fields, so that damage is detected on first reading.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from mlbench_cli.errors import DamagedArchive
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.archive.layout import MAX_DOCUMENT_BYTES, MAX_SUMS_BYTES
from mlbench_cli.results.archive.schema import SCHEMAS, validate
from mlbench_cli.storage import run_folder
from mlbench_cli.util.json_text import parse_versioned


def read_documents(folder: Path, names: Sequence[str]) -> list[JsonObject]:
    """The documents `names` in a sealed folder. Raises DamagedArchive for the first one that is not as sealed."""
    sums = _read(folder, run_folder.SUMS, MAX_SUMS_BYTES)
    return [_read_document(folder, name, sums) for name in names]


def _read_document(folder: Path, name: str, sums: bytes) -> JsonObject:
    data = _read(folder, name, MAX_DOCUMENT_BYTES)
    listed = re.search(rb"^([0-9a-f]{64})  %b$" % re.escape(name.encode()), sums, re.MULTILINE)
    if listed is None:
        raise DamagedArchive(folder, name, "it is not listed in SHA256SUMS", problem="extra")
    if hashlib.sha256(data).hexdigest().encode() != listed[1]:
        raise DamagedArchive(folder, name, "it is not what was sealed: its SHA-256 differs", problem="changed")
    try:
        document = parse_versioned(data)
    except ValueError as error:
        raise DamagedArchive(folder, name, str(error), problem="schema") from None
    if message := next(validate(document, SCHEMAS[name]), None):
        raise DamagedArchive(folder, name, message, problem="schema")
    return document


def _read(folder: Path, name: str, limit: int) -> bytes:
    try:
        with open(folder / name, "rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise DamagedArchive(folder, name, "it is missing", problem="missing") from None
    except OSError as error:
        raise DamagedArchive(folder, name, f"it cannot be read: {error.strerror}", problem="unreadable") from None
    if len(data) > limit:
        raise DamagedArchive(folder, name, f"it has more than {limit} bytes", problem="too_large")
    return data
