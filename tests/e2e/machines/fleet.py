"""What the tests on real machines share: a client as a person has it, and looks at real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE = 150.0  # seconds; only a broken program, or a machine that others keep busy, needs them


@dataclass(frozen=True)
class Fleet:
    shared: Path
    hosts: tuple[str, ...]
    ssh_config: Path


@dataclass
class Client:
    """mlbench with a data folder of its own; `path` replaces PATH."""

    home: Path
    attach: list[str] = field(default_factory=list)
    path: str | None = None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        path = {} if self.path is None else {"PATH": self.path}
        return {**os.environ, "MLBENCH_HOME": str(self.home), "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", **path}

    def run(self, *words: str, seconds: float = 200.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mlbench_cli", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def ok(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlbench_cli", *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=open(self.home.parent / "client.log", "ab"),  # noqa: SIM115
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def shell(self, name: str, workers: int, script: str, *more: str) -> subprocess.CompletedProcess[str]:
        return self.run("run", name, str(workers), "--command", f"sh -c '{script}'", "--yes", *more)

    def elsewhere(self) -> "Client":
        """Another machine of the same person: it knows nothing but how to attach."""
        other = Client(self.home.with_name("elsewhere"), self.attach)
        other.ok(*other.attach)
        other.ok("status", "--refresh")
        return other

    def observation(self, name: str) -> Any:
        return json.loads((self.folder(name) / "observation.json").read_text())

    def result(self, name: str) -> Any:
        return json.loads((self.folder(name) / "result.json").read_text())

    def folder(self, name: str) -> Path:
        for path in (self.home / "runs").iterdir():
            if json.loads((path / "run.json").read_text())["spec"]["name"] == name:
                return path
        raise AssertionError(name)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not (self.home / "runs").exists():
            return
        for path in (self.home / "runs").iterdir():
            if (path / "run.json").exists():
                self.run("delete", json.loads((path / "run.json").read_text())["spec"]["name"], "--force", "--yes")


def until(condition: Callable[[], Any], seconds: float = PATIENCE, every: float = 0.2) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(every)
    return found


def find_processes(*words: str) -> list[int]:
    """Processes of this machine whose variables or arguments have all the words."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit() or int(path.name) == os.getpid():
            continue
        try:
            text = (path / "environ").read_bytes() + b"\0" + (path / "cmdline").read_bytes()
        except OSError:
            continue
        if all(word.encode() in text for word in words):
            found.append(int(path.name))
    return found


def agents(name: str) -> list[int]:
    """The agents of a run on all machines, without the children that guard them."""
    found = [pid for pid in find_processes(f"runs/{name}/nodes/") if b"mlbench_cli.agent.node" in command_of(pid)]
    return [pid for pid in found if parent_of(pid) not in found]


def ranks(name: str) -> list[int]:
    return find_processes(f"runs/{name}/nodes/", "MLBENCH_OUTPUT_DIR=")


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def kill(pids: Sequence[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it ended since it was listed
            os.kill(pid, number)
