"""Signatures: their format, what ssh-keygen is asked, and which error its answer becomes.

The answers are those of OpenSSH 9; tests/contract/commands/test_sign.py has the program itself answer.
"""

import base64
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CredentialError, DeadlineError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.results.archive import sign
from mlbench_cli.results.archive.pack import pack
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.sign import (
    OriginError,
    Signer,
    check_origin,
    find_signer,
    make_signature,
    refuse_unsigned,
    require_key,
    require_signers,
)
from mlbench_cli.results.archive.signature import NAMESPACE, RECEIPT_NAMESPACE, find_signature_problem
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.util import files
from tests.unit.results.runs import sealed_run

# --- the format: https://github.com/openssh/openssh-portable/blob/master/PROTOCOL.sshsig ------------------------------


def pack_string(data: bytes) -> bytes:
    """A string of the SSH protocol: its length in 4 bytes, and its bytes (RFC 4251, section 5)."""
    return len(data).to_bytes(4, "big") + data


def make_blob(namespace: str = NAMESPACE, magic: bytes = b"SSHSIG", version: int = 1) -> bytes:
    key = pack_string(b"ssh-ed25519") + pack_string(bytes(32))
    signature = pack_string(b"ssh-ed25519") + pack_string(bytes(64))
    parts = (key, namespace.encode(), b"", b"sha512", signature)
    return magic + version.to_bytes(4, "big") + b"".join(map(pack_string, parts))


def armor(blob: bytes) -> bytes:
    text = base64.b64encode(blob).decode()
    lines = [text[start : start + 70] for start in range(0, len(text), 70)]
    return "\n".join(["-----BEGIN SSH SIGNATURE-----", *lines, "-----END SSH SIGNATURE-----", ""]).encode()


SIGNATURE = armor(make_blob())


@pytest.mark.parametrize("namespace", [NAMESPACE, RECEIPT_NAMESPACE, "git"])
def test_a_signature_is_valid_for_its_own_namespace(namespace: str) -> None:
    assert find_signature_problem(armor(make_blob(namespace)), namespace) is None


@pytest.mark.parametrize(
    ("signed_for", "wanted"),
    [
        ("git", NAMESPACE),
        (RECEIPT_NAMESPACE, NAMESPACE),
        (NAMESPACE, RECEIPT_NAMESPACE),
        (f"{NAMESPACE}s", NAMESPACE),  # a longer name that begins with the wanted one
        (NAMESPACE[:-1], NAMESPACE),
        (f"my-{NAMESPACE}", NAMESPACE),
    ],
)
def test_a_signature_for_another_namespace_names_the_wanted_one(signed_for: str, wanted: str) -> None:
    problem = find_signature_problem(armor(make_blob(signed_for)), wanted)
    assert problem == f"it is a signature for another namespace than {wanted}"


def test_archives_and_receipts_are_signed_for_different_namespaces() -> None:
    assert find_signature_problem(SIGNATURE) is None
    assert find_signature_problem(armor(make_blob(RECEIPT_NAMESPACE))) is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        SIGNATURE[:-1],  # no newline at the end
        SIGNATURE + b"\n",
        b"\n" + SIGNATURE,
        b"x" + SIGNATURE,
        SIGNATURE * 2,
        SIGNATURE.replace(b"\n", b"\r\n"),
        SIGNATURE.replace(b"SSH SIGNATURE", b"PGP SIGNATURE"),
        SIGNATURE.replace(b"-----\n", b"-----\n!", 1),
        b"-----BEGIN SSH SIGNATURE-----\n\n-----END SSH SIGNATURE-----\n",
        b"-----BEGIN SSH SIGNATURE-----\nA\n-----END SSH SIGNATURE-----\n",  # one character is no base64
        armor(b""),
        armor(make_blob(magic=b"SSHSIH")),
        armor(make_blob(version=2)),
        armor(b"x" + make_blob()),
        make_blob(),
    ],
)
def test_other_bytes_are_not_a_signature(data: bytes) -> None:
    assert find_signature_problem(data) == "it is not an OpenSSH signature"


# --- ssh-keygen -------------------------------------------------------------------------------------------------------


class SshKeygen:
    """Answers as ssh-keygen would, in this order, and records what it was asked."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[tuple[list[str], dict[str, Any]]] = []
        self.inputs: list[bytes | None] = []
        self.files: list[dict[str, bytes]] = []

    def __call__(self, words: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        assert options["check"] is False  # its exit code is explained
        self.asked.append((list(words), options))
        stdin = options["stdin"]
        self.inputs.append(stdin.read() if hasattr(stdin, "read") else None)
        folder = next((Path(word).parent for word in words if word.endswith(("data", "data.sig"))), None)
        self.files.append({path.name: path.read_bytes() for path in folder.iterdir()} if folder else {})
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, bytes):  # the signature that it writes beside the file
            Path(f"{words[-1]}.sig").write_bytes(answer)
            answer = ""
        out, error, code = answer if isinstance(answer, tuple) else (answer, "", 0)
        return subprocess.CompletedProcess(list(words), code, out, error)


@pytest.fixture
def ssh(monkeypatch: pytest.MonkeyPatch) -> SshKeygen:
    fake = SshKeygen()
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    return fake


@pytest.fixture
def signers(tmp_path: Path) -> Path:
    path = tmp_path / "signers"
    path.write_text("me@example.org ssh-ed25519 AAAA\n")
    return path


def test_a_signature_is_made_with_the_key_for_the_namespace(ssh: SshKeygen, tmp_path: Path) -> None:
    ssh.answers = [b"signature"]
    assert make_signature(b"sums", tmp_path / "key", "mlbench-receipt") == b"signature"
    ((words, options),) = ssh.asked
    assert words[:-1] == [
        *("/bin/ssh-keygen", "-Y", "sign"),
        *("-f", str(tmp_path / "key"), "-n", "mlbench-receipt"),
    ]
    assert ssh.files == [{"data": b"sums"}]
    assert options["env"]["LC_ALL"] == "C"  # errors are recognized by their English words
    assert options["stdin"] is subprocess.DEVNULL
    assert (options["capture_output"], options["text"], options["errors"]) == (True, True, "replace")
    assert not Path(words[-1]).parent.exists()


def test_archives_are_signed_for_their_namespace_unless_another_is_given(ssh: SshKeygen, tmp_path: Path) -> None:
    ssh.answers = [b"signature"]
    make_signature(b"sums", tmp_path / "key")
    assert ssh.asked[0][0][5:7] == ["-n", NAMESPACE]


@pytest.mark.parametrize(("is_terminal", "stdin"), [(True, None), (False, subprocess.DEVNULL)])
def test_only_a_terminal_is_asked_for_a_passphrase(
    ssh: SshKeygen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_terminal: bool, stdin: int | None
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: is_terminal))
    ssh.answers = [b"signature"]
    make_signature(b"sums", tmp_path / "key")
    assert ssh.asked[0][1]["stdin"] is stdin


def test_without_standard_input_nobody_is_asked(
    ssh: SshKeygen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    ssh.answers = [b"signature"]
    make_signature(b"sums", tmp_path / "key")
    assert ssh.asked[0][1]["stdin"] is subprocess.DEVNULL


LOCKED = 'Enter passphrase: Load key "key": incorrect passphrase supplied to decrypt private key\n'


@pytest.mark.parametrize(
    ("stderr", "kind", "message", "hint"),
    [
        (
            LOCKED,
            CredentialError,
            "The key KEY could not be unlocked: wrong passphrase, or no terminal to enter it. ssh-keygen says: "
            '"Load key "key": incorrect passphrase supplied to decrypt private key".',
            "ssh-add KEY, then run the command again",
        ),
        (
            "Permissions 0644 for 'key' are too open.\nIt is required that your private key files are NOT accessible\n",
            CredentialError,
            "Other users can read the key KEY, so ssh-keygen rejects it.",
            "chmod 600 KEY",
        ),
        (
            'No private key found for public key "key.pub"\n',
            CredentialError,
            "KEY is a public key, and no agent has the private one. ssh-keygen says: "
            '"No private key found for public key "key.pub"".',
            "Give the file of the private key, or add it to the agent: ssh-add FILE",
        ),
        (
            "Couldn't get agent socket: No such file or directory\n",
            CredentialError,
            "KEY is a public key, and no agent has the private one. ssh-keygen says: "
            '"Couldn\'t get agent socket: No such file or directory".',
            "Give the file of the private key, or add it to the agent: ssh-add FILE",
        ),
        (
            'first\nLoad key "key": error in libcrypto\n\n',
            UsageError,
            'The key KEY cannot sign. ssh-keygen says: "Load key "key": error in libcrypto".',
            "It must be an OpenSSH private key (ed25519, ecdsa, rsa), e.g. from: ssh-keygen -t ed25519 -f FILE",
        ),
        (
            "",
            UsageError,
            'The key KEY cannot sign. ssh-keygen says: "nothing".',
            "It must be an OpenSSH private key (ed25519, ecdsa, rsa), e.g. from: ssh-keygen -t ed25519 -f FILE",
        ),
    ],
    ids=("passphrase", "too open", "public key", "no agent", "libcrypto", "silent"),
)
def test_a_key_that_cannot_sign_is_explained(
    ssh: SshKeygen, tmp_path: Path, stderr: str, kind: type[MlbenchError], message: str, hint: str
) -> None:
    key = tmp_path / "key"
    ssh.answers = [("", stderr, 255)]
    with pytest.raises(MlbenchError) as caught:
        make_signature(b"sums", key)
    assert type(caught.value) is kind
    assert caught.value.message == message.replace("KEY", str(key))
    assert caught.value.hint == hint.replace("KEY", str(key))


def test_a_long_message_is_quoted_in_part(ssh: SshKeygen, tmp_path: Path) -> None:
    ssh.answers = [("", "y" * 301, 1)]
    with pytest.raises(UsageError) as caught:
        make_signature(b"sums", tmp_path / "key")
    assert f'"{"y" * 300}"' in caught.value.message


@pytest.mark.parametrize("answer", [("", "", 0), ("", "", 1)])
def test_no_signature_is_an_error_whatever_the_exit_code(
    ssh: SshKeygen, tmp_path: Path, answer: tuple[str, str, int]
) -> None:
    ssh.answers = [answer]
    with pytest.raises(UsageError, match="cannot sign"):
        make_signature(b"sums", tmp_path / "key")


def test_a_signature_of_a_failed_command_is_not_used(
    ssh: SshKeygen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(words: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        Path(f"{words[-1]}.sig").write_bytes(b"half")
        return subprocess.CompletedProcess(list(words), 1, "", "disk full")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(UsageError, match="disk full"):
        make_signature(b"sums", tmp_path / "key")


def test_a_program_that_does_not_answer_is_given_up_with_its_time(ssh: SshKeygen, tmp_path: Path) -> None:
    ssh.answers = [subprocess.TimeoutExpired("ssh-keygen", 1), subprocess.TimeoutExpired("ssh-keygen", 1)]
    with pytest.raises(DeadlineError) as signing:
        make_signature(b"sums", tmp_path / "key")
    with pytest.raises(DeadlineError) as checking:
        find_signer(b"sums", SIGNATURE, tmp_path)
    seconds = [options["timeout"] for _, options in ssh.asked]
    assert [error.value.message for error in (signing, checking)] == [
        f"ssh-keygen has not answered within {each:g} s." for each in seconds
    ]
    assert seconds[0] > 60 >= seconds[1]  # a person types a passphrase; nobody is asked for a check


def test_without_ssh_keygen_the_message_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, signers: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for check in (lambda: require_signers(signers), lambda: make_signature(b"sums", tmp_path / "key")):
        with pytest.raises(UsageError, match="ssh-keygen, which is not installed") as caught:
            check()
        assert "apt install openssh-client" in str(caught.value.hint)


def test_a_missing_key_or_file_of_signers_is_named(ssh: SshKeygen, tmp_path: Path, signers: Path) -> None:
    with pytest.raises(NotFoundError, match=r"There is no key .*nothing") as no_key:
        require_key(tmp_path / "nothing")
    assert no_key.value.hint == f"ssh-keygen -t ed25519 -f {tmp_path / 'nothing'}"
    (tmp_path / "a folder").mkdir()
    with pytest.raises(NotFoundError, match="a folder"):
        require_key(tmp_path / "a folder")
    with pytest.raises(NotFoundError, match=r"The signers file .*nothing does not exist"):
        require_signers(tmp_path / "nothing")
    require_signers(signers)
    require_key(signers)


# --- who signed -------------------------------------------------------------------------------------------------------

GOOD = 'Good "mlbench-archive" signature for me@example.org with ED25519 key SHA256:abc/+1\n'


def test_the_signer_is_the_principal_for_whom_the_signature_is_good(ssh: SshKeygen, signers: Path) -> None:
    ssh.answers = ["me@example.org\n", GOOD]
    found = find_signer(b"sums", SIGNATURE, signers)
    assert found == Signer("me@example.org", "ED25519", "SHA256:abc/+1")
    assert found.to_dict() == {
        "principal": "me@example.org",
        "key_type": "ED25519",
        "fingerprint": "SHA256:abc/+1",
    }
    (asked, _), (verified, options) = ssh.asked
    folder = Path(asked[-1]).parent
    assert asked == ["/bin/ssh-keygen", "-Y", "find-principals", "-f", str(signers), "-s", str(folder / "data.sig")]
    assert verified == [
        *("/bin/ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "me@example.org"),
        *("-n", NAMESPACE, "-s", str(folder / "data.sig")),
    ]
    assert ssh.inputs == [None, b"sums"]
    assert ssh.files[1] == {"data": b"sums", "data.sig": SIGNATURE}
    assert options["env"]["LC_ALL"] == "C"


def test_a_terminal_is_not_read_in_place_of_the_signed_data(
    ssh: SshKeygen, monkeypatch: pytest.MonkeyPatch, signers: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    ssh.answers = ["me@example.org", GOOD]
    find_signer(b"sums", SIGNATURE, signers)
    assert ssh.asked[0][1]["stdin"] is subprocess.DEVNULL
    assert ssh.inputs[1] == b"sums"


def test_every_principal_of_the_key_is_tried_in_order(ssh: SshKeygen, signers: Path) -> None:
    ssh.answers = ["one\n\n two \nthree\n", ("", "has expired", 255), GOOD]
    assert find_signer(b"sums", SIGNATURE, signers).principal == "two"
    assert [words[words.index("-I") + 1] for words, _ in ssh.asked[1:]] == ["one", "two"]


def test_a_good_exit_code_needs_good_words_and_the_reverse(ssh: SshKeygen, signers: Path) -> None:
    ssh.answers = ["one\ntwo\n", "fine", (GOOD, "", 1)]
    with pytest.raises(OriginError):
        find_signer(b"sums", SIGNATURE, signers)


@pytest.mark.parametrize(
    ("answers", "problem", "message"),
    [
        ([("", "", 1)], "unknown_signer", "SIGNERS does not list the signing key"),
        ([("", "No principal matched.\n", 1)], "unknown_signer", "SIGNERS does not list the signing key"),
        (
            ["me\n", ("Could not verify signature.\n", "Signature verification failed: incorrect signature\n", 255)],
            "tampered",
            "SHA256SUMS is not what was signed",
        ),
        (
            ["me\n", ("", "SIGNERS:1: key has expired: certificate has expired at 2020\nmore\n", 255)],
            "expired",
            "SIGNERS does not allow the signer's key at this time: certificate has expired at 2020",
        ),
        (
            ["me\n", ("", "first\nSIGNERS:1: key is not yet valid: verify time 2020 < valid-after 2030\n", 255)],
            "expired",
            "SIGNERS does not allow the signer's key at this time: verify time 2020 < valid-after 2030",
        ),
        (
            ["me\n", ("", 'SIGNERS:1: key is not permitted for use in signature namespace "mlbench-archive"\n', 255)],
            "namespace",
            "SIGNERS allows the signer only other namespaces",
        ),
        (
            ["me\n", ("incorrect signature", "", 255)],  # said on standard output
            "tampered",
            "SHA256SUMS is not what was signed",
        ),
    ],
)
def test_an_origin_that_is_not_proven_has_a_reason(
    ssh: SshKeygen, signers: Path, answers: list[Any], problem: str, message: str
) -> None:
    ssh.answers = answers
    with pytest.raises(OriginError) as caught:
        find_signer(b"sums", SIGNATURE, signers)
    expected = message.replace("SIGNERS", str(signers)) if "SIGNERS:" not in message else message
    assert caught.value.message == f"The origin is not proven: {expected}."
    assert caught.value.details == {"problem": problem}
    assert (caught.value.code, caught.value.exit_code) == ("origin_not_proven", 3)
    assert caught.value.hint


def test_a_line_without_the_namespace_is_shown_how_to_allow_it(ssh: SshKeygen, signers: Path) -> None:
    ssh.answers = ["me\n", ("", "key is not permitted for use in signature namespace", 255)]
    with pytest.raises(OriginError) as caught:
        find_signer(b"x", armor(make_blob(RECEIPT_NAMESPACE)), signers, name="receipt", namespace=RECEIPT_NAMESPACE)
    assert str(caught.value.hint).endswith(f'its line must say: namespaces="git,{RECEIPT_NAMESPACE}"')
    assert ssh.asked[1][0][-3] == RECEIPT_NAMESPACE


@pytest.mark.parametrize(
    ("answer", "quoted"),
    [
        ("signers:3: missing key\n", "3: missing key"),
        ("signers:12: invalid options: no end quote\nmore", "12: invalid options: no end quote"),
        ("signers:1: bad options: x\n", "1: bad options: x"),
        ("signers:1: unsupported options: x\n", "1: unsupported options: x"),
        ("signers:2: unknown key options\n", "2: unknown key options"),
    ],
)
def test_a_line_that_ssh_keygen_cannot_read_is_quoted(ssh: SshKeygen, signers: Path, answer: str, quoted: str) -> None:
    ssh.answers = [("", answer, 255)]
    with pytest.raises(UsageError) as caught:
        find_signer(b"sums", SIGNATURE, signers)
    assert caught.value.message == f'{signers} is not a signers file. ssh-keygen says: "{quoted}".'
    assert "Write one line per signer" in str(caught.value.hint)


def test_malformed_signatures_are_refused_before_ssh_keygen_sees_them(ssh: SshKeygen, signers: Path) -> None:
    with pytest.raises(OriginError, match=r"SHA256SUMS\.sig: it is not an OpenSSH signature") as caught:
        find_signer(b"sums", b"x", signers)
    assert caught.value.details == {"problem": "malformed"}
    with pytest.raises(OriginError, match=r"receipt\.sig: it is a signature for another namespace"):
        find_signer(b"sums", SIGNATURE, signers, name="receipt", namespace=RECEIPT_NAMESPACE)
    assert ssh.asked == []


# --- archives ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text("private")
    return tmp_path / "key"


@pytest.fixture(params=["folder", "zip"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = sealed_run(tmp_path / "a")
    if request.param == "folder":
        return folder
    pack(folder, tmp_path / "a.zip")
    return tmp_path / "a.zip"


def read(path: Path, name: str) -> bytes:
    with Archive.open(path) as archive:
        return archive.read(name)


def test_the_list_of_digests_is_signed_and_the_signature_stored_beside_it(
    ssh: SshKeygen, archive: Path, key: Path, signers: Path
) -> None:
    with Archive.open(archive) as opened, pytest.raises(OriginError, match="it has no signature") as caught:
        check_origin(opened, signers)
    assert caught.value.hint == refuse_unsigned(archive).hint == f"mlbench sign {archive} --key FILE"
    assert caught.value.details == {"problem": "unsigned"}
    ssh.answers = [SIGNATURE]
    sign.sign(archive, key)
    sums = read(archive, "SHA256SUMS")
    assert ssh.files == [{"data": sums}]
    assert read(archive, "SHA256SUMS.sig") == SIGNATURE
    assert verify(archive).ok
    ssh.answers = ["me\n", GOOD]
    with Archive.open(archive) as opened:
        assert check_origin(opened, signers).principal == "me"
    assert ssh.inputs[-1] == sums


def test_a_signature_is_replaced_only_on_request(ssh: SshKeygen, archive: Path, key: Path) -> None:
    ssh.answers = [SIGNATURE]
    sign.sign(archive, key)
    with pytest.raises(UsageError, match="is already signed") as caught:
        sign.sign(archive, key)
    assert "--force" in str(caught.value.hint)
    other = armor(make_blob() + b"x")
    ssh.answers = [other]
    sign.sign(archive, key, force=True)
    assert read(archive, "SHA256SUMS.sig") == other


@pytest.mark.parametrize("prepare", [lambda path: (path / "run.json").unlink(), lambda path: None])
def test_nothing_is_signed_with_a_missing_key_or_in_a_damaged_archive(
    ssh: SshKeygen, tmp_path: Path, key: Path, prepare: Callable[[Path], None]
) -> None:
    folder = sealed_run(tmp_path / "a")
    prepare(folder)
    is_damaged = not (folder / "run.json").exists()
    with pytest.raises(MlbenchError, match=r"run\.json: it is missing" if is_damaged else "There is no key"):
        sign.sign(folder, key if is_damaged else tmp_path / "other")
    assert ssh.asked == []
    assert not (folder / "SHA256SUMS.sig").exists()


def test_an_origin_is_not_checked_without_a_file_of_signers(ssh: SshKeygen, tmp_path: Path) -> None:
    with Archive.open(sealed_run(tmp_path / "a")) as archive, pytest.raises(NotFoundError, match="The signers file"):
        check_origin(archive, tmp_path / "nothing")


def test_a_signature_that_cannot_be_stored_is_an_error_with_the_file(
    ssh: SshKeygen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: Path
) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "write_atomically", fail)
    ssh.answers = [SIGNATURE]
    folder = sealed_run(tmp_path / "a", name="demo-2")
    with pytest.raises(MlbenchError) as caught:
        sign.sign(folder, key)
    assert caught.value.message == f"{folder / 'SHA256SUMS.sig'} cannot be written: No space left on device."
