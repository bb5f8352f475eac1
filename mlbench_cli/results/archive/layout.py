"""The files of an archive: their names, which names are portable, and their digests.

Names are relative to the run's folder, with "/" between parts. Parts that begin with a dot belong to mlbench and are
not in the archive, except below output/, where they belong to the task.
"""

import hashlib
import os
import re
import stat
import unicodedata
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mlbench_cli.errors import DamagedArchive, MlbenchError, UsageError
from mlbench_cli.model.run import Finding
from mlbench_cli.storage.run_folder import (
    CERTIFICATE,
    ENVIRONMENT,
    FAULTS,
    FINDINGS,
    LOG_PATTERN,
    METRICS,
    NETWORK,
    OBSERVATION,
    OFFICIAL,
    RESOURCES,
    RESULT,
    RUN,
    SHAPING,
    SIGNATURE,
    STATE_FOLDER,
    SUMS,
)
from mlbench_cli.util.files import replace_file, sync_folder

REQUIRED = (RUN, RESULT, OFFICIAL, METRICS, ENVIRONMENT, RESOURCES, FINDINGS)
DOCUMENTS = (RESULT, OFFICIAL, METRICS, ENVIRONMENT, FINDINGS)  # derived by the judge from the other files

MAX_FILES = 250_000
MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255
MAX_FOLDER_BYTES = 2048  # of a path in the run's folder: systems have limits for whole paths
MAX_DOCUMENT_BYTES = 16 << 20  # one JSON document, or one line of a .jsonl file
MAX_SUMS_BYTES = 64 << 20
CHUNK = 1 << 20


_SUMS_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")
_UNPORTABLE = re.compile(r"[\x00-\x1f\x7f\\]|[\ud800-\udfff]")
# Control characters of ISO 6429, bidirectional marks and overrides (UAX #9), line separators, byte order marks.
_MISREAD = re.compile("[\x80-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
# "Naming Files, Paths, and Namespaces" of the Windows API.
_RESERVED = re.compile(r'[<>:"|?*]')
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[0-9\u00b9\u00b2\u00b3])(\..*)?", re.IGNORECASE)


def find_name_problem(name: str) -> str | None:
    """Why an archive's file must not be named `name`; None if it may."""
    if not name:
        return "the name is empty"
    if name.startswith("/"):
        return "the name is absolute"
    if _UNPORTABLE.search(name):
        return "the name contains a control character, a backslash or invalid UTF-8"
    parts = name.split("/")
    if ".." in parts or "." in parts or "" in parts:
        return 'the name contains an empty part, "." or ".."'
    if any(part.startswith(".") for part in parts) and parts[0] != "output":
        return "archives cannot contain hidden files"
    if len(name.encode()) > MAX_NAME_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return "the name is too long"
    return None


def find_portability_problem(name: str) -> str | None:
    """Why a file name is not portable: it is invalid, ambiguous or misleading on some system. None if it is portable.

    Archives judged by version 1 or 2 may have such names.
    """
    if _MISREAD.search(name):
        return "the name contains a control or bidirectional character"
    for part in name.split("/"):
        if _DEVICE.fullmatch(part) or part.endswith((".", " ")) or _RESERVED.search(part):
            return "Windows does not allow this file name"
    return None


def is_in_layout(name: str) -> bool:
    """Whether a file with this name belongs in an archive."""
    known = {*REQUIRED, OBSERVATION, NETWORK, CERTIFICATE, SHAPING, FAULTS, SUMS, SIGNATURE}
    return (
        name in known or name.startswith(("output/", "manifests/", "code/")) or LOG_PATTERN.fullmatch(name) is not None
    )


def find_collisions(names: Iterable[str]) -> dict[str, str]:
    """Names that collide with another name, or with a folder of one, if case or Unicode normalization are ignored; each
    with the other name. The first name of a group is not listed.
    """
    found: dict[str, str] = {}
    files: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name in sorted(names):
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        parts = folded.split("/")
        parents = ["/".join(parts[:count]) for count in range(1, len(parts))]
        other = files.get(folded) or folders.get(folded) or next((files[at] for at in parents if at in files), None)
        if other is not None:
            found[name] = other
            continue
        files[folded] = name
        for parent in parents:
            folders.setdefault(parent, name)
    return found


def portable_part(part: str) -> str:
    """A file name with every invalid character written as %XX, truncated to the maximum length."""
    last = len(part) - 1
    text = "".join(
        "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogateescape"))
        if _UNPORTABLE.match(char)
        or _MISREAD.match(char)
        or _RESERVED.match(char)
        or (index == last and char in ". ")
        or (index == 0 and _DEVICE.fullmatch(part))
        else char
        for index, char in enumerate(part)
    )
    if len(text.encode()) <= MAX_PART_BYTES:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text.encode()[: MAX_PART_BYTES - 17].decode("utf-8", "ignore") + "-" + digest


def walk(folder: Path, below: str = "") -> Iterator[tuple[str, int]]:
    """Name and `st_mode` of everything except directories in an archive's folder, in no particular order. Links are not
    followed."""
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
    """Remove temporary files of a killed writer."""
    for name in (*REQUIRED, OBSERVATION, SUMS):
        for temporary in folder.glob(f".{name}.*.tmp"):
            temporary.unlink(missing_ok=True)


def make_portable(folder: Path) -> list[Finding]:
    """Rename files with invalid names, and move links and devices aside. Idempotent."""
    findings = []
    for name in list(_open_folders(folder)):
        _put_aside(folder, name)
        shown = f"{ascii(name)[1:61]}..."
        findings.append(Finding("file_left_out", f"The folder {shown} is nested too deeply; it was left out."))
    found = sorted(walk(folder))
    colliding = find_collisions(os.fsencode(name).decode("utf-8", "replace") for name, _ in found)
    for name, mode in found:
        if not stat.S_ISREG(mode):
            _put_aside(folder, name)
            shown = ascii(name)[1:-1]
            findings.append(
                Finding("file_left_out", f"{shown} is not a regular file; archives contain only regular files.")
            )
        elif not name.startswith(".") and not is_in_layout(name):
            _put_aside(folder, name)
            findings.append(Finding("file_left_out", f"{ascii(name)[1:-1]} does not belong in an archive."))
            continue
        elif trouble := find_name_problem(name) or find_portability_problem(name) or _name_collision(colliding, name):
            portable = "/".join(map(portable_part, name.split("/")))
            if portable == name or find_name_problem(portable) or (folder / portable).exists():
                portable = f"output/renamed-{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}"
            (folder / portable).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, folder / portable)
            findings.append(Finding("file_renamed", f"{ascii(name)[1:-1]} is now {portable}: {trouble}."))
            name = portable
        if stat.S_ISREG(mode):
            _let_read(folder / name, stat.S_IRUSR)
    return findings


def _open_folders(folder: Path, below: str = "") -> Iterator[str]:
    """Make all folders readable. Yields those that are too deep to be read by their paths, which it does not enter."""
    with os.scandir(folder / below) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in names:
        inner = f"{below}/{name}" if below else name
        if len(os.fsencode(inner)) > MAX_FOLDER_BYTES:
            yield inner
            continue
        _let_read(folder / inner, stat.S_IRWXU)
        yield from _open_folders(folder, inner)


def _put_aside(folder: Path, name: str) -> None:
    aside = folder / STATE_FOLDER / "left_out" / urllib.parse.quote(os.fsencode(name), safe="")[-200:]
    aside.parent.mkdir(parents=True, exist_ok=True)
    os.replace(folder / name, aside)


def _name_collision(colliding: Mapping[str, str], name: str) -> str | None:
    other = colliding.get(name)
    return None if other is None else f"on some systems it is the same as {ascii(other)[1:-1]}"


def _let_read(path: Path, needed: int) -> None:
    """Make a file readable: a task may have removed its owner's read permission."""
    mode = path.lstat().st_mode
    if not stat.S_ISLNK(mode) and mode & needed != needed:
        path.chmod(stat.S_IMODE(mode) | needed)


def log_names(names: Iterable[str]) -> dict[int, str]:
    """Rank -> name of its log, ordered by rank, for the logs among `names`."""
    matches = [match for name in names if (match := LOG_PATTERN.fullmatch(name))]
    return {int(match[1]): match[0] for match in sorted(matches, key=lambda match: int(match[1]))}


def digest(file: BinaryIO) -> str:
    """Hex SHA-256 of the rest of `file`."""
    sha = hashlib.sha256()
    while chunk := file.read(CHUNK):
        sha.update(chunk)
    return sha.hexdigest()


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS of a folder's files after all of them are on disk. This seals the folder."""
    sync_folder(folder)
    sums = format_sums(_digest_files(folder))
    with replace_file(folder / SUMS) as file:
        file.write(sums)
    sync_folder(folder)


def _digest_files(folder: Path) -> dict[str, str]:
    """Name -> digest of every file. All files are on disk when this returns."""
    digests = {}
    for name, _ in walk(folder):
        if name == SUMS:
            continue
        if name == SIGNATURE:  # an old signature
            (folder / name).unlink()
            continue
        with open(folder / name, "rb") as file:
            digests[name] = digest(file)
            os.fsync(file.fileno())
        if len(digests) >= MAX_FILES:
            raise UsageError(
                f"{folder} has more than {MAX_FILES} files, the limit of an archive.",
                hint=f"Remove some from {folder / 'output'}, then run the command again.",
            )
    return digests


def format_sums(digests: Mapping[str, str]) -> bytes:
    """SHA256SUMS in the format of coreutils, sorted by name, to be checked with `sha256sum -c SHA256SUMS`."""
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()


def parse_sums(data: bytes, path: Path | str) -> dict[str, str]:
    """Name -> digest. Raises DamagedArchive unless `data` is exactly the output of `format_sums` for safe names."""
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
            path, SUMS, "it is not a sorted list of digests in sha256sum's format", problem="malformed_sums"
        )
    return digests


@contextmanager
def naming_file_on_os_error(path: Path, action: str) -> Iterator[None]:
    """Convert an OSError in the block into an MlbenchError that names the file."""
    try:
        yield
    except OSError as error:
        what = error.filename or path
        raise MlbenchError(f"{what} cannot be {action}: {error.strerror or error}.") from None
