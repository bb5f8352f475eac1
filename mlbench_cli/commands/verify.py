"""`mlbench verify`: are archives what they were when they were sealed?"""

from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.errors import CannotTellError, UsageError
from mlbench_cli.results.archive.verify import Verification
from mlbench_cli.results.archive.verify import verify as check


def verify(
    archives: Annotated[list[Path], typer.Argument(metavar="ARCHIVE...", help="folders or zip files of runs")],
    output: Output = Format.text,
) -> int:
    """Check archives: every file against its checksum, and every field of the results against the evidence.

    The run is judged again from the archive's own logs and observation. The exit code is 0 only if nothing is wrong
    with any of them; 9 if something could not be derived from the evidence.
    """
    found = {path: check(path) for path in archives}
    if output == Format.json:
        console.out_json({"archives": [_document(path, result) for path, result in found.items()]})
    else:
        for path, result in found.items():
            _show(path, result)
    if any(result.problems for result in found.values()):
        return UsageError.exit_code
    return 0 if all(result.ok for result in found.values()) else CannotTellError.exit_code


def _document(path: Path, result: Verification) -> dict[str, object]:
    return {
        "archive": str(path),
        "ok": result.ok,
        "problems": [problem.to_dict() for problem in result.problems],
        "not_derived": list(result.not_derived),
    }


def _show(path: Path, result: Verification) -> None:
    if result.problems:
        count = len(result.problems)
        console.out(f"{path}: {'1 problem' if count == 1 else f'{count} problems'}")
    else:
        console.out(f"{path}: {'ok' if result.ok else 'not everything follows from the evidence'}")
    for line in (*map(str, result.problems), *result.not_derived):
        console.out(f"  {console.clean(line)}")
