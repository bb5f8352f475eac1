"""What the tests of local runs share: a store and an engine in a folder of their own, and looks at real processes."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.base import Engine
from mlbench_cli.engines.follow import read_log, watch
from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.model.run import Observation, Run
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.storage.store import Store

PATIENCE = 120.0  # seconds; only a broken program, or a machine that others keep busy, needs them
SLEEP = ("sleep", "600")


def bind_superuser() -> list[str]:
    """Words before a command whose superuser may read no more than others; tests without such a user are skipped."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("only the superuser can give away files, and only setpriv takes rights from them")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner"]


class Lab:
    """One client: its store in `home`, its engine. Ends what it started when it is closed."""

    kind = "local"

    def __init__(self, home: Path, engine: Engine | None = None) -> None:
        self.store = Store(home)
        self.engine: Engine = engine or LocalEngine()
        self.runs: list[Run] = []

    def record(self, argv: Sequence[str], name: str | None = None, **options: Any) -> Run:
        name = name or f"run-{len(self.runs)}"
        pods = {"image": "image:1", "kubernetes": KubernetesOptions(collect="all")}
        fields: dict[str, Any] = {
            "workers": 1,
            **(pods if self.kind == "kubernetes" else {}),
            "backend": "gloo",
            "task": "custom",
            "preset": "custom",
            **options,
        }
        spec = RunSpec(name=name, cluster=self.kind, engine=self.kind, argv=tuple(argv), **fields)
        run = self.store.record_run(spec)
        write_run_document(run)
        self.runs.append(run)
        return run

    def start(self, argv: Sequence[str], **options: Any) -> Run:
        run = self.record(argv, **options)
        self.engine.submit(run, self.engine.render(run.spec))
        return run

    def end(self, run: Run) -> Observation:
        """The last observation of a run."""
        (*_, last) = watch(self.engine, run)
        return last

    def log(self, run: Run, rank: int = 0) -> bytes:
        return b"".join(line.text for line in read_log(self.engine, run, rank, follow=True))

    def close(self) -> None:
        for run in self.runs:
            self.engine.delete(run, force=True)
        self.store.close()


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def python(script: str) -> tuple[str, ...]:
    return ("python", "-c", script)


def until(condition: Callable[[], Any]) -> Any:
    """The first true value of `condition`, or an AssertionError."""
    end, pause = time.monotonic() + PATIENCE, 0.01
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)  # many a condition looks at all processes of the machine
    raise AssertionError("it did not happen")


def processes_of(run: Run) -> list[int]:
    """Live processes that were given an output folder of this run, however deep or orphaned."""
    return processes_below(f"{run.folder}/output")


def processes_below(folder: str) -> list[int]:
    """Live processes that were given an output folder below `folder`."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
            state = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if f"MLBENCH_OUTPUT_DIR={folder}/".encode() in environment and state not in b"ZX":
            found.append(int(name))
    return found


def client(home: Path, script: str, **options: Any) -> "subprocess.Popen[str]":
    """Another process that knows the same store: `script` finds `lab` in it."""
    prelude = (
        "import sys; from pathlib import Path; from tests.contract.local_runs import *; "
        "from mlbench_cli.runs import finalize, supervise; lab = Lab(Path(sys.argv[1]))\n"
    )
    words = [sys.executable, "-c", prelude + script, str(home)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options)
