"""Signatures of archives, which prove their origin: OpenSSH signatures, made and checked by ssh-keygen.

SHA256SUMS is signed, and thereby every file of the archive. The signature is SHA256SUMS.sig, next to it in the folder
or zip, and the only other file that SHA256SUMS does not list. Trusted signers are in a file like git's
gpg.ssh.allowedSignersFile (ssh-keygen(1), ALLOWED SIGNERS); if a line lists namespaces, they must include NAMESPACE.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from msgspec import Struct
from msgspec.structs import asdict

from mlbench_cli.errors import (
    CredentialError,
    DeadlineError,
    MlbenchError,
    NotFoundError,
    UsageError,
    naming_file_on_os_error,
)
from mlbench_cli.results.archive.files import MAX_SUMS_BYTES, Archive, write_archive
from mlbench_cli.results.archive.verify import (
    MAX_SIGNATURE_BYTES,
    NAMESPACE,
    find_signature_problem,
    open_verified,
)
from mlbench_cli.storage import run_folder
from mlbench_cli.util import files

SIGN_SECONDS = 120.0  # for a person to type a passphrase or touch a hardware key
CHECK_SECONDS = 30.0

_GOOD = re.compile(r'Good "[^"]*" signature for (.+) with (\S+) key (\S+)')
_MALFORMED_LINE = re.compile(r":(\d+: (?:missing|invalid|bad|unsupported|unknown)[^\n]*)")
_INSTALL = "Install OpenSSH's client, for example: apt install openssh-client"
_SIGNERS_HINT = 'Write one line per signer, as for git: echo "me@example.org $(cat KEY.pub)" >> FILE'


class OriginError(CredentialError):
    """The origin of an archive is not proven. `details["problem"]` says why:

    unsigned, malformed, tampered, unknown_signer, expired or namespace.
    """

    code = "origin_not_proven"


class Signer(Struct, frozen=True):
    """The signer of an archive: the principal in the signers file, and the key (type, SHA256 fingerprint)."""

    principal: str
    key_type: str
    fingerprint: str

    def to_dict(self) -> dict[str, str]:
        """Principal and key as plain values."""
        return asdict(self)


def sign(path: Path, key: Path, *, force: bool = False) -> None:
    """Sign the archive in a folder or zip with the private OpenSSH key in the file `key` (or its public key, if an
    agent has the private one). A zip is rewritten in canonical form and replaced atomically.

    Raises DamagedArchive for an archive that does not verify, UsageError if it is already signed (unless `force`) or
    the key cannot sign, CredentialError for a wrong passphrase, DeadlineError after SIGN_SECONDS.
    """
    require_key(key)
    with open_verified(path) as archive:
        if run_folder.SIGNATURE in archive.names and not force:
            raise UsageError(f"{path} is already signed.", hint="Add --force to replace the signature.")
        signature = make_signature(archive.read(run_folder.SUMS, MAX_SUMS_BYTES), key)
        if not path.is_dir():
            write_archive(archive, path, {run_folder.SIGNATURE: signature})
            return
        with naming_file_on_os_error(path, "written"):
            files.write_atomically(path / run_folder.SIGNATURE, signature)


def check_origin(archive: Archive, signers: Path) -> Signer:
    """The signer of the archive among `signers`. Does not check the files against SHA256SUMS: use `verify`, too.

    Raises OriginError if the origin is not proven, UsageError or NotFoundError if this cannot be checked.
    """
    require_signers(signers)
    if run_folder.SIGNATURE not in archive.names:
        raise refuse_unsigned(Path(archive.path))
    signature = archive.read(run_folder.SIGNATURE, MAX_SIGNATURE_BYTES)
    return find_signer(archive.read(run_folder.SUMS, MAX_SUMS_BYTES), signature, signers)


def find_signer(
    data: bytes, signature: bytes, signers: Path, *, name: str = run_folder.SUMS, namespace: str = NAMESPACE
) -> Signer:
    """The one of `signers` who made `signature` of `data`, named `name` in errors. Raises the errors of
    `check_origin`."""
    if problem := find_signature_problem(signature, namespace):
        raise _not_proven("malformed", f"{name}.sig: {problem}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data.sig").write_bytes(signature)
        (Path(folder) / "data").write_bytes(data)
        return _find_signer(Path(folder) / "data", signers, name, namespace)


def refuse_unsigned(path: Path) -> OriginError:
    """The error for an archive or receipt that has no signature."""
    return _not_proven(
        "unsigned", "it has no signature", f"Its author signs it: mlbench verify {shlex.quote(str(path))} --sign KEY"
    )


def require_key(key: Path) -> None:
    """Raises NotFoundError if the key does not exist."""
    if not key.is_file():
        raise NotFoundError(f"There is no key {key}.", hint=f"ssh-keygen -t ed25519 -f {key}")


def require_signers(signers: Path) -> None:
    """Raises NotFoundError if the signers file does not exist, UsageError if ssh-keygen is missing."""
    if not signers.is_file():
        raise NotFoundError(f"The signers file {signers} does not exist.", hint=_SIGNERS_HINT)
    _find_program()


# --- sign -------------------------------------------------------------------------------------------------------------


def make_signature(data: bytes, key: Path, namespace: str = NAMESPACE) -> bytes:
    """The signature of `data`. Raises the errors of `sign`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data"
        file.write_bytes(data)
        words = ["sign", "-f", str(key), "-n", namespace, str(file)]
        done = _ssh_keygen(words, SIGN_SECONDS, asks=True)
        signature = Path(f"{file}.sig")
        if done.returncode or not signature.is_file():
            raise _sign_error(key, done.stderr)
        return signature.read_bytes()


def _sign_error(key: Path, stderr: str) -> MlbenchError:
    """The error for ssh-keygen's message. Messages differ between versions, so they are quoted, too."""
    quoted = f'ssh-keygen says: "{_last_line(stderr)}".'
    if "passphrase" in stderr:
        return CredentialError(
            f"The key {key} could not be unlocked: wrong passphrase, or no terminal to enter it. {quoted}",
            hint=f"ssh-add {key}, then run the command again",
        )
    if "too open" in stderr:
        return CredentialError(
            f"Other users can read the key {key}, so ssh-keygen rejects it.", hint=f"chmod 600 {key}"
        )
    if "No private key found" in stderr or "agent" in stderr:
        return CredentialError(
            f"{key} is a public key, and no agent has the private one. {quoted}",
            hint="Give the file of the private key, or add it to the agent: ssh-add FILE",
        )
    return UsageError(
        f"The key {key} cannot sign. {quoted}",
        hint="It must be an OpenSSH private key (ed25519, ecdsa, rsa), e.g. from: ssh-keygen -t ed25519 -f FILE",
    )


# --- check ------------------------------------------------------------------------------------------------------------


def _find_signer(file: Path, signers: Path, name: str, namespace: str) -> Signer:
    """The signer of `file`. The signature is in the same folder, with the suffix .sig."""
    signature = f"{file}.sig"
    found = _ssh_keygen(["find-principals", "-f", str(signers), "-s", signature], CHECK_SECONDS)
    answer = found.stderr
    for principal in filter(None, map(str.strip, found.stdout.splitlines())):
        words = ["verify", "-f", str(signers), "-I", principal, "-n", namespace, "-s", signature]
        with open(file, "rb") as data:
            done = _ssh_keygen(words, CHECK_SECONDS, data)
        if done.returncode == 0 and (good := _GOOD.search(done.stdout)):
            return Signer(principal, good[2], good[3])
        answer = done.stderr + done.stdout
    raise _origin_error(signers, answer, name, namespace)


def _origin_error(signers: Path, answer: str, name: str, namespace: str) -> MlbenchError:
    if "not permitted for use in signature namespace" in answer:
        return _not_proven(
            "namespace",
            f"{signers} allows the signer only other namespaces",
            f'If the signer may vouch for this, its line must say: namespaces="git,{namespace}"',
        )
    invalid = next((line for line in answer.splitlines() if "has expired" in line or "not yet valid" in line), None)
    if invalid is not None:
        return _not_proven(
            "expired", f"{signers} does not allow the signer's key at this time: {invalid.rpartition(': ')[2]}"
        )
    if "incorrect signature" in answer:
        return _not_proven("tampered", f"{name} is not what was signed")
    if malformed := _MALFORMED_LINE.search(answer):
        return UsageError(f'{signers} is not a signers file. ssh-keygen says: "{malformed[1]}".', hint=_SIGNERS_HINT)
    return _not_proven(
        "unknown_signer",
        f"{signers} does not list the signing key",
        "If you trust its author, add the public key of the signature to the signers file.",
    )


def _not_proven(problem: str, why: str, hint: str | None = None) -> OriginError:
    return OriginError(
        f"The origin is not proven: {why}.",
        hint=hint or "Ask the author for an archive signed with a key that you trust.",
        details={"problem": problem},
    )


# --- ssh-keygen -------------------------------------------------------------------------------------------------------


def _find_program() -> str:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise UsageError("Signatures need the program ssh-keygen, which is not installed.", hint=_INSTALL)
    return program


def _ssh_keygen(
    words: Sequence[str], seconds: float, file: IO[bytes] | None = None, *, asks: bool = False
) -> "subprocess.CompletedProcess[str]":
    """Run `ssh-keygen -Y WORDS`, with `file` as standard input, or the terminal if there is one and `asks` is set.

    Raises UsageError if ssh-keygen is missing, DeadlineError after `seconds`.
    """
    # If standard input is not a terminal, ssh-keygen would read the passphrase from it.
    interactive = asks and sys.stdin is not None and sys.stdin.isatty()
    try:
        return subprocess.run(
            [_find_program(), "-Y", *words],
            env={**os.environ, "LC_ALL": "C"},
            stdin=None if interactive else file or subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"ssh-keygen has not answered within {seconds:g} s.", hint="Run the command again."
        ) from None


def _last_line(stderr: str) -> str:
    lines = [line.rpartition("Enter passphrase: ")[2].strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"
