"""Reading of runs: their logs line by line, what details and experiments say, and their removal."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.base import Cursor, LogLine
from mlbench_cli.errors import CleanupError, UnreachableError
from mlbench_cli.model.run import (
    Cluster,
    Ending,
    Experiment,
    ExperimentState,
    Member,
    Observation,
    Outcome,
    Run,
    RunRow,
    RunState,
    WorkerState,
)
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.log_times import LogBlock
from mlbench_cli.runs import removal
from mlbench_cli.runs.experiment_status import experiment_status
from mlbench_cli.runs.log_reader import LogReader, select_entries, without_event
from mlbench_cli.runs.removal import delete_run
from mlbench_cli.runs.snapshot import RunStatus
from mlbench_cli.runs.views import run_details
from mlbench_cli.storage.queue_folder import QueueFolder, write_queued
from mlbench_cli.storage.store import Store
from task_images.contract import format_event
from tests.fakes.engine import FakeEngine

SPEC = RunSpec("x-2", "far", "kubernetes", "custom", "custom", ("true",), "gloo", 2)
EVENT = format_event({"v": 1, "event": "metric", "rank": 0, "time": 1.0, "name": "loss", "value": 1}).encode() + b"\n"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    store.record_cluster(Cluster("far", "attached"))
    return store


# --- logs ------------------------------------------------------------------------------------------------------------


def test_an_archive_is_read_once_and_an_engine_from_where_it_was(tmp_path: Path) -> None:
    run = Run("abc", SPEC, tmp_path, "2027")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_bytes(b"one\ntwo")
    reader = LogReader(run, None, [0, 1])
    assert (reader.is_whole, list(reader.read_lines(0)), list(reader.read_lines(1))) == (True, [b"one\n", b"two"], [])
    assert (list(reader.read_new(0)), list(reader.read_new(0))) == ([b"one\n", b"two"], [])
    engine = FakeEngine(logs={0: [b"one\n"]})
    live = LogReader(run, engine, [0])
    assert (live.is_whole, list(live.read_new(0)), list(live.read_new(0))) == (False, [b"one\n"], [])
    engine.lines[0].append(b"two\n")
    assert list(live.read_new(0)) == [b"two\n"]
    assert list(live.read_lines(0)) == [b"one\n", b"two\n"]


def test_lines_of_all_ranks_are_handed_over_until_they_end(tmp_path: Path) -> None:
    engine = FakeEngine(logs={0: [b"a\n", b"b\n"], 1: [b"c\n"], 2: []})
    reader = LogReader(Run("abc", SPEC, tmp_path, "2027"), engine, [0, 1, 2])
    list(reader.read_new(1))
    written: list[tuple[int, bytes]] = []
    flushes: list[int] = []
    reader.follow(lambda rank, text: written.append((rank, text)), lambda: flushes.append(len(written)))
    assert sorted(written) == [(0, b"a\n"), (0, b"b\n")]
    assert flushes[-1] == 2


def test_the_trouble_of_a_rank_ends_the_following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    def logs(run: Run, rank: int, since: Cursor | None = None, follow: bool = False) -> Iterator[LogLine]:
        yield LogLine(rank, b"a\n", Cursor(1))
        raise UnreachableError("away")

    monkeypatch.setattr(engine, "logs", logs)
    written: list[bytes] = []
    with pytest.raises(UnreachableError, match="away"):
        LogReader(Run("abc", SPEC, tmp_path, "2027"), engine, [0]).follow(
            lambda rank, text: written.append(text), lambda: None
        )
    assert written == [b"a\n"]


BLOCKS = [
    LogBlock(0, 10.0, True, [b"one\n", EVENT]),
    LogBlock(1, None, False, [b"two\n"]),
    LogBlock(0, 20.0, False, [b"half" + EVENT, b"three\n"]),
]


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"raw": False}, [b"one\n", b"two\n", b"half" + EVENT, b"three\n"]),
        ({"raw": True}, [b"one\n", EVENT, b"two\n", b"half" + EVENT, b"three\n"]),
        ({"raw": False, "since": 20.0}, [b"two\n", b"half" + EVENT, b"three\n"]),
        ({"raw": False, "since": 20.1}, [b"two\n"]),
        ({"raw": False, "tail": 1}, [b"three\n"]),
        ({"raw": False, "tail": 0}, []),
        ({"raw": True, "tail": 9}, [b"one\n", EVENT, b"two\n", b"half" + EVENT, b"three\n"]),
    ],
)
def test_which_lines_are_shown(options: dict[str, Any], texts: list[bytes]) -> None:
    assert [entry.text for entry in select_entries(BLOCKS, **options)] == texts


def test_a_line_keeps_its_rank_and_time() -> None:
    (first, *_) = select_entries(BLOCKS, raw=False)
    assert (first.rank, first.time, first.is_exact) == (0, 10.0, True)


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (EVENT, b""),
        (b"  " + EVENT, b""),
        (b"50%" + EVENT, b"50%\n"),
        (b"plain\n", b"plain\n"),
        (b"@mlbench {x\n", b"@mlbench {x\n"),
    ],
)
def test_a_line_without_its_event(line: bytes, left: bytes) -> None:
    assert without_event(line) == left


# --- details ---------------------------------------------------------------------------------------------------------


def test_details_of_a_live_run_have_times_as_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerState(0, "running", started=1_800_000_000.0)
    row = RunRow(Run("abc", SPEC, tmp_path, "2027-01-15T08:00:00.000Z"), RunState.RUNNING, None)
    engine = FakeEngine([Observation(1_800_000_009.0, (worker,))])
    document = run_details(row, lambda run: engine)
    assert document["ranks"][0]["started"] == "2027-01-15T08:00:00.000Z"
    assert (document["ranks"][0]["finished"], document["kept_until"]) == (None, None)


@pytest.mark.parametrize(
    ("ended", "until", "shown"),
    [
        (Ending.EXITED, 1_800_000_000.0, "2027-01-15T08:00:00.000Z"),
        (Ending.EXITED, None, None),
        (Ending.EXITED, UnreachableError("away"), None),
        (None, 1_800_000_000.0, None),
    ],
)
def test_how_long_results_of_an_ended_run_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Ending | None, until: Any, shown: str | None
) -> None:
    engine = FakeEngine([Observation(1.0, (), ended=ended)])

    def kept_until(run: Run) -> float | None:
        if isinstance(until, Exception):
            raise until
        return until  # type: ignore[no-any-return]

    monkeypatch.setattr(engine, "kept_until", kept_until)
    row = RunRow(Run("abc", SPEC, tmp_path, "2027-01-15T08:00:00.000Z"), RunState.RUNNING, None)
    assert run_details(row, lambda run: engine)["kept_until"] == shown


# --- experiments -----------------------------------------------------------------------------------------------------


def test_an_experiment_counts_its_members(store: Store) -> None:
    states: list[RunStatus] = []
    for number, (state, outcome) in enumerate(
        [("finished", "completed"), ("finished", "failed"), ("running", None), ("created", None)]
    ):
        run = Run(f"r{number}", SPEC, store.folder / "runs" / f"r{number}", "2027-01-15T08:00:00.000Z")
        states.append(
            RunStatus(RunRow(run, RunState(state), None if outcome is None else Outcome(outcome)), state, outcome)
        )
    write_queued(states[3].row.run.folder, "e", "x")
    members = tuple(Member(number, f"r{number}", "h") for number in (3, 0, 1, 2, 9))
    experiment = Experiment("e", "x", "2027", {"name": "x"}, members, parallel=2)
    found = experiment_status(experiment, states, store, lambda run: FakeEngine())
    assert (found.name, found.state, found.finished, found.failed, found.total) == (
        "x",
        ExperimentState.RUNNING,
        2,
        1,
        4,
    )
    assert (found.eta, found.log, found.queue_text) == (None, [], None)
    document = found.to_dict()
    assert document["progress"] == {"finished": 2, "failed": 1, "total": 4}
    assert document["queue"] == {"state": "ended", "text": None}
    assert document["members"][0] == {"index": 3, "run": "r3", "content_hash": "h", "point": {}}
    done = experiment_status(experiment, states[:1], store, lambda run: FakeEngine())
    assert (done.state, done.total, done.eta) == (ExperimentState.COMPLETED, 1, None)


def test_an_experiment_that_was_stopped_says_why(store: Store) -> None:
    run = Run("r0", SPEC, store.folder / "runs" / "r0", "2027-01-15T08:00:00.000Z")
    write_queued(run.folder, "e", "x")
    experiment = Experiment("e", "x", "2027", {}, (Member(0, "r0", "h"),))
    status = RunStatus(RunRow(run, RunState.CREATED, None), "created", None)
    folder = QueueFolder.of(store.folder, "e")
    folder.path.mkdir(parents=True)
    folder.write_holder(7, is_detached=True)
    folder.log.write_text("".join(f"line {number}\n" for number in range(30)))
    found = experiment_status(experiment, [status], store, lambda run: FakeEngine())
    assert found.state is ExperimentState.STOPPED
    assert found.queue_text == "ended: its process 7 was killed; its log ends with: line 29"
    assert (len(found.log), found.log[0]) == (20, "line 10")


# --- removal ---------------------------------------------------------------------------------------------------------


def test_a_run_is_removed_from_its_cluster_its_folder_and_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(removal, "connect_engine", lambda cluster: engine)
    run = store.record_run(SPEC)
    run.folder.mkdir(parents=True, exist_ok=True)
    delete_run(run, store)
    assert (engine.calls, run.folder.exists(), store.find_run(run.id)) == (["delete"], False, None)


def test_a_cluster_that_does_not_answer_keeps_a_run_unless_it_is_forced(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    engine.error = UnreachableError("No answer.")
    monkeypatch.setattr(removal, "connect_engine", lambda cluster: engine)
    run = store.record_run(SPEC)
    with pytest.raises(UnreachableError):
        delete_run(run, store)
    assert store.find_run(run.id) is not None
    warnings: list[str] = []
    delete_run(run, store, force=True, warn=warnings.append)
    assert warnings == ["No answer. What x-2 left on far stays there until it expires."]
    assert store.find_run(run.id) is None


def test_a_run_of_a_deleted_cluster_or_of_a_queue_is_on_no_cluster(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(removal, "connect_engine", lambda cluster: engine)
    waiting = store.record_run(SPEC)
    write_queued(waiting.folder, "e", "x")
    delete_run(waiting, store)
    lost = store.record_run(RunSpec(**{**vars(SPEC), "cluster": "gone"}))
    delete_run(lost, store)
    assert engine.calls == []
    starting = store.record_run(SPEC)
    write_queued(starting.folder, "e", "x", is_starting=True)
    delete_run(starting, store)
    assert engine.calls == ["delete"]


def test_a_folder_that_cannot_be_removed_keeps_the_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(removal, "connect_engine", lambda cluster: FakeEngine())
    monkeypatch.setattr(shutil, "rmtree", refuse)
    run = store.record_run(SPEC)
    with pytest.raises(CleanupError, match="cannot be removed: Permission denied") as caught:
        delete_run(run, store)
    assert caught.value.hint == "mlbench delete x-2 --yes"
    assert store.find_run(run.id) is not None
