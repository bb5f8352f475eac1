"""Parameter servers as processes of their own: sums, bounds, and what becomes of the others if one is killed."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from task_images.comm.methods import Method
from task_images.comm.presets import resolve
from task_images.comm.wire import assign
from tests.contract.task_images.ranks import ROOT, environments

SECONDS = 240.0


@contextmanager
def start(method: Method, trainers: int, folder: Path, **parameters: bool) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Trainers, then servers, with their outputs in `folder`/out-N."""
    changes = {"MLBENCH_METHOD": json.dumps(method.to_dict())}
    processes = []
    for number, environment in enumerate(environments(trainers, folder, parameters, changes, method.server_count)):
        with open(folder / f"out-{number}", "wb") as out:
            command = [sys.executable, "-m", "tests.contract.task_images.comm.server_checks"]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def read_outputs(folder: Path, count: int) -> list[str]:
    return [(folder / f"out-{number}").read_text() for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        resolve("wfbp-ps", {"servers": "2", "partition": "256"}),
        resolve("bytescheduler-ps", {"codec": "none", "partition": "256"}),
        resolve("ssp-ps", {"staleness": "ssp:1", "partition": "2kB"}),
        resolve("async-ps"),
        resolve("wfbp-ps", {"codec": "topk:0.1", "feedback": "ef", "partition": "none"}),
    ],
    ids=lambda method: f"{method.name} {method.codec}",
)
def test_trainers_and_servers_end_together(method: Method, tmp_path: Path) -> None:
    with start(method, 2, tmp_path) as processes:
        codes = [process.wait(SECONDS) for process in processes]
    outputs = read_outputs(tmp_path, len(codes))
    assert codes == [0] * len(codes), outputs
    for output in outputs[:2]:
        assert "OK self-check" in output
        assert "OK training" in output
    for output in outputs[2:]:
        assert "all 2 trainers are done" in output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 2], ids=["a trainer", "the server"])
def test_whoever_is_killed_the_others_end_and_say_so(victim: int, tmp_path: Path) -> None:
    with start(resolve("wfbp-ps"), 2, tmp_path, endless=True) as processes:
        deadline = time.monotonic() + SECONDS
        while "OK self-check" not in (tmp_path / "out-0").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        processes[victim].send_signal(signal.SIGKILL)
        codes = [process.wait(SECONDS) for process in processes]
    outputs = read_outputs(tmp_path, 3)
    assert codes[victim] == -signal.SIGKILL
    assert [code for number, code in enumerate(codes) if number != victim] == [75, 75], outputs
    assert not any("Traceback" in output for output in outputs), outputs
    if victim == 2:
        assert all("parameter server 0 is gone" in output for output in outputs[:2]), outputs
    else:
        assert "the parameter server ends: trainer 1 is gone" in outputs[2], outputs


def test_servers_share_the_bytes_evenly() -> None:
    sizes = [4_000_000] * 5 + [1_000_000] * 7 + [12]
    chosen = assign(sizes, 3)
    load = [sum(size for size, server in zip(sizes, chosen, strict=True) if server == index) for index in range(3)]
    assert max(load) / (sum(load) / 3) < 1.1
    assert assign(sizes, 1) == [0] * len(sizes)
