"""What an agent reads of its machine: devices, memory, clocks, interfaces, streams and control groups."""

import io
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from mlbench_cli.agent import machine
from mlbench_cli.agent.load import LoadMeter
from mlbench_cli.agent.machine import TICKS, visible_gpus

# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "files", "found"),
    [
        ("0,2", ["nvidia0"], ["0", "2"]),
        ("", ["nvidia0"], []),
        ("GPU-abc", ["nvidia0"], ["GPU-abc"]),
        ("NoDevFiles", ["nvidia0"], []),
        ("0", [], []),
        ("1,-1,0", ["nvidia0", "nvidia1"], ["1"]),
        ("0", ["dxg"], ["0"]),
        (None, ["nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"], ["2", "10"]),
        (None, ["kfd"], ["0", "1"]),
        (None, ["kfd", "nvidia0"], ["0"]),
        (None, ["null"], []),
    ],
)
def test_gpus_are_those_of_the_environment_or_of_the_kernel(
    tmp_path: Path, given: str | None, files: list[str], found: list[str]
) -> None:
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, gpu in enumerate(("0", "4098", "4099", "no number")):  # 0 is a CPU
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "gpu_id").write_text(gpu)
    (nodes / "9").mkdir()
    environ = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible_gpus(environ, str(tmp_path)) == found
    assert visible_gpus({}, str(tmp_path / "nowhere")) == []


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "limit"), [("1000000", 1_000_000), ("max", 2048 * 1024), ("9999999999", 2048 * 1024), (None, 2048 * 1024)]
)
def test_memory_is_what_the_group_or_the_machine_has_whichever_is_less(
    monkeypatch: pytest.MonkeyPatch, group: str | None, limit: int
) -> None:
    files = {"/proc/meminfo": "MemTotal: 2048 kB\nMemFree: 1 kB\n", "/proc/self/cgroup": "0::/run\n"}
    if group is not None:
        files["/sys/fs/cgroup/run/memory.max"] = group

    def open_file(path: str, *_: Any, **__: Any) -> io.StringIO:
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    with monkeypatch.context() as patch:  # a test cannot have a kernel of its own
        patch.setattr("builtins.open", open_file)
        found = machine.memory_limit()
    assert found == limit


# --- ranks -----------------------------------------------------------------------------------------------------------


def test_the_cpu_time_of_children_that_have_ended_stays_that_of_their_rank() -> None:
    burn = f"{sys.executable} -S -c 'import time\nwhile time.process_time() < 0.2: pass'"
    with subprocess.Popen(["sh", "-c", f"{burn}; echo; read line"], stdin=PIPE, stdout=PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        [line] = machine.Sampler().lines({3: rank.pid})
        rank.kill()
    assert line["rank"] == 3
    assert line["cpu_seconds"] >= 0.18


# --- load ------------------------------------------------------------------------------------------------------------


def test_load_is_that_of_the_cpus_which_the_run_may_use(tmp_path: Path) -> None:
    """Others belong to other containers or pinned runs, whose work is no disturbance."""
    own = min(os.sched_getaffinity(0))
    (tmp_path / "proc").mkdir()

    def write(ours: int, theirs: int) -> None:
        rows = [
            f"cpu {ours + theirs} 0 0 9 9 0 0",
            f"cpu{own} {ours} 0 0 9 9 0 0",
            f"cpu{own + 5000} {theirs} 0 0 9 9 0 0",
        ]
        (tmp_path / "proc/stat").write_text("\n".join(rows))

    write(100, 100)
    meter = LoadMeter("held", root=str(tmp_path))
    write(100 + 3 * TICKS, 100 + 50 * TICKS)
    assert meter.row(0.0)["busy_seconds"] == 3.0
