"""`mlbench verify`: are archives what they were when they were sealed?"""

from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.errors import UsageError
from mlbench_cli.results.archive.verify import verify as find_problems


def verify(
    archives: Annotated[list[Path], typer.Argument(metavar="ARCHIVE...", help="folders or zip files of runs")],
    output: Output = Format.text,
) -> int:
    """Check archives: every file against its checksum, missing and extra files, and the results against the logs.

    The exit code is 0 only where nothing is wrong with any of them.
    """
    found = {path: find_problems(path) for path in archives}
    if output == Format.json:
        documents = [
            {"archive": str(path), "ok": not problems, "problems": [problem.to_dict() for problem in problems]}
            for path, problems in found.items()
        ]
        console.out_json({"archives": documents})
    else:
        for path, problems in found.items():
            console.out(f"{path}: {'ok' if not problems else _count(len(problems))}")
            for problem in problems:
                console.out(f"  {console.clean(str(problem))}")
    return UsageError.exit_code if any(found.values()) else 0


def _count(problems: int) -> str:
    return "1 problem" if problems == 1 else f"{problems} problems"
