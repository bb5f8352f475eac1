"""Folders of runs and of queues: what is written into them, what is read, and what a damaged file means."""

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import Ending, Finding, NodeClock, Observation, Run, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage import queue_folder
from mlbench_cli.storage.queue_folder import (
    QueueFolder,
    QueueHolder,
    QueueState,
    clear_queued,
    queued_observation,
    read_queued,
    write_queued,
)
from mlbench_cli.storage.run_folder import RunFolder, is_sealed
from mlbench_cli.util.files import is_lock_held

SPEC = RunSpec("x-2", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 2)

# --- runs ------------------------------------------------------------------------------------------------------------


def test_the_logs_of_a_run_are_found_by_rank(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "logs").mkdir()
    for name in ("rank-10.log", "rank-2.log", "rank-0.log", "rank-02.log", "rank-x.log", "rank-12345678.log", "other"):
        (tmp_path / "logs" / name).touch()
    (tmp_path / "logs" / "rank-3.log").symlink_to("rank-0.log")
    (tmp_path / "logs" / "rank-4.log").mkdir()
    assert folder.logs() == {rank: tmp_path / "logs" / f"rank-{rank}.log" for rank in (0, 2, 10)}
    assert list(folder.logs()) == [0, 2, 10]
    assert (folder.log(2), folder.output(2)) == (tmp_path / "logs" / "rank-2.log", tmp_path / "output" / "rank-2")


def test_a_folder_with_sums_is_sealed(tmp_path: Path) -> None:
    run = Run("abc", SPEC, tmp_path, "2027")
    assert (RunFolder(tmp_path).is_sealed, is_sealed(run)) == (False, False)
    (tmp_path / "SHA256SUMS").touch()
    assert (RunFolder(tmp_path).is_sealed, is_sealed(run)) == (True, True)


def test_the_state_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.state == tmp_path / "run" / ".state"
    assert folder.state.is_dir()


OBSERVATION = Observation(
    1.5,
    (WorkerState(0, "failed", "why", "n1", 3, 1.0, 2.0, 1, "sha256:a", 0.5), WorkerState(1)),
    (Finding("x", "y", "z", True, True, {"a": [1]}),),
    Ending.FAILED,
    0,
    {"n1": {"zone": "z"}},
    9.5,
    (NodeClock("n1", 0.5, 1.0, 2.0, 0.1),),
)


def test_an_observation_is_stored_with_everything_that_is_known(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_observation() is None
    folder.write_observation(OBSERVATION)
    assert folder.read_observation() == OBSERVATION
    document = json.loads((tmp_path / "observation.json").read_text())
    assert (document["schema_version"], document["ended"], document["first_failed"]) == (1, "failed", 0)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"time": 1, "workers": 3, "findings": [], "ended": null}', '{"workers": [], "findings": []}'],
)
def test_a_damaged_observation_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "observation.json").write_text(text)
    assert RunFolder(tmp_path).read_observation() is None


def test_json_objects_are_read_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write("a/b.json", b'{"x": 1}')
    assert folder.read_json("a/b.json") == {"x": 1}
    folder.write("a/b.json", b"[1]")
    assert (folder.read_json("a/b.json"), folder.read_json("nothing")) == (None, None)


def test_a_folder_is_locked_by_one_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.lock():
        assert is_lock_held(folder.path)
    assert not is_lock_held(folder.path)


# --- queues ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def queue(tmp_path: Path) -> QueueFolder:
    folder = QueueFolder.of(tmp_path, "e")
    folder.path.mkdir(parents=True)
    return folder


def test_a_queue_has_its_files_below_the_data_folder(tmp_path: Path) -> None:
    folder = QueueFolder.of(tmp_path, "e")
    assert folder.path == tmp_path / "experiments" / "e"
    assert (folder.lock.name, folder.log.name) == ("queue.lock", "queue.log")


def test_the_holder_of_a_queue_is_recorded(queue: QueueFolder) -> None:
    assert (queue.read_holder(), queue.find_state()) == (None, QueueState.ENDED)
    queue.write_holder(7, is_detached=True)
    holder = queue.read_holder()
    assert holder is not None
    assert (holder.pid, holder.host, holder.is_detached, holder.ended) == (7, os.uname().nodename, True, None)
    assert holder.phrase == f"queue, process 7 on {holder.host}, since {holder.started}"
    assert holder._replace(is_detached=False).phrase.startswith("mlbench run, process 7 on ")


def test_the_end_of_a_queue_keeps_its_beginning(queue: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(["first", "second"])
    monkeypatch.setattr(queue_folder, "now", lambda: next(moments))
    queue.write_holder(7, is_detached=True)
    queue.write_end("stopped")
    holder = queue.read_holder()
    assert holder is not None
    assert (holder.pid, holder.started, holder.is_detached, holder.ended) == (7, "first", True, "stopped")
    queue.write_holder(8, is_detached=False)
    holder = queue.read_holder()
    assert holder is not None
    assert (holder.started, holder.ended) == ("second", None)


def test_a_queue_that_was_stopped_before_it_began_has_no_process(queue: QueueFolder) -> None:
    queue.write_end("stopped")
    holder = queue.read_holder()
    assert holder is not None
    assert (holder.pid, holder.is_detached, holder.ended) == (0, False, "stopped")


@pytest.mark.parametrize(
    ("boot", "host", "ended", "is_held", "state"),
    [
        ("here", "here", None, True, QueueState.ALIVE),
        ("here", "here", None, False, QueueState.ENDED),
        ("other", "here", None, True, QueueState.ALIVE),
        ("here", "far", None, True, QueueState.ALIVE),
        ("other", "far", None, True, QueueState.UNKNOWN),
        ("other", "far", "stopped", True, QueueState.ENDED),
    ],
)
def test_whether_a_queue_is_alive(
    queue: QueueFolder,
    monkeypatch: pytest.MonkeyPatch,
    boot: str,
    host: str,
    ended: str | None,
    is_held: bool,
    state: QueueState,
) -> None:
    monkeypatch.setattr(queue_folder, "process_origin", lambda: {"boot_id": "here", "host": "here"})
    monkeypatch.setattr(queue_folder, "is_lock_held", lambda path: is_held)
    holder = QueueHolder(7, host, boot, "2027", True, ended)
    (queue.path / "queue.json").write_text(json.dumps(holder._asdict()))
    assert queue.find_state() is state


def test_a_lock_is_held_by_one_process(queue: QueueFolder) -> None:
    descriptor = queue.acquire()
    assert descriptor is not None
    assert queue.acquire() is None
    os.close(descriptor)
    again = queue.acquire()
    assert again is not None
    os.close(again)


@pytest.mark.parametrize(
    ("holder", "log", "words"),
    [
        (None, "", "it was never started"),
        ({"ended": "it was stopped"}, "x", "it was stopped"),
        ({"is_detached": False}, "x\n", "its process 7 was killed"),
        ({}, "", "its process 7 was killed"),
        ({}, "one\n two \n", "its process 7 was killed; its log ends with: two"),
        ({}, "x" * 300, f"its process 7 was killed; its log ends with: {'x' * 200}"),
    ],
)
def test_why_a_queue_ended(queue: QueueFolder, holder: dict[str, Any] | None, log: str, words: str) -> None:
    if holder is not None:
        plain = QueueHolder(7, "here", "boot", "2027", is_detached=True)._asdict()
        (queue.path / "queue.json").write_text(json.dumps({**plain, **holder}))
    if log:
        queue.log.write_text(log)
    assert queue.explain_end() == words


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 7, "unknown": 1}'])
def test_a_damaged_record_of_a_holder_is_none(queue: QueueFolder, text: str) -> None:
    (queue.path / "queue.json").write_text(text)
    assert queue.read_holder() is None


def test_the_end_of_a_long_log_is_read(queue: QueueFolder) -> None:
    assert queue.read_log() == []
    queue.log.write_bytes(b"first\n" + b"x" * (1 << 16) + b"\nlast \xff\n")
    lines = queue.read_log()
    assert (len(lines), lines[-1]) == (2, "last \ufffd")
    assert "first" not in lines


def test_a_run_that_waits_has_a_note(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "abc"
    assert read_queued(run) is None
    write_queued(run, "e", "series")
    note = read_queued(run)
    assert note is not None
    assert (note.experiment, note.is_starting) == ("series", False)
    assert note.queue.path.resolve() == QueueFolder.of(tmp_path, "e").path
    write_queued(run, "e", "series", is_starting=True)
    started = read_queued(run)
    assert started is not None
    assert started.is_starting
    clear_queued(run)
    clear_queued(run)
    assert read_queued(run) is None


@pytest.mark.parametrize("text", ["", "[]", '{"queue": "x"}', '{"experiment": "x"}'])
def test_a_damaged_note_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ".state").mkdir()
    (tmp_path / ".state" / "queued.json").write_text(text)
    assert read_queued(tmp_path) is None


@pytest.mark.parametrize(
    ("state", "reason"), [(QueueState.ALIVE, True), (QueueState.UNKNOWN, True), (QueueState.ENDED, False)]
)
def test_what_is_seen_of_a_run_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: QueueState, reason: bool
) -> None:
    run = Run("abc", SPEC, tmp_path / "runs" / "abc", "2027")
    write_queued(run.folder, "e", "series")
    note = read_queued(run.folder)
    assert note is not None
    monkeypatch.setattr(QueueFolder, "find_state", lambda self: state)
    found = queued_observation(run, note)
    assert [worker.reason for worker in found.workers] == 2 * ["waiting for the runs before it" if reason else None]
    assert [(finding.code, finding.hint) for finding in found.findings] == (
        [] if reason else [("queue_ended", "To resume: mlbench run series")]
    )
    assert found.ended is None


def test_a_queue_whose_folder_was_removed_meanwhile_excludes_nobody(
    queue: QueueFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder removed the folder between opening the file and locking it."""
    lock = fcntl.flock

    def remove_and_lock(descriptor: int, mode: int) -> None:
        queue.lock.unlink()
        lock(descriptor, mode)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    before = len(os.listdir("/dev/fd"))
    assert queue.acquire() is None
    assert len(os.listdir("/dev/fd")) == before


def test_a_lock_is_readable_by_its_owner_alone(queue: QueueFolder) -> None:
    descriptor = queue.acquire()
    assert descriptor is not None
    os.close(descriptor)
    assert queue.lock.stat().st_mode & 0o777 == 0o600


def test_an_error_of_the_lock_leaves_no_descriptor_open(queue: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, mode: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match="No locks available"):
        queue.acquire()
    assert len(os.listdir("/dev/fd")) == before


def test_a_lock_that_cannot_be_looked_at_is_not_held(queue: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(queue_folder, "is_lock_held", fail)
    assert queue.find_state() is QueueState.ENDED


def test_a_run_whose_queue_ended_says_why_and_how_to_resume(tmp_path: Path) -> None:
    run = Run("abc", SPEC, tmp_path / "runs" / "abc", "2027")
    write_queued(run.folder, "e", "series")
    note = read_queued(run.folder)
    assert note is not None
    (finding,) = queued_observation(run, note).findings
    assert finding.summary == (
        'x-2 has not been started: the queue of the experiment "series" ended; it was never started.'
    )
    assert finding.hint == "To resume: mlbench run series"


def test_a_waiting_run_has_all_its_ranks_and_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPEC, processes_per_worker=2, method={"name": "x", "servers": "1"})
    run = Run("abc", spec, tmp_path / "runs" / "abc", "2027")
    write_queued(run.folder, "e", "series")
    note = read_queued(run.folder)
    assert note is not None
    monkeypatch.setattr(QueueFolder, "find_state", lambda self: QueueState.ALIVE)
    seen = queued_observation(run, note)
    assert [worker.rank for worker in seen.workers] == [0, 1, 2, 3, 4]
    assert {(worker.phase, worker.started) for worker in seen.workers} == {("pending", None)}


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_queued(tmp_path, "e1", "series")
    document = json.loads((tmp_path / ".state" / "queued.json").read_text())
    assert document == {"queue": "../../experiments/e1", "experiment": "series", "is_starting": False}


def test_the_record_of_a_holder_names_its_process(queue: QueueFolder) -> None:
    queue.write_holder(7, is_detached=False, ended="it was stopped")
    document = json.loads((queue.path / "queue.json").read_text())
    assert {key: document[key] for key in ("pid", "is_detached", "ended")} == {
        "pid": 7,
        "is_detached": False,
        "ended": "it was stopped",
    }
    assert {"host", "boot_id", "started"} <= set(document)
