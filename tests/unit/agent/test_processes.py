"""Which process a note names, whether it lives, and that no other one gets its signals."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent import machine, processes
from mlbench_cli.agent.processes import is_alive, is_lock_held, is_signaled, process_note, signal_process, try_lock

pytestmark = pytest.mark.skipif(not processes.HAS_PROC, reason="it takes /proc")


def note_of(pid: int, **changes: Any) -> Any:
    return {**process_note(pid), **changes}


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ({"start_time": 1}, False),  # another process has its number now
        ({"boot_id": "other"}, False),  # this machine was started again
        ({"boot_id": "other", "host": "other"}, None),  # another machine
        ({"pid_namespace": 1}, None),
        ({"start_time": None}, True),
    ],
)
def test_a_note_of_elsewhere_or_of_before_names_no_process_here(changes: dict[str, Any], alive: bool | None) -> None:
    assert is_alive(note_of(os.getpid(), **changes)) is alive


@pytest.mark.parametrize("note", [None, [], {}, {"pid": os.getpid()}, {"pid": 1, "boot_id": None}])
def test_what_is_no_note_names_no_process(note: object) -> None:
    assert is_alive(note) is False


def test_a_process_that_has_ended_and_is_not_waited_for_yet_does_not_live() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        note = process_note(process.pid)
        assert is_alive(note)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(note) is False


@pytest.mark.parametrize("changes", [{"start_time": 1}, {"boot_id": "other", "host": "other"}, {"pid_namespace": 1}])
def test_a_process_that_is_not_meant_gets_no_signal(changes: dict[str, Any]) -> None:
    with subprocess.Popen(["sleep", "600"]) as bystander:
        signal_process(note_of(bystander.pid, **changes), signal.SIGTERM)
        signal_process(note_of(bystander.pid), signal.SIGKILL)
        assert bystander.wait() == -signal.SIGKILL


def test_a_lock_is_held_by_whom_it_may_be(tmp_path: Path) -> None:
    path, own = tmp_path / "lock", note_of(os.getpid())
    elsewhere = {**own, "boot_id": "other", "host": "other"}
    assert [is_lock_held(path, note) for note in (None, own, elsewhere)] == [False, False, None]
    with open(path, "w") as file:
        assert [is_lock_held(path, note) for note in (None, own, elsewhere)] == [False, False, None]
        assert try_lock(file.fileno())
        assert [is_lock_held(path, note) for note in (None, own, elsewhere)] == [True] * 3


@pytest.mark.parametrize(
    ("script", "signaled"),
    [("kill -TERM $$", True), ("exit 143", True), ("exit 1", False), ("kill -KILL $$", False)],
)
def test_a_rank_that_ended_by_term_or_says_so_was_ended_by_others(script: str, signaled: bool) -> None:
    with subprocess.Popen(["sh", "-c", script]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_signaled(process.pid) is signaled
    assert is_signaled(process.pid) is False  # it is no child any more


# --- this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ({"cgroup": 1, "machine": 5}, {"cgroup": 1, "machine": 5}, None),
        ({"cgroup": 1, "machine": 5}, {"cgroup": 2, "machine": 6}, "cgroup"),
        ({"cgroup": 1, "machine": 5}, {"cgroup": 1, "machine": 6}, "machine"),
        ({}, {"machine": 1}, "machine"),
        ({"cgroup": 1}, {}, None),
    ],
)
def test_memory_ran_out_where_a_count_of_kills_has_risen(
    before: dict[str, int], after: dict[str, int], kind: str | None
) -> None:
    assert machine.risen(before, after) == kind
