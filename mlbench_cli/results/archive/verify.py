"""Verifies that every byte of an archive is what was sealed, and that its documents follow from its evidence."""

import base64
import binascii
import hashlib
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct
from msgspec.structs import asdict, replace

from mlbench_cli import __version__
from mlbench_cli.errors import DamagedArchive, NotFoundError, UnprovenArchive
from mlbench_cli.model.spec import SPEC_VERSION, canonical_json
from mlbench_cli.results.archive.documents import DOCUMENTS
from mlbench_cli.results.archive.evidence import Evidence, load_evidence
from mlbench_cli.results.archive.files import (
    MAX_SUMS_BYTES,
    REQUIRED,
    Archive,
    Folder,
    Zip,
    check_canonical,
    check_document,
    find_collisions,
    find_portability_problem,
    is_in_layout,
    parse_sums,
)
from mlbench_cli.results.archive.judge import JUDGE_VERSION, judge
from mlbench_cli.storage import run_folder
from mlbench_cli.tasks.catalog import find_rules
from mlbench_cli.tasks.provenance import parse_provenance
from mlbench_cli.util.json_text import format_parsed, format_row, parse_document
from mlbench_cli.util.text import brief, one_line

MAX_PROBLEMS = 1000
MAX_SIGNATURE_BYTES = 16 << 10
# Namespaces of signatures (PROTOCOL.sshsig of OpenSSH).
NAMESPACE = "mlbench-archive"
RECEIPT_NAMESPACE = "mlbench-receipt"
_ARMOR = re.compile(rb"-----BEGIN SSH SIGNATURE-----\n([A-Za-z0-9+/=\n]+)\n-----END SSH SIGNATURE-----\n")
_MAGIC = b"SSHSIG\0\0\0\1"


class Problem(Struct, frozen=True):
    """One problem of an archive. `file` is the file's name in the archive, empty for the whole archive.

    `code` is one of: unsealed missing extra changed truncated malformed_sums unsafe_name link special duplicate order
    encrypted compressed header trailing_data too_large unreadable not_an_archive signature schema inconsistent.
    """

    code: str
    file: str
    message: str

    def to_dict(self) -> dict[str, str]:
        """Code, file and message as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.file}: {self.message}" if self.file else self.message


class Verification(Struct, frozen=True):
    """The result of `verify`. `not_derived` lists, in one sentence each, what the evidence could not confirm.

    `has_other_form`: its documents are those of another mlbench, and this one cannot show them.
    """

    problems: tuple[Problem, ...]
    not_derived: tuple[str, ...] = ()
    has_other_form: bool = False

    @property
    def ok(self) -> bool:
        """Whether every byte is what was sealed, and every document follows from the evidence."""
        return not self.problems and not self.not_derived


def verify(path: Path) -> Verification:
    """Check the archive in a folder or zip: every byte against its checksum, every document against the evidence.

    A zip must be, byte for byte, the canonical form of its contents. Memory is bounded for any file. Raises
    NotFoundError if `path` does not exist.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _collect(lambda: Folder(path))
        if not stat.S_ISREG(mode):
            return _refuse("not_an_archive", "it is neither a folder nor a file")
        with open(path, "rb") as file:
            return verify_zip(file, path)
    except FileNotFoundError as error:
        if Path(error.filename) != path:
            return _refuse("missing", f"{error.filename} disappeared during the check")
        raise NotFoundError(
            f"There is no archive {path}.", hint="mlbench status, then: mlbench download NAME"
        ) from None
    except OSError as error:
        return _refuse("unreadable", f"{error.filename or path} cannot be read: {error.strerror or error}")


def verify_zip(file: BinaryIO, path: Path | str = "zip") -> Verification:
    """Like `verify`, for a zip in an open, seekable file."""
    return _collect(lambda: Zip(file, path))


def find_problems(path: Path) -> list[Problem]:
    """The problems that `verify` finds; empty for an intact archive."""
    return list(verify(path).problems)


def open_verified(path: Path, *, unproven: bool = False) -> Archive:
    """Verify and open the archive at `path`. All commands that present archives use this.

    Raises DamagedArchive with the first problem if there is one, UnprovenArchive if something could not be derived from
    the evidence. With `unproven`, such an archive is opened, and the names of its run and task are marked. Strings in
    the archive are cleaned for display.
    """
    found = verify(path)
    if found.problems:
        first = found.problems[0]
        raise DamagedArchive(path, first.file, first.message, problem=first.code)
    if found.not_derived and (found.has_other_form or not unproven):
        raise UnprovenArchive(path, found.not_derived, can_be_shown=not found.has_other_form)
    return Archive.open(path, not_derived=found.not_derived, is_shown=True)


def find_signature_problem(data: bytes, namespace: str = NAMESPACE) -> str | None:
    """Why `data` is not an OpenSSH signature for `namespace`, or None. Only `check_origin` checks its validity."""
    match = _ARMOR.fullmatch(data)
    try:
        blob = base64.b64decode(match[1].replace(b"\n", b""), validate=True) if match else b""
    except binascii.Error:
        blob = b""
    if not blob.startswith(_MAGIC):
        return "it is not an OpenSSH signature"
    if len(namespace).to_bytes(4, "big") + namespace.encode() not in blob:
        return f"it is a signature for another namespace than {namespace}"
    return None


def _refuse(code: str, message: str) -> Verification:
    return Verification((Problem(code, "", message),))


def _collect(open_archive: Callable[[], Archive]) -> Verification:
    """Collect problems, and sentences (strings) about what could not be derived. Unreadable damage ends the search and
    is last."""
    found: list[Problem] = []
    not_derived: list[str] = []
    try:
        for problem in _archive_problems(open_archive()):
            if isinstance(problem, str):
                not_derived.append(problem)
                continue
            found.append(problem)
            if len(found) >= MAX_PROBLEMS:
                found.append(Problem(problem.code, "", f"more than {MAX_PROBLEMS} problems; stopped here"))
                break
    except DamagedArchive as damage:
        found.append(Problem(damage.problem, _printable_name(damage.file), damage.plain))
    except OSError:
        raise
    except Exception as error:  # whatever a stranger wrote, it is the damage of this archive alone
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        found.append(Problem("schema", "", f"it cannot be judged: {reason}"))
    return Verification(tuple(found), tuple(not_derived), any(isinstance(item, _OtherForm) for item in not_derived))


class _OtherForm(str):
    """The sentence that the documents are of another form."""


# --- bytes --------------------------------------------------------------------------------------------------------


def _archive_problems(archive: Archive) -> Iterator[Problem | str]:
    """Check files against SHA256SUMS and, if all match, documents against the evidence."""
    damaged = bool(archive.irregular)
    for name, code in archive.irregular.items():
        yield Problem(
            code, _printable_name(name), f"it is {'a symbolic link' if code == 'link' else 'no regular file'}"
        )
    if run_folder.SUMS not in archive.names:
        is_unsealed = isinstance(archive, Folder) and (run_folder.RUN in archive.names or archive.logs)
        code = "unsealed" if is_unsealed else "not_an_archive"
        why = "the run has not finished, or its results have not been fetched"
        why = why if is_unsealed else "it is not an mlbench archive"
        yield Problem(code, run_folder.SUMS, f"there is no SHA256SUMS: {why}")
        return
    known = check_canonical(archive) if isinstance(archive, Zip) else {}
    sums = parse_sums(archive.read(run_folder.SUMS, MAX_SUMS_BYTES), archive.path)
    names = {*archive.names} - {run_folder.SUMS, run_folder.SIGNATURE}
    if run_folder.SIGNATURE in archive.names:  # results/archive/sign.py checks who made it
        try:
            reason = find_signature_problem(archive.read(run_folder.SIGNATURE, MAX_SIGNATURE_BYTES))
        except OSError as error:
            reason = f"it cannot be read: {error.strerror}"
        if reason:
            damaged = True
            yield Problem("signature", run_folder.SIGNATURE, reason)
    for name in sorted(names | {*sums}):
        problem = None
        if name not in names:
            problem = Problem("missing", name, "it is missing")
        elif name not in sums:
            problem = Problem("extra", _printable_name(name), "it is not listed in SHA256SUMS")
        else:
            try:
                if (known.get(name) or archive.digest(name)) != sums[name]:
                    problem = Problem("changed", name, "it is not what was sealed: its SHA-256 differs")
            except OSError as error:
                problem = Problem("unreadable", name, f"it cannot be read: {error.strerror}")
        if problem:
            damaged = True
            yield problem
    if not damaged:
        yield from _content_problems(archive)


# --- contents -----------------------------------------------------------------------------------------------------


def _content_problems(archive: Archive) -> Iterator[Problem | str]:
    """Check the documents against their types, and then against the evidence."""
    missing = [name for name in REQUIRED if name not in archive.names]
    for name in missing:
        yield Problem("missing", name, "every archive must have it")
    if missing:
        return
    violations = []
    for name in DOCUMENTS:
        if name in archive.names:
            try:
                check_document(name, archive.document(name))
            except ValueError as error:
                violations.append(Problem("schema", name, str(error)))
    judged_by = archive.document(run_folder.RESULT).get("judge")
    if violations and type(judged_by) is int and judged_by != JUDGE_VERSION:
        yield _OtherForm(
            f"The documents are of another form (rules {judged_by}; this mlbench knows rules {JUDGE_VERSION}): only "
            "checksums were checked. Use the mlbench that run.json names."
        )
        return
    yield from violations
    unusual: list[int] = []  # the first line of resources.jsonl that is not in the form of a row
    samples = _read_samples(archive, unusual)
    if not violations:
        yield from _derivation_problems(archive, samples, unusual)
    for _ in samples:  # the rows that the judge has not read
        pass


def _read_samples(archive: Archive, unusual: list[int]) -> Iterator[Mapping[str, Any]]:
    """The rows of resources.jsonl, each checked as it is read. Raises DamagedArchive for a line that is no JSON
    object."""
    for number, line in enumerate(archive.lines(run_folder.RESOURCES), 1):
        try:
            row = parse_document(line)
        except ValueError as error:
            raise DamagedArchive(
                archive.path, run_folder.RESOURCES, f"line {number}: {error}", problem="schema"
            ) from None
        if not unusual and format_row(row) != line:
            unusual.append(number)
        yield row


def _derivation_problems(
    archive: Archive, samples: Iterator[Mapping[str, Any]], unusual: Sequence[int]
) -> Iterator[Problem | str]:
    """Judge the archive's evidence again, and compare every field of the documents with the result."""
    run = archive.run
    if run["spec_hash"] != hashlib.sha256(canonical_json(run["spec"])).hexdigest()[:16]:
        yield Problem("inconsistent", run_folder.RUN, "spec_hash is not the hash of spec")
    if run["name"] != run["spec"].get("name"):
        yield Problem("inconsistent", run_folder.RUN, "name is not that of spec")
    judged_by = archive.result["judge"]
    if judged_by != JUDGE_VERSION:
        yield (
            f"The documents were judged by version {judged_by} of the rules, and this mlbench knows only version "
            f"{JUDGE_VERSION}: only checksums and schemas were checked."
            + (" Upgrade mlbench." if judged_by > JUDGE_VERSION else "")
        )
        return
    if (version := run["spec"].get("spec_version")) != SPEC_VERSION:
        yield (
            f"The run is described in version {version} of the form, and this mlbench reads only version "
            f"{SPEC_VERSION}: only checksums and schemas were checked."
        )
        return
    if run.get("provenance") is not None:
        try:
            parse_provenance(run["provenance"])
        except ValueError as error:
            yield Problem("schema", run_folder.RUN, f"provenance: {error}")
    evidence = replace(load_evidence(archive), samples=lambda: samples)
    yield from _form_problems(archive, evidence)
    yield from _rules_problems(run, evidence)
    if evidence.observation.ended is None:
        yield Problem("inconsistent", run_folder.OBSERVATION, "the run has not ended")
        return
    lines, number = archive.lines(run_folder.METRICS), 0

    def compare(expected: bytes | None) -> None:
        nonlocal number
        number += 1
        if next(lines, None) != expected:
            message = f"line {number} does not follow from the logs"
            raise DamagedArchive(archive.path, run_folder.METRICS, message, problem="inconsistent")

    judgement = judge(evidence, compare)
    compare(None)
    if unusual:
        yield Problem("inconsistent", run_folder.RESOURCES, f"line {unusual[0]} is not formatted as a row")
    for name in (run_folder.NETWORK, run_folder.CERTIFICATE):
        if name in archive.names and name not in judgement.documents:
            yield Problem("inconsistent", name, "it does not follow from the evidence")
    for name, expected in judgement.documents.items():
        if name in archive.names:
            yield from _differences(name, archive.document(name), expected)
        else:
            yield Problem("missing", name, "it follows from the evidence")
    if archive.read(run_folder.OFFICIAL) != judgement.official_text.encode():
        yield Problem("inconsistent", run_folder.OFFICIAL, "it does not follow from the evidence")


def _form_problems(archive: Archive, evidence: Evidence) -> Iterator[Problem]:
    """Problems of names that are not allowed in an archive, and of documents that are not in canonical form, which
    readers could interpret differently."""
    for name, other in find_collisions(archive.names).items():
        shown = f"on some systems it is the same as {_printable_name(other)}"
        yield Problem("unsafe_name", _printable_name(name), shown)
    for name in archive.names:
        if not is_in_layout(name):
            yield Problem("extra", _printable_name(name), "an archive has no such file")
        elif problem := find_portability_problem(name):
            yield Problem("unsafe_name", _printable_name(name), problem)
    for rank, name in archive.logs.items():
        if rank >= evidence.spec.process_count:
            yield Problem("extra", name, f"the run has no rank {rank}")
    recorded_by = evidence.provenance.get("mlbench")
    if recorded_by is not None and recorded_by != archive.run.get("mlbench"):
        yield Problem("inconsistent", run_folder.RUN, f"mlbench is not {brief(recorded_by)}, as its provenance says")
    for name in DOCUMENTS:
        if name in archive.names and archive.read(name) != format_parsed(archive.document(name)):
            yield Problem("inconsistent", name, "it is not formatted the way documents are written")


def _rules_problems(run: Mapping[str, Any], evidence: Evidence) -> Iterator[Problem | str]:
    """Problems of the task's rules in run.json, compared with the catalog."""
    spec, rules = evidence.spec, evidence.rules
    known = find_rules(spec.task, spec.preset)
    if known == rules:
        return
    if known is None and rules is not None and rules.origin is not None:
        yield f"The rules of {spec.task}, a task of {rules.origin}, cannot be compared: this mlbench does not have it."
        return
    if run.get("mlbench") == __version__:
        yield Problem("inconsistent", run_folder.RUN, f'"task" is not what mlbench {__version__} says of {spec.task}')
    else:
        version = run.get("mlbench")
        yield f"run.json gives the rules of {spec.task} in mlbench {version}; those of this mlbench are different."


def _differences(file: str, found: Any, expected: Any, path: str = "") -> Iterator[Problem]:
    """The fields of a document that differ from those derived from the evidence."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted({*found, *expected} - ({"schema_version"} if not path else set())):
            inner = f"{path}.{key}" if path else key
            if key not in expected:
                yield Problem("inconsistent", file, f"{inner} does not follow from the evidence")
            elif key not in found:
                yield Problem("inconsistent", file, f"{inner} is missing")
            else:
                yield from _differences(file, found[key], expected[key], inner)
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, (left, right) in enumerate(zip(found, expected, strict=True)):
            yield from _differences(file, left, right, f"{path}[{index}]")
    elif found != expected or isinstance(found, bool) != isinstance(expected, bool):
        yield Problem("inconsistent", file, f"{path} is {brief(found)}, but the evidence gives {brief(expected)}")


def _printable_name(name: str) -> str:
    """An untrusted name without control characters or invalid Unicode."""
    return name if name.isprintable() else ascii(name)[1:-1]
