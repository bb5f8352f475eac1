"""`mlbench logs` on real runs: the last lines, events, a run that goes on."""

import json
import subprocess
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.util.times import parse_timestamp
from tests.contract import clients
from tests.contract.local_runs import until
from tests.contract.terminal import LIMIT

Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("home")


def show_logs(capsys: Captured, *argv: str) -> list[str]:
    capsys.readouterr()
    assert run(["logs", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def test_ranks_follow_one_another(capsys: Captured) -> None:
    command = "sh -c 'for i in 1 2 3; do echo $i of {rank}; done'"
    assert run(["run", "a", "2", "--command", command]) == 0
    lines = show_logs(capsys, "a-2")
    assert lines == [f"[{rank}] {number} of {rank}" for rank in (0, 1) for number in (1, 2, 3)]
    assert show_logs(capsys, "a-2", "--tail", "1") == [lines[2], lines[5]]
    document = json.loads("\n".join(show_logs(capsys, "a-2", "--tail", "1", "-o", "json")))
    assert [(line["rank"], line["text"]) for line in document["lines"]] == [(0, "3 of 0\n"), (1, "3 of 1\n")]
    assert show_logs(capsys, "a-2", "--tail", "0") == []
    assert show_logs(capsys, "a-2", "--rank", "1", "--tail", "2") == ["2 of 1", "3 of 1"]


def test_events_have_their_time(capsys: Captured) -> None:
    code = 'from task_images.contract import emit; print("before", flush=True); emit("phase", phase="training")'
    assert run(["run", "a", "1", "--command", f"python -c '{code}'"]) == 0
    document = json.loads("\n".join(show_logs(capsys, "a-1", "--raw", "-o", "json")))
    before, event = document["lines"]
    assert (before["text"], before["time"]) == ("before\n", None)
    assert json.loads(event["text"].removeprefix("@mlbench "))["time"] == pytest.approx(
        parse_timestamp(event["time"]), abs=2e-3
    )
    assert show_logs(capsys, "a-1") == ["before"]


def test_following_begins_with_the_last_lines(capsys: Captured) -> None:
    command = "sh -c 'echo one; echo two; touch there; while [ ! -e go ]; do sleep 0.05; done; echo three'"
    assert run(["run", "a", "2", "--detach", "--command", command]) == 0
    until(lambda: len(show_logs(capsys, "a-2")) == 4)
    follower = clients.start("logs", "a-2", "--follow", "--tail", "1", stdout=subprocess.PIPE)
    assert follower.stdout is not None
    first = [follower.stdout.readline() for _ in range(2)]
    Path("go").touch()
    rest, _ = follower.communicate(timeout=LIMIT)
    assert follower.returncode == 0
    assert [line.split()[-1] for line in (*first, *rest.splitlines())].count("three") == 2
    assert all("two" in line for line in first)
    assert len(rest.splitlines()) == 2
    assert run(["wait", "a-2"]) == 0
