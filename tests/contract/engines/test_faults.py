"""Faults and attempts of runs on several machines: what node 0 decides happens on all of them, and leaves nothing."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.hosts.engine import HostsEngine
from mlbench_cli.engines.machines.details import HostRecord, HostsDetails
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import LOCAL, Phase, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.runs.finalize import finalize
from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request
from tests import NIGHTLY
from tests.contract.engines.labs import HOSTS, EngineLab, install_commands
from tests.contract.local_runs import python, shell, until

SECOND_TRY = 'test -n "$MLBENCH_ATTEMPT" && exit 0; exec sleep 60'


# Rank 0 loses rank 1 and waits for it, as task_images.harness.survivors does; whoever is started again ends well.
SURVIVOR = """
import json, os, time
folder, rank = os.environ["MLBENCH_CHECKPOINT_DIR"], os.environ["RANK"]
if os.environ.get("MLBENCH_ATTEMPT"):
    print("again", os.environ["MASTER_PORT"], flush=True)
    raise SystemExit
if rank == "1":
    time.sleep(300)
assert os.environ["MLBENCH_SURVIVE"] == "1"
print("waits", flush=True)
time.sleep(DELAY)
open(f"{folder}/waiting-0-{rank}", "x").close()
while not os.path.exists(f"{folder}/next-1-{rank}.json"):
    time.sleep(0.02)
found = json.load(open(f"{folder}/next-1-{rank}.json"))
print("goes on", found["MLBENCH_ATTEMPT"], found["MASTER_PORT"], flush=True)
"""


# Slurm's machines have the same agents: by day only where a client must learn from Slurm what has happened.
BOTH = pytest.mark.parametrize("lab", ["hosts", "slurm"], indirect=True)


@pytest.fixture(params=["hosts", "slurm"] if NIGHTLY else ["hosts"])
def lab(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLab]:
    for name, value in install_commands(tmp_path / "commands").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "home").mkdir()
    opened = EngineLab(request.param, tmp_path / "home")
    yield opened
    opened.close()


def conclude(lab: EngineLab, run: Run) -> dict[str, Any]:
    """The result of a run that has ended."""
    finalize(run, lab.engine, lab.store)
    document: dict[str, Any] = json.loads((run.folder / "result.json").read_bytes())
    return document


def read_record(run: Run) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run.folder / "faults.json").read_bytes())
    return document


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"


def is_alive(pid: int) -> bool:
    """Whether it is there, and not only because nobody has asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


@BOTH
def test_a_rank_killed_on_another_machine_starts_all_ranks_again(lab: EngineLab) -> None:
    words = f"echo $MLBENCH_ATTEMPT:$MASTER_PORT; {SECOND_TRY}"
    run = lab.start(shell(words), workers=3, faults="at 0.3s kill rank 2", on_failure="restart")
    end = lab.end(run)
    assert end.ended == "exited"
    assert [(worker.exit_code, worker.restarts) for worker in end.workers] == [(0, 1)] * 3
    result = conclude(lab, run)
    assert (result["faults"]["injected"], result["faults"]["attempts"]) == (1, 2)
    assert abs(sum(result["faults"]["seconds"].values()) - result["faults"]["wall_seconds"]) < 0.01
    attempts = read_record(run)["attempts"]
    assert [(attempt["rank"], attempt["why"]) for attempt in attempts] == [(2, "killed"), (None, None)]
    logs = {lab.log(run, rank) for rank in range(3)}
    assert len(logs) == 1  # the second attempt meets at one port, too
    (log,) = logs
    assert log.split()[1].startswith(b"1:")


@pytest.mark.parametrize("lab", ["local", "hosts", "slurm"], indirect=True)
def test_a_rank_that_lost_another_waits_for_it_in_the_same_process(lab: EngineLab) -> None:
    run = lab.start(
        python(SURVIVOR.replace("DELAY", "1")), workers=2, faults="at 0.5s kill rank 1", on_failure="replace"
    )
    end = lab.end(run)
    assert end.ended == "exited"
    assert [(worker.exit_code, worker.restarts) for worker in end.workers] == [(0, 0), (0, 1)]
    conclude(lab, run)
    survivor, other = (lab.log(run, rank).split() for rank in range(2))
    assert survivor[:4] == [b"waits", b"goes", b"on", b"1"]
    assert survivor[4] == other[1]  # they meet at one port


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_ranks_that_notice_no_loss_are_started_again_with_the_one_that_did(lab: EngineLab) -> None:
    """Rank 0 waits although rank 1 has not ended: a connection was lost. Rank 1 has half a minute to notice."""
    run = lab.start(python(SURVIVOR.replace("DELAY", "0")), workers=2, on_failure="replace")
    end = lab.end(run)
    assert end.ended == "exited"
    assert [(worker.exit_code, worker.restarts) for worker in end.workers] == [(0, 0), (0, 1)]
    conclude(lab, run)
    attempts = read_record(run)["attempts"]
    assert [(attempt["rank"], attempt["exit_code"]) for attempt in attempts] == [(0, 75), (None, None)]
    assert attempts[1]["started"] - attempts[0]["ended"] >= 30


def test_a_rank_that_has_ended_well_starts_again_with_the_others(lab: EngineLab) -> None:
    run = lab.start(
        shell(f"test $RANK = 1 && exit 0; {SECOND_TRY}"), workers=2, faults="at 1s kill rank 0", on_failure="restart"
    )
    end = lab.end(run)
    assert end.ended == "exited"
    assert [(worker.exit_code, worker.restarts) for worker in end.workers] == [(0, 1)] * 2


def test_shrinking_goes_on_without_a_machine(lab: EngineLab) -> None:
    words = f"echo $RANK of $WORLD_SIZE; {SECOND_TRY}"
    task: dict[str, Any] = {"task": "digits_resnet", "preset": "tiny", "parameters": {"batch_size": 2}}
    run = lab.start(shell(words), workers=3, faults="at 0.5s kill rank 0", on_failure="shrink", **task)
    assert lab.end(run).ended == "exited"
    conclude(lab, run)
    assert [attempt["ranks"] for attempt in read_record(run)["attempts"]] == [3, 2]
    logs = [lab.log(run, rank) for rank in range(3)]
    assert [log.split(b"\n")[-2] for log in logs[:2]] == [b"0 of 2", b"1 of 2"]
    assert b"of 2" not in logs[2]


def test_without_a_policy_the_run_fails_by_the_rank_that_was_killed(lab: EngineLab) -> None:
    run = lab.start(shell("sleep 60"), workers=2, faults="at 0.3s kill rank 1")
    end = lab.end(run)
    assert (end.ended, end.first_failed) == ("failed", 1)
    conclude(lab, run)
    (event,) = read_record(run)["events"]
    assert event["problem"] is None
    assert read_record(run)["attempts"][0]["rank"] == 1


def test_a_run_that_never_gets_further_is_given_up(lab: EngineLab) -> None:
    run = lab.start(shell("test $RANK = 1 && exit 3; exec sleep 60"), workers=2, on_failure="restart")
    end = lab.end(run)
    assert (end.ended, end.first_failed) == ("failed", 1)
    conclude(lab, run)
    assert len(read_record(run)["attempts"]) == 3
    assert "no new checkpoint" in read_record(run)["problem"]
    assert not lab.processes(run)


def test_a_stopped_rank_on_another_machine_is_found_in_seconds(lab: EngineLab) -> None:
    run = lab.start(
        shell(SECOND_TRY), workers=2, faults="at 0.3s stop rank 1", on_failure="restart", detect_seconds=1.0
    )
    assert lab.end(run).ended == "exited"
    conclude(lab, run)
    record = read_record(run)
    assert (record["attempts"][0]["why"], record["attempts"][0]["rank"]) == ("stopped", 1)
    assert 1 <= record["attempts"][0]["ended"] - record["events"][0]["at"] < 15


def test_what_lasts_ends_on_the_machine_where_it_began(lab: EngineLab) -> None:
    script = "at 0.2s for 1s slow rank 1 to 30% cpu; at 0.3s for 1s stop rank 0"
    run = lab.start(shell("exec sleep 3"), workers=2, faults=script)
    assert lab.end(run).ended == "exited"
    conclude(lab, run)
    slowed, stopped = read_record(run)["events"]
    assert (slowed["problem"], stopped["problem"]) == (None, None)
    assert 0.4 <= slowed["stopped_share"] <= 0.8  # 0.7 on an idle machine
    assert 1 <= stopped["until"] - stopped["at"] < 10


def test_a_cancelled_run_is_not_started_again(lab: EngineLab) -> None:
    run = lab.start(shell("sleep 60"), workers=2, faults="at 0.2s for 60s stop rank 1", on_failure="restart")
    until(lambda: any(is_stopped(pid) for pid in lab.processes(run)))
    lab.engine.cancel(run)
    assert lab.end(run).ended == "cancelled"
    until(lambda: not lab.processes(run))


@BOTH
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_gone_ends_the_run_everywhere(lab: EngineLab, node: int) -> None:
    run = lab.start(shell("sleep 77 & sleep 77"), workers=2, faults=f"at 0.3s node {node} gone")
    assert lab.end(run).ended in ("lost", "failed")
    until(lambda: not lab.processes(run))
    gone = lab.agents(run)[node]
    until(lambda: not is_alive(gone))


@pytest.mark.parametrize("node", [0, 1])
def test_a_machine_whose_agent_is_killed_ends_the_run_everywhere(lab: EngineLab, node: int) -> None:
    run = lab.start(shell("sleep 77 & sleep 77"), workers=2, faults="at 0.2s for 60s stop rank 1", on_failure="restart")
    until(lambda: any(is_stopped(pid) for pid in lab.processes(run)))
    os.kill(lab.agents(run)[node], signal.SIGKILL)
    assert lab.end(run).ended in ("lost", "failed")
    until(lambda: not lab.processes(run))


# Writes its part of the checkpoint of update 5; whoever is started again says what it finds.
PART = """
import os, time
folder, rank = os.environ["MLBENCH_CHECKPOINT_DIR"], os.environ["RANK"]
if os.environ.get("MLBENCH_ATTEMPT"):
    found = os.environ["MLBENCH_RESUME"]
    print(rank, os.environ["WORLD_SIZE"], os.environ["MLBENCH_HOSTS"], os.environ.get("MLBENCH_FIRST_RANK", rank))
    names = sorted(os.listdir(found))
    print(os.path.basename(found), *(name + "=" + open(found + "/" + name).read() for name in names))
    raise SystemExit
os.mkdir(folder + "/5")
for name in ["rank-" + rank + ".pt", *(["main.pt"] if rank == "0" else [])]:
    with open(folder + "/part", "w") as file:
        file.write("x" + rank * 3_000_000)
    os.rename(folder + "/part", folder + "/5/" + name)
time.sleep(300)
"""
SHRINK: dict[str, Any] = {"on_failure": "shrink", "parameters": {"batch_size": 2}}


def node_folder(lab: EngineLab, run: Run, node: int) -> Path:
    return lab.place(run) / str(node)


def copied(lab: EngineLab, run: Run) -> dict[str, int]:
    """The last checkpoint of each node of which another machine holds what its ranks wrote."""
    path = node_folder(lab, run, 0) / "faults.json"
    found: dict[str, int] = json.loads(path.read_bytes())["attempts"][0].get("copied", {}) if path.exists() else {}
    return found


def lose_machine(lab: EngineLab, run: Run, node: int) -> None:
    """Kill a machine's agent, with which its ranks die, and empty its disk."""
    os.kill(lab.agents(run)[node], signal.SIGKILL)
    shutil.rmtree(node_folder(lab, run, node) / ".state/checkpoints")


@BOTH
def test_a_shrinking_run_goes_on_without_a_machine_that_is_gone(lab: EngineLab) -> None:
    words = f"echo $RANK of $WORLD_SIZE on $MLBENCH_HOSTS; {SECOND_TRY}"
    run = lab.start(shell(words), workers=3, faults="at 0.5s node 1 gone", **SHRINK)
    end = lab.end(run)
    assert end.ended == "exited"
    assert [worker.phase for worker in end.workers if worker.rank == 1] == [Phase.LOST]
    result = conclude(lab, run)
    assert (result["outcome"], result.get("doubts")) == ("completed", None)
    assert (result["faults"]["injected"], result["faults"]["attempts"], result["faults"]["ranks"]) == (1, 2, 2)
    assert abs(sum(result["faults"]["seconds"].values()) - result["faults"]["wall_seconds"]) < 0.01
    assert result["faults"]["recoveries"][0]["rank"] == 1
    codes = [item["code"] for item in json.loads((run.folder / "findings.json").read_bytes())["findings"]]
    assert {"node_left_behind", "results_lost"} <= {*codes}
    assert "node_lost" not in codes
    first, second = read_record(run)["attempts"]
    assert (first["rank"], first["why"]) == (1, "lost")
    assert second["members"] == [0, 2]
    last = [lab.log(run, rank).split(b"\n")[-2] for rank in (0, 2)]
    assert [line.split(b" on ")[0] for line in last] == [b"0 of 2", b"1 of 2"]
    assert verify(run.folder).ok


def test_what_a_lost_machine_had_written_comes_from_the_memory_of_the_next_one(lab: EngineLab) -> None:
    run = lab.start(python(PART), workers=3, checkpoint_copy="peer", **SHRINK)
    until(lambda: copied(lab, run) == {"1": 5, "2": 5})
    lose_machine(lab, run, 1)
    assert lab.end(run).ended == "exited"
    assert conclude(lab, run)["outcome"] == "completed"
    where, found = lab.log(run, 2).decode().splitlines()
    number, size, hosts, first = where.split()
    assert (number, size, first) == ("1", "2", "2")
    assert len(hosts.split(",")) == 2
    assert found.split() == ["5", "rank-1.pt=x" + "1" * 3_000_000, "rank-2.pt=x" + "2" * 3_000_000]
    assert lab.log(run, 0).decode().split()[:2] == ["0", "2"]
    until(lambda: not lab.processes(run))


def test_without_copies_the_run_goes_on_from_a_checkpoint_that_lacks_what_was_lost(lab: EngineLab) -> None:
    run = lab.start(python(PART), workers=3, **SHRINK)
    written = [node_folder(lab, run, node) / f".state/checkpoints/5/rank-{node}.pt" for node in range(3)]
    until(lambda: all(path.exists() for path in (*written, written[0].with_name("main.pt"))))
    lose_machine(lab, run, 1)
    assert lab.end(run).ended == "exited"
    conclude(lab, run)
    assert read_record(run)["attempts"][1]["resumed_update"] == 5
    assert lab.log(run, 2).split()[4] == b"5"


def test_two_machines_that_are_lost_together_leave_the_run_to_the_rest(lab: EngineLab) -> None:
    run = lab.start(shell(SECOND_TRY), workers=3, on_failure="shrink", parameters={"batch_size": 2})
    until(lambda: len(lab.processes(run)) == 3)
    for pid in lab.agents(run)[1:]:
        os.kill(pid, signal.SIGKILL)
    assert lab.end(run).ended == "exited"
    conclude(lab, run)
    assert read_record(run)["attempts"][-1]["ranks"] == 1


def test_a_run_that_cannot_shrink_ends_with_the_machine(lab: EngineLab) -> None:
    run = lab.start(shell("exec sleep 60"), workers=3, on_failure="shrink", parameters={"batch_size": 1})
    until(lambda: len(lab.processes(run)) == 3)
    os.kill(lab.agents(run)[2], signal.SIGKILL)
    assert lab.end(run).ended == "failed"
    conclude(lab, run)
    assert "cannot be divided evenly among 2 ranks" in read_record(run)["problem"]
    until(lambda: not lab.processes(run))


def test_a_run_that_lost_a_machine_can_be_cancelled(lab: EngineLab) -> None:
    run = lab.start(shell("exec sleep 60"), workers=3, **SHRINK)
    until(lambda: len(lab.processes(run)) == 3)
    os.kill(lab.agents(run)[1], signal.SIGKILL)
    until(lambda: len(lab.processes(run)) == 2 and all(worker.restarts for worker in lab.engine.look(run).workers[::2]))
    lab.engine.cancel(run)
    assert lab.end(run).ended == "cancelled"
    until(lambda: not lab.processes(run))


@pytest.mark.parametrize(
    ("slots", "changes", "words"),
    [
        (3, {"checkpoint_copy": "peer"}, "all workers are on one machine"),
        (2, {"faults": "at 1s node 1 gone"}, "the machine of worker 0"),
        (1, {"faults": "at 1s node 1 gone; at 2s node 2 gone", "parameters": {"batch_size": 2}}, None),
        (1, {"faults": "at 1s node 1 gone; at 1s node 1 gone", "parameters": {"batch_size": 2}}, None),
        (1, {"faults": "at 1s node 1 gone", "parameters": {"batch_size": 1}}, "evenly among 2 ranks"),
    ],
)
def test_what_a_run_cannot_do_on_its_hosts_is_refused(
    tmp_path: Path, slots: int, changes: dict[str, Any], words: str | None
) -> None:
    hosts = [HostRecord(name=name, login=name, slots=slots, address="127.0.0.1", interface="lo") for name in HOSTS]
    engine = HostsEngine(HostsDetails(folder=str(tmp_path), python=sys.executable, hosts=hosts))
    fields: dict[str, Any] = {"engine": "hosts", "backend": "gloo", "workers": 3, **SHRINK, **changes}
    spec = RunSpec(name="r-3", cluster="h", task="custom", preset="custom", argv=("true",), **fields)
    if words is None:
        engine.render(spec)
    else:
        with pytest.raises(UsageError, match=words):
            engine.render(spec)


@pytest.mark.parametrize("script", ["at 1s node 0 gone", "at 1s node 1 gone; at 2s node 0 gone"])
def test_the_loss_of_the_first_machine_is_refused(lab: EngineLab, script: str) -> None:
    spec = lab.record(shell("true"), workers=3, faults=script, on_failure="shrink", parameters={"batch_size": 6}).spec
    with pytest.raises(UsageError, match="machine of worker 0"):
        lab.engine.render(spec)


def train(lab: EngineLab, name: str, method: str, copy: str | None, *, loses_machine: bool) -> dict[str, Any]:
    """The result of a training that loses rank 1 of 3 after its only checkpoint: alone, or with its machine's disk."""
    settings = {"goal_full": "100", "epochs": "40"}
    request = Request(name=name, workers=(3,), task="digits_resnet", preset="tiny", method=method, set=settings)
    (spec,) = resolve(replace(request, share_machine=True), LOCAL)
    kept = {field: value for field, value in vars(spec).items() if field not in ("name", "cluster", "engine", "argv")}
    more = {"on_failure": "shrink", "checkpoint_every": "161", "checkpoint_copy": copy, "cluster_kind": None}
    run = lab.start(spec.argv, name=name, **{**kept, **more})
    parts = [node_folder(lab, run, node) / f".state/checkpoints/161/rank-{node}.pt" for node in range(3)]
    files, wanted = [*parts, parts[0].with_name("main.pt")], {"1": 161, "2": 161} if copy else {}
    end = time.monotonic() + 300
    while copied(lab, run) != wanted or not all(file.exists() for file in files):
        assert time.monotonic() < end
        time.sleep(0.05)
    if loses_machine:
        lose_machine(lab, run, 1)
    else:
        state = json.loads((node_folder(lab, run, 1) / ".state/state.json").read_bytes())
        os.kill(state["ranks"][0]["pid"], signal.SIGKILL)
    lab.end(run)
    result = conclude(lab, run)
    attempts = read_record(run)["attempts"]
    assert [attempt["resumed_update"] for attempt in attempts] == [None, 161]
    return result


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lab", ["hosts"], indirect=True)
@pytest.mark.parametrize(("method", "copy"), [("eftopk", "peer"), ("bsp", None)])
def test_the_curve_is_that_of_a_run_that_lost_only_the_rank(lab: EngineLab, method: str, copy: str | None) -> None:
    """With eftopk each rank has residuals, whose sum the remaining ranks share: it is all there only with the copy."""
    kept = train(lab, "kept", method, copy, loses_machine=False)
    lost = train(lab, "lost", method, copy, loses_machine=True)
    assert (kept["outcome"], lost["outcome"]) == ("goal_missed", "goal_missed")
    assert (kept.get("doubts"), lost.get("doubts")) == (None, None)
    assert len(kept["details"]["curve"]) == 40
    for one, other in zip(kept["details"]["curve"], lost["details"]["curve"], strict=True):
        for name in ("update", "train_loss", "loss", "Prec@1"):
            assert one[name] == pytest.approx(other[name], rel=1e-6), name


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lab", ["hosts"], indirect=True)
def test_residuals_that_were_lost_end_the_run_and_name_the_option(lab: EngineLab) -> None:
    result = train(lab, "lost", "eftopk", None, loses_machine=True)
    assert result["outcome"] == "failed"
    assert b"--checkpoint-copy peer" in lab.log(lab.runs[-1], 0)
