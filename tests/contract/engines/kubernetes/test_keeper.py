"""keeper.py as a process, worker.sh that hands over to it, and a client that fetches from it."""

import contextlib
import hashlib
import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import templates
import templates.kubernetes.keeper
from mlbench_cli.engines.base import LOG_GAP
from mlbench_cli.engines.kubernetes import results
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.engines.kubernetes.manifests import FETCHED_ANNOTATION
from mlbench_cli.model.run import Run
from tests.contract.engines.kubernetes.test_engine import a_run, job_of, put_pod, submit, terminated_pod
from tests.contract.engines.kubernetes.test_worker_script import Worker, members
from tests.fakes.kube_api import Fault, KubeApi
from tests.fakes.ports import reserve_port

SCRIPT = templates.FOLDER / "kubernetes" / "keeper.py"
TOKEN = "the-jobs-uid"
TOOLS = "sh mkdir rm cat tee mkfifo head sleep date tail wc tar sha256sum mv dd setsid"  # of an image without Python
KEEPER_POD = "r-2-keeper-x"
program: Any = templates.kubernetes.keeper


class Keeper:
    """The keeper's process; `folder` is its /results."""

    def __init__(self, folder: Path, **changes: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.held, self.port = reserve_port()
        self.environ = {
            "MLBENCH_WORK_DIR": str(folder),
            "MLBENCH_WORKERS": "2",
            "MLBENCH_KEEP": "3600",
            "MLBENCH_KEEPER_BYTES": str(1 << 20),
            "MLBENCH_KEEPER_TOKEN": TOKEN,
            "MLBENCH_KEEPER_PORT": str(self.port),
            **changes,
        }
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-I", "-S", str(SCRIPT), "serve"], env=self.environ)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionRefusedError:
                assert self.process.poll() is None
                time.sleep(0.02)

    def put(self, path: str, data: bytes, sha256: str | None = None, token: str = TOKEN) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        digest = hashlib.sha256(data).hexdigest() if sha256 is None else sha256
        try:
            connection.request("PUT", path, data, {"Authorization": f"Bearer {token}", "X-Sha256": digest})
            return connection.getresponse().status
        finally:
            connection.close()

    @property
    def index(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "index.json").read_text())
        return found

    def variables(self) -> dict[str, str]:
        """What a worker knows of the keeper."""
        return {
            "MLBENCH_KEEPER": f"127.0.0.1:{self.port}",
            "MLBENCH_KEEPER_TOKEN": TOKEN,
            "MLBENCH_KEEPER_SCRIPT": str(SCRIPT),
        }


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path / "keeper")
    yield keeper
    keeper.process.kill()
    keeper.process.wait()
    keeper.held.close()


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- the keeper -----------------------------------------------------------------------------------------------------


def test_only_what_is_whole_and_committed_is_in_the_index(keeper: Keeper) -> None:
    log = {"size": 3, "sha256": hashlib.sha256(b"log").hexdigest(), "truncated": False}
    said = json.dumps({"summary": {"worker": 1}, "archive": None, "log": log, "samples": None}).encode()
    assert keeper.put("/1/summary", said) == 409  # the log has not come
    assert keeper.put("/1/log", b"log") == 200
    assert keeper.index == {"until": None, "workers": {}}
    assert keeper.put("/1/summary", said) == 200
    assert keeper.index["workers"] == {"1": {"summary": {"worker": 1}, "archive": None, "log": log, "samples": None}}
    assert 3500 < keeper.index["until"] - time.time() <= 3600
    assert (keeper.folder / "1/log").read_bytes() == b"log"


def test_who_does_not_know_the_token_changes_nothing(keeper: Keeper) -> None:
    assert keeper.put("/1/log", b"log", token="guessed") == 403
    assert keeper.put("/1/summary", b"{}", token="") == 403
    assert files_of(keeper.folder) == ["index.json"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/2/log", 400), ("/../log", 400), ("/x/log", 400), ("/0/other", 404), ("/0/../1", 404), ("/", 400)],
)
def test_requests_for_anything_else_are_refused(keeper: Keeper, path: str, status: int) -> None:
    assert keeper.put(path, b"log") == status
    assert files_of(keeper.folder) == ["index.json"]


def test_damage_on_the_way_is_refused(keeper: Keeper) -> None:
    assert keeper.put("/0/archive", b"bytes", sha256="0" * 64) == 422
    assert files_of(keeper.folder) == ["index.json"]


def test_what_would_fill_the_disk_is_refused_before_it_comes(keeper: Keeper) -> None:
    """The kubelet evicts a pod that uses more than its limit, and all it has would be lost."""
    assert keeper.put("/0/archive", b"x" * (700 << 10)) == 200
    assert keeper.put("/1/offer", b"700000") == 507
    assert keeper.put("/1/offer", b"100000") == 200
    with contextlib.suppress(ConnectionError):  # it may not have listened any more when all was sent
        assert keeper.put("/1/archive", b"x" * (700 << 10)) == 507
    assert "1" not in os.listdir(keeper.folder)
    assert keeper.put("/1/archive", b"x" * (100 << 10)) == 200


def test_the_keeper_ends_when_the_results_time_is_up(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "keeper", MLBENCH_KEEP="1")
    keeper.put("/0/summary", b"{}")
    assert keeper.process.wait(30) == 0


def test_a_keeper_that_crashed_still_has_everything(keeper: Keeper) -> None:
    keeper.put("/0/log", b"log")
    keeper.put("/0/summary", json.dumps({"summary": {"exit_code": 0}}).encode())
    before = keeper.index
    keeper.process.kill()
    keeper.process.wait()
    keeper.start()
    assert keeper.index == before
    assert (keeper.folder / "0/log").read_bytes() == b"log"


def test_the_keeper_ends_at_once_when_it_is_stopped(keeper: Keeper) -> None:
    keeper.process.send_signal(signal.SIGTERM)
    assert keeper.process.wait(30) == 0


# Name lookups that never answer, and that a signal does not interrupt: a lock of C that is taken twice.
SLOW_NAMES = """
import ctypes, os, runpy, socket, sys
def wait_for_ever(*_, **__):
    os.write(1, b"asked\\n")
    lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock), libc.pthread_mutex_lock(lock)
socket.getaddrinfo = wait_for_ever
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_keeper_ends_while_a_name_server_does_not_answer(keeper: Keeper) -> None:
    argv = [sys.executable, "-I", "-S", "-c", SLOW_NAMES, str(SCRIPT), "serve"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environ = {**keeper.environ, "MLBENCH_KEEPER_PORT": str(free.getsockname()[1]), "MLBENCH_KEEP": "30"}
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "asked\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


# --- worker.sh hands over -------------------------------------------------------------------------------------------


@pytest.fixture(params=["dash", "bash --posix"])
def shell(request: pytest.FixtureRequest) -> list[str]:
    return str(request.param).split()


def work(shell: list[str], folder: Path, keeper: Keeper, *argv: str, **changes: str) -> Worker:
    return Worker(shell, folder, *argv, **{"MLBENCH_HOLD": "600", **keeper.variables(), **changes})


def test_a_worker_hands_over_and_ends(shell: list[str], keeper: Keeper, tmp_path: Path) -> None:
    script = 'echo out; echo err >&2; echo made > "$MLBENCH_OUTPUT_DIR/f"; printf end; exit 3'
    worker = work(shell, tmp_path / "w", keeper, "sh", "-c", script)
    output, _ = worker.process.communicate(timeout=60)
    assert worker.process.returncode == 3
    assert "\nout\nerr\nend@mlbench-worker {" in output  # the container's log has all of it as before
    entry = keeper.index["workers"]["0"]
    assert (keeper.folder / "0/log").read_bytes() == b"out\nerr\nend"
    assert (entry["summary"]["exit_code"], entry["log"]["truncated"], entry["samples"]) == (3, False, None)
    assert (keeper.folder / "0/archive.tar").read_bytes() == (tmp_path / "w/archive.tar").read_bytes()
    assert members(tmp_path / "w", entry)["output/f"] == b"made\n"
    assert json.loads((tmp_path / "w/termination").read_text())["handover"] == "kept"


def test_a_worker_whose_output_is_not_collected_hands_over_its_log(
    shell: list[str], keeper: Keeper, tmp_path: Path
) -> None:
    worker = work(shell, tmp_path / "w", keeper, "echo", "out", JOB_COMPLETION_INDEX="1")
    worker.process.communicate(timeout=60)
    assert keeper.index["workers"]["1"]["archive"] is None
    assert files_of(keeper.folder / "1") == ["log", "resources.jsonl"]


def test_a_server_leaves_the_results_of_the_first_worker_alone(
    shell: list[str], keeper: Keeper, tmp_path: Path
) -> None:
    """It is the first pod of its own Job, too."""
    for folder, first in (("w", "0"), ("s", "1")):
        worker = work(shell, tmp_path / folder, keeper, "echo", folder, MLBENCH_FIRST_UNIT=first)
        worker.process.communicate(timeout=60)
    assert (keeper.folder / "0/log").read_bytes() == b"w\n"
    assert (keeper.folder / "1/log").read_bytes() == b"s\n"


def test_a_worker_that_cannot_reach_its_keeper_holds(shell: list[str], keeper: Keeper, tmp_path: Path) -> None:
    keeper.process.kill()
    keeper.process.wait()
    worker = work(shell, tmp_path / "w", keeper, "true", MLBENCH_KEEPER_PATIENCE="1")
    while "unreachable" not in _text(tmp_path / "w/summary.json"):
        time.sleep(0.05)
    assert worker.process.poll() is None
    (tmp_path / "w/ack").touch()
    worker.process.communicate(timeout=60)
    assert worker.process.returncode == 0


def test_the_time_to_hold_begins_when_the_keeper_was_given_up(keeper: Keeper, tmp_path: Path) -> None:
    keeper.process.kill()
    keeper.process.wait()
    worker = work(["dash"], tmp_path / "w", keeper, "true", MLBENCH_KEEPER_PATIENCE="6", MLBENCH_HOLD="5")
    while "unreachable" not in _text(tmp_path / "w/summary.json"):
        time.sleep(0.02)
    time.sleep(1)
    assert worker.process.poll() is None
    (tmp_path / "w/ack").touch()
    worker.process.communicate(timeout=60)


def test_a_keeper_that_comes_late_ends_the_hold(keeper: Keeper, tmp_path: Path) -> None:
    keeper.process.kill()
    keeper.process.wait()
    worker = work(["dash"], tmp_path / "w", keeper, "true", MLBENCH_KEEPER_PATIENCE="0")
    while "unreachable" not in _text(tmp_path / "w/summary.json"):
        time.sleep(0.05)
    keeper.start()
    worker.process.communicate(timeout=60)
    assert "0" in keeper.index["workers"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"PATH": "EMPTY"}, "no_python"), ({"MLBENCH_KEEPER_TOKEN": "wrong"}, "forbidden"), ({}, "no_room")],
)
def test_why_a_worker_holds_is_said(keeper: Keeper, tmp_path: Path, changes: dict[str, str], why: str) -> None:
    if changes.get("PATH"):
        tools = tmp_path / "bin"
        tools.mkdir()
        for name in TOOLS.split():
            (tools / name).symlink_to(str(shutil.which(name)))
        changes = {"PATH": str(tools)}
    script = 'dd if=/dev/zero of="$MLBENCH_OUTPUT_DIR/zeros" bs=1048576 count=2 2>&1'
    worker = Worker(
        ["/bin/dash"], tmp_path / "w", "sh", "-c", script, MLBENCH_HOLD="600", **keeper.variables() | changes
    )
    while why not in _text(tmp_path / "w/summary.json"):
        assert worker.process.poll() is None
        time.sleep(0.05)
    assert json.loads((tmp_path / "w/summary.json").read_text())["handover"] == why
    (tmp_path / "w/ack").touch()
    worker.process.communicate(timeout=60)


def test_a_log_beyond_its_limit_is_marked(keeper: Keeper, tmp_path: Path) -> None:
    worker = work(["dash"], tmp_path / "w", keeper, "seq", "1000", MLBENCH_LOG_BYTES="100")
    output, _ = worker.process.communicate(timeout=60)
    assert "\n1000\n" in output
    assert keeper.index["workers"]["0"]["log"]["truncated"] is True
    assert len((keeper.folder / "0/log").read_bytes()) == 100


def test_what_is_left_behind_does_not_keep_the_worker(keeper: Keeper, tmp_path: Path) -> None:
    """A process in a session of its own has the log open for ever."""
    worker = work(["dash"], tmp_path / "w", keeper, "sh", "-c", "echo on; setsid sleep 30 & sleep 0.2")
    worker.process.wait(60)
    assert (keeper.folder / "0/log").read_bytes() == b"on\n"


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# --- a client fetches -----------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


def summary_of(worker: int, archive: bytes | None, log: bytes, **more: Any) -> dict[str, Any]:
    def facts(data: bytes) -> dict[str, Any]:
        return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    return {
        "worker": worker,
        "exit_code": 0,
        "reason": "exited",
        "held": archive is not None,
        "handover": "kept",
        "archive": archive and facts(archive),
        "log": {**facts(log), "truncated": False},
        "samples": None,
        **more,
    }


def archive_of(**files: bytes) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"output/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return target.getvalue()


def put_keeper(server: KubeApi, folder: Path, *summaries: tuple[dict[str, object], bytes | None, bytes]) -> None:
    """A keeper's pod that has these workers' archives and logs."""
    workers = {}
    for summary, archive, log in summaries:
        own = folder / str(summary["worker"])
        own.mkdir(parents=True)
        (own / "log").write_bytes(log)
        if archive is not None:
            (own / "archive.tar").write_bytes(archive)
        kinds = {kind: summary[kind] for kind in ("archive", "log", "samples")}
        workers[str(summary["worker"])] = {"summary": summary, **kinds}
    (folder / "index.json").write_text(json.dumps({"until": 2e9, "workers": workers}))
    labels = {"mlbench/run": "r-2", "mlbench/role": "keeper"}
    running = {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]}
    owner = {"kind": "Job", "name": "r-2-keeper", "uid": server.objects["jobs", "r-2-keeper"]["metadata"]["uid"]}
    metadata = {"name": KEEPER_POD, "labels": labels, "ownerReferences": [owner]}
    server.put("pods", {"metadata": metadata, "spec": {}, "status": running})
    server.folders[KEEPER_POD] = folder


def finish(server: KubeApi) -> None:
    server.put("jobs", {**job_of(server), "status": {"conditions": [{"type": "Complete", "status": "True"}]}})


def a_kept_run(server: KubeApi, tmp_path: Path, **changes: Any) -> Run:
    """A run that has ended; its pods are gone with their nodes."""
    run = a_run(tmp_path / "run", **changes)
    submit(server, run)
    finish(server)
    archive = archive_of(answer=b"42")
    first = (summary_of(0, archive, b"log of 0\n"), archive, b"log of 0\n")
    put_keeper(server, tmp_path / "kept", first, (summary_of(1, None, b"log of 1"), None, b"log of 1"))
    return run


def test_results_outlive_the_workers_pods(server: KubeApi, tmp_path: Path) -> None:
    run = a_kept_run(server, tmp_path)
    engine = KubernetesEngine(server.access)
    assert engine.kept_until(run) == 2e9
    seen = engine.look(run)
    assert (seen.ended, [worker.exit_code for worker in seen.workers]) == ("exited", [0, 0])
    fetched = engine.fetch(run)
    assert (fetched.complete, fetched.files, fetched.findings) == (True, 1, ())
    assert (run.folder / "output/rank-0/answer").read_bytes() == b"42"
    assert (run.folder / "logs/rank-0.log").read_bytes() == b"log of 0\n"
    assert (run.folder / "logs/rank-1.log").read_bytes() == b"log of 1"
    assert FETCHED_ANNOTATION in job_of(server)["metadata"]["annotations"]
    assert ("jobs", "r-2-keeper") not in server.objects  # let go


def test_a_worker_of_several_processes_brings_the_files_of_its_first_rank(server: KubeApi, tmp_path: Path) -> None:
    run = a_kept_run(server, tmp_path, processes_per_worker=2)
    fetched = KubernetesEngine(server.access).fetch(run)
    assert (fetched.complete, fetched.findings) == (True, ())
    assert {path.name: path.read_bytes() for path in (run.folder / "logs").iterdir()} == {
        "rank-0.log": b"log of 0\n",
        "rank-2.log": b"log of 1",
    }


@pytest.mark.parametrize("cut", [3, 300, 5000])
def test_a_fetch_that_breaks_lets_nothing_go(server: KubeApi, tmp_path: Path, cut: int) -> None:
    run = a_kept_run(server, tmp_path)
    server.faults.append(Fault(r"exec.*archive\.tar", times=1000, status=403))
    with pytest.raises(Exception, match="as the test wants it"):
        KubernetesEngine(server.access).fetch(run)
    assert ("jobs", "r-2-keeper") in server.objects
    assert FETCHED_ANNOTATION not in job_of(server)["metadata"]["annotations"]
    server.faults[:] = [Fault("exec", cut=cut), Fault("exec", short=7)]
    assert KubernetesEngine(server.access).fetch(run).complete
    assert (run.folder / "output/rank-0/answer").read_bytes() == b"42"


def test_an_archive_that_is_not_the_workers_is_not_taken(server: KubeApi, tmp_path: Path) -> None:
    """The worker's own last word is in its pod's status, which only the kubelet writes."""
    run = a_kept_run(server, tmp_path)
    status = terminated_pod(0)
    said = json.dumps(summary_of(0, archive_of(answer=b"41"), b"log of 0\n"))
    status["containerStatuses"][0]["state"]["terminated"]["message"] = said
    put_pod(server, 0, **status)
    server.write("r-2-0-x", b"log of 0")
    server.end_log("r-2-0-x")
    fetched = KubernetesEngine(server.access).fetch(run)
    assert fetched.complete is False
    assert [finding.code for finding in fetched.findings] == ["results_replaced"]
    assert not (run.folder / "output/rank-0/answer").exists()


def test_a_keeper_that_was_evicted_is_a_finding(server: KubeApi, tmp_path: Path) -> None:
    run = a_kept_run(server, tmp_path)
    status = terminated_pod(0)
    said = json.dumps(summary_of(0, archive_of(answer=b"42"), b"log of 0\n"))
    status["containerStatuses"][0]["state"]["terminated"]["message"] = said
    put_pod(server, 0, **status)
    server.write("r-2-0-x", b"log of 0")
    server.end_log("r-2-0-x")
    gone = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}
    server.put("pods", {**server.objects["pods", KEEPER_POD], "status": gone})
    del server.folders[KEEPER_POD]
    fetched = KubernetesEngine(server.access).fetch(run)
    assert fetched.complete is False
    assert fetched.findings[0].code == "results_lost"
    assert "Evicted: The node was low on resource" in fetched.findings[0].summary
    assert (run.folder / "logs/rank-0.log").read_bytes() == b"log of 0\n"


def test_logs_that_end_in_the_keeper_only_are_taken_from_there(server: KubeApi, tmp_path: Path) -> None:
    """The node gives a beginning of the log: the rest was rotated away, or its end is not there."""
    run = a_kept_run(server, tmp_path)
    put_pod(server, 1, **terminated_pod(0))
    server.write("r-2-1-x", b"log")
    server.end_log("r-2-1-x")
    fetched = KubernetesEngine(server.access).fetch(run)
    assert fetched.findings == ()
    assert (run.folder / "logs/rank-1.log").read_bytes() == b"log of 1"


@pytest.mark.parametrize("processes", [1, 2])
def test_logs_that_do_not_come_in_time_are_a_finding(
    server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr(results, "LOG_SECONDS", 1.0)
    run = a_kept_run(server, tmp_path, processes_per_worker=processes)
    index = json.loads((tmp_path / "kept/index.json").read_text())
    del index["workers"]["1"]
    (tmp_path / "kept/index.json").write_text(json.dumps(index))
    put_pod(server, 1, **terminated_pod(0))
    server.write("r-2-1-x", b"log of 1", b"and more")
    server.faults.append(Fault("r-2-1-x/log", times=1000, status=500))
    fetched = KubernetesEngine(server.access).fetch(run)
    (finding,) = fetched.findings
    assert (finding.code, finding.evidence["unfinished"]) == (LOG_GAP, [f"logs/rank-{processes}.log"])
    assert "its last lines did not arrive in time" in finding.summary


def test_a_worker_that_held_and_hands_over_after_all_is_fetched_from_the_keeper(
    server: KubeApi, tmp_path: Path
) -> None:
    run = a_kept_run(server, tmp_path)
    index = (tmp_path / "kept/index.json").read_text()
    (tmp_path / "kept/index.json").write_text(json.dumps({"until": None, "workers": {}}))
    held = tmp_path / "worker"
    held.mkdir()
    said = summary_of(0, archive_of(answer=b"42"), b"log of 0\n", handover="unreachable")
    (held / "summary.json").write_text(json.dumps(said))
    put_pod(server, 0, phase="Running", containerStatuses=[{"name": "main", "state": {"running": {"startedAt": "x"}}}])
    server.write("r-2-0-x", b"log of 0", b"@mlbench-worker " + json.dumps(said).encode())
    server.folders["r-2-0-x"] = held  # it says that it holds, and has no archive: as if it ended at this moment
    real = server.fault

    def ending(request: str) -> Fault | None:
        if "r-2-0-x/exec" in request and "archive.tar" in request:
            (tmp_path / "kept/index.json").write_text(index)
            server.folders.pop("r-2-0-x", None)
        return real(request)

    server.fault = ending  # type: ignore[method-assign]
    fetched = KubernetesEngine(server.access).fetch(run)
    assert fetched.complete
    assert (run.folder / "output/rank-0/answer").read_bytes() == b"42"


# --- the program's decisions, in this process -----------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path: Path) -> Any:
    return program.Shelf(str(tmp_path), 2, 1000, 3600.0)


def used_by_index(shelf: Any) -> int:
    return os.path.getsize(os.path.join(shelf.folder, "index.json"))


def test_the_keeper_takes_what_just_fits_and_not_a_byte_more(shelf: Any, tmp_path: Path) -> None:
    room = 1000 - used_by_index(shelf)
    (tmp_path / "x.part").write_bytes(b"x" * 500)  # of a transfer, whose bytes are reserved
    assert shelf.reserve(room + 1) is False
    assert shelf.reserve(room) is True
    assert shelf.reserve(1) is False
    shelf.release(1)
    assert shelf.reserve(1) is True


@pytest.mark.parametrize(("until", "is_over"), [(None, False), (1e12, False), (0, True)])
def test_results_are_kept_until_their_time_is_up(shelf: Any, until: float | None, is_over: bool) -> None:
    shelf.index["until"] = until
    assert shelf.is_over() is is_over


def test_an_index_that_cannot_be_read_begins_anew(tmp_path: Path) -> None:
    """As after the crash of a node: the keeper must not end at each start."""
    (tmp_path / "index.json").write_text('{"until": ')
    shelf = program.Shelf(str(tmp_path), 2, 1000, 3600.0)
    assert shelf.index == {"until": None, "workers": {}}
    assert json.loads((tmp_path / "index.json").read_text()) == shelf.index


# --- what a worker sends --------------------------------------------------------------------------------------------


def test_a_handover_whose_time_is_up_connects_to_nobody() -> None:
    environ = {"MLBENCH_KEEPER": "no-such-host:1", "MLBENCH_KEEPER_TOKEN": TOKEN}
    with pytest.raises(TimeoutError):
        program.put(environ, "/0/offer", b"1", "", time.monotonic())


@pytest.mark.parametrize("words", [[], ["send"], ["send", "1", "2"], ["keep"]])
def test_other_words_are_a_mistake_of_the_command_line(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert program.main(words) == 64
    assert "keeper.py serve" in capsys.readouterr().err


# --- when the keeper knows that the run is over ---------------------------------------------------------------------
