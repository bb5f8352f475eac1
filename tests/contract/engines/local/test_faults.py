"""Faults and attempts that one machine is enough for; ../test_faults.py has those of several machines."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import Run
from mlbench_cli.runs.finalize import finalize
from tests import slow
from tests.contract.engines.local.test_shaped_network import find_obstacle
from tests.contract.local_runs import Lab, client, processes_of, python, shell, until

# Sleeps in the first attempt; ends at once in the next.
SECOND_TRY = 'test -n "$MLBENCH_ATTEMPT" && exit 0; exec sleep 60'


def record_of(run: Run) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run.folder / "faults.json").read_bytes())
    return document


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (FileNotFoundError, ProcessLookupError):  # it ended since it was listed
        return False


def test_a_fault_of_the_second_attempt_comes_in_its_time(lab: Lab) -> None:
    script = "at 0.3s kill rank 1; at 1s for 0.5s stop rank 0"
    run = lab.start(shell("exec sleep 5"), workers=2, faults=script, on_failure="restart")
    assert lab.end(run).ended == "exited"
    record = record_of(run)
    assert record["attempts"][1]["training"] - record["attempts"][1]["started"] < 30
    assert [event["planned"]["kind"] for event in record["events"]] == ["kill", "stop"]
    assert record["missed"] is None


@pytest.mark.parametrize("code", [64, 78, *slow([70, 126, 127])])
def test_what_another_attempt_would_not_change_is_not_tried_again(lab: Lab, code: int) -> None:
    run = lab.start(shell(f"exit {code}"), workers=2, on_failure="restart")
    assert lab.end(run).ended == "failed"
    assert len(record_of(run)["attempts"]) == 1


def test_a_slowed_rank_has_its_share_of_the_time_and_is_not_taken_for_stopped(lab: Lab) -> None:
    burn = "import time; end = time.monotonic() + 2.5\nwhile time.monotonic() < end: pass\ntime.sleep(4)"
    run = lab.start(python(burn), workers=1, faults="at 0.3s for 4s slow rank 0 to 10% cpu", detect_seconds=1.0)
    assert lab.end(run).ended == "exited"
    (event,) = record_of(run)["events"]
    assert event["until"] - event["at"] >= 3.9
    assert 0.6 <= event["stopped_share"] <= 0.98  # 0.9 on an idle machine; late turns bring it nearer to a half


def test_what_left_the_group_of_its_rank_is_stopped_with_it(lab: Lab) -> None:
    """torchrun starts its workers in sessions of their own."""
    run = lab.start(shell("setsid sleep 77 & sleep 77"), faults="at 0.3s for 1s stop rank 0")
    until(lambda: [is_stopped(pid) for pid in processes_of(run)] == [True] * 3)
    until(lambda: [is_stopped(pid) for pid in processes_of(run)] == [False] * 3)


@pytest.mark.parametrize("moment", ["stop rank 0", "slow rank 0 to 20% cpu"])
def test_an_agent_that_is_killed_leaves_nothing_stopped(lab: Lab, moment: str) -> None:
    # A child in the same group: it does not die with the agent by itself.
    run = lab.start(shell("sleep 77 & sleep 77"), workers=2, faults=f"at 0.2s for 60s {moment}")
    assert until(lambda: any(is_stopped(pid) for pid in processes_of(run)))
    state = json.loads((run.folder / ".state" / "state.json").read_bytes())
    stopped = [pid for pid in processes_of(run) if is_stopped(pid)]
    os.kill(state["pid"], signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() and is_stopped(pid) for pid in stopped))


def test_ranks_start_again_from_the_last_checkpoint_that_is_whole(lab: Lab) -> None:
    """Of update 3 there is all; of update 6 each rank has written its part, but rank 0 not yet what all share."""
    script = (
        'test -n "$MLBENCH_RESUME" && echo $MLBENCH_RESUME && exit; cd $MLBENCH_CHECKPOINT_DIR; mkdir -p 3 6; '
        "test $RANK = 0 && touch 3/main.pt; touch 3/rank-$RANK.pt 6/rank-$RANK.pt; "
        "until test -e 6/rank-0.pt && test -e 6/rank-1.pt; do sleep 0.01; done; sleep 1; exit 3"
    )
    run = lab.start(shell(script), workers=2, on_failure="restart")
    end = lab.end(run)
    assert end.ended == "exited"
    assert (end.seconds or 0) >= 1  # the first attempt counts
    assert [lab.log(run, rank).decode().strip().rpartition("/")[2] for rank in range(2)] == ["3", "3"]


def test_a_run_whose_attempts_make_new_checkpoints_now_and_then_goes_on(lab: Lab) -> None:
    script = (
        "cd $MLBENCH_CHECKPOINT_DIR; number=${MLBENCH_ATTEMPT:-0}; test $number = 5 && exit; "
        "test $((number % 2)) = 1 && mkdir $number && touch $number/main.pt $number/rank-0.pt; exit 3"
    )
    assert lab.end(lab.start(shell(script), on_failure="restart")).ended == "exited"


def test_what_left_the_group_of_its_rank_ends_before_the_next_attempt(lab: Lab) -> None:
    """torchrun starts its workers in sessions of their own."""
    script = (
        'cd $MLBENCH_CHECKPOINT_DIR; if test -n "$MLBENCH_ATTEMPT"; then grep "^State:.[RS]" /proc/$(cat pid)/status; '
        "exit 0; fi; setsid sleep 600 & echo $! > pid; sleep 0.3; exit 3"
    )
    run = lab.start(shell(script), on_failure="restart")
    assert lab.end(run).ended == "exited"
    assert b"State" not in lab.log(run)


def test_a_fault_that_was_not_injected_makes_the_run_no_result(lab: Lab) -> None:
    # Links of a run without a network of its own: the client refuses that, and the agent cannot do it.
    run = lab.start(shell("sleep 5"), workers=2, faults="at 0.2s link 0 down")
    end = lab.end(run)
    assert end.ended == "exited"
    finalize(run, lab.engine, lab.store)
    findings = json.loads((run.folder / "findings.json").read_bytes())["findings"]
    assert "fault_not_injected" in [found["code"] for found in findings]
    result = json.loads((run.folder / "result.json").read_bytes())
    assert result["doubts"] == ["fault_not_injected"]
    assert result["faults"]["injected"] == 0


EVERYTHING = "at 0.1s for 60s slow rank 0 to 30% cpu; at 0.3s for 0.3s link 0 down; at 0.7s for 60s stop rank 1"
MOMENTS = random.Random(33)


def marked(mark: str) -> list[int]:
    """Live processes that have inherited the variable MLBENCH_TEST_MARK from the client: all that it has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_dead = (path / "stat").read_bytes().rpartition(b")")[2].split()[0] in b"ZX"
            if f"MLBENCH_TEST_MARK={mark}".encode() in (path / "environ").read_bytes() and not is_dead:
                found.append(int(path.name))
    return found


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [round(MOMENTS.uniform(0.1, 6), 2) for _ in range(12)])
def test_a_client_killed_at_any_moment_leaves_nothing(lab: Lab, tmp_path: Path, seconds: float) -> None:
    """Whatever there is then: a network that is made or probed, ranks, a stopped one, a link that is down."""
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(obstacle)
    script = (
        "print('go', flush=True)\n"
        "run = lab.start(shell('sleep 77 & sleep 77'), name='theirs', workers=2, "
        f"network='50mbit,1ms', faults={EVERYTHING!r}, on_failure='restart', checkpoint_every='60s')\nsys.stdin.read()"
    )
    mark = uuid.uuid4().hex
    environment = {**os.environ, "MLBENCH_TEST_MARK": mark}
    with client(tmp_path, script, stdin=subprocess.PIPE, env=environment) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "go\n"
        time.sleep(seconds)
        other.kill()
    end = time.monotonic() + 150  # the agent measures its network again before it leaves, up to three times
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes()[-200:] for pid in left]


# Rank 1 sends 20 KB to rank 0 and back, and prints when it began and how long that took.
ECHO = """
import os, socket, time
def receive(connection, left):
    while left:
        data = connection.recv(left)
        if not data: raise SystemExit
        left -= len(data)
if os.environ["RANK"] == "0":
    connection, _ = socket.create_server(("", 5555)).accept()
    while True:
        receive(connection, 20000)
        connection.sendall(bytes(20000))
for _ in range(100):
    try: connection = socket.create_connection((os.environ["MASTER_ADDR"], 5555)); break
    except OSError: time.sleep(0.05)
end = time.monotonic() + 8
while time.monotonic() < end:
    begun = time.time()
    connection.sendall(bytes(20000))
    receive(connection, 20000)
    print(begun, time.time() - begun, flush=True)
    time.sleep(0.02)
"""


@pytest.mark.nightly  # links of the switch itself: unit/agent/network/test_links.py
def test_a_link_is_down_and_slowed_for_its_time_and_then_as_before(lab: Lab) -> None:
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(obstacle)
    script = "at 1s for 1s link 1 down; at 4s for 1s link 1 200kbit"
    run = lab.start(python(ECHO), workers=2, network="20mbit,40ms", faults=script)
    assert lab.end(run).ended == "exited"
    finalize(run, lab.engine, lab.store)
    result = json.loads((run.folder / "result.json").read_bytes())
    assert (result["faults"]["injected"], result.get("doubts")) == (2, None)
    record = record_of(run)
    down, slowed = ([record["began"] + event[name] for name in ("at", "until")] for event in record["events"])
    echoes = [tuple(map(float, line.split())) for line in lab.log(run, 1).decode().splitlines()]
    assert max(took for begun, took in echoes if down[0] - 1 < begun < down[1]) >= 0.9
    # 160,000 bits each way at 200 kbit/s
    assert max(took for begun, took in echoes if slowed[0] - 0.1 < begun < slowed[1]) >= 0.8
    calm = sorted(took for begun, took in echoes if begun < down[0] - 0.2 or begun > slowed[1] + 1)
    assert calm[len(calm) // 2] < 0.6
    assert sum(begun > slowed[1] + 1 for begun, _ in echoes) > 3
