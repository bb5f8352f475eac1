"""An archive's files: their names, which names are portable, their digests, and the folder or zip that has them.

Names are relative to the run's folder, with "/" between parts. Parts that begin with a dot belong to mlbench and are
not in the archive, except below output/, where they belong to the task. Reading verifies nothing; see `verify`.

A zip is canonical: entries sorted by name, uncompressed, with constant dates and attributes. Equal contents give equal
bytes on every machine, and any unzip program can read them. `check_canonical` writes the zip again and compares, so it
finds every flipped bit.
"""

import hashlib
import io
import os
import re
import shlex
import stat
import struct
import unicodedata
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from mlbench_cli.errors import DamagedArchive, NotFoundError, UsageError, naming_file_on_os_error
from mlbench_cli.model.run import FindingDocument, JsonObject
from mlbench_cli.results.archive.documents import PUBLISHED, EnvironmentDocument, ResultDocument, RunDocument
from mlbench_cli.storage import run_folder
from mlbench_cli.util.files import replace_file, sync_folder
from mlbench_cli.util.json_text import parse_document, parse_versioned
from mlbench_cli.util.text import clean_values, counted

REQUIRED = (
    run_folder.RUN,
    run_folder.RESULT,
    run_folder.OFFICIAL,
    run_folder.METRICS,
    run_folder.ENVIRONMENT,
    run_folder.RESOURCES,
    run_folder.FINDINGS,
)
DOCUMENTS = (
    run_folder.RESULT,
    run_folder.OFFICIAL,
    run_folder.METRICS,
    run_folder.ENVIRONMENT,
    run_folder.FINDINGS,
)  # derived by the judge from the other files

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
ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date of the format, of every entry: equal contents give equal bytes
_ATTRIBUTES = (stat.S_IFREG | 0o644) << 16
_UNIX = 3
UNPROVEN = "(unproven)"
_REPACKED = "another program packed this file again; unpack it, and verify the folder"
_ENCRYPTED = 1  # flag of an entry
_ENTRY_MARK = b"PK\1\2"
# What zipfile raises for bytes that are not a zip, besides OSError.
UNREADABLE = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OverflowError, struct.error)


# --- names and digests ----------------------------------------------------------------------------------------------


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
    """Why a file name is not portable: invalid, ambiguous or misleading on some system. None if it is portable."""
    if _MISREAD.search(name):
        return "the name contains a control or bidirectional character"
    for part in name.split("/"):
        if _DEVICE.fullmatch(part) or part.endswith((".", " ")) or _RESERVED.search(part):
            return "Windows does not allow this file name"
    return None


def is_in_layout(name: str) -> bool:
    """Whether a file with this name belongs in an archive."""
    known = {
        *REQUIRED,
        run_folder.OBSERVATION,
        run_folder.NETWORK,
        run_folder.CERTIFICATE,
        run_folder.SHAPING,
        run_folder.FAULTS,
        run_folder.SUMS,
        run_folder.SIGNATURE,
    }
    return (
        name in known
        or name.startswith(("output/", "manifests/", "code/"))
        or run_folder.LOG_PATTERN.fullmatch(name) is not None
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


def walk(folder: Path) -> Iterator[tuple[str, int]]:
    """Name and `st_mode` of everything except directories in an archive's folder, in no particular order. Links are not
    followed."""
    pending = [""]  # and no recursion: a task may nest folders deeper than Python calls
    while pending:
        below = pending.pop()
        with os.scandir(folder / below) as entries:
            for entry in entries:
                name = f"{below}/{entry.name}" if below else entry.name
                if entry.name.startswith(".") and not name.startswith("output/"):
                    continue
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    pending.append(name)
                else:
                    yield name, mode


def log_names(names: Iterable[str]) -> dict[int, str]:
    """Rank -> name of its log, ordered by rank, for the logs among `names`."""
    matches = [match for name in names if (match := run_folder.LOG_PATTERN.fullmatch(name))]
    return {int(match[1]): match[0] for match in sorted(matches, key=lambda match: int(match[1]))}


def digest(file: BinaryIO) -> str:
    """Hex SHA-256 of the rest of `file`."""
    sha = hashlib.sha256()
    while chunk := file.read(CHUNK):
        sha.update(chunk)
    return sha.hexdigest()


def format_sums(digests: Mapping[str, str]) -> bytes:
    """SHA256SUMS in the format of coreutils, sorted by name, to be checked with `sha256sum -c SHA256SUMS`."""
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()


def parse_sums(data: bytes, path: Path | str) -> dict[str, str]:
    """Name -> digest. Raises DamagedArchive unless `data` is exactly the output of `format_sums` for safe names."""
    try:
        digests = {name: value for value, name in _SUMS_LINE.findall(data.decode())}
    except UnicodeDecodeError:
        raise DamagedArchive(path, run_folder.SUMS, "it is not UTF-8", problem="malformed_sums") from None
    for name in digests:
        if problem := find_name_problem(name):
            raise DamagedArchive(path, run_folder.SUMS, f"it lists {name[:100]!r}: {problem}", problem="unsafe_name")
    if run_folder.SUMS in digests or run_folder.SIGNATURE in digests:
        what = "itself" if run_folder.SUMS in digests else "its own signature"
        raise DamagedArchive(path, run_folder.SUMS, f"it lists {what}", problem="malformed_sums")
    if format_sums(digests) != data:
        raise DamagedArchive(
            path, run_folder.SUMS, "it is not a sorted list of digests in sha256sum's format", problem="malformed_sums"
        )
    return digests


# --- reading --------------------------------------------------------------------------------------------------------


class Archive(ABC):
    """Read-only view of an archive in a folder or a zip. All errors are DamagedArchive, with the name of the file.

    `not_derived` lists what could not be derived from the evidence. If it is not empty, the names of run and task, the
    summary and the official line are marked as UNPROVEN, so that everything that shows the archive shows this, too.
    With `is_shown`, all strings in documents, metrics, samples and events are cleaned for display, so that no presenter
    can forget it. `document`, `rows` and `read` return unchanged contents.
    """

    def __init__(
        self, path: Path | str, names: Iterable[str], not_derived: Sequence[str] = (), *, is_shown: bool = False
    ) -> None:
        self.path = path
        self.names = tuple(names)  # of all files, sorted
        self.irregular: Mapping[str, str] = {}  # names of what is no file, each "link" or "special"
        self.not_derived = tuple(not_derived)
        self._is_shown = is_shown

    @abstractmethod
    def size(self, name: str) -> int:
        """The size of an existing file in bytes."""

    @abstractmethod
    def _open(self, name: str) -> BinaryIO:
        """Open an existing file for reading. Raises OSError, as reading does."""

    @abstractmethod
    def close(self) -> None:
        """Close the folder or zip."""

    @staticmethod
    def open(path: Path, *, not_derived: Sequence[str] = (), is_shown: bool = False) -> "Archive":
        """The archive at `path`, without verifying it. Raises NotFoundError, or DamagedArchive if it is not an
        archive."""
        with naming_file_on_os_error(path, "read"):
            if path.is_dir():
                return Folder(path, not_derived, is_shown=is_shown)
            if not path.exists():
                raise NotFoundError(f"There is no archive {path}.", hint="mlbench status, then: mlbench download NAME")
            if not path.is_file():
                raise DamagedArchive(path, "", "it is neither a folder nor a file", problem="not_an_archive")
            file = open(path, "rb")  # noqa: SIM115 - closed with the archive
            try:
                return Zip(file, path, not_derived, is_shown=is_shown)
            except DamagedArchive:
                file.close()
                raise

    def __repr__(self) -> str:
        return f"<archive {self.path}>"

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def logs(self) -> dict[int, str]:
        """Rank -> name of its log."""
        return log_names(self.names)

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.names)

    @cached_property
    def run(self) -> RunDocument:
        """run.json: the spec, the task's rules and the provenance."""
        document = cast(RunDocument, self._show(self.document(run_folder.RUN)))
        if self.not_derived:
            spec = {**document["spec"], "task": f"{document['spec']['task']} {UNPROVEN}"}
            document = {**document, "name": f"{document['name']} {UNPROVEN}", "spec": spec}
        return document

    @cached_property
    def name(self) -> str:
        """What the run is called where it is shown: its name, which `tell_apart` completes where several have it."""
        return self.run["name"]

    @cached_property
    def result(self) -> ResultDocument:
        """result.json, derived by the judge."""
        document = cast(ResultDocument, self._show(self.document(run_folder.RESULT)))
        if self.not_derived:
            run, task = (f"{document[key]} {UNPROVEN}" for key in ("run", "task"))
            summary, line = f"{UNPROVEN} {document['summary']}", document.get("official_line")
            official = None if line is None else f"{UNPROVEN} {line}"
            document = {**document, "run": run, "task": task, "summary": summary, "official_line": official}
        return document

    @cached_property
    def environment(self) -> EnvironmentDocument:
        """environment.json: code, packages and machines."""
        return cast(EnvironmentDocument, self._show(self.document(run_folder.ENVIRONMENT)))

    @cached_property
    def findings(self) -> list[FindingDocument]:
        """The findings of findings.json."""
        found = self._show(self.document(run_folder.FINDINGS)).get("findings")
        return found if isinstance(found, list) else []

    def metrics(self) -> Iterator[JsonObject]:
        """The lines of metrics.jsonl, see `events.parse_metric`."""
        return map(self._show, self.rows(run_folder.METRICS))

    def resources(self) -> Iterator[JsonObject]:
        """The rows of resources.jsonl."""
        return map(self._show, self.rows(run_folder.RESOURCES))

    def samples(self) -> Iterator[JsonObject]:
        """The rows of resources.jsonl, of which only numbers may be displayed."""
        return self.rows(run_folder.RESOURCES)

    def _show(self, document: JsonObject) -> JsonObject:
        return cast(JsonObject, clean_values(document)) if self._is_shown else document

    def open_file(self, name: str) -> BinaryIO:
        """Open one file for reading, in binary mode."""
        if name not in self._known:
            raise DamagedArchive(self.path, name, self._missing(name), problem="missing")
        try:
            return self._open(name)
        except OSError as error:
            raise DamagedArchive(
                self.path, name, f"it cannot be read: {error.strerror}", problem="unreadable"
            ) from None

    def read(self, name: str, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
        """The content of a file of at most `limit` bytes."""
        with self.open_file(name) as file:
            try:
                if self.size(name) > limit:
                    raise DamagedArchive(self.path, name, f"it has more than {limit} bytes", problem="too_large")
                return file.read(limit)
            except OSError as error:
                raise DamagedArchive(self.path, name, f"it cannot be read: {error}", problem="unreadable") from None

    def digest(self, name: str) -> str:
        """Hex SHA-256 of a file. Raises OSError, as reading does."""
        with self.open_file(name) as file:
            return digest(file)

    def document(self, name: str) -> JsonObject:
        """A JSON document of this schema version."""
        try:
            return parse_versioned(self.read(name))
        except ValueError as error:
            raise DamagedArchive(self.path, name, str(error), problem="schema") from None

    def rows(self, name: str) -> Iterator[JsonObject]:
        """The JSON objects of a .jsonl file, one by one."""
        for number, line in enumerate(self.lines(name), 1):
            try:
                yield parse_document(line)
            except ValueError as error:
                raise DamagedArchive(self.path, name, f"line {number}: {error}", problem="schema") from None

    def lines(self, name: str) -> Iterator[bytes]:
        """The lines of a file, each of at most MAX_DOCUMENT_BYTES."""
        with self.open_file(name) as file:
            try:
                while line := file.readline(MAX_DOCUMENT_BYTES):
                    yield line
            except OSError as error:
                raise DamagedArchive(self.path, name, f"it cannot be read: {error}", problem="unreadable") from None

    def _missing(self, name: str) -> str:
        if run_folder.SUMS in self._known:
            return "it is missing"
        return "it is missing: the run has not finished, or its results have not been fetched (mlbench wait NAME)"


class Folder(Archive):
    """An archive in a folder, of which only regular files are seen."""

    def __init__(self, path: Path, not_derived: Sequence[str] = (), *, is_shown: bool = False) -> None:
        found = sorted(walk(path))
        names = [name for name, mode in found if stat.S_ISREG(mode)]
        super().__init__(path, names, not_derived, is_shown=is_shown)
        self.irregular = {
            name: "link" if stat.S_ISLNK(mode) else "special" for name, mode in found if not stat.S_ISREG(mode)
        }
        self._folder = path

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        return (self._folder / name).stat().st_size

    def _open(self, name: str) -> BinaryIO:
        return open(self._folder / name, "rb")

    def close(self) -> None:
        """Does nothing."""


class Zip(Archive):
    """An archive in a seekable file. Raises DamagedArchive. Only `check_canonical` reads all of its bytes."""

    def __init__(
        self, file: BinaryIO, path: Path | str, not_derived: Sequence[str] = (), *, is_shown: bool = False
    ) -> None:
        super().__init__(path, (), not_derived, is_shown=is_shown)
        self.file = file
        self.file_size = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(4)
        if head != b"PK\3\4":
            raise self._damage("not_an_archive", "", "it does not start like a zip file" if head else "it is empty")
        try:
            self._zip = open_zip(file)
        except _TooLarge as error:
            raise self._damage("too_large", "", str(error)) from None
        except UNREADABLE as error:
            raise self._damage("truncated", "", f"the zip directory is missing or incomplete: {error}") from None
        except OSError as error:
            raise self._damage("truncated", "", f"the zip directory cannot be read: {error}") from None
        self._entries = {entry.orig_filename: entry for entry in self._zip.infolist()}
        self.names = tuple(self._entries)
        self._check_entries()

    def _damage(self, code: str, name: str, message: str) -> DamagedArchive:
        return DamagedArchive(self.path, name, message, problem=code)

    def _check_entries(self) -> None:
        before, room = "", self.file_size
        for entry in self._zip.infolist():
            name = entry.orig_filename
            if name == before:
                raise self._damage("duplicate", name, "it appears twice")
            if name < before:
                raise self._damage("order", name, f"it is not sorted, so {_REPACKED}")
            before, room = name, room - entry.compress_size
            if entry.flag_bits & _ENCRYPTED:
                raise self._damage("encrypted", name, "it is encrypted")
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise self._damage("compressed", name, f"it is compressed, so {_REPACKED}")
            if name.endswith("/"):
                raise self._damage("unsafe_name", name, f"it is a folder, so {_REPACKED}")
            if trouble := find_name_problem(name):
                raise self._damage("unsafe_name", name, trouble)
            if stat.S_ISLNK(entry.external_attr >> 16):
                raise self._damage("link", name, "it is a symbolic link")
            if room < 0:
                raise self._damage("truncated", name, f"more bytes are declared than the zip has ({self.file_size})")

    def _open(self, name: str) -> BinaryIO:  # whose CRC-32 is checked at its end
        return cast(BinaryIO, io.BufferedReader(_Entry(self._zip, self._entries[name]), 1 << 16))

    def size(self, name: str) -> int:
        """The size of an entry in bytes."""
        return self._entries[name].file_size

    def close(self) -> None:
        """Close the zip's file."""
        self._zip.close()
        self.file.close()


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """A zip of a stranger, with its directory read in bounded memory. Raises OSError, or one of UNREADABLE."""
    directory = _Directory(file)
    zipped = zipfile.ZipFile(cast(BinaryIO, directory))
    directory.is_read = True
    return zipped


class _TooLarge(ValueError):
    """A zip's directory has more bytes or files than that of an archive."""


class _Directory:
    """A zip's file for zipfile, which reads a directory of the size that the zip declares, and has no limit for it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable
        self.is_read = False

    def read(self, size: int = -1) -> bytes:
        """Raises _TooLarge for a directory of more bytes or files than that of an archive."""
        data = b"" if size > MAX_SUMS_BYTES else self._file.read(size)
        if size > MAX_SUMS_BYTES or (not self.is_read and data.count(_ENTRY_MARK) > MAX_FILES):
            raise _TooLarge(f"more than {MAX_FILES} files")
        return data


class _Entry(io.RawIOBase):
    """One entry of a zip as a stream. Raises OSError, also for a wrong CRC-32."""

    def __init__(self, zipped: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
        self._zip, self._entry = zipped, entry
        self._data: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            self._data = self._data or self._zip.open(self._entry)
            return int(self._data.readinto(buffer))
        except UNREADABLE as error:
            raise OSError(str(error)) from None


def check_document(name: str, document: Mapping[str, Any]) -> None:
    """Raises ValueError with the field for a parsed document that is not of its type, or has more than its type."""
    try:
        known = msgspec.convert(document, PUBLISHED[name])
    except (msgspec.ValidationError, OverflowError) as error:
        raise ValueError(str(error)) from None
    own = {key: value for key, value in document.items() if key != "schema_version"}
    # Comparing is 30 times as fast as looking for what msgspec has left out.
    if own != known and (unknown := _find_unknown(own, known, "$")) is not None:
        raise ValueError(f"Unknown field - at `{unknown}`")


def _find_unknown(found: Any, known: Any, path: str) -> str | None:
    """The first field that msgspec has left out of `known`."""
    if isinstance(found, dict):
        inside = ((value, known.get(key), f"{path}.{key}", key in known) for key, value in found.items())
    elif isinstance(found, list):
        inside = ((value, known[number], f"{path}[{number}]", True) for number, value in enumerate(found))
    else:
        return None
    for value, kept, place, is_known in inside:
        if not is_known:
            return place
        if (unknown := _find_unknown(value, kept, place)) is not None:
            return unknown
    return None


def read_documents(folder: Path, names: Sequence[str]) -> list[JsonObject]:
    """The documents `names` in a sealed folder, without reading the rest of it: fast enough for lists of many runs.

    Raises DamagedArchive for the first one that is not what was sealed, or not of its schema.
    """
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
        check_document(name, document)
    except ValueError as error:
        raise DamagedArchive(folder, name, str(error), problem="schema") from None
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


# --- packing --------------------------------------------------------------------------------------------------------


def pack(folder: Path, target: Path) -> None:
    """Write a sealed folder as a canonical zip to `target`, which appears only when complete.

    Raises DamagedArchive if a file is not what was sealed.
    """
    if target.is_dir():
        raise UsageError(f"{target} is a folder.", hint=f"Give a file name, for example {target / 'results.zip'}.")
    archive = Archive.open(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is already packed.", hint=shlex.join(["cp", str(folder), str(target)]))
    sums = parse_sums(archive.read(run_folder.SUMS, MAX_SUMS_BYTES), folder)
    for name in sorted(set(archive.names) - {run_folder.SIGNATURE} ^ {*sums, run_folder.SUMS}):
        missing = name in sums
        message = "it is missing" if missing else "it is not part of the sealed archive"
        raise DamagedArchive(folder, name, message, problem="missing" if missing else "extra")
    write_archive(archive, target, {}, sums)


def write_archive(
    archive: Archive, target: Path, changes: Mapping[str, bytes], sums: Mapping[str, str] | None = None
) -> None:
    """Write the files of `archive`, replaced or supplemented by those of `changes`, as a canonical zip.

    Raises DamagedArchive for a file whose SHA-256 differs from that in `sums`, if listed there.
    """
    with naming_file_on_os_error(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(target) as file:
            digests = write_zip(file, _contents(archive, changes), archive.path)
            for name, expected in (sums or {}).items():
                if digests.get(name) != expected:
                    message = "it has changed since it was sealed"
                    raise DamagedArchive(archive.path, name, message, problem="changed")
        sync_folder(target.parent)


def _contents(archive: Archive, changes: Mapping[str, bytes]) -> Iterator[tuple[str, int, BinaryIO]]:
    for name in sorted({*archive.names, *changes}):
        if name in changes:
            yield name, len(changes[name]), io.BytesIO(changes[name])
        else:
            yield name, archive.size(name), archive.open_file(name)


def write_zip(target: BinaryIO, contents: Iterable[tuple[str, int, BinaryIO]], path: Path | str) -> dict[str, str]:
    """Write a canonical zip of the files in `contents` (name, size, data), which are sorted by name. Returns the hex
    SHA-256 of each file. Raises DamagedArchive, with `path`, if one is longer or shorter than it was to be.

    zipfile in Python 3.11 to 3.14 writes the same bytes, except of a file of 2.0 to 2.1 GiB.
    """
    digests = {}
    with zipfile.ZipFile(target, "w") as zipped:
        for name, size, source in contents:
            entry = zipfile.ZipInfo(name, ZIP_EPOCH)
            entry.create_system, entry.external_attr, entry.file_size = _UNIX, _ATTRIBUTES, size
            sha, written = hashlib.sha256(), 0
            with source, zipped.open(entry, "w") as stored:
                while written <= size and (chunk := source.read(CHUNK)):
                    written += len(chunk)
                    sha.update(chunk)
                    stored.write(chunk)
            if written != size:
                message = f"it changed from {size} to {written} bytes while it was read"
                raise DamagedArchive(path, name, message, problem="changed")
            digests[name] = sha.hexdigest()
    return digests


def check_canonical(zipped: Zip) -> dict[str, str]:
    """Compare every byte with the canonical zip of the same files. Returns the hex SHA-256 of each file."""
    copy = _Comparison(zipped.file)
    name = ""

    def contents() -> Iterator[tuple[str, int, BinaryIO]]:
        nonlocal name
        for name in zipped.names:
            yield name, zipped.size(name), zipped.open_file(name)
            if copy.differing:  # a hostile zip is not read any further
                return

    try:
        digests = write_zip(cast(BinaryIO, copy), contents(), zipped.path)
    except OSError as error:
        message = f"it cannot be read: {error.strerror or error}"
        raise DamagedArchive(zipped.path, name, message, problem="changed") from None
    if copy.differing:
        message = f"it is not in canonical form from byte {min(copy.differing)} on, so it was damaged, or {_REPACKED}"
        raise DamagedArchive(zipped.path, name, message, problem="header")
    if copy.end != zipped.file_size:
        message = f"{counted(zipped.file_size - copy.end, 'byte')} after the end of the zip"
        raise DamagedArchive(zipped.path, "", message, problem="trailing_data")
    return digests


class _Comparison(io.RawIOBase):
    """Takes what zipfile writes, and notes in `differing` where it is not what the file has.

    zipfile writes an entry's header twice: before its data, and with the CRC-32 after them.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = self.end = 0
        self.differing: set[int] = set()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset
        return offset

    def write(self, data: Any) -> int:
        self._file.seek(self._at)
        if self._file.read(len(data)) == data:
            self.differing.discard(self._at)
        else:
            self.differing.add(self._at)
        self._at += len(data)
        self.end = max(self.end, self._at)
        return len(data)
