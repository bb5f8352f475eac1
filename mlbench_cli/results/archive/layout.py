"""What an archive is made of: its file names, which of them are safe everywhere, their digests, and writing them.

The names below are relative to the run's folder, with "/" between parts. A part that begins with a dot is the tool's
own and no part of the archive; only below output/ such files are a task's and belong to it.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mlbench_cli.errors import MlbenchError, UsageError
from mlbench_cli.run_folder import (
    ENVIRONMENT,
    FINDINGS,
    LOG_PATTERN,
    METRICS,
    OFFICIAL,
    RESOURCES,
    RESULT,
    RUN,
    SIGNATURE,
    SUMS,
)

SCHEMA_VERSION = 1
REQUIRED = (RUN, RESULT, OFFICIAL, METRICS, ENVIRONMENT, RESOURCES, FINDINGS)
DOCUMENTS = (RESULT, OFFICIAL, METRICS, ENVIRONMENT, FINDINGS)  # what the judge makes of the rest

MAX_FILES = 250_000
MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255
MAX_DOCUMENT_BYTES = 16 << 20  # one JSON document, or one line of a .jsonl file
MAX_SUMS_BYTES = 64 << 20
CHUNK = 1 << 20


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_SUMS_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")
_UNPORTABLE = re.compile(r"[\x00-\x1f\x7f\\]|[\ud800-\udfff]")


class DamagedArchive(UsageError):
    """A file of an archive is missing, changed, unreadable or not what it must be. `details["file"]` names it."""

    code = "damaged_archive"

    def __init__(self, path: Path | str, file: str, message: str, *, problem: str = "damaged") -> None:
        where = f"{path}: {file}" if file else str(path)
        super().__init__(
            f"{where}: {message}", hint=f"mlbench verify {path}", details={"file": file, "problem": problem}
        )
        self.file = file
        self.problem = problem
        self.plain = message


def find_name_problem(name: str) -> str | None:
    """Why `name` may not be the name of an archive's file; None if it may."""
    if not name:
        return "the name is empty"
    if name.startswith("/"):
        return "the name is absolute"
    if _UNPORTABLE.search(name):
        return "the name holds a control character, a backslash or no valid UTF-8"
    parts = name.split("/")
    if ".." in parts or "." in parts or "" in parts:
        return 'the name holds an empty part, "." or ".."'
    if any(part.startswith(".") for part in parts) and parts[0] != "output":
        return "hidden files are no part of an archive"
    if len(name.encode()) > MAX_NAME_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return "the name is too long"
    return None


def portable_part(part: str) -> str:
    """A file name with every character that an archive cannot hold written as %XX, and cut to its greatest length."""
    text = "".join(
        "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogateescape")) if _UNPORTABLE.match(char) else char
        for char in part
    )
    if len(text.encode()) <= MAX_PART_BYTES:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text.encode()[: MAX_PART_BYTES - 17].decode("utf-8", "ignore") + "-" + digest


def walk(folder: Path, below: str = "") -> Iterator[tuple[str, int]]:
    """Name and `st_mode` of everything but directories in an archive's folder, in no order. Links are not followed."""
    with os.scandir(folder / below) as entries:
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.name.startswith(".") and not name.startswith("output/"):
                continue
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                yield from walk(folder, name)
            else:
                yield name, mode


def log_names(names: Iterable[str]) -> dict[int, str]:
    """Rank to name of its log, in the order of ranks, for those of `names` that are logs."""
    matches = [match for name in names if (match := LOG_PATTERN.fullmatch(name))]
    return {int(match[1]): match[0] for match in sorted(matches, key=lambda match: int(match[1]))}


def digest(file: BinaryIO) -> str:
    """Hex SHA-256 of what is left to read in `file`."""
    sha = hashlib.sha256()
    while chunk := file.read(CHUNK):
        sha.update(chunk)
    return sha.hexdigest()


def format_sums(digests: Mapping[str, str]) -> bytes:
    """SHA256SUMS in the form of coreutils, sorted by name: `sha256sum -c SHA256SUMS` checks it."""
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()


def parse_sums(data: bytes, path: Path | str) -> dict[str, str]:
    """Name to digest. Raises DamagedArchive unless `data` is exactly what `format_sums` makes of safe names."""
    try:
        digests = {name: value for value, name in _SUMS_LINE.findall(data.decode())}
    except UnicodeDecodeError:
        raise DamagedArchive(path, SUMS, "it is not UTF-8", problem="malformed_sums") from None
    for name in digests:
        if problem := find_name_problem(name):
            raise DamagedArchive(path, SUMS, f"it lists {name[:100]!r}: {problem}", problem="unsafe_name")
    if SUMS in digests or SIGNATURE in digests:
        what = "itself" if SUMS in digests else "its own signature"
        raise DamagedArchive(path, SUMS, f"it lists {what}", problem="malformed_sums")
    if format_sums(digests) != data:
        raise DamagedArchive(
            path, SUMS, "it is not a sorted list of digests as sha256sum writes it", problem="malformed_sums"
        )
    return digests


def format_document(value: Mapping[str, Any]) -> bytes:
    """A JSON document of an archive: readable, key order as given, ASCII, ends with a newline."""
    return (json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=2, allow_nan=False) + "\n").encode()


def parse_document(data: bytes) -> dict[str, object]:
    """The JSON object in `data`. Raises ValueError with the reason; NaN and Infinity are refused."""
    try:
        value = _DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


@contextmanager
def naming_file_on_os_error(path: Path, action: str) -> Iterator[None]:
    """Turn an operating-system error below into a message that names the file."""
    try:
        yield
    except OSError as error:
        what = error.filename or path
        raise MlbenchError(f"{what} cannot be {action}: {error.strerror or error}.") from None
