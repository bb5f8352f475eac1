"""The life of an agent from its start to the ends of its ranks; ends, times and networks are the test's own."""

import fcntl
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli import isolation
from mlbench_cli.agent import agent as module
from mlbench_cli.agent import machine, processes
from mlbench_cli.agent.agent import GRACE, Agent, Rank
from mlbench_cli.agent.messages import pending_facts
from mlbench_cli.agent.network.namespaces import ShapingError
from tests.fakes.clock import Clock
from tests.unit.agent.test_agent import read_state

KILL = signal.SIGKILL


class Clocks(Clock):
    """The wall clock shows 4000 s more than the monotonic one."""

    def time(self) -> float:
        return self.now + 4000.0


Make = Callable[..., Any]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found = Clocks(1000.0)
    monkeypatch.setattr("mlbench_cli.agent.agent.time", found)
    return found


@pytest.fixture
def make(tmp_path: Path, clock: Clocks, sent: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Agent] = []
    monkeypatch.setattr(processes, "kill_descendants", lambda: None)
    monkeypatch.setattr(machine, "memory_kills", dict)

    def make(ranks: int = 2, **plan: Any) -> Any:
        for name in (".state", "logs"):
            (tmp_path / name).mkdir(exist_ok=True)
        entries = [
            {"rank": rank, "argv": ["true"], "environment": {"NODE_RANK": "0", "MLBENCH_OUTPUT_DIR": "output"}}
            for rank in range(ranks)
        ]
        request = {
            "run_id": "the-id",
            "python": "/opt/python/bin/python3",
            "installed_code_only": False,
            "machine_lock": {"lock": "held", "lock_reason": None},
            "plan": {
                "name": "a-1",
                "spec_hash": "abc",
                "timeout": 600.0,
                "gpus_per_worker": 0,
                "environment": {},
                "defaults": {},
                "workers": 2,
                "ranks": entries,
                **plan,
            },
        }
        made.append(Agent(str(tmp_path), request, -1))
        return made[-1]

    yield make
    for agent in made:
        agent.selector.close()


def begin(agent: Agent, *pids: int) -> None:
    for rank, pid in zip(agent.ranks, pids, strict=False):
        rank.begin(pid, 1000.0, 5000.0)


def read_rows(agent: Agent) -> list[Any]:
    path = Path(agent.folder, "resources.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- the state ------------------------------------------------------------------------------------------------------


def test_the_first_state_says_which_run_and_which_process_it_is(make: Make) -> None:
    agent = make()
    note = processes.process_note(os.getpid())
    assert agent.state == {
        "schema_version": 1,
        "run_id": "the-id",
        "name": "a-1",
        "spec_hash": "abc",
        **note,
        "master_port": agent.port,
        "started": 5000.0,
        "finished": None,
        "seconds": None,
        "stepped_seconds": 0.0,
        "ended": None,
        "first_failed": None,
        "disk_full": False,
        "start_problem": None,
        "network_problem": None,
        "ranks": [pending_facts(0), pending_facts(1)],
    }
    assert agent.deadline == 1600.0
    agent.set_port(4711)
    assert (agent.port, agent.state["master_port"]) == (4711, 4711)


def test_a_rank_is_noted_from_its_start_to_its_end(clock: Clocks) -> None:
    rank = Rank({"rank": 3, "argv": ["true"], "environment": {}})
    assert (rank.running, rank.pid, rank.pidfd, rank.cpus) == (False, 0, -1, [])
    rank.begin(11, 990.0, 4990.0)
    assert rank.facts == {**pending_facts(3), "pid": 11, "phase": "running", "started": 4990.0}
    clock.now = 1000.12345
    rank.end()
    assert (rank.facts["finished"], rank.facts["seconds"], rank.running) == (5000.12345, 10.123, False)


# --- main -----------------------------------------------------------------------------------------------------------


class Steps:
    """An agent whose parts only note that they had their turn."""

    steps: list[Any]
    problem: str | None

    def __init__(self, folder: str, request: dict[str, Any], leash: int) -> None:
        self.steps.append((folder, request["run_id"], leash))

    def prepare(self) -> None:
        self.steps.append("prepare")

    def start(self) -> str | None:
        self.steps.append("start")
        return self.problem

    def watch(self) -> None:
        self.steps.append("watch")

    def finish(self) -> None:
        self.steps.append("finish")


@pytest.mark.parametrize(("problem", "told"), [(None, b"ok\n"), ("no such file", b"no such file\n")])
@pytest.mark.parametrize("is_heard", [True, False])
def test_an_agent_says_whether_it_has_started_and_goes_on_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str | None, told: bytes, is_heard: bool
) -> None:
    """A client may have died in between."""
    monkeypatch.setattr(Steps, "steps", [], raising=False)
    monkeypatch.setattr(Steps, "problem", problem, raising=False)
    monkeypatch.setattr(module, "Agent", Steps)
    monkeypatch.setattr(module, "_finalize", lambda folder, name: Steps.steps.append((folder, name)))
    kept: list[int] = []
    monkeypatch.setattr(machine, "keep_only", lambda *descriptors: kept.extend(descriptors))
    (tmp_path / ".state").mkdir()
    (tmp_path / ".state/request.json").write_text('{"run_id": "the-id", "finalizer": "a.module"}')
    reader, ready = os.pipe()
    lock = os.open(os.devnull, os.O_RDONLY)
    if not is_heard:
        os.close(reader)
    assert module.main([str(tmp_path), "-1", str(ready), str(lock), "7"]) == 0
    assert kept == [-1, ready, lock, 7]
    if is_heard:
        assert os.read(reader, 100) == told
        assert os.read(reader, 100) == b""
        os.close(reader)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lock)
    place = str(tmp_path)
    assert Steps.steps == [(place, "the-id", -1), "prepare", "start", "watch", "finish", (place, "a.module")]


def test_faults_are_ready_before_the_first_rank_and_the_state_says_what_runs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[Any] = []

    def start(self: Agent, rank: Rank) -> None:
        order.append(rank.number)
        rank.begin(11 + rank.number, 1000.0, 5000.0)

    monkeypatch.setattr(Agent, "_start", start)
    monkeypatch.setattr(Agent, "_sample", lambda self: order.append("sample"))
    agent = make()
    agent.faults = SimpleNamespace(begin=lambda: order.append("faults"), waits=False)
    assert agent.start() is None
    assert order == ["faults", 0, 1, "sample"]
    assert [rank["pid"] for rank in read_state(agent)["ranks"]] == [11, 12]
    assert Path(agent.folder, ".state/reserve").stat().st_size == 64 * 1024


def test_signals_wake_the_agent_and_only_two_of_them_end_the_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives the terminal of its client."""
    handlers: dict[int, Any] = {}
    woken: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda number, what: handlers.update({number: what}))
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda descriptor, warn_on_full_buffer: woken.append(descriptor))
    agent = make()
    leash, held = os.pipe()
    agent.leash = leash
    agent._listen()
    assert handlers.keys() == {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP}
    assert handlers[signal.SIGHUP] is signal.SIG_IGN
    assert (agent.cancelled, handlers[signal.SIGCHLD](signal.SIGCHLD, None)) == (False, None)
    (writer,) = woken
    os.write(writer, b"xyz")
    ((key, _),) = agent.selector.select(5.0)
    key.data()
    assert agent.selector.select(0) == []  # all of it is read
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert agent.cancelled
    os.close(held)
    ((lost, _),) = agent.selector.select(5.0)
    assert lost.fd == leash
    for descriptor in (writer, key.fd, leash):
        os.close(descriptor)


# --- the network ----------------------------------------------------------------------------------------------------


class Network:
    """A shaped network that is made, or not."""

    problem: str | None = None
    where = "verify"

    def __init__(self, shape: object, workers: int) -> None:
        self.words = (str(shape), workers)
        self.finished: list[str] = []
        self.channel, self._other = os.pipe()
        if self.problem and self.where == "make":
            raise ShapingError(self.problem)

    def verify(self) -> None:
        if self.problem:
            raise ShapingError(self.problem)

    def finish(self, path: str) -> None:
        self.finished.append(path)
        if self.problem:
            raise OSError(28, self.problem)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> type[Network]:
    monkeypatch.setattr("mlbench_cli.agent.network.shaped.ShapedNetwork", Network)
    monkeypatch.setattr(Network, "problem", None)
    return Network


@pytest.mark.parametrize("where", ["make", "verify"])
def test_a_network_that_cannot_be_had_starts_nothing(
    make: Make, network: type[Network], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(network, "problem", "requested 50mbit, but it has 80")
    monkeypatch.setattr(network, "where", where)
    monkeypatch.setattr(Agent, "_start", lambda self, rank: pytest.fail("a rank was started"))
    agent = make(network="50mbit,20ms")
    assert agent.start() == "network: requested 50mbit, but it has 80"
    assert agent.state["network_problem"] == "requested 50mbit, but it has 80"
    assert (agent.state["ended"], agent.state["start_problem"]) == ("never_started", None)


def test_the_loss_of_the_network_fails_the_run(make: Make, network: type[Network]) -> None:
    agent = make(network="50mbit,20ms")
    assert agent._shape_network() is True
    assert agent.network.words == ("50mbit,20ms", 2)
    os.close(agent.network._other)
    for key, _ in agent.selector.select(5.0):
        key.data()
    assert agent.state["network_problem"] == "the process that made it has ended"
    assert (agent.state["ended"], agent.stop_at) == ("failed", 1000.0 + GRACE)
    assert not agent.selector.get_map()
    os.close(agent.network.channel)


def test_the_evidence_of_the_network_is_written_at_the_end(
    make: Make, network: type[Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make()
    agent._finish_network()  # there is none
    agent.network = made = Network("50mbit", 2)
    agent._finish_network()
    assert (made.finished, agent.state["ended"]) == ([f"{agent.folder}/shaping.json"], None)
    monkeypatch.setattr(network, "problem", "No space left on device")
    agent._finish_network()
    assert (agent.state["ended"], agent.state["disk_full"]) == ("failed", True)
    for descriptor in (made.channel, made._other):
        os.close(descriptor)


# --- the child that becomes a rank ----------------------------------------------------------------------------------


class Ended(BaseException):
    """The child ends with this code."""


class Child:
    """The forked child of an agent: what it does to itself, in order, and how it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.steps: list[Any] = []
        self.error: BaseException = Ended(0)  # an exec does not return
        self.reader, self.report = os.pipe()
        self.parent = 4711

    def note(self, *words: Any) -> None:
        self.steps.append(words)

    def execute(self, file: str, argv: list[str], environment: dict[str, str]) -> None:
        self.steps.append(("exec", file, argv, environment["MASTER_PORT"]))
        raise self.error

    def exit(self, code: int) -> None:
        raise Ended(code)

    def become(self, agent: Any, rank: Rank) -> int:
        """The child's exit code."""
        note = self.note
        with self.monkeypatch.context() as patch:
            patch.setattr(os, "setpgid", lambda *words: note("group", *words))
            patch.setattr(os, "getppid", lambda: self.parent)
            patch.setattr(os, "sched_setaffinity", lambda *words: note("cpus", *words))
            patch.setattr(os, "dup2", lambda source, target: note("stream", target, source))
            patch.setattr(os, "execvpe", self.execute)
            patch.setattr(os, "_exit", self.exit)
            patch.setattr(signal, "signal", lambda number, what: note("signal", number, what))
            patch.setattr(machine, "prctl", lambda *words: note("prctl", *words))
            with pytest.raises(Ended) as caught:
                agent._exec_command(rank, (7, 8), self.report, 4711)
        os.close(self.report)
        code: int = caught.value.args[0]
        return code

    def read(self) -> bytes:
        told = os.read(self.reader, 1000)
        os.close(self.reader)
        return told


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    return Child(monkeypatch)


def test_a_rank_dies_with_its_agent_and_has_streams_of_its_own(make: Make, child: Child) -> None:
    agent = make()
    agent.ranks[0].argv, agent.ranks[0].cpus = ["python", "train.py"], [3]
    agent.network = SimpleNamespace(enter_worker=lambda worker: child.note("network", worker))
    child.become(agent, agent.ranks[0])
    null = child.steps[7][2]
    assert child.steps == [
        ("group", 0, 0),
        ("network", 0),  # a new user namespace clears what is set next
        ("prctl", machine.PR_SET_PDEATHSIG, KILL),
        *(("signal", number, signal.SIG_DFL) for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP)),
        ("cpus", 0, [3]),
        ("stream", 0, null),
        ("stream", 1, 7),
        ("stream", 2, 8),
        ("exec", "/opt/python/bin/python3", ["python", "train.py"], str(agent.port)),
    ]
    os.close(null)
    child.read()


def test_a_rank_whose_agent_has_died_does_not_start(make: Make, child: Child) -> None:
    agent = make()
    child.parent = 1
    assert child.become(agent, agent.ranks[0]) == 126
    assert child.steps[-1][0] == "prctl"
    child.read()


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (FileNotFoundError(2, "No such file or directory"), 127, b"trian: No such file or directory"),
        (PermissionError(13, "Permission denied"), 126, b"trian: Permission denied"),
        (ValueError("embedded null byte"), 126, b"trian: embedded null byte"),
    ],
)
def test_a_command_that_cannot_be_run_ends_as_in_a_shell(
    make: Make, child: Child, error: BaseException, code: int, told: bytes
) -> None:
    """POSIX: 127 if there is none, 126 if it cannot be executed."""
    agent = make()
    agent.ranks[0].argv, child.error = ["trian"], error
    assert child.become(agent, agent.ranks[0]) == code
    os.close(child.steps[-4][2])
    assert (child.steps[-1][1], child.read()) == ("trian", told)


def test_a_rank_of_an_installed_mlbench_sees_only_its_code(
    make: Make, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def isolate(argv: list[str], environ: object, path: str | None) -> list[str]:
        asked.append((argv, path))
        return ["env", *argv]

    monkeypatch.setattr(isolation, "rank_command", isolate)
    agent = make(environment={"MLBENCH_TASK_PATH": "/task"})
    agent.installed_code_only = True
    child.become(agent, agent.ranks[0])
    assert asked == [(["true"], "/task")]
    assert child.steps[-1][1:3] == ("env", ["env", "true"])
    os.close(child.steps[-4][2])
    child.read()


@pytest.mark.parametrize("told", [b"", b"trian: No such file or directory"])
@pytest.mark.parametrize("divides", [True, False])
def test_a_rank_that_was_started_is_noted_and_watched(
    make: Make, monkeypatch: pytest.MonkeyPatch, told: bytes, divides: bool
) -> None:
    pipes: list[tuple[int, int]] = []
    pipe = os.pipe
    groups: list[Any] = []

    def make_pipe() -> tuple[int, int]:
        pipes.append(pipe())
        return pipes[-1]

    def fork() -> int:
        os.write(pipes[-1][1], told)  # what the child says if it cannot become its command
        return 4711

    agent = make()
    agent.divides_streams = divides
    handle = os.open(os.devnull, os.O_RDONLY)
    watched: dict[int, Any] = {}
    agent.selector.close()
    agent.selector = SimpleNamespace(
        register=lambda what, events, call: watched.update({what: call}), close=lambda: None
    )
    monkeypatch.setattr(os, "pipe", make_pipe)
    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(os, "setpgid", lambda *words: groups.append(words))
    monkeypatch.setattr(processes, "process_handle", lambda pid: handle)
    rank = agent.ranks[1]
    agent._start(rank)
    assert (rank.pid, rank.running, rank.begun, rank.facts["started"]) == (4711, True, 1000.0, 5000.0)
    assert rank.facts["start_error"] == (told.decode() or None)
    assert (rank.pidfd, groups) == (handle, [(4711, 4711)])
    assert Path(agent.folder, "logs/rank-1.log").stat().st_mode & 0o777 == 0o644
    errors = [rank.errors.reader] if divides else []
    assert list(watched) == [*errors, handle]
    assert Path(agent.folder, ".state/stderr-1").exists() is divides
    for descriptor in pipes[-1]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    if rank.errors is not None:
        rank.errors.close()
    os.close(handle)


def test_a_rank_without_a_command_has_only_a_log(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it was started"))
    agent = make()
    agent.ranks[1].argv = None
    agent._start(agent.ranks[1])
    assert Path(agent.folder, "logs/rank-1.log").exists()
    assert (agent.ranks[1].running, agent.ranks[1].facts) == (False, pending_facts(1))


class Errors:
    """A rank's standard error, of which there is more, or no more, or for which there is no room."""

    def __init__(self, found: bool | OSError) -> None:
        self.found, self.reader, self.is_closed = found, 99, False

    def copy(self) -> bool:
        if isinstance(self.found, OSError):
            raise self.found
        return self.found

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("found", "is_closed", "ended"),
    [(True, False, None), (False, True, None), (OSError(28, "No space left on device"), True, "failed")],
)
def test_standard_error_is_read_to_its_end_or_until_there_is_no_room(
    make: Make, found: bool | OSError, is_closed: bool, ended: str | None
) -> None:
    agent = make()
    forgotten: list[int] = []
    agent.selector.close()
    agent.selector = SimpleNamespace(unregister=forgotten.append, close=lambda: None)
    agent.ranks[0].errors = errors = Errors(found)
    agent._copy_errors(agent.ranks[0])
    assert (errors.is_closed, forgotten) == (is_closed, [99] if is_closed else [])
    assert (agent.ranks[0].errors is None, agent.state["ended"], agent.state["disk_full"]) == (
        is_closed,
        ended,
        ended is not None,
    )
    agent._end_errors(agent.ranks[0])
    assert (errors.is_closed, len(forgotten)) == (True, 1)


def test_what_an_attempt_has_left_in_standard_error_is_read_before_the_next(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make()
    agent.divides_streams = False
    agent.selector.close()
    agent.selector = SimpleNamespace(unregister=lambda what: None, register=lambda *words: None, close=lambda: None)
    agent.ranks[0].errors = errors = Errors(True)
    monkeypatch.setattr(os, "fork", lambda: 4711)
    monkeypatch.setattr(os, "setpgid", lambda *words: None)
    monkeypatch.setattr(processes, "process_handle", lambda pid: -1)
    agent._start(agent.ranks[0])
    assert (errors.is_closed, agent.ranks[0].errors) == (True, None)


def test_the_folder_of_a_run_is_locked_by_its_agent_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers take a free lock as proof of its death."""
    locked: list[Any] = []
    monkeypatch.setattr("mlbench_cli.agent.agent.fcntl.flock", lambda *words: locked.append(words))
    agent = make()
    agent._hold_lock()
    ((descriptor, operation),) = locked
    path = Path(agent.folder, ".state/supervisor.lock")
    assert os.fstat(descriptor).st_ino == path.stat().st_ino
    assert (operation, path.stat().st_mode & 0o777) == (fcntl.LOCK_EX, 0o600)
    os.close(descriptor)


# --- ends of ranks --------------------------------------------------------------------------------------------------


def end_rank(agent: Any, monkeypatch: pytest.MonkeyPatch, number: int, status: int) -> None:
    """A rank's process ends with this status of wait4: a code in the second byte, or a signal in the first."""
    usage = SimpleNamespace(ru_utime=1.5, ru_stime=0.25, ru_maxrss=2)
    pid = agent.ranks[number].pid
    monkeypatch.setattr(os, "wait4", lambda asked, options: (pid, status, usage) if asked == pid else (0, 0, None))
    agent._on_exit(agent.ranks[number])


@pytest.mark.parametrize(
    ("status", "phase", "code", "number", "ended"),
    [
        (0, "succeeded", 0, None, None),
        (3 << 8, "failed", 3, None, "failed"),
        (signal.SIGSEGV, "failed", 128 + signal.SIGSEGV, signal.SIGSEGV, "failed"),
    ],
)
def test_the_end_of_a_rank_is_noted_as_it_was(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    sent: list[Any],
    status: int,
    phase: str,
    code: int,
    number: int | None,
    ended: str | None,
) -> None:
    agent = make()
    begin(agent, 11, 12)
    end_rank(agent, monkeypatch, 1, status)
    facts = agent.ranks[1].facts
    assert (facts["phase"], facts["exit_code"], facts["signal"], facts["stopped"]) == (phase, code, number, False)
    assert (facts["peak_rss_bytes"], facts["out_of_memory"], facts["memory_limit_bytes"]) == (2048, None, None)
    assert sent[0] == ("group", 12, KILL)  # what it left behind ends with it
    assert sent[1:] == ([("process", 11, signal.SIGTERM)] if ended else [])
    assert (agent.state["ended"], agent.state["first_failed"]) == (ended, 1 if ended else None)
    assert read_state(agent)["ranks"][1]["exit_code"] == code
    (row,) = read_rows(agent)
    assert (row["rank"], row["cpu_seconds"], row["peak_rss_bytes"]) == (1, 1.75, 2048)


def test_a_rank_that_still_runs_has_not_ended(make: Make, monkeypatch: pytest.MonkeyPatch, sent: list[Any]) -> None:
    agent = make()
    begin(agent, 11, 12)
    monkeypatch.setattr(os, "wait4", lambda pid, options: (0, 0, None))
    agent._on_exit(agent.ranks[0])
    assert (agent.ranks[0].running, agent.ranks[0].facts["phase"], sent) == (True, "running", [])


def test_ranks_that_end_after_the_first_were_stopped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make()
    begin(agent, 11, 12)
    end_rank(agent, monkeypatch, 1, 3 << 8)
    end_rank(agent, monkeypatch, 0, signal.SIGTERM)
    assert (agent.state["first_failed"], agent.ranks[0].facts["stopped"], agent.ranks[1].facts["stopped"]) == (
        1,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("status", "before", "after", "kind", "limit"),
    [
        (KILL, {"cgroup": 1}, {"cgroup": 2}, "cgroup", 4096),
        (KILL, {"cgroup": 1, "machine": 5}, {"cgroup": 1, "machine": 6}, "machine", 4096),
        (KILL, {"cgroup": 1}, {"cgroup": 1}, None, None),
        (KILL, {}, {}, None, None),
        (137 << 8, {"cgroup": 1}, {"cgroup": 2}, None, None),  # a code that only looks like it
        (signal.SIGSEGV, {"cgroup": 1}, {"cgroup": 2}, None, None),
    ],
)
def test_memory_ran_out_for_a_rank_that_was_killed_while_the_kernel_counted(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    before: dict[str, int],
    after: dict[str, int],
    kind: str | None,
    limit: int | None,
) -> None:
    monkeypatch.setattr(machine, "memory_kills", lambda: before)
    monkeypatch.setattr(machine, "memory_limit", lambda: 4096)
    agent = make()
    begin(agent, 11, 12)
    monkeypatch.setattr(machine, "memory_kills", lambda: after)
    end_rank(agent, monkeypatch, 0, status)
    facts = agent.ranks[0].facts
    assert (facts["out_of_memory"], facts["memory_limit_bytes"]) == (kind, limit)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_rank_whose_run_goes_on_keeps_its_phase(make: Make, monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    agent = make()
    begin(agent, 11, 12)
    asked: list[Any] = []

    def take_end(rank: Rank, code: int, number: int | None) -> bool:
        asked.append((rank.number, code, number))
        return goes_on

    agent.faults = SimpleNamespace(take_end=take_end, waits=False)
    end_rank(agent, monkeypatch, 0, KILL)
    assert asked == [(0, 137, 9)]
    facts = agent.ranks[0].facts
    assert (facts["phase"], facts["exit_code"], facts["signal"]) == ("running" if goes_on else "failed", 137, 9)
    assert (len(read_rows(agent)), agent.state["ended"]) == ((0, None) if goes_on else (1, "failed"))
    assert read_state(agent)["ranks"][0]["exit_code"] == 137


def test_a_rank_that_is_started_again_runs_and_that_is_written(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make()
    monkeypatch.setattr(Agent, "_start", lambda self, rank: rank.begin(21, 1007.0, 5007.0))
    agent.start_again(agent.ranks[0])
    facts = read_state(agent)["ranks"][0]
    assert (facts["restarts"], facts["pid"], facts["phase"]) == (1, 21, "running")


def test_the_log_of_a_rank_is_complete_before_readers_learn_of_its_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make()
    begin(agent, 11, 12)
    seen: list[Any] = []
    monkeypatch.setattr(Agent, "_copy_errors", lambda self, rank: seen.append((rank.number, rank.running)))
    end_rank(agent, monkeypatch, 1, 0)
    assert seen == [(1, True)]


@pytest.mark.parametrize(("number", "is_full"), [(28, True), (5, False)])
def test_a_disk_on_which_a_page_finds_no_room_fails_the_run(
    make: Make, monkeypatch: pytest.MonkeyPatch, number: int, is_full: bool
) -> None:
    """A task may ignore that the last lines of its results were not written."""

    def refuse(path: str, mode: str) -> None:
        assert (path, mode) == (f"{agent.folder}/.state/probe", "wb")
        raise OSError(number, os.strerror(number))

    agent = make()
    monkeypatch.setattr(module, "open", refuse, raising=False)
    agent._check_space()
    assert (agent.state["disk_full"], agent.state["ended"]) == (is_full, "failed")


# --- watching -------------------------------------------------------------------------------------------------------


class Selector:
    """A selector that lets the time pass for which it is asked, until the ranks end."""

    def __init__(self, agent: Any, clock: Clocks, rounds: int) -> None:
        self.agent, self.clock, self.rounds = agent, clock, rounds
        self.waits: list[float] = []

    def select(self, seconds: float) -> list[Any]:
        self.waits.append(round(seconds, 6))
        self.clock.now += seconds
        if len(self.waits) == self.rounds:
            for rank in self.agent.ranks:
                rank.running = False
        return []

    def close(self) -> None:
        """Nothing is open."""


def watch(agent: Any, clock: Clocks, monkeypatch: pytest.MonkeyPatch, rounds: int) -> list[float]:
    """How long the agent waits in its first rounds."""
    for rank in agent.ranks:
        rank.pidfd = 99
    agent.selector.close()
    agent.selector = Selector(agent, clock, rounds)
    monkeypatch.setattr(Agent, "_reap_orphans", lambda self: None)
    agent.watch()
    waits: list[float] = agent.selector.waits
    return waits


def test_an_agent_wakes_once_a_second_for_samples_and_at_the_deadline(
    make: Make, clock: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make(timeout=2.75)
    begin(agent, 11, 12)
    agent.next_sample = 1000.5
    assert watch(agent, clock, monkeypatch, 5) == [0.5, 1.0, 1.0, 0.25, 0.75]
    assert (agent.state["ended"], agent.stop_at) == ("deadline", 1002.75 + 5.0)  # five seconds to end by itself
    assert len(read_rows(agent)) >= 4


def test_an_agent_wakes_for_its_faults_and_when_ranks_must_be_killed(
    make: Make, clock: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make()
    begin(agent, 11, 12)
    agent.next_sample = 1e9
    seen: list[float] = []
    agent.faults = SimpleNamespace(waits=False, next_moment=lambda: clock.now + 0.25, on_time=seen.append)
    assert watch(agent, clock, monkeypatch, 2) == [0.25, 0.25]
    assert seen == [1000.25, 1000.5]
    begin(agent, 11, 12)
    agent._stop("failed", 3.0)
    agent.give_up_at = 1001.5
    assert watch(agent, clock, monkeypatch, 1) == [1.0]  # faults have no turn any more


@pytest.mark.parametrize(("waits", "rounds"), [(True, 3), (False, 0)])
def test_an_agent_stays_for_another_attempt(
    make: Make, clock: Clocks, monkeypatch: pytest.MonkeyPatch, waits: bool, rounds: int
) -> None:
    agent = make()
    agent.faults = SimpleNamespace(waits=waits, next_moment=lambda: clock.now + 1.0)

    def on_time(now: float) -> None:
        if now >= 1003.0:
            agent.faults.waits = False

    agent.faults.on_time = on_time
    agent.next_sample = 1e9
    assert watch(agent, clock, monkeypatch, 99) == [1.0] * rounds


def test_a_rank_without_a_descriptor_is_looked_at_in_each_round(
    make: Make, clock: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(Agent, "_on_exit", lambda self, rank: looked.append(rank.number))
    monkeypatch.setattr(Agent, "_reap_orphans", lambda self: None)
    agent = make()
    begin(agent, 11, 12)
    agent.ranks[0].pidfd = 99
    agent.selector.close()
    agent.selector = Selector(agent, clock, 3)
    agent.watch()
    assert looked == [1, 1]  # in the last round all have ended


def test_orphans_are_taken_up_until_a_rank_is_next(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = iter([21, 22, 11, 23])
    taken: list[int] = []
    monkeypatch.setattr(os, "waitid", lambda kind, number, options: SimpleNamespace(si_pid=next(ended)))
    monkeypatch.setattr(os, "waitpid", lambda pid, options: taken.append(pid))
    agent = make()
    begin(agent, 11, 12)
    agent._reap_orphans()
    assert taken == [21, 22]
    monkeypatch.setattr(os, "waitid", lambda kind, number, options: None)
    agent._reap_orphans()
    assert taken == [21, 22]


# --- samples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "looks"), [((1 << 20) - 4096, 1), (1 << 20, 0)])
def test_a_disk_that_is_nearly_full_is_watched_closely(
    make: Make, monkeypatch: pytest.MonkeyPatch, free: int, looks: int
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free // 4096, f_frsize=4096))
    monkeypatch.setattr(Agent, "_check_space", lambda self: looked.append(1))
    agent = make()
    agent._sample()
    assert (len(looked), agent.next_sample) == (looks, 1001.0)


def test_samples_are_those_of_ranks_that_run_and_of_the_machine(make: Make) -> None:
    agent = make(3)
    begin(agent, 11, 12)
    agent.ranks[1].end()
    asked: list[Any] = []

    def lines(ranks: dict[int, int]) -> list[dict[str, object]]:
        asked.append(ranks)
        return [{"rank": rank} for rank in ranks]

    agent.sampler = SimpleNamespace(lines=lines, running_seconds=1.5)
    agent.load = SimpleNamespace(row=lambda seconds: {"kind": "machine", "of": seconds})
    Path(agent.folder, "logs/rank-0.log").write_text("abc")
    agent._sample()
    assert asked == [{0: 11}]
    assert read_rows(agent) == [{"rank": 0, "log_bytes": 3}, {"kind": "machine", "of": 1.5}]


def test_a_run_that_is_over_is_written_for_good(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make()
    undone: list[str] = []
    agent.faults = SimpleNamespace(finish=lambda: undone.append("faults"), waits=False)
    monkeypatch.setattr(processes, "kill_descendants", lambda: undone.append("processes"))
    monkeypatch.setattr(Agent, "_check_space", lambda self: undone.append("space"))
    agent.clock = SimpleNamespace(check=lambda: 2.5)
    agent.load = SimpleNamespace(row=lambda seconds: {"kind": "machine", "of": seconds})
    agent.finish()
    assert undone == ["faults", "processes", "space"]
    state = read_state(agent)
    assert (state["ended"], state["finished"], state["stepped_seconds"]) == ("exited", 5000.0, 2.5)
    assert read_rows(agent) == [{"kind": "machine", "of": 0.0}]
