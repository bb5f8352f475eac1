"""`mlbench sign`: vouch for archives and receipts with an OpenSSH key."""

from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.results import receipts
from mlbench_cli.results.archive.bundle import refuse_bundle
from mlbench_cli.results.archive.sign import SIGN_SECONDS
from mlbench_cli.results.archive.sign import sign as sign_archive


def sign(
    archives: Annotated[
        list[Path], typer.Argument(metavar="ARCHIVE...", help="folders or zip files of runs, or receipts")
    ],
    key: Annotated[
        Path, typer.Option("--key", "-k", help="private OpenSSH key, or the public key of one held by ssh-agent")
    ],
    force: Annotated[bool, typer.Option("--force", help="replace an existing signature")] = False,
    output: Output = Format.text,
) -> None:
    """Sign archives or receipts with an OpenSSH key, so that others can check who made them
    (mlbench verify --signers FILE).

    The signature covers SHA256SUMS and through it every file, and is stored in the archive. Archives that do not verify
    are not signed. The signature of a receipt FILE is FILE.sig.
    """
    for path in archives:
        refuse_bundle(path, "mlbench sign")
    console.note(f"Signing with {key}. Enter the passphrase or touch the key within {SIGN_SECONDS:g} s.")
    for path in archives:
        if receipts.is_receipt(path):
            receipts.sign_receipt(path, key, force=force)
        else:
            sign_archive(path, key, force=force)
        if output == Format.text:
            console.out(f"{path}: signed")
    if output == Format.json:
        console.out_json({"archives": [{"archive": str(path), "signed": True} for path in archives]})
