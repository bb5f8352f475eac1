"""Following local runs to a sealed archive, by one client or several, interrupted or not."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.errors import DeadlineError, NotFoundError, StoreError
from mlbench_cli.model.run import Ending, Finding, Observation, Run, RunState, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.verify import find_problems
from mlbench_cli.runs import removal, supervise
from mlbench_cli.runs.finalize import FinishedRun, finalize
from mlbench_cli.runs.progress import Progress
from mlbench_cli.runs.snapshot import finished_snapshot, live_snapshot
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.storage.store import Store
from task_images.contract import format_event
from tests.contract.local_runs import PATIENCE, SLEEP, Lab, client, processes_of, python, shell, until
from tests.fakes.engine import FakeEngine

GOAL = {"metric": "Prec@1", "comparison": ">=", "threshold": 80, "kind": "full", "value": 81.5}


def event(kind: str, **fields: Any) -> str:
    return format_event({"v": 1, "event": kind, "rank": 0, "time": 1.5, **fields})


def task(outcome: str = "goal_reached", code: int = 0, rank: int = 0) -> tuple[str, ...]:
    """A task whose rank 0 reports a metric and a result; `rank` ends with `code`."""
    lines = [
        event("phase", phase="training", epoch=1, epochs=2),
        event("metric", name="val_global_Prec@1", value=81.5),
        event("result", outcome=outcome, goal=GOAL, wall_seconds=0.003, training_seconds=0.002),
    ]
    script = (
        "import os, sys, time\nrank = os.environ['RANK']\n"
        f"if rank == '0': print({chr(10).join(lines)!r}.replace('\"time\":1.5', '\"time\":%r' % time.time()))\n"
    )
    return python(script + f"sys.exit({code} if rank == '{rank}' else 0)")


def end_of(finished: FinishedRun | None) -> tuple[str, int, bool]:
    """Outcome, exit code, and whether the archive is complete."""
    assert finished is not None
    return str(finished.outcome), finished.exit_code(), finished.result is not None


def follow(lab: Lab, run: Run, **options: Any) -> FinishedRun:
    return supervise.follow(run, lab.engine, lab.store, **options)


def result_of(run: Run) -> dict[str, object]:
    result: dict[str, Any] = json.loads((run.folder / "result.json").read_bytes())
    return result


def assert_sound(run: Run) -> None:
    assert find_problems(run.folder) == []


def test_a_reached_goal_is_followed_to_a_verified_archive(lab: Lab) -> None:
    run = lab.start(task(), workers=2)
    reports: list[Progress] = []
    outcome = follow(lab, run, report=reports.append)
    assert end_of(outcome) == ("goal_reached", 0, True)
    assert outcome.summary == f"{run.name} reached its goal: Prec@1 81.5 (>= 80) after 0.0 s."
    assert reports[-1].observation.ended == "exited"
    assert (reports[-1].epoch, reports[-1].epochs) == (1, 2)
    row = lab.store.run(run.name)
    assert (row.state, row.outcome) == ("finished", "goal_reached")
    assert result_of(run)["outcome"] == "goal_reached"
    assert_sound(run)


@pytest.mark.parametrize(
    ("argv", "word", "code"),
    [
        (task(code=3, rank=1), "failed", 7),
        (task(outcome="goal_missed"), "goal_missed", 0),
        (("true",), "completed", 0),
        (shell("exit 9"), "failed", 7),
    ],
)
def test_what_a_task_says_never_outweighs_an_exit_code(lab: Lab, argv: tuple[str, ...], word: str, code: int) -> None:
    run = lab.start(argv, workers=2)
    outcome = follow(lab, run)
    assert end_of(outcome) == (word, code, True)
    assert result_of(run)["outcome"] == word == lab.store.run(run.name).outcome
    assert_sound(run)


def test_the_state_in_the_store_goes_from_submitted_to_running_to_finished(lab: Lab) -> None:
    run = lab.record(SLEEP)
    assert lab.store.run(run.name).state == "submitted"
    lab.engine.submit(run, lab.engine.render(run.spec))
    with pytest.raises(DeadlineError, match=r"1 running.*It continues") as caught:
        follow(lab, run, timeout=0.05)
    assert (caught.value.exit_code, f"mlbench wait {run.name}" in str(caught.value.hint)) == (124, True)
    assert lab.store.run(run.name).state == "running"
    assert len(processes_of(run)) == 1
    assert finalize(run, lab.engine, lab.store) is None
    outcome = supervise.cancel(run, lab.engine, lab.store)
    assert outcome
    assert end_of(outcome) == ("canceled", 7, True)
    assert (lab.store.run(run.name).state, result_of(run)["outcome"]) == ("finished", "canceled")
    assert_sound(run)


def test_whoever_comes_first_completes_a_detached_run_and_once_only(lab: Lab, tmp_path: Path) -> None:
    run = lab.start(task(), workers=2)
    lab.end(run)
    script = (
        "sys.stdin.readline(); row = lab.store.run('run-0')\n"
        "outcome = finalize.finalize(row.run, lab.engine, lab.store)\n"
        "print(outcome.outcome, outcome.summary, flush=True); os._exit(0)"
    )
    others = [client(tmp_path, "import os\n" + script, stdin=subprocess.PIPE) for _ in range(2)]
    for other in others:
        assert other.stdin
        other.stdin.write("go\n")
        other.stdin.flush()
    answers = {other.communicate()[0] for other in others}
    assert answers == {f"goal_reached {run.name} reached its goal: Prec@1 81.5 (>= 80) after 0.0 s.\n"}
    sealed = (run.folder / "SHA256SUMS").stat().st_mtime_ns
    assert_sound(run)
    assert follow(lab, run).outcome == "goal_reached"
    assert (run.folder / "SHA256SUMS").stat().st_mtime_ns == sealed


def test_a_client_killed_between_seal_and_store_leaves_nothing_undone(lab: Lab) -> None:
    run = lab.start(task(), workers=2)
    follow(lab, run)
    lab.store.advance(run, RunState.RUNNING)
    assert finalize(run, lab.engine, lab.store)
    assert lab.store.run(run.name).state == "finished"
    assert lab.store.run(run.name).outcome == "goal_reached"
    assert_sound(run)


def test_an_interrupt_cancels_gracefully(lab: Lab, tmp_path: Path) -> None:
    script = (
        f"run = lab.start({SLEEP!r}, name='theirs', workers=2); print('up', flush=True)\n"
        "try:\n  supervise.follow(run, lab.engine, lab.store)\n"
        "except KeyboardInterrupt:\n  print(supervise.cancel(run, lab.engine, lab.store).outcome, flush=True)\n"
        "  import os; os._exit(130)"
    )
    with client(tmp_path, script) as other:
        assert other.stdout
        assert other.stdout.readline() == "up\n"
        run = lab.store.run("theirs").run
        until(lambda: lab.store.run("theirs").state == "running")
        other.send_signal(signal.SIGINT)
        assert other.stdout.read() == "canceled\n"
        assert other.wait() == 130
    assert processes_of(run) == []
    assert lab.store.run("theirs").outcome == "canceled"
    assert_sound(run)


def test_a_lost_run_is_sealed_as_lost_with_what_there_is(lab: Lab) -> None:
    run = lab.start(shell("echo up; exec sleep 600"))
    until(lambda: (run.folder / "logs/rank-0.log").read_bytes() == b"up\n")
    os.kill(json.loads((run.folder / ".state/state.json").read_bytes())["pid"], signal.SIGKILL)
    outcome = follow(lab, run)
    assert end_of(outcome) == ("lost", 7, True)
    assert [found.code for found in outcome.findings] == ["node_lost"]
    assert_sound(run)


def test_a_run_deleted_while_it_is_followed_is_an_error_and_not_an_archive(lab: Lab) -> None:
    run = lab.start(SLEEP)
    seen = threading.Event()
    caught: list[Exception] = []

    def other() -> None:
        theirs = Lab(lab.store.folder)
        try:
            supervise.follow(run, theirs.engine, theirs.store, report=lambda _: seen.set())
        except NotFoundError as error:
            caught.append(error)
        theirs.close()

    thread = threading.Thread(target=other)
    thread.start()
    assert seen.wait(PATIENCE)
    lab.store.forget_run(run)
    LocalEngine().delete(run, force=True)
    thread.join(PATIENCE)
    assert "was deleted in the meantime" in str(caught[0])
    assert not RunFolder(run.folder).is_sealed


def test_a_run_deleted_while_its_archive_waits_for_the_folder_is_no_archive(lab: Lab) -> None:
    run = lab.start(("true",))
    lab.end(run)
    waits = threading.Event()

    def complete() -> None:
        theirs = Lab(lab.store.folder)
        with contextlib.suppress(NotFoundError):
            finalize(run, theirs.engine, theirs.store, notice=lambda sentence: waits.set())
        theirs.close()

    thread = threading.Thread(target=complete)
    with RunFolder(run.folder).lock():
        thread.start()
        assert waits.wait(PATIENCE)
        lab.store.forget_run(run)
    thread.join(PATIENCE)
    assert not RunFolder(run.folder).is_sealed


def test_a_run_deleted_just_before_its_archive_is_begun_leaves_no_folder(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, find = lab.start(("true",)), Store.find_run
    lab.end(run)

    def find_and_delete(store: Store, run_id: str) -> object:
        monkeypatch.setattr(Store, "find_run", find)
        found = find(store, run_id)
        removal.delete_run(run, lab.store)
        return found

    monkeypatch.setattr(Store, "find_run", find_and_delete)
    with pytest.raises(NotFoundError, match="was deleted in the meantime"):
        finalize(run, LocalEngine(), lab.store)
    assert not run.folder.exists()


def test_snapshot_while_running_and_after(lab: Lab) -> None:
    gate = lab.store.folder / "gate"
    lines = [
        event("phase", phase="training", epoch=2, epochs=5, goal={**GOAL, "value": None}),
        event("metric", name="val_global_Prec@1", value=70.0),
        event("metric", name="val_global_Prec@1", value=60.0),
        event("metric", name="train_loss", value=0.5),
    ]
    wait = f"while [ ! -e {gate} ]; do sleep 0.01; done"
    run = lab.start(shell(f"echo '{chr(10).join(lines)}'; {wait}; exit $RANK"), workers=2)
    until(lambda: (run.folder / "logs/rank-0.log").read_bytes().count(b"\n") == 4)
    now = live_snapshot(lab.store.run(run.name), lab.engine)
    assert (now["outcome"], now["ended"]) == (None, None)
    assert [rank["phase"] for rank in now["ranks"]] == ["running", "running"]
    assert now["metrics"] == {"val_global_Prec@1": 60.0, "train_loss": 0.5}
    assert (now["progress"]["epoch"], now["progress"]["loss"]) == (2, 0.5)
    assert (now["goal"]["best"], now["goal"]["distance"]) == (70.0, 10.0)
    gate.touch()
    follow(lab, run)
    shutil.rmtree(run.folder / "logs")
    later = finished_snapshot(lab.store.run(run.name))
    assert later is not None
    assert (later["state"], later["outcome"], later["first_failed"]) == ("finished", "failed", 1)
    assert later["ranks"][1]["exit_code"] == 1
    assert later["metrics"] == now["metrics"]
    assert later["findings"][0]["code"] == "rank_crashed"
    json.dumps(later, allow_nan=False)


def test_a_full_disk_leaves_the_run_to_be_sealed_later(lab: Lab, small_disk: Path) -> None:
    run = replace(lab.record(task(), workers=2), folder=small_disk / "run")
    lab.engine.submit(run, lab.engine.render(run.spec))
    lab.end(run)
    ballast = small_disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        while (room := os.statvfs(small_disk).f_bfree) > 0:
            file.write(b"\0" * 4096 * room)
    outcome = follow(lab, run)
    assert end_of(outcome) == ("goal_reached", 8, False)
    assert outcome.findings[-1].code == "archive_unfinished"
    assert lab.store.run(run.name).state != "finished"
    ballast.unlink()
    outcome = follow(lab, run)
    assert end_of(outcome) == ("goal_reached", 0, True)
    assert_sound(run)


NO_IMAGE = Finding("image_not_found", "The image no/such:1 does not exist.", permanent=True)


def test_a_run_that_has_started_goes_on_whatever_one_of_its_ranks_waits_for(lab: Lab) -> None:
    run = lab.record(("prog",), workers=2)
    one_runs = (WorkerState(0, "running", started=1.0), WorkerState(1, "pending"))
    ended = tuple(WorkerState(rank, "succeeded", exit_code=0, started=1.0, finished=3.0) for rank in (0, 1))
    engine = FakeEngine([Observation(2.0, one_runs, (NO_IMAGE,)), Observation(3.0, ended, (), Ending.EXITED)])
    assert end_of(supervise.follow(run, engine, lab.store)) == ("completed", 0, True)
    assert "cancel" not in engine.calls


def test_waiting_is_given_up_where_it_cannot_help(lab: Lab) -> None:
    run = lab.record(("prog",))
    engine = FakeEngine([Observation(1.0, (WorkerState(0, "pending"),), (NO_IMAGE,))])
    outcome = supervise.follow(run, engine, lab.store)
    assert end_of(outcome) == ("never_started", 6, True)
    assert outcome.summary == f"{run.name} never started. The image no/such:1 does not exist."
    assert_sound(run)


def test_a_full_disk_is_the_reason_that_the_store_gives(small_disk: Path) -> None:
    words = ("true", "x" * 5000)
    specs = (RunSpec(f"a{number}-1", "local", "local", "custom", "custom", words, "gloo", 1) for number in range(1000))
    with contextlib.closing(Store(small_disk)) as store, pytest.raises(StoreError, match="disk is full"):
        list(map(store.record_run, specs))
