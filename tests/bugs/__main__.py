"""Put each bug into the product, one at a time, and see whether its tests find it: `python -m tests.bugs [NAME...]`.

A bug is killed if one of its tests that `make test` runs fails, and passes without the bug. Nothing is changed here:
the bugs go into a temporary worktree of the last commit.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SECONDS = 900.0  # a bug that makes its tests hang is killed, too


def git(tree: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True, check=False)


def failing_test(tree: Path, tests: list[str]) -> str | None:
    """The first of the tests that fails in `tree`, or None."""
    options = ["-q", "-x", "-rfE", "-p", "no:cacheprovider", "-m", "not cluster and not nightly and not slow"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "TZ": "Asia/Kolkata", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "(no end)"
    if done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):  # make test leaves slow ones out
        return None
    assert done.returncode == 1, f"{tests} cannot run: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return found[1] if found else "(no name)"


def judge(tree: Path, diff: Path) -> tuple[str, str]:
    """ "killed", "survived" or "does not apply", and the test that tells."""
    _, header, *_ = diff.read_text("utf-8").splitlines()
    tests = [test for test in header.removeprefix("Tests:").split() if (tree / test.partition("::")[0]).exists()]
    if git(tree, "apply", str(diff)).returncode:
        return "does not apply", ""
    try:
        test = failing_test(tree, tests) if tests else None
    finally:
        changed = git(tree, "diff", "--name-only").stdout.split()
        git(tree, "checkout", "--quiet", ".")
        for source in (tree / name for name in changed):  # Python would take the bytecode of the same second and size
            for compiled in source.parent.glob(f"__pycache__/{source.stem}.*"):
                compiled.unlink()
    if test is None:
        return "survived", ""
    if "::" in test and failing_test(tree, [test]):
        return "survived", f"{test} fails without the bug, too"
    return "killed", test


def main(names: list[str]) -> int:
    diffs = [FOLDER / f"{name}.diff" for name in names] or sorted(FOLDER.glob("*.diff"))
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git(ROOT, "worktree", "add", "--quiet", "--detach", str(tree)).check_returncode()
        try:
            for diff in diffs:
                verdict, test = judge(tree, diff)
                counts[verdict] += 1
                print(f"{verdict:15}{diff.stem:40}{test}", flush=True)
        finally:
            git(ROOT, "worktree", "remove", "--force", str(tree))
    score = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("killed", "survived", "does not apply"))
    print(f"of {len(diffs)}: {score}")
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
