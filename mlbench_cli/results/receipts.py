"""Receipts: documents that say which runs reproduce which earlier result, and how closely.

A receipt names the archives of both sides by digest (the SHA-256 of their SHA256SUMS, which a signature does not
change) and has the verdict with everything that it rests on. With the archives at hand it can be derived again; the
signature of FILE is FILE.sig, by the same keys as those of archives, for the namespace RECEIPT_NAMESPACE.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbench_cli import __version__
from mlbench_cli.errors import NotFoundError, UsageError, naming_file_on_os_error
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.reproduction import Reproduction, in_order, judge_reproduction
from mlbench_cli.results.archive.files import MAX_SUMS_BYTES, Archive, check_document
from mlbench_cli.results.archive.sign import Signer, find_signer, make_signature, refuse_unsigned, require_key
from mlbench_cli.results.archive.verify import MAX_SIGNATURE_BYTES, RECEIPT_NAMESPACE
from mlbench_cli.storage import run_folder
from mlbench_cli.util import files
from mlbench_cli.util.json_text import format_document, parse_versioned
from mlbench_cli.util.text import brief, clean_values
from mlbench_cli.util.times import now

MAX_BYTES = 16 << 20
_FLOAT_TOLERANCE = 1e-9  # the functions of math differ in the last digits between platforms
_WORDING = ("reason", "sessions")  # may change from version to version


@dataclass(frozen=True)
class Receipt:
    """A receipt as read from a file."""

    path: Path
    data: bytes
    document: JsonObject

    @property
    def signature_path(self) -> Path:
        """Where its signature is, if it has one."""
        return Path(f"{self.path}.sig")

    @property
    def digests(self) -> list[str]:
        """The digests of the archives that it names."""
        return [str(run["digest"]) for side in ("original", "reproduction") for run in self.document[side]]


@dataclass(frozen=True)
class ReceiptCheck:
    """What is proven of a receipt. `missing`: digests of archives that it names and that were not at hand."""

    problems: tuple[str, ...]
    missing: tuple[str, ...] = ()
    reason: str = ""  # as it follows from the archives, whatever the receipt says

    @property
    def is_derived(self) -> bool:
        """Whether all of it follows from the archives that it names."""
        return not self.problems and not self.missing


def archive_digest(archive: Archive) -> str:
    """The digest by which a receipt names an archive: the SHA-256 of its SHA256SUMS, which covers all of its files."""
    return hashlib.sha256(archive.read(run_folder.SUMS, MAX_SUMS_BYTES)).hexdigest()


def make_receipt(original: Sequence[Archive], reproduction: Sequence[Archive], found: Reproduction) -> JsonObject:
    """The document of a receipt about verified archives."""
    return {
        "kind": "receipt",
        "mlbench": __version__,
        "created": now(),
        **found.to_dict(),
        "original": _describe_runs(original),
        "reproduction": _describe_runs(reproduction),
    }


def write_receipt(path: Path, document: Mapping[str, Any]) -> None:
    """Write a receipt; a signature of an earlier one of that name is removed. Raises MlbenchError."""
    with naming_file_on_os_error(path, "written"):
        Path(f"{path}.sig").unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(path, format_document(document))


def is_receipt(path: Path) -> bool:
    """Whether a path can be that of a receipt; an archive is a folder or a zip."""
    return path.suffix.lower() == ".json" and not path.is_dir()


def read_receipt(path: Path) -> Receipt:
    """The receipt in a file. Raises NotFoundError, or UsageError if the file is none."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"There is no receipt {path}.", hint="mlbench reproduce ARCHIVE") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        document = parse_versioned(data)
        check_document("receipt.json", document)
    except ValueError as error:
        raise UsageError(f"{path} is not a receipt: {error}.", hint="mlbench reproduce ARCHIVE writes one.") from None
    return Receipt(path, data, clean_values(document))


def check_receipt(receipt: Receipt, archives: Iterable[Archive]) -> ReceiptCheck:
    """Derive a receipt again from verified archives, which may be more than those that it names."""
    known = {archive_digest(archive): archive for archive in archives}
    missing = tuple(digest for digest in dict.fromkeys(receipt.digests) if digest not in known)
    if missing:
        return ReceiptCheck((), missing)
    document = receipt.document
    sides = [[known[run["digest"]] for run in document[side]] for side in ("original", "reproduction")]
    if not all(sides):
        return ReceiptCheck(("it names no archives for one side",))
    try:
        names = [figure["name"] for figure in document["figures"]]
        found = judge_reproduction(sides[0], sides[1], float(document["margin"]), names)
    except UsageError as error:
        return ReceiptCheck((error.message,))
    expected = {
        **found.to_dict(),
        "original": _describe_runs(sides[0]),
        "reproduction": _describe_runs(sides[1]),
    }
    if document["mlbench"] != __version__:  # another version may word it differently: show this version's words
        expected = _without_words(expected)
    return ReceiptCheck(tuple(_find_contradictions(clean_values(expected), document, "")), reason=found.reason)


def sign_receipt(path: Path, key: Path, *, force: bool = False) -> None:
    """Sign a receipt with an OpenSSH key; the signature is a file beside it. Raises as `sign` of an archive."""
    require_key(key)
    receipt = read_receipt(path)
    if receipt.signature_path.exists() and not force:
        raise UsageError(f"{path} is already signed.", hint="Add --force to replace the signature.")
    signature = make_signature(receipt.data, key, RECEIPT_NAMESPACE)
    with naming_file_on_os_error(path, "written"):
        files.write_atomically(receipt.signature_path, signature)


def check_receipt_origin(receipt: Receipt, signers: Path) -> Signer:
    """The one of `signers` who signed a receipt. Raises OriginError if none is proven to have."""
    try:
        with open(receipt.signature_path, "rb") as file:
            signature = file.read(MAX_SIGNATURE_BYTES + 1)
    except OSError:
        raise refuse_unsigned(receipt.path) from None
    return find_signer(receipt.data, signature, signers, name=receipt.path.name, namespace=RECEIPT_NAMESPACE)


def _describe_runs(archives: Sequence[Archive]) -> list[JsonObject]:
    return [
        {
            "digest": archive_digest(archive),
            "name": archive.name,
            "id": str(archive.run["id"]),
            "created": str(archive.run["created"]),
        }
        for archive in in_order(archives)
    ]


def _without_words(document: Any) -> Any:
    if isinstance(document, Mapping):
        return {key: _without_words(value) for key, value in document.items() if key not in _WORDING}
    return [_without_words(item) for item in document] if isinstance(document, list) else document


def _find_contradictions(expected: Any, found: Any, path: str) -> Iterable[str]:
    """Where a receipt contradicts its archives, one sentence each."""
    if isinstance(expected, Mapping):
        for key, value in expected.items():
            inner = found.get(key) if isinstance(found, Mapping) else None
            yield from _find_contradictions(value, inner, f"{path}.{key}" if path else key)
    elif isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            yield f'"{path}" does not have the entries that follow from the archives'
            return
        for index, pair in enumerate(zip(expected, found, strict=True)):
            yield from _find_contradictions(*pair, f"{path}[{index}]")
    elif not _agree(expected, found):
        yield f'"{path}" is {brief(found)}, but the archives give {brief(expected)}'


def _agree(expected: Any, found: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, int | float) and not isinstance(found, bool):
        return math.isclose(expected, found, rel_tol=_FLOAT_TOLERANCE, abs_tol=1e-15)
    return type(expected) is type(found) and bool(expected == found)
