"""What an archive is made of: its file names, which of them are safe everywhere, and their digests.

The names below are relative to the run's folder, with "/" between parts. A part that begins with a dot is the tool's
own and no part of the archive; only below output/ such files are a task's and belong to it.
"""

import hashlib
import os
import re
import stat
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mlbench_cli.errors import MlbenchError, UsageError
from mlbench_cli.files import replace_file, sync_folder
from mlbench_cli.model import Finding
from mlbench_cli.run_folder import (
    ENVIRONMENT,
    FINDINGS,
    LOG_PATTERN,
    METRICS,
    OBSERVATION,
    OFFICIAL,
    RESOURCES,
    RESULT,
    RUN,
    SIGNATURE,
    STATE_FOLDER,
    SUMS,
)

REQUIRED = (RUN, RESULT, OFFICIAL, METRICS, ENVIRONMENT, RESOURCES, FINDINGS)
DOCUMENTS = (RESULT, OFFICIAL, METRICS, ENVIRONMENT, FINDINGS)  # what the judge makes of the rest

MAX_FILES = 250_000
MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255
MAX_DOCUMENT_BYTES = 16 << 20  # one JSON document, or one line of a .jsonl file
MAX_SUMS_BYTES = 64 << 20
CHUNK = 1 << 20


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


def remove_temporary_files(folder: Path) -> None:
    """Remove what a killed writer has left."""
    for name in (*REQUIRED, OBSERVATION, SUMS):
        for temporary in folder.glob(f".{name}.*.tmp"):
            temporary.unlink(missing_ok=True)


def make_portable(folder: Path) -> list[Finding]:
    """Rename files that no archive can hold by that name, and put links and devices aside; idempotent."""
    findings = []
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            _let_read(Path(parent, name), stat.S_IRWXU)
    for name, mode in sorted(walk(folder)):
        if not stat.S_ISREG(mode):
            aside = folder / STATE_FOLDER / "left_out" / urllib.parse.quote(os.fsencode(name), safe="")[-200:]
            aside.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, aside)
            shown = ascii(name)[1:-1]
            findings.append(
                Finding("file_left_out", f"{shown} is a link or no regular file; an archive holds only files.")
            )
        elif trouble := find_name_problem(name):
            portable = "/".join(map(portable_part, name.split("/")))
            if find_name_problem(portable) or (folder / portable).exists():
                portable = f"output/renamed-{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}"
            (folder / portable).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, folder / portable)
            findings.append(Finding("file_renamed", f"{ascii(name)[1:-1]} is now {portable}: {trouble}."))
            name = portable
        if stat.S_ISREG(mode):
            _let_read(folder / name, stat.S_IRUSR)
    return findings


def _let_read(path: Path, needed: int) -> None:
    """A task may have taken away its owner's right to read what it wrote."""
    mode = path.lstat().st_mode
    if not stat.S_ISLNK(mode) and mode & needed != needed:
        path.chmod(stat.S_IMODE(mode) | needed)


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


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS of a folder's files, after all of them are on disk: from then on the folder is sealed."""
    sync_folder(folder)
    sums = format_sums(_digest_files(folder))
    with replace_file(folder / SUMS) as file:
        file.write(sums)
    sync_folder(folder)


def _digest_files(folder: Path) -> dict[str, str]:
    """Name to digest of every file, each of them on disk when this returns."""
    digests = {}
    for name, _ in walk(folder):
        if name == SUMS:
            continue
        if name == SIGNATURE:  # of what was not sealed yet
            (folder / name).unlink()
            continue
        with open(folder / name, "rb") as file:
            digests[name] = digest(file)
            os.fsync(file.fileno())
        if len(digests) >= MAX_FILES:
            raise UsageError(
                f"{folder} holds more than {MAX_FILES} files; an archive cannot.",
                hint=f"Remove some from {folder / 'output'}, then run the command again.",
            )
    return digests


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


@contextmanager
def naming_file_on_os_error(path: Path, action: str) -> Iterator[None]:
    """Turn an operating-system error below into a message that names the file."""
    try:
        yield
    except OSError as error:
        what = error.filename or path
        raise MlbenchError(f"{what} cannot be {action}: {error.strerror or error}.") from None
