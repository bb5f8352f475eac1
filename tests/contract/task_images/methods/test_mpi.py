"""The backend mpi: real ranks, real MPI, no launcher."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests import NIGHTLY
from tests.contract.task_images import collectives
from tests.contract.task_images.ranks import ROOT, RankServer, environments, launch

MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))
PROGRAM = "tests.contract.task_images.methods.mpi_ranks"


@pytest.mark.parametrize("size", (2, 3) if NIGHTLY else (2,))
def test_every_collective_gives_what_it_should(ranks: RankServer, tmp_path: Path, size: int) -> None:
    for rank, one in enumerate(ranks.run(PROGRAM, size, tmp_path, {})):
        assert (one.code, one.stderr) == (0, "")
        printed = json.loads(one.stdout)
        assert printed["rank"] == rank
        assert printed["facts"]["library"].startswith("MPICH")
        assert printed["facts"]["detours"] == [
            "bfloat16 reduced as float32",
            "float16 reduced as float32",
            "input copied if it shares memory with the output",
        ]


@pytest.mark.slow
@pytest.mark.parametrize("size", (2, 3) if NIGHTLY else (2,))
def test_the_same_over_the_network_instead_of_shared_memory(ranks: RankServer, tmp_path: Path, size: int) -> None:
    ended = ranks.run(PROGRAM, size, tmp_path, {}, MPIR_CVAR_NOLOCAL="1")
    assert [(one.code, one.stderr) for one in ended] == [(0, "")] * size


def test_the_ranks_take_it_for_any_other_backend(ranks: RankServer, tmp_path: Path) -> None:
    for one in ranks.run("tests.contract.task_images.collectives", 3, tmp_path, {}, MLBENCH_BACKEND="mpi"):
        lines = [line for line in one.stdout.splitlines() if not line.startswith("@mlbench ")]
        assert lines == [f"OK {check.__name__}" for check in collectives.CHECKS]
        assert (one.code, one.stderr) == (0, "")


@pytest.mark.nightly
def test_a_task_by_mpi_ends_cleanly_and_says_so(tmp_path: Path) -> None:
    """Started as an engine starts it, so that the library is finalised too."""
    before = shared_memory()
    parameters = {"max_exponent": 3.0, "count": 4, "samples": 5, "warmup": 1, "dtypes": ["fp32", "bf16"]}
    ended = launch("task_images.run allreduce", 2, tmp_path, parameters, MLBENCH_BACKEND="mpi")
    assert [(one.code, one.stderr) for one in ended] == [(0, "")] * 2
    assert ended[0].result["details"]["backend"]["launcher"] == "none"
    assert ended[0].result["details"]["backend"]["detours"] == ["bfloat16 reduced as float32"]
    assert_nothing_left(before)


def test_a_killed_run_leaves_no_shared_memory(ranks: RankServer, tmp_path: Path) -> None:
    before = shared_memory()
    ended = ranks.run(PROGRAM, 2, tmp_path, {}, LEAVE="1")
    assert [one.code for one in ended] == [9, 9]
    assert_nothing_left(before)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("mpich")}


def assert_nothing_left(before: set[str]) -> None:
    """Other tests may use MPI at the same time: what some process maps is theirs, and what they make is soon gone."""
    deadline = time.monotonic() + 150
    while left := {name for name in shared_memory() - before if not is_mapped(name)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def is_mapped(name: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended
            if name in maps.read_text():
                return True
    return False


@pytest.mark.nightly
def test_under_mpiexec_its_ranks_are_taken(tmp_path: Path) -> None:
    """One mpiexec for both; RANK comes from it."""
    environment = environments(2, tmp_path, {}, {})[0]
    del environment["RANK"]
    ended = subprocess.run(
        [MPIEXEC, "-n", "2", sys.executable, "-m", PROGRAM],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    printed, text, decoder = [], ended.stdout.strip(), json.JSONDecoder()
    while text:  # mpiexec may put what two ranks print into one line
        one, length = decoder.raw_decode(text)
        printed.append(one)
        text = text[length:].lstrip()
    assert sorted(one["rank"] for one in printed) == [0, 1]
    assert {one["facts"]["launcher"] for one in printed} == {"external"}


@pytest.mark.nightly
def test_mpiexec_and_the_run_must_agree(tmp_path: Path) -> None:
    """An mpiexec for each of two ranks makes two jobs of one rank."""
    command = [MPIEXEC, "-n", "1", sys.executable, "-m", "task_images.run", "allreduce"]
    both = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for environment in environments(2, tmp_path, {}, {"MLBENCH_BACKEND": "mpi"})
    ]
    for rank, process in enumerate(both):
        _, stderr = process.communicate(timeout=180)
        assert process.returncode == 78
        assert f"rank {rank}: MPI says rank 0 of 1, the run says rank {rank} of 2" in stderr
        assert "Traceback" not in stderr


def test_without_the_wheel_it_says_what_to_install(ranks: RankServer, tmp_path: Path) -> None:
    (ended,) = ranks.run("tests.contract.task_images.methods.without_mpi", 1, tmp_path, {}, MLBENCH_BACKEND="mpi")
    assert ended.code == 78
    assert "pip install mpi4py mpich" in ended.stderr
    assert "Traceback" not in ended.stderr
