"""Entries of a site: each archive is verified and read once into plain data that processes can exchange."""

import hashlib
import json
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mlbench_cli.errors import DamagedArchive, NotFoundError, UnprovenArchive, UsageError
from mlbench_cli.model.spec import OWN_PRICE
from mlbench_cli.results.analysis.energy import Energy, find_energy
from mlbench_cli.results.analysis.series import Measurement, measure
from mlbench_cli.results.archive.bundle import archives_at, is_zip_name, name_archive, walk
from mlbench_cli.results.archive.files import Archive, pack
from mlbench_cli.results.archive.sign import OriginError, check_origin
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.results.receipts import archive_digest
from mlbench_cli.storage import run_folder
from mlbench_cli.util.text import one_line

ARCHIVES = "archives"
ENTRY = "entry.json"  # next to an archive: the submitter's statements
WITHDRAWN = "withdrawn.jsonl"  # at the top of a folder: withdrawn archives
MAX_ENTRY_BYTES = 64 << 10
ENTRY_FIELDS = ("submitter", "hardware", "note", "supersedes")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how the file begins that stands for one in git LFS
MANY = 24  # number of archives from which several processes are used
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}", re.IGNORECASE)


@dataclass(frozen=True)
class Entry:
    """One verified archive.

    digest      SHA-256 of its SHA256SUMS, used by receipts; not changed by a signature
    file        its place on the site, such as archives/digits-2-0f3a….zip, with `sha256` and `size` of that file
    source      original location
    price       US dollars that the run cost; None if no price is known. `has_own_price`: its submitter named it
    disclosed   personal information by kind: host names, command line, number of packages
    said        entry.json next to it: the submitter's statements, without figures
    repeats     how many repeats its command asked for; 0: not recorded
    """

    digest: str
    file: str
    sha256: str
    size: int
    source: str
    name: str
    run: str
    created: str
    mlbench: str
    seed: int
    machine: str
    measurement: Measurement
    price: float | None
    has_own_price: bool
    energy: Energy | None
    wall_seconds: float
    summary: str
    official_line: str | None
    findings: tuple[tuple[str, str, str], ...]  # code, summary, hint
    signer: str | None
    origin: str  # why no valid signature was found; empty if there is one
    disclosed: Mapping[str, tuple[str, ...]]
    said: Mapping[str, str]
    repeats: int = 0

    @property
    def place(self) -> str:
        """The folder of its claim: runs of different folders are never put together."""
        return str(Path(self.source).parent)


class Refusal(NamedTuple):
    """A rejected archive and the reason. `code` is unproven, or the code of the problem found by `verify`."""

    source: str
    code: str
    message: str


class Withdrawal(NamedTuple):
    """A line of withdrawn.jsonl: the archive stays listed, struck out, but is ignored."""

    digest: str
    date: str
    by: str
    reason: str


class Sources(NamedTuple):
    """The contents of folders: archives (zips and sealed folders), and JSON files that may be receipts."""

    archives: tuple[Path, ...]
    documents: tuple[Path, ...]
    withdrawn: tuple[Withdrawal, ...]


def find_sources(folders: Sequence[Path], site: Path | None = None) -> Sources:
    """Find archives in `folders`, or named directly, except in an earlier `site`.

    Raises NotFoundError, UsageError.
    """
    skipped = None if site is None else site.absolute()
    archives: dict[Path, None] = {}
    documents: dict[Path, None] = {}
    withdrawn: list[Withdrawal] = []
    for folder in folders:
        if not folder.exists():
            raise NotFoundError(f"There is no folder {folder}.", hint="mlbench download NAME --to FOLDER")
        if folder.is_file() or (folder / run_folder.SUMS).is_file():
            archives |= dict.fromkeys(archives_at(folder) if is_plain(folder) else [folder])
            continue
        if is_plain(folder / WITHDRAWN):
            withdrawn += _read_withdrawn(folder / WITHDRAWN)
        for path in walk(folder, skipped):
            if path.is_dir():
                archives[path] = None
            elif is_zip_name(path):
                archives |= dict.fromkeys(archives_at(path) if is_plain(path) else [path])
            elif path.name.endswith(".json") and path.name != ENTRY and is_plain(path):
                documents[path] = None
    return Sources(tuple(archives), tuple(documents), tuple(withdrawn))


def read_entries(paths: Sequence[Path], site: Path, signers: Path | None) -> Iterator[Entry | Refusal]:
    """Copy each archive into the site, verify the copy, and read it; in the order of `paths`."""
    (site / ARCHIVES).mkdir(parents=True, exist_ok=True)
    read, sources = partial(read_entry, site=site, signers=signers), map(name_archive, paths)
    if len(paths) < MANY:
        yield from map(read, paths, sources)
        return
    with ProcessPoolExecutor() as pool:
        yield from pool.map(read, paths, sources, chunksize=8)


def read_entry(path: Path, source: str, site: Path, signers: Path | None) -> Entry | Refusal:
    """The archive at `path`, copied to the site first, so that the served file is the verified one. `source` is its
    name for people."""
    if not path.is_dir() and not is_plain(path):
        return Refusal(source, "special", "it is a link or no regular file")
    copy = site / ARCHIVES / f".{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:24]}.zip"
    try:
        if path.is_dir():
            pack(path, copy)
        else:
            shutil.copyfile(path, copy)
        with open(copy, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                copy.unlink()
                return Refusal(source, "pointer", "it is a pointer of git LFS, not the archive: git lfs pull")
        with open_verified(copy) as archive:
            entry = _read(source, archive, copy, signers)
        copy.replace(site / entry.file)
        return entry
    except UnprovenArchive as error:
        copy.unlink(missing_ok=True)
        return Refusal(source, "unproven", " ".join(error.details["not_derived"]))
    except DamagedArchive as error:
        copy.unlink(missing_ok=True)
        where = f"{error.file}: " if error.file else ""
        return Refusal(source, error.problem, f"{where}{error.plain}")
    except UsageError as error:  # of what its submitter says
        copy.unlink(missing_ok=True)
        return Refusal(source, "entry", error.message)
    except OSError as error:
        copy.unlink(missing_ok=True)
        return Refusal(source, "unreadable", f"it cannot be read: {error.strerror or error}")
    except (ArithmeticError, ValueError, TypeError, LookupError) as error:  # numbers out of any sensible range
        copy.unlink(missing_ok=True)
        return Refusal(source, "unusable", f"it has no figures: {type(error).__name__}: {one_line(str(error), 200)}")


def _read(source: str, archive: Archive, copy: Path, signers: Path | None) -> Entry:
    run, result = archive.run, archive.result
    digest, name = archive_digest(archive), archive.name
    with open(copy, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    signer, origin = _find_signer(archive, signers)
    price, named_by = ((result["price"] or {}).get(name) for name in ("amount", "source"))
    place = next(folder for folder in Path(source).absolute().parents if not folder.is_file())  # but a file of several
    measurement = measure(archive)
    plain = name if _FILE_NAME.fullmatch(name) else "archive"
    return Entry(
        digest=digest,
        file=f"{ARCHIVES}/{plain}-{digest[:12]}.zip",
        sha256=sha256,
        size=copy.stat().st_size,
        source=source,
        name=name,
        run=str(run["id"]),
        created=str(run["created"]),
        mlbench=str(run.get("mlbench") or "unknown"),
        seed=int(run["spec"].get("seed", 0)),
        machine=measurement.key.machine or "unknown machine",
        measurement=measurement,
        price=float(price) if isinstance(price, int | float) and price >= 0 else None,
        energy=find_energy(archive),
        has_own_price=run["spec"]["engine"] != "kubernetes" or named_by == OWN_PRICE["source"],
        repeats=int(run.get("repeats") or 0),
        wall_seconds=float(result["wall_seconds"] or 0.0),
        summary=str(result["summary"]),
        official_line=result["official_line"],
        findings=tuple(
            (str(found.get("code")), str(found.get("summary")), str(found.get("hint") or ""))
            for found in archive.findings
        ),
        signer=signer,
        origin=origin,
        disclosed=find_disclosed(archive),
        said=_read_said(place / ENTRY),
    )


def find_disclosed(archive: Archive) -> dict[str, tuple[str, ...]]:
    """Personal information in an archive: kind -> values."""
    run, ranks = archive.run, (archive.environment.get("ranks") or {}).values()
    provenance: Mapping[str, Any] = run.get("provenance") or {}
    hosts = {str(rank["host"]) for rank in ranks if isinstance(rank, Mapping) and rank.get("host")}
    hosts |= {str(state["node"]) for state in archive.result.get("worker_states") or () if state.get("node")}
    packages = {*(provenance.get("packages") or {})}
    for rank in ranks:
        packages |= {*((rank.get("packages") if isinstance(rank, Mapping) else None) or {})}
    command = " ".join(map(str, provenance.get("command_line") or ()))
    found = {
        "host names": tuple(sorted(hosts)),
        "command line": (command,) if command else (),
        "packages": tuple(sorted(packages)),
        "session": (str(provenance["session"]),) if provenance.get("session") else (),
    }
    return {kind: values for kind, values in found.items() if values}


def _find_signer(archive: Archive, signers: Path | None) -> tuple[str | None, str]:
    if run_folder.SIGNATURE not in archive.names:
        return None, "not signed"
    if signers is None:
        return None, "signed, but this site has no signers file"
    try:
        return check_origin(archive, signers).principal, ""
    except OriginError as error:
        return None, error.message


def _read_said(path: Path) -> dict[str, str]:
    """The cleaned text of entry.json. Raises UsageError if it is invalid."""
    if not path.is_symlink() and not path.exists():
        return {}
    if not is_plain(path):
        raise UsageError(f"{path} is a link or no regular file.")
    with open(path, "rb") as file:
        data = file.read(MAX_ENTRY_BYTES + 1)
    return parse_said(path, data)


def is_plain(path: Path) -> bool:
    """Whether a path is a regular file and no link: only those are read from a submitter's folder, and published."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def parse_said(path: Path, data: bytes) -> dict[str, str]:
    """The content of an entry.json. It has no numbers, because numbers come from the archive. Raises UsageError."""
    try:
        if len(data) > MAX_ENTRY_BYTES:
            raise ValueError(f"it has more than {MAX_ENTRY_BYTES} bytes")
        document = json.loads(data)
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        for key, value in document.items():
            if key not in ENTRY_FIELDS:
                raise ValueError(f'unknown field "{key[:60]}"; known: {", ".join(ENTRY_FIELDS)}')
            if not isinstance(value, str):
                raise ValueError(f'"{key}" is not a text')
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a valid entry: {error}.") from None
    return {key: one_line(value) for key, value in document.items()}


def _read_withdrawn(path: Path) -> Iterator[Withdrawal]:
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            words = [document[name] for name in Withdrawal._fields]
            if not all(isinstance(word, str) for word in words) or not re.fullmatch("[0-9a-f]{64}", words[0]):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"{path}, line {number}: not a withdrawal.",
                hint='One per line: {"digest": "64 HEX DIGITS", "date": "2026-11-25", "by": "...", "reason": "..."}',
            ) from None
        yield Withdrawal(words[0], *map(one_line, words[1:]))
