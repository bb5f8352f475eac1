"""`mlbench verify`: what is proven of archives: integrity, derivation and, with the signers' keys, origin; signing."""

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.api.remote_archives import is_url
from mlbench_cli.api.sources import find_at
from mlbench_cli.certify.certificate import find_edited
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.errors import CannotTellError, CredentialError, NotFoundError, UsageError
from mlbench_cli.results import receipts
from mlbench_cli.results.analysis.comparability import conditions_of
from mlbench_cli.results.archive.bundle import archives_at, name_archive, refuse_bundle
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.sign import SIGN_SECONDS, OriginError, Signer, check_origin, require_signers
from mlbench_cli.results.archive.sign import sign as sign_archive
from mlbench_cli.results.archive.verify import Problem, Verification
from mlbench_cli.util.text import counted

# Codes of problems by which all files are as they were sealed, but say what does not follow from the evidence.
_DERIVATION = {"schema", "inconsistent"}


def verify(
    archives: Annotated[
        list[str],
        typer.Argument(
            metavar="ARCHIVE...",
            help="folders, zip files (of one run or several) or URLs of archives, runs, experiments, or receipts",
            autocompletion=complete_names,
        ),
    ],
    signers: Annotated[
        Path | None, typer.Option("--signers", help="allowed signers file, as used by git; also verifies the origin")
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign",
            metavar="KEY",
            help="sign what verifies with this private OpenSSH key, or with the public key of one held by ssh-agent",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="with --sign: replace an existing signature")] = False,
    output: Output = Format.text,
) -> int:
    """Verify archives: integrity (no file was changed), derivation (every result follows from the evidence) and, with
    --signers, origin (someone you trust signed them).

    mlbench derives the results again from the logs and the observation in the archive, and a receipt from the archives
    that it names, if these are verified with it.

    --sign KEY signs archives or receipts, so that others can verify the origin. The signature covers SHA256SUMS and
    through it every file, and is stored in the archive; that of a receipt FILE is FILE.sig.

    Exit code 0: everything is proven; 2: damaged, or it contradicts its evidence; 3: origin not proven; 9: something
    could not be derived.
    """
    if sign is not None and signers is not None:
        raise UsageError("--sign and --signers exclude each other.", hint="Sign first, then verify the signature.")
    if signers is not None:
        require_signers(signers)
    if sign is not None:
        _sign(archives, sign, force=force, output=output)
        return 0
    if force:
        raise UsageError("--force replaces a signature, and works only with --sign KEY.")
    names = _find(archives)
    paths = list(names)
    folders = [path for path in paths if not receipts.is_receipt(path)]
    found = [_judge(path, signers) for path in console.track("Verifying", folders)]
    papers = [path for path in paths if receipts.is_receipt(path)]
    checked = _judge_receipts(papers, [each.path for each in found if each.checked.ok], signers)
    if output == Format.json:
        documents = {"archives": [_document(each) for each in found]}
        console.out_json(documents | ({"receipts": [each.to_dict() for each in checked]} if papers else {}))
    else:
        for archive in found:
            _show(archive, names[archive.path])
        for receipt in checked:
            _show_receipt(receipt)
    if any(each.checked.problems for each in found) or any(each.checked.problems for each in checked):
        return UsageError.exit_code
    if any(each.origin_error for each in found) or any(each.origin_error for each in checked):
        return CredentialError.exit_code
    is_proven = all(each.checked.ok for each in found) and all(each.checked.is_derived for each in checked)
    return 0 if is_proven else CannotTellError.exit_code


def _sign(words: Sequence[str], key: Path, *, force: bool, output: Format) -> None:
    """Sign each archive, which is verified before, and each receipt."""
    for word in words:
        if is_url(word):
            raise UsageError(f"{word} is a URL; only files of this machine can be signed.", hint="mlbench download")
        refuse_bundle(Path(word), "mlbench verify --sign")
    paths = _find(words)
    for path in paths:  # of a folder: what was unpacked from a file of several runs would be signed in vain
        if (name := name_archive(path)) != str(path):
            refuse_bundle(Path(name).parent, "mlbench verify --sign")
    console.note(f"Signing with {key}. Enter the passphrase or touch the key within {SIGN_SECONDS:g} s.")
    for path in paths:
        if receipts.is_receipt(path):
            receipts.sign_receipt(path, key, force=force)
        else:
            sign_archive(path, key, force=force)
        if output == Format.text:
            console.out(f"{path}: signed")
    if output == Format.json:
        console.out_json({"archives": [{"archive": str(path), "signed": True} for path in paths]})


def _find(words: Sequence[str]) -> dict[Path, str]:
    """The paths of archives and receipts, each with its name for people; a word that is no path is a URL, or the name
    of runs."""
    client = api.Client(notice=console.note)
    found: dict[Path, str] = {}
    for word in words:
        if is_url(word):
            paths = [client.fetch_archive(word)]
        elif "\0" in word or os.path.lexists(word) or "/" in word or word.lower().endswith((".zip", ".json")):
            paths = _find_at(Path(word))
        else:
            names = {run.folder: run.name for run in client.runs()}
            found |= {path: names.get(path, str(path)) for path in client.find_archives([word])}
            continue
        found |= {path: name_archive(path) for path in paths}
    return found


def _find_at(path: Path) -> list[Path]:
    """The archives at a path; the path itself if it holds none, so that what is wrong with it is said."""
    try:
        return find_at(path)
    except NotFoundError:
        return archives_at(path)


@dataclass(frozen=True)
class CheckedArchive:
    """What is proven of one archive. `origin_error` says why its origin is not, if that was asked. `remarks`: why its
    times may be misleading although they follow from the evidence."""

    path: Path
    checked: Verification
    signer: Signer | None = None
    origin_error: OriginError | None = None
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all that was asked is proven."""
        return self.checked.ok and self.origin_error is None

    @property
    def proven(self) -> list[str]:
        """Which of integrity, derivation and origin are proven."""
        codes = {problem.code for problem in self.checked.problems}
        proofs = {"integrity": codes <= _DERIVATION, "derivation": self.checked.ok, "origin": self.signer is not None}
        return [name for name, holds in proofs.items() if holds]


def _judge(path: Path, signers: Path | None) -> CheckedArchive:
    checked = api.check_archive(path)
    if checked.problems:  # a signature of what is damaged proves nothing
        return CheckedArchive(path, checked)
    with Archive.open(path) as archive:
        if not checked.has_other_form and (edited := find_edited(archive)):
            said = "beside the archive, which says something else (mlbench certify --from ARCHIVE --to DIR)"
            return CheckedArchive(path, Verification(tuple(Problem("inconsistent", name, said) for name in edited)))
        preloaded = None if checked.has_other_form else conditions_of(archive).preloaded
        remarks = () if preloaded is None else (preloaded.phrase,)
        try:
            signer = None if signers is None else check_origin(archive, signers)
        except OriginError as error:
            return CheckedArchive(path, checked, origin_error=error, remarks=remarks)
    return CheckedArchive(path, checked, signer, remarks=remarks)


def _document(found: CheckedArchive) -> dict[str, object]:
    return {
        "archive": name_archive(found.path),
        "ok": found.ok,
        "proven": found.proven,
        "problems": [problem.to_dict() for problem in found.checked.problems],
        "not_derived": list(found.checked.not_derived),
        "remarks": list(found.remarks),
        "signer": found.signer.to_dict() if found.signer else None,
        "origin_problem": found.origin_error.details["problem"] if found.origin_error else None,
    }


def _show(found: CheckedArchive, name: str) -> None:
    checked, error, signer = found.checked, found.origin_error, found.signer
    proven = ", ".join(found.proven)
    by = f": {console.clean(signer.principal)}, {signer.key_type} {signer.fingerprint}" if signer else ""
    proofs = f" ({proven}{by})" if proven else ""
    count = len(checked.problems)
    if count:
        console.out(f"{name}: {counted(count, 'problem')}{proofs}")
    elif error is not None:
        console.out(f"{name}: origin not proven{proofs}")
    else:
        console.out(f"{name}: {'ok' if checked.ok else 'not everything follows from the evidence'}{proofs}")
    for line in (*map(str, checked.problems), *checked.not_derived, *found.remarks):
        console.out(f"  {console.clean(line)}")
    if error is not None:
        console.out(f"  {console.clean(error.message)}\n  Next: {console.clean(error.hint or '')}")


# --- receipts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedReceipt:
    """What is proven of one receipt. `origin_error` says why its origin is not, if that was asked."""

    receipt: receipts.Receipt
    checked: receipts.ReceiptCheck
    signer: Signer | None = None
    origin_error: OriginError | None = None

    @property
    def proven(self) -> list[str]:
        """Which of derivation and origin are proven."""
        proofs = {"derivation": self.checked.is_derived, "origin": self.signer is not None}
        return [name for name, holds in proofs.items() if holds]

    def to_dict(self) -> dict[str, object]:
        """What is proven, as `-o json` prints it."""
        return {
            "receipt": str(self.receipt.path),
            "verdict": self.receipt.document["verdict"],
            "ok": self.checked.is_derived and self.origin_error is None,
            "proven": self.proven,
            "problems": list(self.checked.problems),
            "missing": list(self.checked.missing),
            "signer": self.signer.to_dict() if self.signer else None,
            "origin_problem": self.origin_error.details["problem"] if self.origin_error else None,
        }


def _judge_receipts(papers: Iterable[Path], archives: Sequence[Path], signers: Path | None) -> list[CheckedReceipt]:
    """`archives` are those that verify."""
    checked = []
    with ExitStack() as stack:
        opened = [stack.enter_context(api.open_archive(path)) for path in archives] if papers else []
        for path in papers:
            receipt = receipts.read_receipt(path)
            found, signer, error = receipts.check_receipt(receipt, opened), None, None
            if signers is not None and not found.problems:
                try:
                    signer = receipts.check_receipt_origin(receipt, signers)
                except OriginError as caught:
                    error = caught
            checked.append(CheckedReceipt(receipt, found, signer, error))
    return checked


def _show_receipt(found: CheckedReceipt) -> None:
    receipt, checked, error, signer = found.receipt, found.checked, found.origin_error, found.signer
    by = f": {console.clean(signer.principal)}, {signer.key_type} {signer.fingerprint}" if signer else ""
    proofs = f" ({', '.join(found.proven)}{by})" if found.proven else ""
    if checked.problems:
        word = "it does not follow from its archives"
    elif error is not None:
        word = "origin not proven"
    else:
        word = "ok" if checked.is_derived else "not derived"
    verdict = str(receipt.document["verdict"]).replace("_", " ")
    console.out(f"{receipt.path}: {word}{proofs}; it says: {verdict}")
    for line in checked.problems:
        console.out(f"  {console.clean(line)}")
    if checked.missing:
        names = ", ".join(digest[:12] for digest in checked.missing[:3])
        console.out(f"  {len(checked.missing)} of the archives that it names were not passed: {names}")
        console.out("  Pass them to the same command, as files or as names of runs.")
    if error is not None:
        console.out(f"  {console.clean(error.message)}\n  Next: {console.clean(error.hint or '')}")
