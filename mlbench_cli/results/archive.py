"""A run's archive: made from its folder by `seal`, read through `Archive`, carried about by `pack` and `unpack`.

An archive is sealed if and only if its SHA256SUMS is there: that file is written last, when everything it lists is on
disk. A crash before leaves a folder that is sealed by sealing it again.
"""

import fcntl
import hashlib
import io
import os
import shutil
import stat
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from mlbench_cli.engines.base import Finding, Observation
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.results import canonical_zip, layout, record
from mlbench_cli.results.canonical_zip import Entry, ZipDamage
from mlbench_cli.results.events import (
    Reading,
    log_files,
    proves,
    read_events,
    resource_lines,
)
from mlbench_cli.results.layout import DamagedArchive, document, replace, replacing
from mlbench_cli.results.official import official_text
from mlbench_cli.spec import Run
from mlbench_cli.store import OUTCOMES

# --- sealing ------------------------------------------------------------------------------------------------------


def seal(run: Run, *, outcome: str, exit_code: int, observation: Observation) -> str:
    """Complete the run's folder to an archive, once and for all, and return the outcome that it records.

    That is the given outcome (one of store.OUTCOMES), or a lesser one where logs and exit codes contradict it; a
    finding then says why. Sealed already, nothing is done. Logs are read once, in bounded memory.
    """
    if outcome not in OUTCOMES:
        raise UsageError(f"{outcome!r} is no outcome of a run, only {', '.join(OUTCOMES)}.")
    with layout.told(run.folder, "sealed"):
        run.folder.mkdir(parents=True, exist_ok=True)
        with _only_one(run.folder):
            if is_sealed(run.folder):
                return str(Archive.open(run.folder).result["outcome"])
            return _seal(run, outcome, exit_code, observation)


def is_sealed(folder: Path) -> bool:
    """Whether a run's folder is a complete archive. That its files are as they were, only `verify` can say."""
    return (folder / layout.SUMS).is_file()


def _seal(run: Run, outcome: str, exit_code: int, seen: Observation) -> str:
    folder = run.folder
    findings = list(seen.findings) + _make_portable(folder)
    if not _is_of(folder / layout.RUN, run):
        replace(folder / layout.RUN, document(record.run_document(run)))
    _mend_resources(folder / layout.RESOURCES)
    reading = _read_logs(run, record.started(run, seen))
    reported = reading.result
    goal, differing = record.goal_of(run.spec, reported["goal"] if reported else None)
    proven = record.is_proven(goal) and _is_metric(folder, goal, "value")
    shown = _is_metric(folder, goal, "last") if outcome == "budget_spent" else proven
    outcome, contradictions = record.settle(outcome, reported, goal, shown, seen)
    result = record.result_document(
        run, outcome=outcome, exit_code=exit_code, seen=seen, reported=reported, goal=goal, proven=proven
    )
    replace(folder / layout.ENVIRONMENT, document(record.environment_document(run.spec, reading.environments)))
    replace(folder / layout.FINDINGS, document(record.findings_document(findings + differing + contradictions)))
    replace(folder / layout.RESULT, document(result))
    replace(folder / layout.OFFICIAL, official_text(result).encode())
    layout.sync_folder(folder)
    replace(folder / layout.SUMS, layout.format_sums(_digests(folder)))
    layout.sync_folder(folder)
    return outcome


def _is_metric(folder: Path, goal: Mapping[str, Any] | None, key: str) -> bool:
    """Whether the goal's `value` or `last` was reported as its metric, too."""
    if goal is None or goal[key] is None:
        return False
    with open(folder / layout.METRICS, "rb") as metrics:
        return proves({**goal, "value": goal[key]}, metrics)


def _is_of(path: Path, run: Run) -> bool:
    """Whether the run.json that is there, if any, is whole and says what this run is."""
    try:
        written = layout.parse_document(path.read_bytes())
    except (OSError, ValueError):
        return False
    return all(written.get(key) == value for key, value in record.identity(run).items())


def _read_logs(run: Run, started: str | None) -> Reading:
    """Write metrics.jsonl, in the order of logs and of lines in them."""
    reading = Reading(run.spec.world_size, record.judge_of(run.spec, started))
    with replacing(run.folder / layout.METRICS) as metrics:
        for rank, path in log_files(run.folder).items():
            with open(path, "rb") as log:
                metrics.writelines(reading.metrics(rank, log))
    return reading


def _mend_resources(path: Path) -> None:
    """Bring resources.jsonl to the archive's form: times as RFC 3339, no torn lines; empty if nothing was sampled."""
    with replacing(path) as mended:
        if path.is_file():
            with open(path, "rb") as samples:
                mended.writelines(resource_lines(samples))


def _make_portable(folder: Path) -> list[Finding]:
    """Rename files that no archive can hold by that name, and put links and devices aside; idempotent."""
    findings = []
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            _let_read(Path(parent, name), stat.S_IRWXU)
    for name, mode in sorted(layout.walk(folder)):
        if not stat.S_ISREG(mode):
            aside = folder / layout.STATE_FOLDER / "left_out" / urllib.parse.quote(os.fsencode(name), safe="")[-200:]
            aside.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, aside)
            shown = ascii(name)[1:-1]
            findings.append(
                Finding("file_left_out", f"{shown} is a link or no regular file; an archive holds only files.")
            )
        elif trouble := layout.name_trouble(name):
            portable = "/".join(map(layout.portable_part, name.split("/")))
            if layout.name_trouble(portable) or (folder / portable).exists():
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


def _digests(folder: Path) -> dict[str, str]:
    """Name to digest of every file, each of them on disk when this returns."""
    digests = {}
    for name, _ in layout.walk(folder):
        if name == layout.SUMS:
            continue
        with open(folder / name, "rb") as file:
            digests[name] = layout.digest(file)
            os.fsync(file.fileno())
        if len(digests) >= layout.MAX_FILES:
            raise UsageError(
                f"{folder} holds more than {layout.MAX_FILES} files; an archive cannot.",
                hint=f"Remove some from {folder / 'output'}, then run the command again.",
            )
    return digests


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, and clear away what a killed writer has left."""
    state = folder / layout.STATE_FOLDER
    state.mkdir(exist_ok=True)
    with open(state / "seal.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in (*layout.REQUIRED, layout.SUMS):
            for leftover in folder.glob(f".{name}.*.tmp"):
                leftover.unlink(missing_ok=True)
        yield


# --- reading ------------------------------------------------------------------------------------------------------


class Container(Protocol):
    """Where an archive's files are: a folder or a zip."""

    names: tuple[str, ...]

    def open(self, name: str) -> BinaryIO: ...

    def size(self, name: str) -> int: ...

    def close(self) -> None: ...


class Folder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.names = tuple(sorted(name for name, mode in layout.walk(path) if stat.S_ISREG(mode)))

    def open(self, name: str) -> BinaryIO:
        return open(self._path / name, "rb")

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def close(self) -> None:
        pass


class Zip:
    """A canonical zip in a seekable file. Raises ZipDamage. Each opened entry checks its CRC-32 at its end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.entries = {entry.name: entry for entry in canonical_zip.read_entries(file)}
        self.names = tuple(self.entries)

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_EntryReader(self.file, self.entries[name]), 1 << 16))

    def size(self, name: str) -> int:
        return self.entries[name].size

    def close(self) -> None:
        self.file.close()


class Archive:
    """Read-only view of an archive in a folder or a zip. Every trouble is a DamagedArchive that names the file."""

    def __init__(self, path: Path | str, container: Container) -> None:
        self.path = path
        self._container = container
        self._names = frozenset(container.names)

    @classmethod
    def open(cls, path: Path) -> "Archive":
        """The archive at `path`, not yet verified. Raises NotFoundError, or DamagedArchive for what is no archive."""
        with layout.told(path, "read"):
            if path.is_dir():
                return cls(path, Folder(path))
            if not path.exists():
                raise NotFoundError(f"There is no archive {path}.", hint="mlbench status, then: mlbench download NAME")
            if not path.is_file():
                raise DamagedArchive(path, "", "it is neither a folder nor a file", problem="not_an_archive")
            file = open(path, "rb")  # noqa: SIM115 - closed with the archive
            try:
                return cls(path, Zip(file))
            except ZipDamage as damage:
                file.close()
                raise DamagedArchive(path, damage.name, str(damage), problem=damage.code) from None

    def close(self) -> None:
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
        """Rank to name of its log."""
        return layout.log_names(self.names)

    @cached_property
    def run(self) -> dict[str, Any]:
        return self.document(layout.RUN)

    @cached_property
    def result(self) -> dict[str, Any]:
        return self.document(layout.RESULT)

    @cached_property
    def environment(self) -> dict[str, Any]:
        return self.document(layout.ENVIRONMENT)

    @cached_property
    def findings(self) -> list[dict[str, Any]]:
        found = self.document(layout.FINDINGS).get("findings")
        return found if isinstance(found, list) else []

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl, as `events.metric_of` makes them."""
        return self.rows(layout.METRICS)

    def resources(self) -> Iterator[dict[str, Any]]:
        """The lines of resources.jsonl."""
        return self.rows(layout.RESOURCES)

    def events(self, rank: int | None = None) -> Iterator[dict[str, Any]]:
        """The events in one rank's log, or in all logs one after the other."""
        for number, name in self.logs.items():
            if rank in (None, number):
                with self.open_file(name) as log:
                    yield from read_events(log)

    def open_file(self, name: str) -> BinaryIO:
        """One file for reading, bytes."""
        if name not in self._names:
            raise DamagedArchive(self.path, name, self._missing(name), problem="missing")
        try:
            return self._container.open(name)
        except OSError as error:
            raise DamagedArchive(
                self.path, name, f"it cannot be read: {error.strerror}", problem="unreadable"
            ) from None

    def read(self, name: str, limit: int = layout.MAX_DOCUMENT_BYTES) -> bytes:
        """The content of a file of at most `limit` bytes."""
        with self.open_file(name) as file:
            try:
                if self._container.size(name) > limit:
                    raise DamagedArchive(self.path, name, f"it has more than {limit} bytes", problem="too_large")
                return file.read(limit)
            except (OSError, ZipDamage) as error:
                raise DamagedArchive(self.path, name, f"it cannot be read: {error}", problem="unreadable") from None

    def document(self, name: str) -> dict[str, Any]:
        """A JSON document of this schema version."""
        try:
            value = layout.parse_document(self.read(name))
        except ValueError as error:
            raise DamagedArchive(self.path, name, f"no valid JSON: {error}", problem="schema") from None
        version = value.get("schema_version")
        if version != layout.SCHEMA_VERSION or isinstance(version, bool):
            raise DamagedArchive(
                self.path,
                name,
                f"schema version {version!r}; this mlbench reads {layout.SCHEMA_VERSION}",
                problem="schema",
            )
        return value

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        """The JSON objects of a .jsonl file, one by one."""
        for number, line in enumerate(self.lines(name), 1):
            try:
                yield layout.parse_document(line)
            except ValueError as error:
                raise DamagedArchive(self.path, name, f"line {number}: {error}", problem="schema") from None

    def lines(self, name: str) -> Iterator[bytes]:
        """The lines of a file, each of at most MAX_DOCUMENT_BYTES."""
        with self.open_file(name) as file:
            try:
                while line := file.readline(layout.MAX_DOCUMENT_BYTES):
                    yield line
            except (OSError, ZipDamage) as error:
                raise DamagedArchive(self.path, name, f"it cannot be read: {error}", problem="unreadable") from None

    def _missing(self, name: str) -> str:
        if layout.SUMS in self._names:
            return "it is missing"
        return "it is missing; the run is not finished, or its results are not fetched (mlbench wait NAME)"


class _EntryReader(io.RawIOBase):
    """One entry of a zip as a stream. The zip's file is shared, so its position is set before each read."""

    def __init__(self, file: BinaryIO, entry: Entry) -> None:
        self._chunks = canonical_zip.read_data(file, entry)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = next(self._chunks, b"")
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)


# --- carrying about -----------------------------------------------------------------------------------------------


def pack(folder: Path, target: Path) -> None:
    """Write a sealed folder as a canonical zip to `target`, which appears only when it is whole.

    Equal contents give equal bytes on every machine. Raises DamagedArchive where a file is not what was sealed.
    """
    if target.is_dir():
        raise UsageError(f"{target} is a folder.", hint=f"Give a file name, for example {target / 'results.zip'}.")
    archive = Archive.open(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is packed already.", hint=f"cp {folder} {target}")
    sums = layout.parse_sums(archive.read(layout.SUMS, layout.MAX_SUMS_BYTES), folder)
    for name in sorted(set(archive.names) ^ {*sums, layout.SUMS}):
        missing = name in sums
        message = "it is missing" if missing else "it is not part of the sealed archive"
        raise DamagedArchive(folder, name, message, problem="missing" if missing else "extra")
    with layout.told(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            writer = canonical_zip.Writer(file)
            for name in archive.names:
                _add(writer, archive, name, sums.get(name))
            writer.finish()
        layout.sync_folder(target.parent)


def unpack(path: Path, folder: Path) -> None:
    """Write the files of a verified zip to `folder`, which must be new or empty and appears only when it is whole."""
    from mlbench_cli.results.verify import open_verified

    with open_verified(path) as archive, layout.told(folder, "written"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is there already and not empty.", hint="Give the name of a new folder.")
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        temporary.mkdir(parents=True)
        try:
            for name in archive.names:
                target = temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open_file(name) as source, open(target, "wb") as copy:
                    while chunk := source.read(layout.CHUNK):
                        copy.write(chunk)
                    copy.flush()
                    os.fsync(copy.fileno())
            os.replace(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        layout.sync_folder(folder.parent)


def _add(writer: canonical_zip.Writer, archive: Archive, name: str, expected: str | None) -> None:
    sha = hashlib.sha256()
    with archive.open_file(name) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)

        def chunks() -> Iterator[bytes]:
            while chunk := file.read(layout.CHUNK):
                sha.update(chunk)
                yield chunk

        try:
            writer.add(name, size, chunks())
        except ZipDamage as damage:
            raise DamagedArchive(archive.path, name, str(damage), problem=damage.code) from None
    if expected is not None and sha.hexdigest() != expected:
        raise DamagedArchive(archive.path, name, "it has changed since it was sealed", problem="changed")
