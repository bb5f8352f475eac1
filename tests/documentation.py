"""The code blocks of README, CONTRIBUTING and docs/: which commands they have, what those need, and how to run them."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlbench_cli.util.text import clean

LINE_END = "\n"
_UNIT = r"(?: ?(?:d|h|min|s|ms|µs|%|samples/s|images/s))?"
_NUMBER = re.compile(rf"(?<![\w.-])\d[\d,.]*[kMG]?{_UNIT}(?: \d+ (?:min|s|h))?(?![\w-])")
_SPACES = re.compile(r"\s+")
# "1.45× slower (1.39 to 1.52)", "no difference seen (0.9 to 1.1×)": which one it is, depends on the machine's mood.
_CHANGE = re.compile(
    r"(?:#×? (?:faster|slower|higher|lower)|# points (?:higher|lower)|no difference seen)(?: \(# to #×?\))?"
)
_VERDICT = re.compile(r"^(?:No difference seen: .*|\S+ is #×? (?:faster|slower) than .*)$")
ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
# What a block may need that tests do not have: <!-- needs: docker --> on the line before it.
NEEDS = {
    "checkout": "this repository's Makefile",
    "index": "a package index",
    "docker": "Docker and kind",
    "cluster": "a Kubernetes cluster of the reader",
    "slurm": "a Slurm cluster",
    "hosts": "hosts that ssh reaches",
    "gke": "an account at Google",
    "eks": "an account at Amazon",
    "aks": "an account at Azure",
    "gpu": "GPUs",
    "mpi": "the extra mpi",
    "tensorflow": "the extra tensorflow",
    "data": "data sets",
    "web": "a server with archives",
    "time": "more time than a test may take",
}
COMMAND_SECONDS = 900
# With MLBENCH_WRITE_OUTPUTS=1 the outputs that pages show are replaced by those of their commands.
WRITE = bool(os.environ.get("MLBENCH_WRITE_OUTPUTS"))
_FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>\S+) -->\n)?```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block. `needs` is a key of NEEDS or None; a block with a title is the file of that name."""

    page: Path
    language: str
    needs: str | None
    title: str | None
    text: str

    @property
    def commands(self) -> list[str]:
        """Its command lines, without prompts; of a `console` block only what follows a prompt."""
        lines = self.text.splitlines()
        if self.language == "console":
            return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip()] if self.language == "sh" else []

    @property
    def outputs(self) -> dict[str, str]:
        """The output below each command of a `console` block that shows one."""
        parts = re.split(r"^\$ (.*)\n", self.text, flags=re.MULTILINE)[1:] if self.language == "console" else []
        return {command: text for command, text in zip(parts[::2], parts[1::2], strict=True) if text.strip()}


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page from top to bottom."""
    text = page.read_text("utf-8")
    return [
        Block(page, match["language"], match["needs"], match["title"], match["text"]) for match in _FENCE.finditer(text)
    ]


def all_blocks() -> Iterator[Block]:
    for page in PAGES:
        yield from read_blocks(page)


def page_name(page: Path) -> str:
    """The page relative to the repository, for the names of tests."""
    return page.relative_to(ROOT).as_posix()


def shape(output: str) -> list[str]:
    """The lines of an output without what differs from run to run: numbers with their units, ratios, widths."""
    lines = [_SPACES.sub(" ", _NUMBER.sub("#", clean(line))).strip() for line in output.strip().splitlines()]
    return [_CHANGE.sub("CHANGE", _VERDICT.sub("VERDICT", line)) for line in lines]


def write_outputs(page: Path, outputs: Mapping[str, str]) -> None:
    """Replace the outputs of a page's `console` blocks by those of the commands."""
    text = page.read_text("utf-8")
    for block in read_blocks(page):
        for command, shown in block.outputs.items():
            text = text.replace(f"$ {command}\n{shown}", f"$ {command}\n{clean(outputs[command], keep=LINE_END)}")
    page.write_text(text, "utf-8")


def expected_exit_codes(command: str) -> set[int]:
    """The numbers of a trailing comment such as `# exit: 2`, or `# exit: 0 or 9` if measured times decide; else 0."""
    match = re.search(r"# exit: (\d+(?: or \d+)*)$", command)
    return {int(code) for code in match[1].split(" or ")} if match else {0}


def run_page(
    page: Path, folder: Path, *, needs: str | None = None, adapt: Callable[[str], str | None] = lambda command: command
) -> list[str]:
    """Write the titled files of a page into `folder`, and run there the commands of the blocks that need just this, in
    order, with one store in `folder`/home. The commands as they were run.

    `adapt` changes a command to what fits the place, or returns None to leave it out. The outputs that the page shows
    must be those of the commands, but for measured values.
    """
    outputs: dict[str, str] = {}
    ran = []
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MLBENCH_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    for block in read_blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)
        for command in block.commands if block.needs == needs else []:
            adapted = adapt(command)
            if adapted is None:
                continue
            done = subprocess.run(
                ["sh", "-c", adapted],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
                check=False,
            )
            assert done.returncode in expected_exit_codes(command), f"{adapted}\n{done.stdout}{done.stderr}"
            ran.append(adapted)
            if command in block.outputs:
                outputs[command] = done.stdout
                assert WRITE or shape(done.stdout) == shape(block.outputs[command]), f"{command}\n{done.stdout}"
    if WRITE and outputs:
        write_outputs(page, outputs)
    return ran
