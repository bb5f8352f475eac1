"""What every engine promises: local processes, hosts over ssh, Slurm. What is special to one is tested beside it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent.processes import find_processes
from mlbench_cli.engines.base import Cursor
from mlbench_cli.engines.follow import read_log
from mlbench_cli.errors import DamagedRun, NotFoundError, UsageError
from mlbench_cli.model.run import Run, RunState
from mlbench_cli.results.archive.verify import find_problems
from mlbench_cli.runs import supervise
from mlbench_cli.runs.snapshot import live_snapshot
from mlbench_cli.tasks.catalog import load_task
from task_images.methods.catalog import describe, find_class
from tests import NIGHTLY, slow
from tests.contract.engines.labs import EngineLab, install_commands, pod_folder, start_client, start_cluster
from tests.contract.local_runs import SLEEP, python, shell, until

NASTY = b"short\n" + b"x" * (1 << 20) + b"\n 50%\r100%\r\n\xff\xfe\x00 \xc3\n@mlbench {not an event\n\nno line end"
# Ignores TERM, and so do its children: one in its group, one that left it, one that lost its parent.
STUBBORN = shell(
    "trap '' TERM; sh -c 'trap \"\" TERM; sleep 600; true' & setsid sh -c 'trap \"\" TERM; sleep 600; true' & "
    "(setsid sleep 600 &) ; echo ready; while true; do sleep 1; done"
)


ENGINES = ("local", "hosts", "slurm", "kubernetes")


def by_day(*kinds: str) -> pytest.MarkDecorator:
    """What engines do by the same code, e.g. all that the program beside the ranks does: in make test on the first of
    these, by day once for each of its ways, by night on every engine."""
    return pytest.mark.parametrize("kind", ENGINES if NIGHTLY else [kinds[0], *slow(kinds[1:])])


@pytest.fixture(params=["local", "hosts", *slow(["slurm"]), "kubernetes"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def home(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    nothing: dict[str, str] = {}
    with start_cluster(tmp_path / "pods") if kind == "kubernetes" else nullcontext(nothing) as cluster:
        for name, value in {**install_commands(tmp_path / "commands"), **cluster}.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "home").mkdir()
        yield tmp_path / "home"


@pytest.fixture
def lab(kind: str, home: Path) -> Iterator[EngineLab]:
    lab = EngineLab(kind, home)
    yield lab
    lab.close()


# --- start ----------------------------------------------------------------------------------------------------------


def test_ranks_get_the_contract_and_their_command(lab: EngineLab) -> None:
    words = "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK $MLBENCH_RUN_ID $MLBENCH_BACKEND $MLBENCH_SEED "
    words += "$MLBENCH_DEVICE $MLBENCH_GOAL $MLBENCH_PARAMETERS $MLBENCH_DATA_DIR $PYTHONUNBUFFERED"
    options: dict[str, Any] = {"seed": 7, "goal": "light", "parameters": {"batch_size": 3}, "data_dir": "/data"}
    script = f'echo {words} "$@"; echo $MASTER_ADDR:$MASTER_PORT $MLBENCH_HOSTS; echo $RANK > $MLBENCH_OUTPUT_DIR/file'
    run = lab.start(
        (*shell(script), "sh", "{rank}", "{run_id}", "{backend}", "{other}"),
        workers=2,
        processes_per_worker=2,
        **options,
    )
    end = lab.end(run)
    assert (end.ended, [worker.exit_code for worker in end.workers]) == ("exited", [0] * 4)
    lab.engine.head(run).fetch()
    logs = [lab.log(run, rank).decode().splitlines() for rank in range(4)]
    for rank in range(4):
        node = rank // 2
        given = f'{rank}/4 {rank % 2}/2 {node} {run.name} gloo 7 cpu light {{"batch_size":3}} /data 1'
        assert logs[rank][0] == f"{given} {rank} {run.name} gloo {{other}}"
        assert (run.folder / f"output/rank-{rank}/file").read_text() == f"{rank}\n"
    assert len({line for _, line in logs}) == 1  # all meet at the same place
    assert len(logs[0][1].split()[1].split(",")) == 2


@by_day("hosts", "kubernetes")
def test_parameter_servers_run_beside_the_workers_as_ranks_after_theirs(lab: EngineLab) -> None:
    variables = "$RANK/$WORLD_SIZE $LOCAL_RANK $NODE_RANK $MLBENCH_SERVERS $MLBENCH_ROLE"
    script = f"echo {variables}; echo $RANK > $MLBENCH_OUTPUT_DIR/file"
    method = {**describe(find_class("bsp-ps")()), "servers": "1"}
    run = lab.start(shell(script), workers=2, method=method)
    end = lab.end(run)
    assert [(worker.rank, worker.exit_code) for worker in end.workers] == [(0, 0), (1, 0), (2, 0)]
    assert end.ended == "exited"
    lab.engine.head(run).fetch()
    assert [lab.log(run, rank) for rank in range(3)] == [b"0/2 0 0 1\n", b"1/2 0 1 1\n", b"2/2 0 2 1 server\n"]
    assert (run.folder / "output/rank-2/file").read_text() == "2\n"


@by_day("hosts", "slurm", "kubernetes")
def test_the_network_between_nodes_is_measured_for_any_command(lab: EngineLab, kind: str) -> None:
    run = lab.start(shell("sleep 0.1"), workers=3)
    assert lab.end(run).ended == "exited"
    lab.engine.head(run).fetch()
    path = run.folder / "resources.jsonl"
    rows = [row for line in path.read_text().splitlines() if "kind" in (row := json.loads(line))]
    probes = [row for row in rows if row["kind"] == "network"]
    if kind == "local":
        assert probes == []
        return
    assert [(row["worker"], row["nodes"], row["form"], len(row["links"])) for row in probes] == [(0, 3, "short", 3)]
    after = {row["worker"]: row for row in rows if row["kind"] == "interface"}
    assert sorted(after) == [0, 1, 2]
    for node, before in enumerate(probes[0]["counters"]):
        assert after[node]["interface"] == before["interface"]
        assert after[node]["tx_bytes"] >= before["tx_bytes"] > 0


@by_day("hosts", "kubernetes")
def test_only_rank_0_runs_the_command(lab: EngineLab) -> None:
    run = lab.start(shell("echo $RANK"), workers=3, run_on_all=False)
    end = lab.end(run)
    assert end.ended == "exited"
    assert [(worker.phase, worker.exit_code) for worker in end.workers] == [("succeeded", 0)] * 3
    assert [lab.log(run, rank) for rank in range(3)] == [b"0\n", b"", b""]


def test_submitting_again_adopts(lab: EngineLab, kind: str, home: Path) -> None:
    run = lab.start(SLEEP, workers=2)
    before = until(lambda: len(found := lab.processes(run)) == 2 and found)
    agents = lab.agents(run)
    other = EngineLab(kind, home)
    other.engine.submit(run, other.engine.render(run.spec))
    other.engine.resume(run)
    assert (lab.processes(run), lab.agents(run)) == (before, agents)


@contextmanager
def being_submitted(lab: EngineLab, home: Path, run: Run) -> Iterator[None]:
    """Another client is about to hand the run to its cluster, and takes its time."""
    slow = "submit = lab.engine.submit\nlab.engine.submit = lambda *a: (print(flush=True), time.sleep(2), submit(*a))\n"
    start = f"supervise.start_member(lab.store.run({run.name!r}).run, lab.engine, lab.store)"
    with start_client(lab.kind, home, slow + start) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "\n"
        yield
    assert other.returncode == 0


@by_day("hosts", "slurm", "kubernetes")
def test_whoever_follows_a_run_while_it_is_submitted_waits_for_it(lab: EngineLab, home: Path) -> None:
    run = lab.record(shell("echo done"), workers=2)
    with being_submitted(lab, home, run):
        assert live_snapshot(lab.store.run(run.name), lab.engine)["ended"] is None
        assert supervise.follow(run, lab.engine, lab.store).outcome == "completed"


@by_day("slurm", "hosts", "kubernetes")
def test_a_run_whose_client_was_killed_before_its_cluster_knew_of_it_has_never_started(lab: EngineLab) -> None:
    run = lab.record(SLEEP, workers=2)
    lab.store.advance(run, RunState.SUBMITTED)
    assert supervise.follow(run, lab.engine, lab.store, timeout=30).outcome == "never_started"


@by_day("hosts", "slurm", "kubernetes")
def test_whoever_cancels_a_run_while_it_is_submitted_ends_it(lab: EngineLab, home: Path) -> None:
    run = lab.record(SLEEP, workers=2)
    with being_submitted(lab, home, run):
        finished = supervise.cancel(run, lab.engine, lab.store)
    assert finished is not None
    assert finished.outcome == "canceled"
    until(lambda: not lab.processes(run))


# --- logs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENGINES if NIGHTLY else ["local", "slurm", *slow(["kubernetes"])])
def test_logs_are_exact_and_resume_at_a_cursor(lab: EngineLab, tmp_path: Path) -> None:
    (tmp_path / "nasty").write_bytes(NASTY)
    run = lab.start(shell(f"cat {tmp_path / 'nasty'}; exec 1>&2; printf $RANK"), workers=2)
    for rank in range(2):
        wanted = NASTY + b"%d" % rank
        lines = list(read_log(lab.engine, run, rank, follow=True))
        assert b"".join(line.text for line in lines) == wanted == (run.folder / f"logs/rank-{rank}.log").read_bytes()
        assert all(line.text.count(b"\n") == 1 and line.text[-1:] == b"\n" for line in lines[:-1])
        assert [line.text for line in read_log(lab.engine, run, rank, Cursor(lines[1].cursor.offset))] == [
            line.text for line in lines[2:]
        ]
    with pytest.raises(NotFoundError, match="no rank 2, only 0 to 1"):
        list(read_log(lab.engine, run, 2))


@by_day("local", "kubernetes")
def test_lines_come_while_a_rank_still_runs(lab: EngineLab, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    run = lab.start(shell(f"echo first; printf half; while [ ! -e {gate} ]; do sleep 0.02; done; echo ' line'"))
    lines = read_log(lab.engine, run, 0, follow=True)
    assert next(lines).text == b"first\n"
    assert [line.text for line in read_log(lab.engine, run, 0)] == [b"first\n"]
    gate.touch()
    assert [line.text for line in lines] == [b"half line\n"]


HANGS = """
import threading
def wait_for_the_others():
    print("waits", flush=True)
    threading.Event().wait()
wait_for_the_others()
"""


@by_day("hosts", "local", "kubernetes")
def test_ranks_print_their_stacks_each_time_they_are_asked(lab: EngineLab) -> None:
    run = lab.start(python(HANGS), workers=2)
    follow = [read_log(lab.engine, run, rank, follow=True) for rank in range(2)]
    assert [next(lines).text for lines in follow] == [b"waits\n"] * 2
    for _ in range(2):
        lab.engine.head(run).print_stacks()
        for lines in follow:
            assert any(b"in wait_for_the_others" in line.text for line in lines)
    lab.engine.cancel(run)
    assert lab.end(run).ended == "canceled"


# --- a rank ends ----------------------------------------------------------------------------------------------------


@by_day("hosts", "kubernetes")
def test_a_failed_rank_ends_the_run_and_is_named(lab: EngineLab) -> None:
    script = "if [ $RANK = 1 ]; then seq 1 30; printf 'no newline'; exit 3; fi; exec sleep 600"
    run = lab.start(shell(script), workers=3)
    end = lab.end(run)
    assert (end.ended, end.first_failed) == ("failed", 1)
    assert [worker.exit_code for worker in end.workers] == [143, 3, 143]
    assert end.workers[1].reason == "exited with 3"
    assert end.workers[0].reason == "stopped: rank 1 failed"
    (found,) = [finding for finding in end.findings if finding.code == "rank_crashed"]
    assert "Rank 1 exited with 3" in found.summary
    assert found.evidence["log"] == [*map(str, range(22, 31)), "no newline"]
    assert lab.processes(run) == []


@by_day("local", "hosts", "kubernetes")
def test_a_killed_rank_is_a_failure(lab: EngineLab) -> None:
    run = lab.start(SLEEP, workers=2)
    (victim, _) = until(lambda: len(found := lab.processes(run)) == 2 and found)
    os.kill(victim, signal.SIGKILL)
    end = lab.end(run)
    assert end.ended == "failed"
    assert end.workers[end.first_failed or 0].exit_code == 137
    assert "SIGKILL" in end.findings[0].summary


@by_day("local", "kubernetes")
def test_what_a_rank_leaves_behind_ends_with_it(lab: EngineLab) -> None:
    run = lab.start(shell("sleep 600 & setsid sleep 600 & (setsid setsid sleep 600 &) ; exit 0"))
    assert lab.end(run).ended == "exited"
    assert lab.processes(run) == []


# --- the run is ended -----------------------------------------------------------------------------------------------


def test_cancel_is_graceful_and_idempotent_and_keeps_partial_results(lab: EngineLab, kind: str, home: Path) -> None:
    script = (
        "trap 'echo saved; exit 0' TERM; echo kept > $MLBENCH_OUTPUT_DIR/f; echo ready; while :; do sleep 0.05; done"
    )
    run = lab.start(shell(script), workers=2)
    for rank in range(2):
        assert next(read_log(lab.engine, run, rank, follow=True)).text == b"ready\n"
    EngineLab(kind, home).engine.cancel(run)
    lab.engine.cancel(run)
    end = lab.end(run)
    assert (end.ended, end.first_failed, end.findings) == ("canceled", None, ())
    lab.engine.head(run).fetch()
    assert [lab.log(run, rank) for rank in (0, 1)] == [b"ready\nsaved\n"] * 2
    assert (run.folder / "output/rank-1/f").read_text() == "kept\n"
    lab.engine.cancel(run)


@by_day("local", "slurm", "kubernetes")
def test_the_deadline_ends_ranks_that_ignore_term(lab: EngineLab) -> None:
    patience = 10.0 if lab.kind == "local" else 20.0  # within which they begin to ignore it
    run = lab.start(STUBBORN, workers=2, timeout=patience)
    end = lab.end(run)
    assert (end.ended, end.first_failed) == ("deadline", None)
    assert [worker.exit_code for worker in end.workers] == [137, 137]
    assert "deadline" in [finding.code for finding in end.findings]
    assert lab.processes(run) == []


def test_a_running_run_is_deleted_by_force_only(lab: EngineLab, kind: str, home: Path) -> None:
    run = lab.start(SLEEP, workers=2)
    until(lambda: len(lab.processes(run)) == 2)
    with pytest.raises(UsageError, match="still running"):
        lab.engine.delete(run)
    lab.engine.delete(run, force=True)
    until(lambda: not lab.processes(run))
    assert not run.folder.exists()
    lab.engine.delete(run)
    EngineLab(kind, home).engine.cancel(run)  # as a client does that has not heard of it
    assert not (lab.far / "runs" / run.name).exists()


def is_refused(lab: EngineLab, run: Run, text: str, problem: str) -> bool:
    """With this text in place of each state, until an agent writes its own again."""
    for path in lab.states(run):
        path.write_text(text)
    try:
        lab.engine.look(run)
    except DamagedRun as error:
        return problem in error.message
    return False


@by_day("local", "hosts")
def test_a_run_that_another_version_executes_is_refused_and_deleted_by_force(lab: EngineLab) -> None:
    run = lab.start(SLEEP, workers=2)
    until(lambda: len(lab.processes(run)) == 2)
    for text, problem in (('{"schema_version": 2}', "write version 2"), ('{"schema_version": 1}', "is damaged")):
        until(partial(is_refused, lab, run, text, problem))
    lab.engine.delete(run, force=True)
    until(lambda: not lab.processes(run))
    until(lambda: not find_processes(str(lab.far / "runs"), arguments=True))  # nor is the head left
    assert not run.folder.exists()


# --- somebody dies --------------------------------------------------------------------------------------------------


@by_day("local", "slurm", "kubernetes")  # test_faults.py kills each agent of hosts
@pytest.mark.parametrize("node", [0, -1] if NIGHTLY else [0])
def test_a_killed_agent_takes_its_ranks_along_and_the_run_is_lost(lab: EngineLab, node: int) -> None:
    run = lab.start(STUBBORN, workers=2)
    for rank in range(2):
        # It has started its children before.
        assert next(read_log(lab.engine, run, rank, follow=True)).text == b"ready\n"
    os.kill(lab.agents(run)[node], signal.SIGKILL)
    assert lab.end(run).ended == "lost"
    lab.engine.head(run).fetch()
    until(lambda: not lab.processes(run))
    assert lab.log(run, 0) == b"ready\n"


@by_day("hosts", "slurm")
def test_a_detached_run_outlives_its_client_and_is_completed_by_another(
    lab: EngineLab, kind: str, home: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    script = f"echo begun; while [ ! -e {gate} ]; do sleep 0.02; done; echo $RANK > $MLBENCH_OUTPUT_DIR/f; echo done"
    program = f"lab.start({shell(script)!r}, name='theirs', workers=2); print('up', flush=True); "
    with start_client(kind, home, program + "time.sleep(600)") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        other.kill()
    run = lab.store.run("theirs").run
    lab.runs.append(run)
    assert next(read_log(lab.engine, run, 1, follow=True)).text == b"begun\n"
    gate.touch()
    finished = supervise.follow(run, lab.engine, lab.store)
    assert finished.outcome == "completed"
    assert [(run.folder / f"output/rank-{rank}/f").read_text() for rank in range(2)] == ["0\n", "1\n"]
    assert [(run.folder / f"logs/rank-{rank}.log").read_bytes() for rank in range(2)] == [b"begun\ndone\n"] * 2
    assert find_problems(run.folder) == []


# --- what is kept ---------------------------------------------------------------------------------------------------


@by_day("local", "slurm")
def test_a_failed_run_is_followed_to_an_archive_that_verifies(lab: EngineLab) -> None:
    run = lab.start(shell("exit $RANK"), workers=2)
    finished = supervise.follow(run, lab.engine, lab.store)
    assert (finished.outcome, lab.store.run(run.name).outcome) == ("failed", "failed")
    assert find_problems(run.folder) == []
    ranks = [json.loads(line).get("rank") for line in (run.folder / "resources.jsonl").read_text().splitlines()]
    assert {0, 1, None} == set(ranks)  # of each rank, and of the machine


@by_day("slurm", "kubernetes")
def test_a_preloaded_library_of_a_command_is_recorded_on_every_node_and_named_as_a_condition(
    kind: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the agents of the nodes sees their environment; such a library may slow the ranks' clocks."""
    library = next(word for word in Path("/proc/self/maps").read_text().split() if word.endswith("/libc.so.6"))
    monkeypatch.setenv("LD_PRELOAD", library)  # set where processes start: by the shell, or the image of a pod
    monkeypatch.setenv("LAB_SETUP", f"export LD_PRELOAD={library}")  # of a Slurm job, which starts with no variables
    lab = EngineLab(kind, home)
    run = lab.start(shell("echo $LD_PRELOAD"), workers=2)
    supervise.follow(run, lab.engine, lab.store)
    assert lab.log(run, 1).decode() == f"{library}\n"
    conditions = json.loads((run.folder / "result.json").read_bytes())["conditions"]
    assert "preloaded" in conditions["labels"]
    assert conditions["preloaded"]["reason"].startswith(f"LD_PRELOAD={library} may replace clocks")
    assert find_problems(run.folder) == []
    nameless = lab.start(shell("echo"), workers=1, anonymous=True)
    supervise.follow(nameless, lab.engine, lab.store)
    assert library not in (nameless.folder / "resources.jsonl").read_text()
    assert "preloaded" in json.loads((nameless.folder / "result.json").read_bytes())["conditions"]["labels"]
    archived = [path for path in nameless.folder.rglob("*") if path.is_file() and ".state" not in path.parts]
    whole = b"".join(path.read_bytes() for path in archived)
    assert not [word for word in (sys.executable, str(home), library) if word.encode() in whole]
    assert find_problems(nameless.folder) == []
    lab.close()


@pytest.fixture
def small_disk(lab: EngineLab) -> Iterator[Path]:
    """A disk of 16 MiB behind the folder of the runs."""
    place = lab.store.folder / "runs" if lab.kind == "local" else lab.far
    if lab.kind == "kubernetes":
        place = pod_folder("run-0").parents[1]
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here: it needs root")
    yield place
    lab.close()
    subprocess.run(["umount", "-l", str(place)], check=True)


@by_day("hosts", "kubernetes")
@pytest.mark.parametrize("careful", [True, False], ids=["task dies of it", "task does not notice"])
def test_a_full_disk_fails_the_run_and_keeps_what_was_written(lab: EngineLab, small_disk: Path, careful: bool) -> None:
    write = "os.write(1, b'%07d' % number + b' ' * 992 + b'\\n')"
    script = f"import os, time\nfor number in range(1000000):\n  try: {write}\n  except OSError:\n    "
    script += "raise" if careful else "time.sleep(0.01)"
    run = lab.start(python(script), timeout=200.0)
    end = lab.end(run)
    assert end.ended == "failed"
    assert "disk_full" in [finding.code for finding in end.findings]
    lines = (run.folder / "logs/rank-0.log").read_bytes().split(b"\n")
    assert [line[:7] for line in lines[:1000]] == [b"%07d" % number for number in range(1000)]


# --- acceptance -----------------------------------------------------------------------------------------------------


def is_certifying_rank(pid: int, rank: int) -> bool:
    """Whether a process is a rank itself, and not what measures for it."""
    process = Path(f"/proc/{pid}")
    try:
        environment, words = (process / "environ").read_bytes(), (process / "cmdline").read_bytes()
    except OSError:  # what measures ends with each measurement
        return False
    return f"RANK={rank}".encode() in environment.split(b"\0") and b"task_images.run\0certify\0" in words


@pytest.mark.nightly  # by day, a node never starts
def test_a_rank_that_falls_silent_is_certified_as_such_and_the_others_are_measured(lab: EngineLab) -> None:
    changes = {"stages": ["drift", "node", "pairs"], "limit_seconds": 30.0, "rounds": 1}
    parameters = load_task("certify").resolve("tiny", changes)
    argv = ("python", "-m", "task_images.run", "certify")
    run = lab.start(argv, workers=3, task="certify", preset="tiny", parameters=parameters, absent_seconds=10.0)
    until(lambda: len(lab.processes(run)) >= 6)  # each rank and what measures for it
    until(lambda: b'"kind":"rates"' in b"".join(line.text for line in read_log(lab.engine, run, 1)))
    (rank,) = (pid for pid in lab.processes(run) if is_certifying_rank(pid, 2))
    os.kill(rank, signal.SIGSTOP)
    finished = supervise.follow(run, lab.engine, lab.store)
    document = json.loads((run.folder / "certificate.json").read_text())
    assert [node["state"] == "failed" for node in document["nodes"]] == [False, False, True]
    assert document["nodes"][2]["reasons"][0] == "no_answer"
    assert finished.result is not None
    assert find_problems(run.folder) == []


@pytest.mark.parametrize("kind", ["hosts", "slurm", "kubernetes"] if NIGHTLY else ["slurm"])
def test_a_node_that_never_starts_is_certified_as_missing_and_the_others_are_measured(lab: EngineLab) -> None:
    lab.take_down(2)
    changes = {"stages": ["drift", "pairs"], "rounds": 1, "limit_seconds": 20.0}
    parameters = load_task("certify").resolve("tiny", changes)
    argv = ("python", "-m", "task_images.run", "certify")
    run = lab.start(argv, workers=3, task="certify", preset="tiny", parameters=parameters, absent_seconds=10.0)
    supervise.follow(run, lab.engine, lab.store)
    document = json.loads((run.folder / "certificate.json").read_text())
    assert [(node["state"], node["reasons"]) for node in document["nodes"]][2] == ("missing", ["no_answer"])
    assert (document["scope"]["answered"], document["is_partial"]) == (2, False)
    assert "pairs" in document["scope"]["measured"]
    assert find_problems(run.folder) == []
