"""The engine of hosts against agents' files here, and a host that does not answer."""

import hashlib
import json
import os
import resource
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from mlbench_cli.agent.channel import Channel, Target
from mlbench_cli.agent.messages import pending_facts
from mlbench_cli.engines.follow import watch
from mlbench_cli.engines.hosts.engine import HostsEngine
from mlbench_cli.engines.hosts.hostfile import MAX_HOSTS
from mlbench_cli.engines.machines.details import HostsDetails
from mlbench_cli.engines.placement import HostRecord
from mlbench_cli.errors import DeadlineError, MlbenchError
from mlbench_cli.model.run import Ending, Experiment, Member, Outcome, Phase, Run, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.verify import find_problems
from mlbench_cli.runs import supervise
from mlbench_cli.runs.queue import QueueFolder
from mlbench_cli.storage.store import Store
from tests.contract.engines.labs import HOSTS, SSH, EngineLab, install_commands
from tests.contract.local_runs import SLEEP, Lab, bind_superuser, python, shell, until

SPEC = RunSpec(
    name="away-2",
    cluster="c",
    engine="hosts",
    task="custom",
    preset="custom",
    argv=("true",),
    backend="gloo",
    workers=2,
)
LOST = {"why": "lost", "node": 1, "rank": None, "time": 2.0}


def test_a_host_that_is_not_heard_of_any_more_ends_the_run_as_lost_and_the_rest_is_kept(tmp_path: Path) -> None:
    hosts = [
        HostRecord(name=name, login=name, slots=1, address="127.0.0.1", interface=None) for name in ("here", "away")
    ]
    engine = HostsEngine(HostsDetails(folder=str(tmp_path / "far"), python=sys.executable, hosts=hosts))
    engine._by_host["here"] = Channel(Target(None, sys.executable))
    folder = tmp_path / "home" / "runs" / "1"
    (folder / ".state").mkdir(parents=True)
    run = Run("1", SPEC, folder, "2026-01-01T00:00:00Z")
    state = {
        "schema_version": 1, "run_id": "1", "name": SPEC.name, "spec_hash": SPEC.hash, "master_port": 1,
        "finished": None, "seconds": None, "stepped_seconds": 0.0, "pid_namespace": None,
        "first": None, "first_failed": None, "disk_full": False, "start_problem": None, "network_problem": None,
        "started": 1.0, "ended": None,
        "boot_id": None, "host": "elsewhere", "pid": 1, "start_time": 0,
    }  # fmt: skip
    rank = {**pending_facts(0), "phase": "failed", "exit_code": 143, "signal": 15, "stopped": True, "started": 1.0}
    here = {**state, "ranks": [rank], "first": LOST, "ended": "failed", "node_name": "here"}
    results = {"schema_version": 1, "archive": None, "logs": {"0": {"size": 7, "sha256": SHA}}, "problem": None}
    put_node(tmp_path, 0, here, results)
    assert engine.look(run).ended is None  # its ranks had met the other's, whose state is on its way
    running = {**pending_facts(1), "phase": "running", "started": 1.0}
    beat = put_node(tmp_path, 1, {**state, "ranks": [running], "node_name": "away"}, None)
    assert engine.look(run).ended is None
    os.utime(beat, (time.time() - 3600,) * 2)
    last = list(watch(engine, run))[-1]
    assert last.ended is Ending.LOST
    assert [worker.phase for worker in last.workers] == [Phase.FAILED, Phase.LOST]
    fetched = engine.head(run).fetch()
    assert not fetched.complete
    assert "results_lost" in [finding.code for finding in fetched.findings]
    assert (run.folder / "logs" / "rank-0.log").read_text() == "a line\n"


def put_node(home: Path, node: int, state: Mapping[str, object], results: Mapping[str, object] | None) -> Path:
    """What the head has of a node: its last sign of life is now."""
    place = home / "far" / "runs" / "away-2" / "nodes" / str(node)
    (place / ".state").mkdir(parents=True)
    (place / "logs").mkdir()
    (place / "logs" / f"rank-{node}.log").write_text("a line\n")
    (place / ".state" / "state.json").write_text(json.dumps(state))
    if results is not None:
        (place / ".state" / "results.json").write_text(json.dumps(results))
    for name in ("courier", "beat"):
        (place / ".state" / name).touch()
    return place / ".state" / "beat"


SHA = hashlib.sha256(b"a line\n").hexdigest()


def test_many_hosts_raise_this_processs_limit_of_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hosts = [
        HostRecord(name=f"m{n}", login=f"m{n}", slots=1, address="192.0.2.1", interface=None) for n in range(MAX_HOSTS)
    ]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        HostsEngine(HostsDetails(folder="/f", hosts=hosts[:2]))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, before[1])
        HostsEngine(HostsDetails(folder="/f", hosts=hosts))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(before[1], 3 * MAX_HOSTS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_host_whose_key_is_not_known_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in install_commands(tmp_path / "commands").items():
        monkeypatch.setenv(name, value)
    hosts = [HostRecord(name="stranger", login="stranger", slots=1, address="127.0.0.1", interface="lo")]
    engine = HostsEngine(HostsDetails(folder=str(tmp_path / "far"), python=sys.executable, hosts=hosts))
    lab = Lab(tmp_path, engine)
    lab.kind = "hosts"
    with pytest.raises(MlbenchError) as caught:
        lab.start(["true"])
    assert "Host key verification failed" in str(caught.value.to_dict())
    lab.store.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_hosts_meet_by_ipv6_if_they_have_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in install_commands(tmp_path / "commands").items():
        monkeypatch.setenv(name, value)
    lab = EngineLab("hosts", tmp_path)
    hosts = [HostRecord(name=name, login=name, slots=1, address="::1", interface=None) for name in HOSTS[:2]]
    own = {"NCCL_SOCKET_IFNAME": "ib0"}
    lab.engine = HostsEngine(HostsDetails(folder="~/far", python=sys.executable, hosts=hosts, env=own))
    run = lab.start(shell("echo $MASTER_ADDR $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"), workers=2)
    assert supervise.follow(run, lab.engine, lab.store, timeout=60).outcome is Outcome.COMPLETED
    assert {(run.folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)} == {"::1 lo ib0\n"}
    measured = [json.loads(line) for line in (run.folder / "resources.jsonl").read_text().splitlines()]
    assert [row["nodes"] for row in measured if row.get("kind") == "network"] == [2]
    lab.close()


def test_the_time_in_the_queue_counts_against_the_time_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in install_commands(tmp_path / "commands").items():
        monkeypatch.setenv(name, value)
    lab = EngineLab("hosts", tmp_path)
    run = lab.record(["sleep", "3"])
    lab.store.forget_run(run)
    lab.store.record_experiment(Experiment("x", "x", run.created, {}, (Member(0, run.id, "", {}),)), [run])
    queue = QueueFolder.of(lab.store.folder, "x")
    lock = queue.acquire()
    assert lock is not None
    queue.write_holder(os.getpid(), is_detached=False)

    def start_late() -> None:
        time.sleep(3)
        lab.engine.submit(run, lab.engine.render(run.spec))
        Store(tmp_path).advance(run, RunState.RUNNING)

    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(start_late)
        with pytest.raises(DeadlineError):
            supervise.follow(run, lab.engine, lab.store, timeout=5)  # 3 s in the queue, and 2 s of the run
        started.result()
    os.close(lock)
    lab.close()


def test_a_run_that_has_taken_the_name_of_a_deleted_one_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of another machine has deleted the first, and started the second."""
    for name, value in install_commands(tmp_path / "commands").items():
        monkeypatch.setenv(name, value)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with closing(EngineLab("hosts", tmp_path / "two")) as two:
        with closing(EngineLab("hosts", tmp_path / "one")) as one:
            first = one.start(shell("true"), name="same-2", workers=2)
            assert one.end(first).ended == Ending.EXITED
            two.engine.delete(replace(first, folder=tmp_path / "two/runs/1"), force=True)
            second = two.start(SLEEP, name="same-2", workers=2)
            until(lambda: len(two.processes(second)) == 2)
            assert one.engine.look(first).ended == Ending.NEVER_STARTED
            one.engine.cancel(first)
            one.engine.head(first).fetch()
            assert not (two.far / "runs/same-2/fetched").exists()
        assert len(two.processes(second)) == 2  # although the other client has deleted its own
        assert two.engine.look(second).ended is None


@pytest.fixture
def careful_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLab]:
    """Hosts on which a superuser may read no more than others."""
    for name, value in install_commands(tmp_path / "commands").items():
        monkeypatch.setenv(name, value)
    words = bind_superuser()
    ssh = tmp_path / "commands/bin/ssh"
    ssh.write_text(SSH.replace("exec sh", f"exec {shlex.join(words)} sh"))
    (tmp_path / "home").mkdir()
    with closing(EngineLab("hosts", tmp_path / "home")) as lab:
        yield lab


UNUSUAL = """
import os, socket
os.chdir(os.environ["MLBENCH_OUTPUT_DIR"])
for name in ("a", "foreign", "hidden", "z"):
    with open(name, "w") as file:
        file.write(name)
os.chmod("foreign", 0o600)
os.chown("foreign", 12345, 12345)
os.chmod("hidden", 0)
os.mkfifo("pipe")
os.symlink("nowhere", "dangling")
socket.socket(socket.AF_UNIX).bind("socket")
for _ in range(1200):
    os.mkdir("deep")
    os.chdir("deep")
"""


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_kept(careful_lab: EngineLab) -> None:
    run = careful_lab.start(python(UNUSUAL))
    finished = supervise.follow(run, careful_lab.engine, careful_lab.store)
    kept = {path.name: path.read_text() for path in (run.folder / "output/rank-0").iterdir() if path.is_file()}
    assert kept == {"a": "a", "hidden": "hidden", "z": "z"}
    (found,) = [finding.summary for finding in finished.findings if finding.code == "output_incomplete"]
    assert found.startswith("Node 0 could not pack all of its output: output/rank-0/deep/deep/")
    assert found.endswith("/deep (it is nested too deeply); output/rank-0/foreign (Permission denied).")
    assert find_problems(run.folder) == []
