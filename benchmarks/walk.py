"""How far one must walk through the code to follow a command: files, functions, and returns to a file left before.

    python benchmarks/walk.py [--list] [run | hosts | slurm | kubernetes | verify | seal]...

`run` is a run on this machine; hosts, slurm and kubernetes are the same command on these clusters, whose programs and
servers are the doubles of the tests. A walk is the sequence of the product's functions in the order of their first
calls, in all threads of the client's process (not in the agent of a run). A move goes from one file to another, a
return to one that was entered before. Module and class bodies do not count. `--list` prints the walk itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import DEVNULL
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = tuple(f"{ROOT}/{package}/" for package in ("mlbench_cli", "providers", "task_images"))
CLUSTERS = ("hosts", "slurm", "kubernetes")
WALKS = ("run", *CLUSTERS, "verify", "seal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"one of {', '.join(WALKS)} (default: all)")
    parser.add_argument("--list", action="store_true", help="print each function at its first call")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, ExitStack() as clusters:
        run_folder(Path(home))  # compiled, and an archive to verify
        for name in options.walks or WALKS:
            if name in CLUSTERS:
                clusters.enter_context(attached(name, Path(home)))
            walk = trace(name, Path(home))
            if options.list:
                print_walk(walk)
            print(f"{name:10} {summarize(walk)}")


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


@contextmanager
def attached(kind: str, home: Path) -> Iterator[None]:
    """A cluster of this kind on this machine, by the doubles of the tests, attached under its own name."""
    sys.path.insert(0, str(ROOT))
    from tests.contract.engines.labs import install_commands
    from tests.fakes.kube_api import KubeApi
    from tests.fakes.kubelet import Kubelet

    folder = home / kind
    folder.mkdir()
    with ExitStack() as servers:
        if kind == "kubernetes":
            server = servers.enter_context(KubeApi())
            servers.enter_context(Kubelet(server, folder / "pods"))
            server.write_kubeconfig(folder / "kubeconfig")
            words = ["attach-cluster", kind, "--kubeconfig", str(folder / "kubeconfig")]
        else:
            os.environ.update(install_commands(folder / "commands"))
            nodes = [{"names": "n1", "count": 1, "state": "idle", "partition": "debug"}]
            Path(os.environ["SLURM_CONF"]).with_name("nodes.json").write_text(json.dumps(nodes))
            where = ["--hosts", "m0", "--dir"] if kind == "hosts" else ["--no-probe", "--shared"]
            words = [f"attach-{kind}", kind, *where, str(folder / "far"), "--python", sys.executable]
        subprocess.run([sys.executable, "-m", "mlbench_cli", *words], check=True, env=environment(home), stdout=DEVNULL)
        yield


def trace(name: str, home: Path) -> list[tuple[str, str]]:
    """File and function of each first call of the walk, made in a process of its own."""
    target = home / f"{name}.walk"
    words = {
        "run": ["command", *run_words("walked")],
        **{kind: ["command", *run_words(kind), "--cluster", kind] for kind in ("hosts", "slurm")},
        "kubernetes": ["command", *run_words("kubernetes"), "--cluster", "kubernetes", "--image", "python"],
        "verify": ["command", "verify", str(run_folder(home))],
        "seal": ["seal", str(home / "sealed")],
    }[name]
    program = [sys.executable, __file__, "--traced", str(target), *words]
    subprocess.run(program, check=True, env=environment(home), stdout=DEVNULL)
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
