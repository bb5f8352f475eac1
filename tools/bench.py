"""Run the scripts of benchmarks/ one after the other, each with what it needs: `python -m tools.bench`, `make bench`.

Most scripts need this machine only. Those of clusters use the cluster of KUBECONFIG; without that variable a KIND
cluster with two workers is made for them, and deleted at the end. Their image (MLBENCH_BENCH_IMAGE) is loaded onto the
nodes before the first of them starts, because a node without it would wait for it as long as the script lets it.
Scripts that create KIND clusters themselves load a task image into them: MLBENCH_BENCH_TASK_IMAGE, or the one that
`make images` has built.
A script whose needs cannot be met is skipped with the reason, and the others run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mlbench_cli import __version__

ROOT = Path(__file__).parents[1]
CLUSTER = "mlbench-bench"
WORKERS = 2
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
DEFAULT_IMAGE = "python:3.12-slim"  # has sh, coreutils and python3


class Need(StrEnum):
    """What a script needs besides this machine."""

    CLUSTER = "a Kubernetes cluster with two workers, kubectl, and an image with sh, coreutils and python3"
    MACHINES = "a Slurm cluster and hosts that ssh reaches"
    INDEX = "a package index"
    KIND = "Docker, kind, and a task image with torch"
    GPU = "a GPU"


NEEDS = {
    "create_kills": Need.KIND,
    "engines": Need.MACHINES,
    "extras": Need.INDEX,
    "fetch": Need.CLUSTER,
    "findings": Need.CLUSTER,
    "gpu": Need.GPU,
    "kill_points": Need.CLUSTER,
    "nanogpt": Need.GPU,
    "submit": Need.CLUSTER,
}


class CannotPrepare(Exception):
    """Something that scripts need cannot be had; the message says what, and what would help."""


@dataclass(frozen=True)
class Setting:
    """Variables and words that a script gets."""

    variables: Mapping[str, str]
    words: tuple[str, ...] = ()


class Preparation:
    """What scripts need, prepared when the first of them needs it. Leaving the `with` block removes what was made."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._image = environ.get("MLBENCH_BENCH_IMAGE", DEFAULT_IMAGE)
        self._undo = ExitStack()
        self._cluster: Setting | CannotPrepare | None = None

    def __enter__(self) -> "Preparation":
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def prepare(self, need: Need | None) -> Setting:
        """What a script with this need gets. Raises CannotPrepare."""
        if need is Need.MACHINES and "MACHINES_SHARED" not in self._environ:
            raise CannotPrepare("MACHINES_SHARED is not set; tests/e2e/machines/run.sh says how to start machines")
        if need is Need.GPU and not any(map(os.path.exists, GPU_DEVICES)):
            raise CannotPrepare("this machine has none")
        if need is Need.KIND:
            return self._require_task_image()
        if need is not Need.CLUSTER:
            return Setting({})
        if self._cluster is None:
            try:
                self._cluster = self._prepare_cluster()
            except CannotPrepare as problem:
                self._cluster = problem
        if isinstance(self._cluster, CannotPrepare):
            raise self._cluster
        return self._cluster

    def _prepare_cluster(self) -> Setting:
        self._require("kubectl")
        if "KUBECONFIG" in self._environ:
            self._load_image()
            return Setting({}, (self._image,))
        self._require("docker", "kind")
        if self._call("docker", "image", "inspect", self._image).returncode:
            self._must("docker", "pull", self._image)
        home = self._undo.enter_context(tempfile.TemporaryDirectory(prefix="mlbench-bench-"))
        kubeconfig = f"{home}/kubeconfig"
        self._undo.callback(self._mlbench, home, "delete-cluster", "kind", f"{CLUSTER}-{WORKERS}", "--yes", "--force")
        node_image = self._environ.get("MLBENCH_TEST_NODE_IMAGE")
        options = ["--load", self._image, *(["--image", node_image] if node_image else [])]
        made = self._mlbench(home, "create-cluster", "kind", str(WORKERS), CLUSTER, "--yes", *options)
        if made.returncode == 0:
            made = self._call(
                "kind", "export", "kubeconfig", "--name", f"{CLUSTER}-{WORKERS}", "--kubeconfig", kubeconfig
            )
        if made.returncode:
            raise CannotPrepare(f"no KIND cluster could be made: {made.stderr.strip()}")
        return Setting({"KUBECONFIG": kubeconfig}, (self._image,))

    def _require_task_image(self) -> Setting:
        self._require("docker", "kind")
        image = self._environ.get("MLBENCH_BENCH_TASK_IMAGE", f"localhost/mlbench/digits_resnet:{__version__}")
        if self._call("docker", "image", "inspect", image).returncode:
            raise CannotPrepare(f"Docker has no {image}: make images, or name another in MLBENCH_BENCH_TASK_IMAGE")
        return Setting({}, (image,))

    def _load_image(self) -> None:
        """Load the image onto the nodes of a KIND cluster; those of other clusters pull it themselves."""
        context = self._must("kubectl", "config", "current-context").stdout.strip()
        if not context.startswith("kind-") or shutil.which("kind", path=self._environ.get("PATH")) is None:
            return
        self._must("kind", "load", "docker-image", self._image, "--name", context.removeprefix("kind-"))

    def _require(self, *programs: str) -> None:
        for program in programs:
            if shutil.which(program, path=self._environ.get("PATH")) is None:
                raise CannotPrepare(f"{program} is not on the path (or set KUBECONFIG to the cluster to use)")

    def _must(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = self._call(*words)
        if done.returncode:
            raise CannotPrepare(f"{' '.join(words)}: {done.stderr.strip()}")
        return done

    def _mlbench(self, home: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self._call(sys.executable, "-m", "mlbench_cli", *words, MLBENCH_HOME=home)

    def _call(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env={**self._environ, **variables}, cwd=ROOT, capture_output=True, text=True, check=False
        )


def list_scripts(folder: Path) -> list[Path]:
    """The scripts of a folder; those whose name begins with "_" belong to others."""
    return sorted(path for path in folder.glob("[a-z]*.py"))


def run_scripts(scripts: Sequence[Path], environ: Mapping[str, str]) -> int:
    """Run the scripts in turn, printing what each needs. Returns the first exit code that is not 0, or 0."""
    first_failure = 0
    with Preparation(environ) as preparation:
        for script in scripts:
            need = NEEDS.get(script.stem)
            print(f"== {script.name}: needs {need or 'this machine'}", flush=True)
            try:
                setting = preparation.prepare(need)
            except CannotPrepare as problem:
                print(f"left out: {problem}", flush=True)
                continue
            command = [sys.executable, str(script), *setting.words]
            done = subprocess.run(command, env={**environ, **setting.variables}, cwd=ROOT, check=False)
            if done.returncode:
                print(f"{script.name} ended with exit code {done.returncode}", flush=True)
            first_failure = first_failure or done.returncode
    return first_failure


def main(argv: Sequence[str]) -> int:
    """Run the scripts that are named, or all; `--list` only prints what each needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts without .py; default: all")
    parser.add_argument("--list", action="store_true", help="print what each script needs, and run none")
    options = parser.parse_args(argv)
    scripts = list_scripts(ROOT / "benchmarks")
    if unknown := set(options.names) - {script.stem for script in scripts}:
        parser.error(f"no such script in benchmarks/: {', '.join(sorted(unknown))}")
    if options.names:
        scripts = [script for script in scripts if script.stem in options.names]
    if options.list:
        print(*(f"{script.stem:<16}{NEEDS.get(script.stem, 'this machine')}" for script in scripts), sep="\n")
        return 0
    return run_scripts(scripts, os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
