"""`mlbench sign`: vouch for archives with an OpenSSH key."""

from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.results.archive.sign import SIGN_SECONDS
from mlbench_cli.results.archive.sign import sign as sign_archive


def sign(
    archives: Annotated[list[Path], typer.Argument(metavar="ARCHIVE...", help="folders or zip files of runs")],
    key: Annotated[Path, typer.Option("--key", "-k", help="private OpenSSH key, or the public one of an agent's key")],
    force: Annotated[bool, typer.Option("--force", help="replace an earlier signature")] = False,
    output: Output = Format.text,
) -> None:
    """Sign archives with an OpenSSH key, so that others can prove whose they are: mlbench verify --signers FILE.

    What is signed is SHA256SUMS, and with it every file; the signature becomes a file of the archive. An archive that
    does not verify is not signed.
    """
    console.note(f"Signing with {key}. A passphrase or a touch of the key must come within {SIGN_SECONDS:g} s.")
    for path in archives:
        sign_archive(path, key, force=force)
        if output == Format.text:
            console.out(f"{path}: signed")
    if output == Format.json:
        console.out_json({"archives": [{"archive": str(path), "signed": True} for path in archives]})
