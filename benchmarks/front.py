"""What a newcomer meets: the help, the first line of the first run, and a report of 30 mixed runs in Chromium.

    python -m benchmarks.front [ARCHIVE...]

The runs of the report are every second archive of results/archives, or those that are named. Wanted: two dozen commands
and 15 options in the default help, a headline of at most a sentence, and at most 3 s and 3 MB for a report.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser import open_browser  # noqa: E402

RUNS = 30
WIDTHS = (1400, 800, 400)
FIRST_RUN = ("run", "first", "1", "--task", "digits_resnet", "--light", "--share-machine")  # as README, on one worker
OPTION = re.compile(r"  (-\w, )?--[\w-]+(  | [A-Z<]| / |$)")
PAGES = re.compile(rb"/Type\s*/Page[^s]")


def start(home: str, *words: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "MLBENCH_HOME": home,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "mlbench_cli", *words]
    return subprocess.Popen(
        command, env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def help_of(home: str, *words: str) -> list[str]:
    text, _ = start(home, *words).communicate()
    return text.splitlines()


def time_lines(home: str, *words: str) -> list[tuple[float, str]]:
    """The lines that a command prints into a pipe, each with the seconds since its start."""
    begun = time.perf_counter()
    with start(home, *words) as process:
        assert process.stdout is not None
        lines = [(time.perf_counter() - begun, line.rstrip()) for line in process.stdout if line.strip()]
    if process.returncode:
        raise SystemExit("\n".join(line for _, line in lines))
    return lines


def show_help(home: str) -> None:
    lines = help_of(home, "--help")
    commands = lines[lines.index("Commands:") + 1 :]
    count = sum(re.match(r"  [a-z-]+  +[A-Z]", line) is not None for line in commands)
    print(f"mlbench --help: {count} commands, {len(lines)} lines")
    for word in ("--help", "--help-all"):
        options = [line for line in help_of(home, "run", word) if OPTION.match(line)]
        own = [line for line in options if "--help" not in line]
        print(f"mlbench run {word}: {len(own)} options, and {len(options) - len(own)} about help")


def show_first_run(home: str) -> None:
    """The first useful line says what is measured; the last ones name the result and the next commands."""
    lines = time_lines(home, *FIRST_RUN)
    for seconds, line in lines:
        print(f"  {seconds:6.2f} s  {line}")
    print(f"mlbench {' '.join(FIRST_RUN)}: {lines[0][0]:.2f} s to the first line, {lines[-1][0]:.1f} s to the last")


def show_report(home: str, archives: Sequence[Path]) -> None:
    page = Path(home) / "mix.html"
    lines = time_lines(home, "report", str(page), *map(str, archives))
    size = page.stat().st_size
    print(f"report of {len(archives)} mixed runs: {lines[-1][0]:.1f} s, {size / 1e6:.2f} MB")
    with open_browser() as browser:
        for width in WIDTHS:
            browser.emulate(width, 900)
            browser.open(page.as_uri())
            height = browser.run("return document.documentElement.scrollHeight")
            overhang = browser.run("return document.documentElement.scrollWidth - innerWidth")
            print(f"  {height:,} px high at {width} px, {max(0, overhang)} px too wide")
        headline = str(browser.run("return document.querySelector('h1').innerText"))
        names = browser.run(
            "return Math.max(...[...document.querySelectorAll('.legend')].map(each => each.children.length))"
        )
        pages = len(PAGES.findall(browser.print_pdf()))
    print(f"  {pages} printed pages, at most {names} names in a legend")
    print(f"  headline of {len(headline.split())} words: {headline}")


def main() -> None:
    archives = [Path(word) for word in sys.argv[1:]] or sorted((ROOT / "results" / "archives").glob("*.zip"))[::2][
        :RUNS
    ]
    with tempfile.TemporaryDirectory() as home:
        show_help(home)
        show_first_run(home)
        show_report(home, [path.absolute() for path in archives])


if __name__ == "__main__":
    main()
