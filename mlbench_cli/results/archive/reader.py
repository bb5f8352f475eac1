"""Reads a run's archive, in a folder or a zip. It does not verify the archive; see `verify`."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

from mlbench_cli.errors import DamagedArchive, NotFoundError
from mlbench_cli.model.run import FindingDocument, JsonObject
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.documents import EnvironmentDocument, ResultDocument, RunDocument, check_document
from mlbench_cli.results.archive.events import read_events
from mlbench_cli.results.archive.files import Folder, Zip
from mlbench_cli.storage import run_folder
from mlbench_cli.util.json_text import parse_document, parse_versioned
from mlbench_cli.util.text import clean_values

UNPROVEN = "(unproven)"


class Archive:
    """Read-only view of an archive in a folder or a zip. All errors are DamagedArchive, with the name of the file.

    `not_derived` lists what could not be derived from the evidence. If it is not empty, the names of run and task, the
    summary and the official line are marked as UNPROVEN, so that everything that shows the archive shows this, too.
    With `is_shown`, all strings in documents, metrics, samples and events are cleaned for display, so that no presenter
    can forget it. `document`, `rows` and `read` return unchanged contents.
    """

    def __init__(
        self, path: Path | str, container: Folder | Zip, not_derived: Sequence[str] = (), *, is_shown: bool = False
    ) -> None:
        self.path = path
        self.not_derived = tuple(not_derived)
        self._is_shown = is_shown
        self._container = container
        self._names = frozenset(container.names)

    @classmethod
    def open(cls, path: Path, *, not_derived: Sequence[str] = (), is_shown: bool = False) -> "Archive":
        """The archive at `path`, without verifying it. Raises NotFoundError, or DamagedArchive if it is not an
        archive."""
        with layout.naming_file_on_os_error(path, "read"):
            if path.is_dir():
                return cls(path, Folder(path), not_derived, is_shown=is_shown)
            if not path.exists():
                raise NotFoundError(f"There is no archive {path}.", hint="mlbench status, then: mlbench download NAME")
            if not path.is_file():
                raise DamagedArchive(path, "", "it is neither a folder nor a file", problem="not_an_archive")
            file = open(path, "rb")  # noqa: SIM115 - closed with the archive
            try:
                return cls(path, Zip(file, path), not_derived, is_shown=is_shown)
            except DamagedArchive:
                file.close()
                raise

    def __repr__(self) -> str:
        return f"<archive {self.path}>"

    def close(self) -> None:
        """Close the folder or zip."""
        self._container.close()

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all files, sorted."""
        return self._container.names

    @property
    def logs(self) -> dict[int, str]:
        """Rank -> name of its log."""
        return layout.log_names(self.names)

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
        if name not in self._names:
            raise DamagedArchive(self.path, name, self._missing(name), problem="missing")
        try:
            return self._container.open(name)
        except OSError as error:
            raise DamagedArchive(
                self.path, name, f"it cannot be read: {error.strerror}", problem="unreadable"
            ) from None

    def size(self, name: str) -> int:
        """The size of an existing file in bytes."""
        return self._container.size(name)

    def read(self, name: str, limit: int = layout.MAX_DOCUMENT_BYTES) -> bytes:
        """The content of a file of at most `limit` bytes."""
        with self.open_file(name) as file:
            try:
                if self._container.size(name) > limit:
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
        if run_folder.SUMS in self._names:
            return "it is missing"
        return "it is missing: the run has not finished, or its results have not been fetched (mlbench wait NAME)"


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
