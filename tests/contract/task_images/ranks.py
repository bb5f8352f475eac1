"""Start a module as the ranks of a run, with the variables of the contract, and read back what it says."""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mlbench_cli.agent.machine import free_port
from task_images.contract import parse_event

ROOT = Path(__file__).parents[3]
SHARED = "RANKS_OF_TESTS"  # a variable: the address of the program that forks them
SECONDS = 280.0  # a test's own limit, 300 seconds unless it has a mark, would leave ranks behind


Record = dict[str, Any]  # one event of a task, or its result
Parameters = Record


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    code: int
    stdout: str
    stderr: str

    def events(self, kind: str) -> list[Record]:
        found = (parse_event(line) for line in self.stdout.splitlines())
        return [event for event in found if event and event["event"] == kind]

    @property
    def result(self) -> Record:
        [only] = self.events("result")
        return only

    def metric(self, name: str) -> list[float]:
        return [event["value"] for event in self.events("metric") if event["name"] == name]


@dataclass(frozen=True)
class Started:
    """Ranks on their way."""

    pids: list[int]
    folder: Path


def environments(
    world_size: int, folder: Path, parameters: Mapping[str, Any], changes: Mapping[str, str], servers: int = 0
) -> list[dict[str, str]]:
    """The variables of every rank, then of parameter servers. Each has its own output folder, `folder`/output-RANK."""
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "MLBENCH_RUN_ID": f"test-{world_size}",
        "MLBENCH_BACKEND": "gloo",
        "MLBENCH_DEVICE": "cpu",
        "MLBENCH_GOAL": "full",
        "MLBENCH_SEED": "42",
        "MLBENCH_PARAMETERS": json.dumps(dict(parameters)),
        **changes,
    }
    every = []
    for rank in range(world_size + servers):
        output = folder / f"output-{rank}"
        output.mkdir(parents=True, exist_ok=True)
        own = {"RANK": str(rank), "NODE_RANK": str(rank), "MLBENCH_OUTPUT_DIR": str(output)}
        if servers:
            own |= {"MLBENCH_SERVERS": str(servers), "MLBENCH_ROLE": "trainer" if rank < world_size else "server"}
        every.append({**os.environ, **shared, **own})
    return every


def read_ended(codes: Sequence[int], folder: Path) -> list[Ended]:
    return [
        Ended(code, (folder / f"out-{rank}").read_text(), (folder / f"err-{rank}").read_text())
        for rank, code in enumerate(codes)
    ]


def launch(
    module: str, world_size: int, folder: Path, parameters: Mapping[str, Any], *, servers: int = 0, **changes: str
) -> list[Ended]:
    """Run `python -m MODULE`, with its arguments, as every rank and as parameter servers behind them, as an engine
    would, and wait."""
    return launch_within(SECONDS, module, world_size, folder, parameters, changes, servers)


def launch_within(
    seconds: float,
    module: str,
    world_size: int,
    folder: Path,
    parameters: Mapping[str, Any],
    changes: Mapping[str, str],
    servers: int = 0,
) -> list[Ended]:
    """The same; raises TimeoutExpired after `seconds`."""
    processes = []
    for rank, environment in enumerate(environments(world_size, folder, parameters, changes, servers)):
        with open(folder / f"out-{rank}", "wb") as out, open(folder / f"err-{rank}", "wb") as err:
            command = [sys.executable, "-m", *module.split()]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err))
    try:
        codes = [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return read_ended(codes, folder)


def start_forks(*words: str, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.contract.task_images.forks", *words]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, **options)


def share_forks() -> str:
    """The address of the program, for all workers of a session: the first call starts it, and its children inherit the
    variable. While it loads torch, connections wait."""
    if not os.environ.get(SHARED):
        address = f"\0mlbench-ranks-{os.getpid()}"  # Linux forgets it with the socket
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            descriptor = listener.fileno()
            process = start_forks(str(descriptor), pass_fds=[descriptor], stdin=subprocess.DEVNULL)
        atexit.register(process.kill)
        os.environ[SHARED] = address[1:]
    return "\0" + os.environ[SHARED]


class RankServer:
    """Ranks forked from a process that has torch loaded (forks.py): seconds less for each. With the address of one that
    other workers use, too, it is a copy of that."""

    def __init__(self, address: str | None = None) -> None:
        self._orders: IO[str]
        self._answers: IO[str]
        self._process: subprocess.Popen[str] | None = None
        if address:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(address)
                self._orders, self._answers = connection.makefile("w"), connection.makefile("r")
        else:
            self._process = start_forks(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._orders, self._answers = self._process.stdin, self._process.stdout
        self._running: Started | None = None
        assert self._answer() == "ready"

    def run(
        self, module: str, world_size: int, folder: Path, parameters: Mapping[str, Any], **changes: str
    ) -> list[Ended]:
        """`module` as all ranks; how they ended."""
        return self.wait(self.start(module, world_size, folder, parameters, changes))

    def start(
        self,
        module: str,
        world_size: int,
        folder: Path,
        parameters: Mapping[str, Any],
        changes: Mapping[str, str] | None = None,
        missing: int = 0,
        servers: int = 0,
    ) -> Started:
        """The same without waiting; the last `missing` ranks are not started. One group of ranks at a time: those that
        a failed test has left are killed."""
        if self._running is not None:
            self.wait(self._running, 0)
        every = environments(world_size, folder, parameters, changes or {}, servers)
        every = every[: len(every) - missing]
        outputs = [[str(folder / f"out-{rank}"), str(folder / f"err-{rank}")] for rank in range(len(every))]
        for path in (path for pair in outputs for path in pair):
            Path(path).write_bytes(b"")
        print(json.dumps({"module": module, "environments": every, "outputs": outputs}), file=self._orders, flush=True)
        self._running = Started(self._answer(), folder)
        return self._running

    def wait(self, started: Started, seconds: float = SECONDS) -> list[Ended]:
        """How the ranks ended. After `seconds` they are killed, and their codes tell."""
        if not select.select([self._answers], [], [], seconds)[0]:
            for pid in started.pids:
                os.kill(pid, signal.SIGKILL)
        self._running = None
        return read_ended(self._answer(), started.folder)

    def close(self) -> None:
        self._orders.close()
        self._answers.close()
        if self._process is not None:
            self._process.wait(60)

    def _answer(self) -> Any:
        return json.loads(self._answers.readline())
