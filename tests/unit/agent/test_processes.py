"""Which process a note names, whether it lives, and that no other one gets its signals."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent import machine, processes
from mlbench_cli.agent.clock import SLEW, STEP_SECONDS, ClockWatch
from mlbench_cli.agent.processes import descendants, is_alive, is_signaled, process_note, signal_process

pytestmark = pytest.mark.skipif(not processes.HAS_PROC, reason="it takes /proc")


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def note_of(pid: int, **changes: Any) -> Any:
    return {**process_note(pid), **changes}


def test_a_process_lives_until_it_ends_also_if_nobody_waits_for_it(child: "subprocess.Popen[bytes]") -> None:
    note = note_of(child.pid)
    assert is_alive(note) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays as a zombie
    assert is_alive(note) is False
    child.wait()
    assert is_alive(note) is False


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


@pytest.mark.parametrize(("error", "alive"), [(ProcessLookupError(), False), (PermissionError(), True), (None, True)])
def test_without_proc_a_signal_that_does_nothing_tells(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, alive: bool
) -> None:
    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), 0)
        if error is not None:
            raise error

    monkeypatch.setattr(os, "kill", kill)
    assert is_alive(note_of(os.getpid(), start_time=None)) is alive


def test_only_the_process_that_a_note_names_gets_the_signal(child: "subprocess.Popen[bytes]") -> None:
    signal_process(note_of(child.pid, start_time=1), signal.SIGKILL)
    signal_process(note_of(child.pid, boot_id="other"), signal.SIGKILL)
    assert child.poll() is None
    before = len(os.listdir("/proc/self/fd"))
    signal_process(note_of(child.pid), signal.SIGTERM)
    assert child.wait(30) == -signal.SIGTERM
    signal_process(note_of(child.pid, start_time=1), signal.SIGTERM)  # it has gone
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_system_without_handles_signals_by_number(
    child: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "process_handle", lambda pid: -1)
    signal_process(note_of(child.pid), signal.SIGTERM)
    assert child.wait(30) == -signal.SIGTERM


def test_all_below_a_process_are_its_descendants_and_itself_is_not() -> None:
    tree = {1: [2, 3], 2: [4], 4: [5], 9: [10]}
    assert sorted(descendants(1, tree)) == [2, 3, 4, 5]
    assert (descendants(4, tree), descendants(7, tree)) == ([5], [])
    assert tree[1] == [2, 3]


@pytest.mark.parametrize(
    ("script", "signaled"),
    [("kill -TERM $$", True), ("exit 143", True), ("exit 1", False), ("kill -KILL $$", False)],
)
def test_a_rank_that_ended_by_term_or_says_so_was_ended_by_others(script: str, signaled: bool) -> None:
    with subprocess.Popen(["sh", "-c", script]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_signaled(process.pid) is signaled
    assert is_signaled(process.pid) is False  # it is no child any more


def test_a_rank_that_runs_was_ended_by_nobody(child: "subprocess.Popen[bytes]") -> None:
    assert is_signaled(child.pid) is False


def test_processes_of_a_run_are_found_by_their_output_folder_and_agents_by_their_arguments(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    code = ["-c", "import sys; print(flush=True); sys.stdin.read()"]
    variables: tuple[dict[str, str], ...] = (
        {"MLBENCH_OUTPUT_DIR": f"{folder}/output"},
        {"MLBENCH_OUTPUT_DIR": f"{folder}-2/output"},
        {},
    )
    arguments: tuple[list[str], ...] = ([], [], [f"{folder}/nodes/0"])
    started = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", *code, *words],
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for own, words in zip(variables, arguments, strict=True)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        rank, _, agent = (process.pid for process in started)
        assert processes.find_processes(folder) == [rank]
        assert sorted(processes.find_processes(folder, arguments=True)) == sorted([rank, agent])
        killed, left = processes.kill_processes(folder, seconds=0.0)
        assert (killed, left) == ([rank], [rank])  # it was there at the only look
        assert started[0].wait(30) == -signal.SIGKILL
        assert started[1].poll() is None
    finally:
        for process in started:
            process.kill()
            process.communicate()


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


@pytest.mark.parametrize(
    ("worker", "count", "expected"),
    [(0, 2, ["0", "1"]), (1, 2, ["2", "3"]), (2, 2, ["0", "1"]), (1, 3, ["3", "0", "1"]), (0, 6, ["0", "1", "2", "3"])],
)
def test_workers_share_gpus_if_there_are_too_few(worker: int, count: int, expected: list[str]) -> None:
    assert machine.gpus_of_worker(worker, count, ["0", "1", "2", "3"]) == expected


def test_gpus_are_those_of_the_variable_or_of_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert machine.visible_gpus({}, str(tmp_path)) == []
    assert machine.visible_gpus({}, str(tmp_path / "none")) == []
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, gpu in enumerate(("0", "4711", "4712")):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "gpu_id").write_text(f"{gpu}\n")
    assert machine.visible_gpus({}, str(tmp_path)) == []  # without AMD's device
    (tmp_path / "dev/kfd").touch()
    assert machine.visible_gpus({}, str(tmp_path)) == ["0", "1"]
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert machine.visible_gpus({}, str(tmp_path)) == ["2", "10"]
    assert machine.visible_gpus({"CUDA_VISIBLE_DEVICES": "3,"}, str(tmp_path)) == ["3"]
    assert machine.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, str(tmp_path)) == []


def test_a_document_that_is_replaced_is_private_if_it_is_to_be_and_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    machine.replace_file(str(path), {"a": 1}, is_durable=True)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ('{"a": 1}', 0o644)
    machine.replace_file(str(path), {"a": 2}, is_private=True)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ('{"a": 2}', 0o600)
    assert os.listdir(tmp_path) == ["state.json"]


# --- clocks ---------------------------------------------------------------------------------------------------------


def test_a_step_is_what_slewing_and_reading_do_not_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(
        [
            (0.0, 1000.0, 0.001),
            (100.0, 1000.0 + STEP_SECONDS + 100 * SLEW + 0.002, 0.001),  # just what may be
            (100.0, 900.0, 0.0),
            (100.0, 902.5, 0.0),
        ]
    )
    monkeypatch.setattr("mlbench_cli.agent.clock.read_clocks", lambda: next(readings))
    watch = ClockWatch()
    assert watch.check() == 0.0
    first = watch.check()
    assert first == pytest.approx(100.072, abs=0.001)
    assert watch.check() == pytest.approx(first + 2.5, abs=0.001)  # without its sign
