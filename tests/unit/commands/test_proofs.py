"""`mlbench verify`: which of integrity, derivation and origin are proven, in words, as a document and as exit code."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import api
from mlbench_cli.commands import verify as module
from mlbench_cli.commands.verify import CheckedArchive, CheckedReceipt, _document, _show, _show_receipt
from mlbench_cli.console import Format
from mlbench_cli.results import receipts
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.sign import OriginError, Signer
from mlbench_cli.results.archive.verify import Problem, Verification
from mlbench_cli.results.receipts import Receipt, ReceiptCheck

Captured = pytest.CaptureFixture[str]
FINE = Verification(())
CHANGED = Verification((Problem("changed", "result.json", "it was changed"),))
INCONSISTENT = Verification((Problem("inconsistent", "result.json", "it does not follow"),))
MIXED = Verification((*INCONSISTENT.problems, Problem("schema", "x", "y"), *CHANGED.problems))
UNKNOWN = Verification((), ("The log is missing.",), ("A note.",))
SIGNER = Signer("eva@example.org", "ED25519", "SHA256:abc")
UNSIGNED = OriginError("It is not signed.", hint="mlbench sign", details={"problem": "unsigned"})


@pytest.mark.parametrize(
    ("checked", "signer", "error", "proven", "ok"),
    [
        (FINE, None, None, ["integrity", "derivation"], True),
        (FINE, SIGNER, None, ["integrity", "derivation", "origin"], True),
        (FINE, None, UNSIGNED, ["integrity", "derivation"], False),
        (CHANGED, None, None, [], False),
        (INCONSISTENT, None, None, ["integrity"], False),
        (MIXED, None, None, [], False),
        (UNKNOWN, SIGNER, None, ["integrity", "origin"], False),
    ],
)
def test_what_is_proven(
    checked: Verification, signer: Signer | None, error: OriginError | None, proven: list[str], ok: bool
) -> None:
    found = CheckedArchive(Path("a.zip"), checked, signer, error)
    assert (found.proven, found.ok) == (proven, ok)


def test_the_document_of_an_archive() -> None:
    assert _document(CheckedArchive(Path("a.zip"), UNKNOWN, SIGNER)) == {
        "archive": "a.zip",
        "ok": False,
        "proven": ["integrity", "origin"],
        "problems": [],
        "not_derived": ["The log is missing."],
        "notes": ["A note."],
        "signer": {"principal": "eva@example.org", "key_type": "ED25519", "fingerprint": "SHA256:abc"},
        "origin_problem": None,
    }
    found = _document(CheckedArchive(Path("a.zip"), CHANGED, None, UNSIGNED))
    assert found["problems"] == [{"code": "changed", "file": "result.json", "message": "it was changed"}]
    assert (found["signer"], found["origin_problem"]) == (None, "unsigned")


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (CheckedArchive(Path("a"), FINE), ["a: ok (integrity, derivation)"]),
        (
            CheckedArchive(Path("a"), FINE, SIGNER),
            ["a: ok (integrity, derivation, origin: eva@example.org, ED25519 SHA256:abc)"],
        ),
        (
            CheckedArchive(Path("a"), UNKNOWN),
            ["a: not everything follows from the evidence (integrity)", "  The log is missing.", "  A note."],
        ),
        (
            CheckedArchive(Path("a"), FINE, None, UNSIGNED),
            ["a: origin not proven (integrity, derivation)", "  It is not signed.", "  Next: mlbench sign"],
        ),
        (CheckedArchive(Path("a"), CHANGED), ["a: 1 problem", f"  {CHANGED.problems[0]}"]),
        (
            CheckedArchive(Path("a"), INCONSISTENT),
            ["a: 1 problem (integrity)", f"  {INCONSISTENT.problems[0]}"],
        ),
        (CheckedArchive(Path("a"), MIXED), ["a: 3 problems", *(f"  {problem}" for problem in MIXED.problems)]),
    ],
)
def test_an_archive_in_words(capsys: Captured, found: CheckedArchive, lines: list[str]) -> None:
    _show(found)
    assert capsys.readouterr().out.splitlines() == lines


# --- the command ------------------------------------------------------------------------------------------------------


class Archives:
    """Archives and receipts by name, as they would be checked; what is asked of signatures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **found: Verification) -> None:
        self.origins: dict[str, Any] = {}
        self.receipts: dict[str, ReceiptCheck] = {}
        self.opened: list[list[str]] = []
        monkeypatch.setattr(api, "check_archive", lambda path: found[path.name])
        monkeypatch.setattr(api, "open_archive", lambda path: nullcontext(path.name))
        monkeypatch.setattr(Archive, "open", lambda path: nullcontext(path.name))
        monkeypatch.setattr(module, "check_origin", lambda archive, signers: self._sign(archive))
        monkeypatch.setattr(module, "require_signers", lambda signers: None)
        monkeypatch.setattr(receipts, "is_receipt", lambda path: path.suffix == ".json")
        monkeypatch.setattr(receipts, "read_receipt", lambda path: receipt(path))
        monkeypatch.setattr(receipts, "check_receipt", self._check)
        monkeypatch.setattr(receipts, "check_receipt_origin", lambda paper, signers: self._sign(paper.path.name))

    def _sign(self, name: str) -> Signer:
        found = self.origins.get(name, SIGNER)
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Signer)
        return found

    def _check(self, paper: Receipt, opened: list[str]) -> ReceiptCheck:
        self.opened.append(opened)
        return self.receipts[paper.path.name]


def receipt(path: Path) -> Receipt:
    return Receipt(path, b"", {"verdict": "not_the_same"})


def verify(*names: str, signers: Path | None = None, output: Format = Format.text) -> int:
    return module.verify([Path(name) for name in names], signers, output)


@pytest.mark.parametrize(
    ("checked", "signers", "origin", "code"),
    [
        (FINE, None, SIGNER, 0),
        (CHANGED, None, SIGNER, 2),
        (UNKNOWN, None, SIGNER, 9),
        (FINE, Path("s"), SIGNER, 0),
        (FINE, Path("s"), UNSIGNED, 3),
        (UNKNOWN, Path("s"), UNSIGNED, 3),
        (CHANGED, Path("s"), UNSIGNED, 2),  # a signature of what is damaged proves nothing
    ],
)
def test_the_exit_code_of_archives(
    monkeypatch: pytest.MonkeyPatch, checked: Verification, signers: Path | None, origin: Any, code: int
) -> None:
    archives = Archives(monkeypatch, a=FINE, b=checked)
    archives.origins["b"] = origin
    assert verify("a", "b", signers=signers) == code


@pytest.mark.parametrize(
    ("check", "origin", "code"),
    [
        (ReceiptCheck(()), SIGNER, 0),
        (ReceiptCheck((), ("d" * 64,)), SIGNER, 9),
        (ReceiptCheck(("wrong",)), SIGNER, 2),
        (ReceiptCheck(()), UNSIGNED, 3),
        (ReceiptCheck(("wrong",)), UNSIGNED, 2),
    ],
)
def test_the_exit_code_of_a_receipt(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, check: ReceiptCheck, origin: Any, code: int
) -> None:
    archives = Archives(monkeypatch, a=FINE, b=UNKNOWN)
    archives.receipts["r.json"], archives.origins["r.json"] = check, origin
    assert verify("r.json", "a", signers=Path("s"), output=Format.json) == code
    document = json.loads(capsys.readouterr().out)
    assert [each["archive"] for each in document["archives"]] == ["a"]
    (found,) = document["receipts"]
    is_signed = origin is SIGNER and not check.problems
    assert found == {
        "receipt": "r.json",
        "verdict": "not_the_same",
        "ok": code == 0,
        "proven": [*(["derivation"] if check.is_derived else []), *(["origin"] if is_signed else [])],
        "problems": list(check.problems),
        "missing": list(check.missing),
        "signer": SIGNER.to_dict() if is_signed else None,
        "origin_problem": "unsigned" if code == 3 else None,
    }
    assert archives.opened == [["a"]]


def test_a_receipt_is_derived_from_archives_that_verify_only(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    archives = Archives(monkeypatch, a=FINE, b=UNKNOWN, c=CHANGED)
    archives.receipts["r.json"] = ReceiptCheck(())
    assert verify("a", "b", "c", "r.json") == 2
    assert archives.opened == [["a"]]
    capsys.readouterr()
    verify("a", output=Format.json)
    assert "receipts" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (CheckedReceipt(receipt(Path("r")), ReceiptCheck(())), ["r: ok (derivation); it says: not the same"]),
        (
            CheckedReceipt(receipt(Path("r")), ReceiptCheck(()), SIGNER),
            ["r: ok (derivation, origin: eva@example.org, ED25519 SHA256:abc); it says: not the same"],
        ),
        (
            CheckedReceipt(receipt(Path("r")), ReceiptCheck(("It is wrong.",))),
            ["r: it does not follow from its archives; it says: not the same", "  It is wrong."],
        ),
        (
            CheckedReceipt(receipt(Path("r")), ReceiptCheck(()), None, UNSIGNED),
            [
                "r: origin not proven (derivation); it says: not the same",
                "  It is not signed.",
                "  Next: mlbench sign",
            ],
        ),
        (
            CheckedReceipt(receipt(Path("r")), ReceiptCheck((), tuple(letter * 64 for letter in "abcd"))),
            [
                "r: not derived; it says: not the same",
                "  4 of the archives that it names were not passed: aaaaaaaaaaaa, bbbbbbbbbbbb, cccccccccccc",
                "  Next: mlbench verify r ARCHIVE...",
            ],
        ),
    ],
)
def test_a_receipt_in_words(capsys: Captured, found: CheckedReceipt, lines: list[str]) -> None:
    _show_receipt(found)
    assert capsys.readouterr().out.splitlines() == lines
