"""Single documents of a sealed folder: read only as they were sealed."""

import json
from base64 import b64encode
from pathlib import Path

import pytest

from mlbench_cli.errors import DamagedArchive
from mlbench_cli.results.archive import sealed
from mlbench_cli.results.archive.layout import write_sums
from mlbench_cli.results.archive.sealed import read_documents
from mlbench_cli.results.archive.signature import find_signature_problem

FINDINGS = {"schema_version": 1, "findings": []}
ENVIRONMENT = {"schema_version": 1, "ranks": {"0": {"host": "a"}}}


def make_folder(folder: Path, **documents: object) -> Path:
    for name, document in ({"findings": FINDINGS, "environment": ENVIRONMENT} | documents).items():
        (folder / f"{name}.json").write_text(document if isinstance(document, str) else json.dumps(document))
    write_sums(folder)
    return folder


def read_damage(folder: Path, name: str) -> tuple[str, str, str]:
    with pytest.raises(DamagedArchive) as caught:
        read_documents(folder, [name])
    return caught.value.file, caught.value.problem, caught.value.plain


def test_documents_are_read_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    make_folder(tmp_path)
    assert read_documents(tmp_path, ["findings.json", "environment.json"]) == [FINDINGS, ENVIRONMENT]
    assert read_documents(tmp_path, ["environment.json", "findings.json"]) == [ENVIRONMENT, FINDINGS]
    assert read_documents(tmp_path, []) == []


def test_a_document_that_was_changed_after_sealing_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "findings.json").write_text(json.dumps(FINDINGS) + " ")
    assert read_damage(tmp_path, "findings.json") == (
        *("findings.json", "changed"),
        "it is not what was sealed: its SHA-256 differs",
    )


def test_a_document_that_was_not_sealed_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "network.json").write_text("{}")
    file, problem, text = read_damage(tmp_path, "network.json")
    assert (file, problem, text) == ("network.json", "extra", "it is not listed in SHA256SUMS")


def test_a_name_in_the_list_is_compared_as_a_whole(tmp_path: Path) -> None:
    """The dot of "findings.json" is a dot, and a longer name is another file."""
    make_folder(tmp_path)
    sums = (tmp_path / "SHA256SUMS").read_text()
    for other in ("findingsxjson", "findings.json.old", "old-findings.json"):
        (tmp_path / "SHA256SUMS").write_text(sums.replace("findings.json", other))
        assert read_damage(tmp_path, "findings.json")[1] == "extra"


def test_a_document_or_list_that_is_missing_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path)
    assert read_damage(tmp_path, "run.json") == ("run.json", "missing", "it is missing")
    (tmp_path / "SHA256SUMS").unlink()
    assert read_damage(tmp_path, "findings.json") == ("SHA256SUMS", "missing", "it is missing")


def test_a_folder_in_place_of_a_document_cannot_be_read(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "run.json").mkdir()
    assert read_damage(tmp_path, "run.json") == ("run.json", "unreadable", "it cannot be read: Is a directory")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", ""),
        ({"findings": []}, ""),
        ({"schema_version": 1}, '"findings" is missing'),
        ({"schema_version": 1, "findings": [{"code": "x"}]}, '"findings[0].summary" is missing'),
    ],
)
def test_a_document_that_violates_its_schema_is_refused(tmp_path: Path, document: object, message: str) -> None:
    file, problem, text = read_damage(make_folder(tmp_path, findings=document), "findings.json")
    assert (file, problem) == ("findings.json", "schema")
    assert message in text


def test_a_document_may_be_as_long_as_the_limit_but_not_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path)
    size = (tmp_path / "findings.json").stat().st_size
    monkeypatch.setattr(sealed, "MAX_DOCUMENT_BYTES", size)
    assert read_documents(tmp_path, ["findings.json"]) == [FINDINGS]
    monkeypatch.setattr(sealed, "MAX_DOCUMENT_BYTES", size - 1)
    assert read_damage(tmp_path, "findings.json") == (
        *("findings.json", "too_large"),
        f"it has more than {size - 1} bytes",
    )


SIGNED = """-----BEGIN SSH SIGNATURE-----
{}
-----END SSH SIGNATURE-----
"""


@pytest.mark.parametrize(
    ("blob", "problem"),
    [
        # PROTOCOL.sshsig: the magic preamble, version 1, then texts with their lengths in four bytes, big-endian.
        (b"SSHSIG\0\0\0\1\0\0\0\4key!\0\0\0\x0fmlbench-archive", None),
        (b"SSHSIG\0\0\0\2\0\0\0\x0fmlbench-archive", "it is not an OpenSSH signature"),
        (b"SSHSIX\0\0\0\1\0\0\0\x0fmlbench-archive", "it is not an OpenSSH signature"),
        (
            b"SSHSIG\0\0\0\1\0\0\0\x0emlbench-archive",
            "it is a signature for another namespace than mlbench-archive",
        ),
        (b"SSHSIG\0\0\0\1\0\0\0\4file", "it is a signature for another namespace than mlbench-archive"),
    ],
)
def test_a_signature_is_one_of_openssh_for_the_namespace_of_archives(blob: bytes, problem: str | None) -> None:
    text = SIGNED.format(b64encode(blob).decode())
    assert find_signature_problem(text.encode()) == problem
    wrapped = SIGNED.format("\n".join(b64encode(blob).decode()[at : at + 8] for at in range(0, 200, 8)).strip("\n"))
    assert find_signature_problem(wrapped.encode()) == problem


@pytest.mark.parametrize("data", [b"", b"x", SIGNED.format("AAA").encode(), SIGNED.format("U1NI").encode() + b"\n"])
def test_anything_else_is_not_a_signature(data: bytes) -> None:
    assert find_signature_problem(data) == "it is not an OpenSSH signature"
