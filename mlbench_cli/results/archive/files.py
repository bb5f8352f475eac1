"""An archive's files, in a folder or a zip, and the documents in them. Nothing here verifies them; see `verify`."""

import hashlib
import io
import os
import re
import stat
import struct
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from mlbench_cli.errors import DamagedArchive, NotFoundError
from mlbench_cli.model.run import FindingDocument, JsonObject
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.documents import EnvironmentDocument, ResultDocument, RunDocument, check_document
from mlbench_cli.results.archive.events import read_events
from mlbench_cli.storage import run_folder
from mlbench_cli.util.json_text import parse_document, parse_versioned
from mlbench_cli.util.text import clean_values

UNPROVEN = "(unproven)"
_ENCRYPTED = 1  # flag of an entry
_ENTRY_MARK = b"PK\1\2"
# What zipfile raises for bytes that are not a zip, besides OSError.
_UNREADABLE = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OverflowError, struct.error)


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
        with layout.naming_file_on_os_error(path, "read"):
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
        return layout.log_names(self.names)

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

    def events(self, rank: int | None = None) -> Iterator[JsonObject]:
        """The events in one rank's log, or in all logs."""
        for number, name in self.logs.items():
            if rank in (None, number):
                with self.open_file(name) as log:
                    yield from map(self._show, read_events(log))

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

    def read(self, name: str, limit: int = layout.MAX_DOCUMENT_BYTES) -> bytes:
        """The content of a file of at most `limit` bytes."""
        with self.open_file(name) as file:
            try:
                if self.size(name) > limit:
                    raise DamagedArchive(self.path, name, f"it has more than {limit} bytes", problem="too_large")
                return file.read(limit)
            except OSError as error:
                raise DamagedArchive(self.path, name, f"it cannot be read: {error}", problem="unreadable") from None

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
        """The lines of a file, each of at most layout.MAX_DOCUMENT_BYTES."""
        with self.open_file(name) as file:
            try:
                while line := file.readline(layout.MAX_DOCUMENT_BYTES):
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
        names = sorted(name for name, mode in layout.walk(path) if stat.S_ISREG(mode))
        super().__init__(path, names, not_derived, is_shown=is_shown)
        self._folder = path

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        return (self._folder / name).stat().st_size

    def _open(self, name: str) -> BinaryIO:
        return open(self._folder / name, "rb")

    def close(self) -> None:
        """Does nothing."""


class Zip(Archive):
    """An archive in a seekable file. Raises DamagedArchive. Only `pack.check_canonical` reads all of its bytes."""

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
        directory = _Directory(file)
        try:
            self._zip = zipfile.ZipFile(cast(BinaryIO, directory))
        except _UNREADABLE as error:
            if directory.is_too_large:
                raise self._damage("too_large", "", f"more than {layout.MAX_FILES} files") from None
            raise self._damage("truncated", "", f"the zip directory is missing or incomplete: {error}") from None
        except OSError as error:
            raise self._damage("truncated", "", f"the zip directory cannot be read: {error}") from None
        directory.is_read = True
        self._entries = {entry.orig_filename: entry for entry in self._zip.infolist()}
        self.names = tuple(self._entries)
        self._check_entries()

    def _damage(self, code: str, name: str, message: str) -> DamagedArchive:
        return DamagedArchive(self.path, name, message, problem=code)

    def _check_entries(self) -> None:
        before, room = "", self.file_size
        for entry in self._zip.infolist():
            name = entry.orig_filename
            if name <= before:
                twice = name == before
                raise self._damage(
                    "duplicate" if twice else "order", name, "it appears twice" if twice else "it is not sorted"
                )
            before, room = name, room - entry.compress_size
            if entry.flag_bits & _ENCRYPTED:
                raise self._damage("encrypted", name, "it is encrypted")
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise self._damage("compressed", name, "it is compressed; archives store files uncompressed")
            if trouble := layout.find_name_problem(name):
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


class _Directory:
    """A zip's file for zipfile, which reads a directory of the size that the zip declares, and has no limit for it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable
        self.is_read = self.is_too_large = False

    def read(self, size: int = -1) -> bytes:
        """Raises ValueError for a directory of more bytes or files than that of an archive."""
        self.is_too_large = size > layout.MAX_SUMS_BYTES
        data = b"" if self.is_too_large else self._file.read(size)
        self.is_too_large |= not self.is_read and data.count(_ENTRY_MARK) > layout.MAX_FILES
        if self.is_too_large:
            raise ValueError("it is too large")
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
        except _UNREADABLE as error:
            raise OSError(str(error)) from None


def read_documents(folder: Path, names: Sequence[str]) -> list[JsonObject]:
    """The documents `names` in a sealed folder, without reading the rest of it: fast enough for lists of many runs.

    Raises DamagedArchive for the first one that is not what was sealed, or not of its schema.
    """
    sums = _read(folder, run_folder.SUMS, layout.MAX_SUMS_BYTES)
    return [_read_document(folder, name, sums) for name in names]


def _read_document(folder: Path, name: str, sums: bytes) -> JsonObject:
    data = _read(folder, name, layout.MAX_DOCUMENT_BYTES)
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
