"""How far one must walk through the code to follow a command: files, functions, and returns to a file left before.

    python benchmarks/walk.py [--list] [run | verify | seal]...

A walk is the sequence of the product's functions in the order of their first calls, in all threads of the client's
process (not in the agent of a run). A move goes from one file to another, a return to one that was entered before.
Module and class bodies do not count. `--list` prints the walk itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = tuple(f"{ROOT}/{package}/" for package in ("mlbench_cli", "providers", "task_images"))
WALKS = ("run", "verify", "seal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"one of {', '.join(WALKS)} (default: all)")
    parser.add_argument("--list", action="store_true", help="print each function at its first call")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        run_folder(Path(home))  # compiled, and an archive to verify
        for name in options.walks or WALKS:
            walk = trace(name, Path(home))
            if options.list:
                print_walk(walk)
            print(f"{name:8} {summarize(walk)}")


def run_folder(home: Path) -> Path:
    """The archive of a run in `home`; it is made once."""
    if not (found := list(home.glob("runs/*/result.json"))):
        subprocess.run([sys.executable, "-m", "mlbench_cli", *run_words("first")], check=True, env=environment(home))
        found = list(home.glob("runs/*/result.json"))
    return found[0].parent


def run_words(name: str) -> list[str]:
    return ["run", name, "1", "--command", 'python -c "print(1)"', "--yes", "--quiet"]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "MLBENCH_HOME": str(home), "PYTHONPATH": str(ROOT)}


def trace(name: str, home: Path) -> list[tuple[str, str]]:
    """File and function of each first call of the walk, made in a process of its own."""
    target = home / f"{name}.walk"
    words = {
        "run": ["command", *run_words("walked")],
        "verify": ["command", "verify", str(run_folder(home))],
        "seal": ["seal", str(home / "sealed")],
    }[name]
    program = [sys.executable, __file__, "--traced", str(target), *words]
    subprocess.run(program, check=True, env=environment(home), stdout=subprocess.DEVNULL)
    return [(file, function) for file, function in json.loads(target.read_text())]


def print_walk(walk: list[tuple[str, str]]) -> None:
    last = None
    for file, function in walk:
        print(f"{file if file != last else '':48} {function}")
        last = file


def summarize(walk: list[tuple[str, str]]) -> str:
    files = [file for file, _ in walk]
    moves = [after for before, after in zip(["", *files], files, strict=False) if after != before]
    entered = len(set(files))
    return f"{entered:3} files {len(walk):4} functions {len(moves):4} moves {len(moves) - entered:4} returns"


# --- in the traced process -------------------------------------------------------------------------------------------


def run_traced(target: str, kind: str, *words: str) -> int:
    if kind == "seal":
        from verify import seal_run, write_run

        run = write_run(Path(words[0]), 1000)

        def walked() -> int:
            seal_run(run)
            return 0

    else:
        from mlbench_cli.__main__ import main as walked

        sys.argv = ["mlbench", *words]

    seen: dict[CodeType, bool] = {}
    walk: list[tuple[str, str]] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen[code] = True
            # A comprehension belongs to its function, and the bodies of modules and classes have no fast locals.
            if code.co_filename.startswith(PRODUCT) and code.co_flags & 1 and not code.co_name.startswith("<"):
                walk.append((os.path.relpath(code.co_filename, ROOT), code.co_qualname))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        return walked()
    finally:
        sys.setprofile(None)
        Path(target).write_text(json.dumps(walk))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--traced"]:
        sys.exit(run_traced(*sys.argv[2:]))
    main()
