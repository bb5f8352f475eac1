"""How large the project is: lines by package, commands, options, and words of documentation: `make size`."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from mlbench_cli import commands

ROOT = Path(__file__).parents[1]
CODE = (".py", ".js", ".css", ".j2", ".yaml", ".sh", ".csv", ".toml")
PRODUCT = ("mlbench_cli", "providers", "templates", "task_images")
NOT_FOR_USERS = ("docs/schemas/", "docs/notebooks/", "docs/images/", "docs/development/")


def count_lines() -> Counter[str]:
    """Lines of code of all files that git has, by package: two levels in mlbench_cli, providers and tests, else one."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found: Counter[str] = Counter()
    for name in listed.splitlines():
        path = Path(name)
        if path.suffix in CODE and (ROOT / path).is_file() and len(path.parts) > 1 and not name.startswith("docs/"):
            deep = path.parts[0] in ("mlbench_cli", "providers", "tests") and len(path.parts) > 2
            package = "/".join(path.parts[: 2 if deep else 1])
            found[package] += (ROOT / path).read_bytes().count(b"\n")
    return found


def count_words() -> int:
    """Words of what users read: README and the pages of docs/ that are neither generated nor for developers."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [page for page in pages if not page.relative_to(ROOT).as_posix().startswith(NOT_FOR_USERS)]
    return sum(len(page.read_text("utf-8").split()) for page in texts)


def count_options(*words: str) -> int:
    """The options that the help of a command shows."""
    command = [sys.executable, "-m", "mlbench_cli", *words]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return len(re.findall(r"^  -[-a-z]", text, re.MULTILINE))


def main() -> None:
    """Print everything as one table."""
    lines = count_lines()
    product = sum(count for name, count in lines.items() if name.split("/")[0] in PRODUCT)
    tests = sum(count for name, count in lines.items() if name.split("/")[0] == "tests")
    rows = [*sorted(lines.items()), ("lines of the product", product), ("lines of tests", tests)]
    rows += [("commands", len(commands.names())), ("words of documentation", count_words())]
    rows += [
        (f"options in {' '.join(words)}", count_options(*words)) for words in (("run", "-h"), ("run", "--help-all"))
    ]
    for name, count in rows:
        print(f"{name:28} {count:7,}")


if __name__ == "__main__":
    main()
