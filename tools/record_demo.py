"""Record the commands of README's first block as an SVG image: `python -m tools.record_demo`.

The commands run for real, in an empty data folder. Output is what they print into a pipe, so progress is one line per
update instead of a bar. Update the image when the output changes:

    .venv/bin/python -m tools.record_demo docs/images/demo.svg
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 110
COMMANDS = (
    "mlbench run first 1 2 --task digits_resnet --light",
    "mlbench download first-2 --to first-2.zip",
    "mlbench verify first-2.zip",
)
MAX_LINES = 16  # of one command; the middle of a longer output is replaced by "..."
SECONDS = 600


def run_command(command: str, folder: Path) -> list[str]:
    """The lines that a command prints, standard output and error as they come. Raises if it fails."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MLBENCH_HOME": str(folder / "home"),
        "COLUMNS": str(WIDTH),
    }
    done = subprocess.run(
        shlex.split(command),
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    return done.stdout.replace(str(folder), "~").splitlines()


def shorten_output(lines: list[str], limit: int = MAX_LINES) -> list[str]:
    """At most `limit` lines: the first few, "...", and the last ones, which hold the result."""
    if len(lines) <= limit:
        return lines
    head = limit // 4
    return [*lines[:head], "...", *lines[len(lines) - (limit - head - 1) :]]


def record(commands: tuple[str, ...] = COMMANDS) -> str:
    """The SVG of a terminal in which the commands have run."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    with tempfile.TemporaryDirectory() as folder:
        for command in commands:
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            for line in shorten_output(run_command(command, Path(folder))):
                console.print(Text(line))
    # Rich names a web font; an image of this repository fetches nothing.
    return re.sub(r"@font-face {.*?}\s*", "", console.export_svg(title="mlbench"), flags=re.DOTALL)


def main() -> None:
    """Write the SVG to the given path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="SVG file to write")
    target: Path = parser.parse_args().target
    target.write_text(record(), encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
