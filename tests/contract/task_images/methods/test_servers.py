"""Parameter servers as processes of their own: sums, and what becomes of the others if one is killed."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from task_images.methods.servers import assign
from tests.contract.task_images.ranks import RankServer, Started

SECONDS = 240.0
PROGRAM = "tests.contract.task_images.methods.server_checks"


def start(ranks: RankServer, method: dict[str, str], folder: Path, **parameters: bool) -> Started:
    """Two trainers, then servers."""
    changes = {"MLBENCH_METHOD": json.dumps(method)}
    return ranks.start(PROGRAM, 2, folder, parameters, changes, servers=int(method.get("servers", "1")))


SERVED: list[dict[str, str]] = [
    {"name": "wfbp-ps", "servers": "2", "partition": "256"},
    {"name": "bsp-ps"},
    {"name": "bytescheduler-ps", "partition": "256"},
]


@pytest.mark.parametrize("method", SERVED, ids=lambda method: method["name"])
def test_trainers_and_servers_end_together(ranks: RankServer, method: dict[str, str], tmp_path: Path) -> None:
    ended = ranks.wait(start(ranks, method, tmp_path), SECONDS)
    assert [one.code for one in ended] == [0] * len(ended), ended
    for one in ended[:2]:
        assert "OK self-check" in one.stdout
        assert "OK training" in one.stdout
    for one in ended[2:]:
        assert "all 2 trainers are done" in one.stdout + one.stderr


@pytest.mark.parametrize("victim", [1, 2], ids=["a trainer", "the server"])
def test_whoever_is_killed_the_others_end_and_say_so(ranks: RankServer, victim: int, tmp_path: Path) -> None:
    started = start(ranks, {"name": "wfbp-ps"}, tmp_path, endless=True)
    deadline = time.monotonic() + SECONDS
    while "OK self-check" not in (tmp_path / "out-0").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(started.pids[victim], signal.SIGKILL)
    ended = ranks.wait(started, SECONDS)
    codes, outputs = [one.code for one in ended], [one.stdout + one.stderr for one in ended]
    assert codes[victim] == -signal.SIGKILL
    assert [code for number, code in enumerate(codes) if number != victim] == [75, 75], outputs
    assert not any("Traceback" in output for output in outputs), outputs
    assert all("lost another rank" in output for number, output in enumerate(outputs) if number != victim), outputs


def test_servers_share_the_bytes_evenly() -> None:
    sizes = [4_000_000] * 5 + [1_000_000] * 7 + [12]
    chosen = assign(sizes, 3)
    load = [sum(size for size, server in zip(sizes, chosen, strict=True) if server == index) for index in range(3)]
    assert max(load) / (sum(load) / 3) < 1.1
    assert assign(sizes, 1) == [0] * len(sizes)
