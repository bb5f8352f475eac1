"""`mlbench verify`: what is proven of archives: integrity, derivation and, with the signers' keys, origin."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.errors import CannotTellError, CredentialError, UsageError
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.sign import OriginError, Signer, check_origin, require_signers
from mlbench_cli.results.archive.verify import Verification

# Codes of problems by which all files are as they were sealed, but say what does not follow from the evidence.
_DERIVATION = {"schema", "inconsistent"}


def verify(
    archives: Annotated[list[Path], typer.Argument(metavar="ARCHIVE...", help="folders or zip files of runs")],
    signers: Annotated[
        Path | None, typer.Option("--signers", help="file of allowed signers, as git's; proves the origin, too")
    ] = None,
    output: Output = Format.text,
) -> int:
    """Prove what archives say: their integrity (every file is as it was sealed), their derivation (every field of the
    results follows from the evidence) and, with --signers, their origin (somebody whom you trust has signed them).

    The run is judged again from the archive's own logs and observation. The exit code is 0 only if nothing is wrong
    with any of them; 2 if an archive is damaged or contradicts its evidence; 3 if an origin is not proven; 9 if
    something could not be derived from the evidence.
    """
    if signers is not None:
        require_signers(signers)
    found = [_judge(path, signers) for path in archives]
    if output == Format.json:
        console.out_json({"archives": [_document(each) for each in found]})
    else:
        for each in found:
            _show(each)
    if any(each.checked.problems for each in found):
        return UsageError.exit_code
    if any(each.origin_error for each in found):
        return CredentialError.exit_code
    return 0 if all(each.checked.ok for each in found) else CannotTellError.exit_code


@dataclass(frozen=True)
class CheckedArchive:
    """What is proven of one archive. `origin_error` says why its origin is not, if that was asked."""

    path: Path
    checked: Verification
    signer: Signer | None = None
    origin_error: OriginError | None = None

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
    if signers is None or checked.problems:  # a signature of what is damaged proves nothing
        return CheckedArchive(path, checked)
    try:
        with Archive.open(path) as archive:
            return CheckedArchive(path, checked, check_origin(archive, signers))
    except OriginError as error:
        return CheckedArchive(path, checked, origin_error=error)


def _document(found: CheckedArchive) -> dict[str, object]:
    return {
        "archive": str(found.path),
        "ok": found.ok,
        "proven": found.proven,
        "problems": [problem.to_dict() for problem in found.checked.problems],
        "not_derived": list(found.checked.not_derived),
        "signer": found.signer.to_dict() if found.signer else None,
        "origin_problem": found.origin_error.details["problem"] if found.origin_error else None,
    }


def _show(found: CheckedArchive) -> None:
    checked, error, signer = found.checked, found.origin_error, found.signer
    proven = ", ".join(found.proven)
    by = f": {console.clean(signer.principal)}, {signer.key_type} {signer.fingerprint}" if signer else ""
    proofs = f" ({proven}{by})" if proven else ""
    count = len(checked.problems)
    if count:
        console.out(f"{found.path}: {'1 problem' if count == 1 else f'{count} problems'}{proofs}")
    elif error is not None:
        console.out(f"{found.path}: origin not proven{proofs}")
    else:
        console.out(f"{found.path}: {'ok' if checked.ok else 'not everything follows from the evidence'}{proofs}")
    for line in (*map(str, checked.problems), *checked.not_derived):
        console.out(f"  {console.clean(line)}")
    if error is not None:
        console.out(f"  {console.clean(error.message)}\n  Next: {console.clean(error.hint or '')}")
