"""What the agent of one machine decides about its ranks, with ranks that have no processes."""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent import processes
from mlbench_cli.agent.agent import AT_START, GRACE, RESERVE, UNKILLABLE, Agent, _finalize
from task_images.harness import cores

KILLED = 128 + signal.SIGKILL


def make_agent(folder: Path, ranks: int = 2, **plan: Any) -> Agent:
    for name in (".state", "logs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    request = {
        "run_id": "a-1",
        "python": "/opt/python/bin/python3",
        "installed_code_only": False,
        "machine_lock": {"lock": "held", "lock_reason": None},
        "plan": {
            "name": "a-1",
            "spec_hash": "0",
            "timeout": 600.0,
            "gpus_per_worker": 0,
            "environment": {},
            "defaults": {},
            "ranks": [
                {
                    "rank": rank,
                    "argv": ["true"],
                    "environment": {"NODE_RANK": str(rank), "MLBENCH_OUTPUT_DIR": f"output/rank-{rank}"},
                }
                for rank in range(ranks)
            ],
            **plan,
        },
    }
    return Agent(str(folder), request, -1)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = make_agent(tmp_path)
    yield made
    made.selector.close()


@pytest.fixture(autouse=True)
def swept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that the agent kills all its descendants, which are those of the tests here."""
    found: list[int] = []
    monkeypatch.setattr(processes, "kill_descendants", lambda: found.append(1))
    return found


def run_rank(agent: Agent, number: int, pid: int) -> None:
    agent.ranks[number].begin(pid, time.monotonic(), time.time())


def read_state(agent: Agent) -> Any:
    return json.loads(Path(agent.folder, ".state/state.json").read_text())


# --- ranks that are not started again -------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "phase"), [(KILLED, "failed"), (0, "succeeded")])
def test_a_rank_that_is_left_out_has_ended_for_good(agent: Agent, code: int, phase: str) -> None:
    """Otherwise its log and its phase would wait for an attempt that never comes."""
    rank = agent.ranks[1]
    rank.facts.update({"phase": "running", "exit_code": code})
    agent.leave_out(rank)
    assert (rank.facts["phase"], rank.facts["stopped"]) == (phase, False)


def test_ranks_that_wait_for_another_attempt_are_stopped_by_the_one_that_failed(agent: Agent) -> None:
    for rank, code in zip(agent.ranks, (143, 3), strict=True):
        rank.facts.update({"phase": "running", "exit_code": code})
    agent.fail(1, 3)
    assert [rank.facts["phase"] for rank in agent.ranks] == ["failed", "failed"]
    assert [rank.facts["stopped"] for rank in agent.ranks] == [True, False]
    assert (agent.state["first_failed"], agent.state["ended"]) == (1, "failed")


def test_ranks_that_run_or_have_ended_are_not_abandoned(agent: Agent) -> None:
    run_rank(agent, 0, 11)
    agent.ranks[1].facts.update({"phase": "succeeded", "exit_code": 3})
    agent.abandon_ranks()
    assert [rank.facts["phase"] for rank in agent.ranks] == ["running", "succeeded"]


def test_another_start_counts_and_forgets_how_the_one_before_ended(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agent, "_start", lambda self, rank: None)
    rank = agent.ranks[0]
    rank.facts.update({"exit_code": KILLED, "signal": 9, "stopped": True, "out_of_memory": "cgroup"})
    agent.start_again(rank)
    agent.start_again(rank)
    assert rank.facts["restarts"] == 2
    ending = (rank.facts["exit_code"], rank.facts["signal"], rank.facts["stopped"], rank.facts["out_of_memory"])
    assert ending == (None, None, False, None)
    assert read_state(agent)["ranks"][0]["restarts"] == 2


def test_a_rank_keeps_its_first_start_and_loses_its_end_when_it_starts_again(agent: Agent) -> None:
    rank = agent.ranks[0]
    rank.begin(11, 100.0, 5000.0)
    rank.end()
    assert rank.facts["finished"] is not None
    rank.begin(12, 107.0, 5007.0)
    assert (rank.pid, rank.begun, rank.facts["started"]) == (12, 100.0, 5000.0)
    assert rank.running
    assert rank.facts["finished"] is None


def test_a_rank_runs_from_before_the_fork_however_late_its_agent_runs_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = os.fork

    def fork_and_wait() -> int:
        if pid := fork():
            time.sleep(0.2)
        return pid

    monkeypatch.setattr(os, "fork", fork_and_wait)
    rank = agent.ranks[0]
    agent._start(rank)
    os.waitpid(rank.pid, 0)
    rank.end()
    started, finished, seconds = (rank.facts[key] for key in ("started", "finished", "seconds"))
    assert started is not None
    assert finished is not None
    assert seconds is not None
    assert min(finished - started, seconds) >= 0.2


# --- the end --------------------------------------------------------------------------------------------------------


def test_the_first_reason_to_end_stays(agent: Agent, sent: list[Any]) -> None:
    agent._stop("failed", GRACE)
    agent._stop("deadline", GRACE)
    agent._stop("client_lost", grace=0)
    assert agent.state["ended"] == "failed"


def test_a_later_reason_hastens_the_end_only_without_grace(agent: Agent, sent: list[Any]) -> None:
    run_rank(agent, 0, 11)
    agent._stop("failed", GRACE)
    first = agent.stop_at
    agent._stop("cancelled", GRACE)
    assert agent.stop_at == first
    assert sent == [("process", 11, signal.SIGTERM)]
    agent._stop("client_lost", grace=0)
    assert first is not None
    assert agent.stop_at is not None
    assert agent.stop_at < first
    assert sent[1:] == [("group", 11, signal.SIGKILL)]


def test_ranks_that_have_ended_get_no_signal(agent: Agent, sent: list[Any]) -> None:
    """Their numbers may belong to other processes."""
    run_rank(agent, 0, 11)
    run_rank(agent, 1, 12)
    agent.ranks[1].end()
    agent._signal(signal.SIGTERM)
    agent._signal(signal.SIGKILL)
    assert [pid for _, pid, _ in sent] == [11, 11]


def test_the_state_promises_the_end_only_when_all_is_over(agent: Agent) -> None:
    agent._stop("deadline", GRACE)
    assert (read_state(agent)["ended"], read_state(agent)["stopping"]) == (None, "deadline")
    agent._write_state(last=True)
    assert read_state(agent)["ended"] == "deadline"
    assert "stopping" not in read_state(agent)


def test_a_run_ends_at_its_deadline_and_not_before(agent: Agent, sent: list[Any]) -> None:
    agent._on_time(agent.deadline - 0.1)
    assert agent.state["ended"] is None
    agent._on_time(agent.deadline)
    assert agent.state["ended"] == "deadline"


def test_a_cancellation_ends_the_run_when_the_time_is_looked_at(agent: Agent, sent: list[Any]) -> None:
    agent._on_cancel()
    agent._on_time(agent.deadline)
    assert agent.state["ended"] == "cancelled"


def test_a_rank_that_ignores_term_is_killed_after_the_grace(agent: Agent, sent: list[Any]) -> None:
    run_rank(agent, 0, 11)
    agent._stop("failed", GRACE)
    assert agent.stop_at is not None
    end = agent.stop_at
    agent._on_time(end - 0.1)
    assert ("group", 11, signal.SIGKILL) not in sent
    agent._on_time(end)
    assert sent.count(("group", 11, signal.SIGKILL)) == 1
    assert (agent.stop_at, agent.give_up_at) == (end + GRACE, end + UNKILLABLE)
    agent._on_time(end + GRACE)
    assert sent.count(("group", 11, signal.SIGKILL)) == 2
    assert agent.give_up_at == end + UNKILLABLE


def test_a_rank_that_cannot_be_killed_is_given_up(agent: Agent, sent: list[Any]) -> None:
    """A process that waits in the kernel for a dead file server would keep the agent for ever."""
    run_rank(agent, 0, 11)
    agent.ranks[1].facts["phase"] = "succeeded"
    agent._stop("failed", grace=0)
    assert agent.stop_at is not None
    agent._on_time(agent.stop_at)
    assert agent.give_up_at is not None
    agent._on_time(agent.give_up_at - 0.1)
    assert agent.ranks[0].facts["phase"] == "running"
    agent._on_time(agent.give_up_at)
    assert not any(rank.running for rank in agent.ranks)
    assert (agent.ranks[0].facts["phase"], agent.ranks[0].facts["stopped"]) == ("lost", True)
    assert (agent.ranks[1].facts["phase"], agent.ranks[1].facts["stopped"]) == ("succeeded", False)


def test_the_end_of_an_attached_client_ends_the_run_at_once(tmp_path: Path, sent: list[Any]) -> None:
    reader, writer = os.pipe()
    made = make_agent(tmp_path)
    made.leash = reader
    made.selector.register(reader, 1, made._on_client_lost)
    run_rank(made, 0, 11)
    os.close(writer)
    for key, _ in made.selector.select(1.0):
        key.data()
    assert made.state["ended"] == "client_lost"
    assert sent == [("group", 11, signal.SIGKILL)]
    assert not made.selector.get_map()
    os.close(reader)
    made.selector.close()


def test_workers_without_a_command_end_as_the_run_does(tmp_path: Path) -> None:
    for ended, facts in ((None, ("succeeded", 0, False)), ("failed", ("failed", None, True))):
        made = make_agent(tmp_path)
        made.ranks[1].argv = None
        made.state["ended"] = ended
        made.finish()
        found = made.ranks[1].facts
        assert (found["phase"], found["exit_code"], found["stopped"]) == facts
        assert made.ranks[0].facts["phase"] == "pending"
        made.selector.close()


def test_an_end_without_another_reason_is_an_exit_and_lasts_from_first_start_to_last_end(
    agent: Agent, swept: list[int]
) -> None:
    for rank, begun, ended in zip(agent.ranks, (10.0, 12.0), (15.5, 14.0), strict=True):
        rank.begun, rank.ended = begun, ended
    agent._reserve()
    assert Path(agent.folder, ".state/reserve").stat().st_size == RESERVE
    agent.finish()
    assert (read_state(agent)["ended"], read_state(agent)["seconds"]) == ("exited", 5.5)
    assert not Path(agent.folder, ".state/reserve").exists()
    assert swept == [1]


def test_a_run_of_which_no_rank_started_has_no_duration(agent: Agent) -> None:
    agent._stop("never_started", grace=0)
    agent.finish()
    assert (read_state(agent)["ended"], read_state(agent)["seconds"]) == ("never_started", None)


# --- files that cannot be written -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False), (errno.EACCES, False)]
)
def test_a_file_that_cannot_be_written_fails_the_run(agent: Agent, number: int, is_full: bool) -> None:
    agent.on_write_error(OSError(number, "no"))
    assert (agent.state["ended"], agent.state["disk_full"]) == ("failed", is_full)


def test_a_folder_that_was_removed_cancels_the_run(tmp_path: Path) -> None:
    made = make_agent(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "gone")
    made._write_resources([{"rank": 0}])
    assert (made.state["ended"], made.state["disk_full"]) == ("cancelled", False)
    made.selector.close()


def test_half_a_line_of_resources_is_taken_back(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent._write_resources([{"rank": 0}])
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    agent._write_resources([{"rank": 1}])
    monkeypatch.undo()
    assert Path(agent.folder, "resources.jsonl").read_text() == '{"rank":0}\n'
    assert agent.state["disk_full"]


def test_the_look_for_room_on_the_disk_leaves_nothing(agent: Agent) -> None:
    agent._check_space()
    assert os.listdir(Path(agent.folder, ".state")) == []
    assert agent.state["disk_full"] is False


def test_samples_have_the_size_of_a_log_that_there_is(agent: Agent) -> None:
    Path(agent.folder, "logs/rank-0.log").write_bytes(b"12345")
    found = agent._with_log_sizes([{"rank": 0}, {"rank": 1}])
    assert found == [{"rank": 0, "log_bytes": 5}, {"rank": 1}]


# --- the start ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "is_full"), [(errno.ENOSPC, True), (errno.EAGAIN, False)])
def test_ranks_that_cannot_be_started_are_the_reason(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, number: int, is_full: bool
) -> None:
    def refuse(self: Agent, rank: object) -> None:
        raise OSError(number, "the system's words")

    monkeypatch.setattr(Agent, "_start", refuse)
    assert agent.start() == "the system's words"
    assert (agent.state["start_problem"], agent.state["ended"]) == ("the system's words", "never_started")
    assert agent.state["disk_full"] is is_full


def test_too_few_cpus_to_pin_start_nothing(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.plan["pin"] = True
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    problem = agent.start()
    assert problem is not None
    assert problem.startswith("--pin: ")
    assert agent.state["ended"] == "never_started"


def test_only_ranks_with_a_command_get_cpus(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    agent._share_cpus()
    assert [rank.cpus for rank in agent.ranks] == [[], []]  # nobody asked for it
    agent.plan["pin"] = True
    agent.ranks[1].argv = None
    agent._share_cpus()
    assert [rank.cpus for rank in agent.ranks] == [[3], []]


def test_the_users_variables_outweigh_defaults_and_the_contracts_outweigh_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_DEFAULT", "user")
    monkeypatch.setenv("A_CONTRACT", "user")
    monkeypatch.setenv("PATH", "/usr/bin")
    defaults = {"A_DEFAULT": "default", "A_CONTRACT": "default", "ANOTHER": "default", "THREADS": AT_START}
    made = make_agent(tmp_path, environment={"A_CONTRACT": "plan"}, defaults=defaults)
    monkeypatch.setattr(cores, "effective_cores", lambda: 7)
    found = made._environment(made.ranks[1])
    assert (found["A_DEFAULT"], found["A_CONTRACT"], found["ANOTHER"]) == ("user", "plan", "default")
    assert found["THREADS"] == "3"  # of 7 cores for 2 ranks
    assert found["PATH"] == "/opt/python/bin:/usr/bin"
    assert found["MLBENCH_OUTPUT_DIR"] == f"{tmp_path}/output/rank-1"
    assert found["MASTER_PORT"] == str(made.port)
    assert cores.PINNED_FROM not in found
    monkeypatch.setattr(cores, "effective_cores", lambda: 1)
    assert made._environment(made.ranks[1])["THREADS"] == "1"
    made.selector.close()


@pytest.mark.parametrize(
    ("count", "devices", "seen"), [(1, "4,5", "5"), (2, "4,5,6,7", "6,7"), (0, "4,5", "4,5"), (1, "", "")]
)
def test_a_rank_sees_the_gpus_of_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, devices: str, seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    made = make_agent(tmp_path, gpus_per_worker=count)
    assert made._environment(made.ranks[1])["CUDA_VISIBLE_DEVICES"] == seen
    made.selector.close()


def test_a_finalizer_that_fails_does_not_lose_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[str] = []

    class Finalizer:
        @staticmethod
        def main(folder: str) -> None:
            called.append(folder)
            raise ValueError("it cannot be sealed")

    monkeypatch.setitem(sys.modules, "a_finalizer", Finalizer)
    _finalize(str(tmp_path), "a_finalizer")
    assert called == [str(tmp_path)]
    assert "ValueError: it cannot be sealed" in capsys.readouterr().err
    _finalize(str(tmp_path / "gone"), "a_finalizer")
    _finalize(str(tmp_path), None)
    assert len(called) == 1
