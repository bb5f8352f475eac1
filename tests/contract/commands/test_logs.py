"""`mlbench logs` on real runs: times, the last lines, lines since a time, ranks merged, a run that goes on."""

import json
import re
import subprocess
import time
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import parse_timestamp
from tests.contract import clients
from tests.contract.terminal import LIMIT

Captured = pytest.CaptureFixture[str]
TICKS = """sh -c 'for i in 1 2 3; do echo "$i of {rank}"; sleep 1.1; done'"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def show_logs(capsys: Captured, *argv: str) -> list[str]:
    capsys.readouterr()
    assert run(["logs", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def test_ranks_are_merged_by_time(capsys: Captured) -> None:
    assert run(["run", "a", "2", "--command", TICKS]) == 0
    lines = show_logs(capsys, "a-2")
    assert lines == [f"[{rank}] {number} of {rank}" for number in (1, 2, 3) for rank in (0, 1)]
    assert show_logs(capsys, "a-2", "--tail", "3") == lines[-3:]
    assert show_logs(capsys, "a-2", "--tail", "0") == []
    stamped = show_logs(capsys, "a-2", "--timestamps", "--rank", "1")
    assert all(re.fullmatch(r"~\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ    \d of 1", line) for line in stamped)
    document = json.loads("\n".join(show_logs(capsys, "a-2", "-o", "json")))
    moments = [line["time"] for line in document["lines"]]
    assert moments == sorted(moments)
    assert {line["time_is_exact"] for line in document["lines"]} == {False}
    row = Store().run("a-2")
    workers = LocalEngine().look(row.run).workers
    started = min(worker.started or 0.0 for worker in workers)
    assert all(started < parse_timestamp(moment) < time.time() for moment in moments)
    assert show_logs(capsys, "a-2", "--since", moments[-1]) == lines[-2:]
    assert show_logs(capsys, "a-2", "--since", "1h") == lines
    assert show_logs(capsys, "a-2", "--since", "2999-01-01T00:00:00Z") == []


def test_events_have_exact_times(capsys: Captured) -> None:
    code = 'from task_images.contract import emit; print("before", flush=True); emit("phase", phase="training")'
    assert run(["run", "a", "1", "--command", f"python -c '{code}'"]) == 0
    document = json.loads("\n".join(show_logs(capsys, "a-1", "--raw", "-o", "json")))
    before, event = document["lines"]
    assert (before["text"], before["time_is_exact"], event["time_is_exact"]) == ("before\n", False, True)
    assert before["time"] == event["time"]  # it was written no later than that
    assert json.loads(event["text"].removeprefix("@mlbench "))["time"] == pytest.approx(
        parse_timestamp(event["time"]), abs=2e-3
    )
    (line,) = show_logs(capsys, "a-1", "--timestamps")
    assert re.fullmatch(r"~\d{4}\S+Z    before", line)


def test_following_begins_with_the_last_lines(home: Path, capsys: Captured) -> None:
    command = "sh -c 'echo one; echo two; touch there; while [ ! -e go ]; do sleep 0.05; done; echo three'"
    assert run(["run", "a", "2", "--detach", "--command", command]) == 0
    end = time.monotonic() + LIMIT
    while len(show_logs(capsys, "a-2")) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    follower = clients.start("logs", "a-2", "--follow", "--tail", "2", "--timestamps", stdout=subprocess.PIPE)
    assert follower.stdout is not None
    first = [follower.stdout.readline() for _ in range(2)]
    Path("go").touch()
    rest, _ = follower.communicate(timeout=LIMIT)
    assert follower.returncode == 0
    assert [line.split()[-1] for line in (*first, *rest.splitlines())].count("three") == 2
    assert sum("one" in line for line in first) <= 1
    assert len(rest.splitlines()) == 2
    assert run(["wait", "a-2"]) == 0
