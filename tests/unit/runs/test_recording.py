"""Recording an experiment: all of it or nothing, whenever the client is killed."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Experiment, Member, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.runs.recording import record
from mlbench_cli.storage.store import Store

CREATED = "2026-01-01T00:00:00.000Z"


def run_of(home: Path, number: int, name: str = "demo") -> Run:
    spec = RunSpec(f"{name}-{number}", "local", "local", "custom", "custom", ("true",), "gloo", number)
    return Run(f"{name}{number}", spec, home / "runs" / f"{name}{number}", CREATED)


def experiment_of(runs: list[Run], name: str = "demo", **more: Any) -> Experiment:
    members = tuple(Member(index, run.id, run.spec.content_hash) for index, run in enumerate(runs))
    return Experiment(f"id{name}", name, CREATED, {"name": name}, members, **more)


def leftovers(home: Path) -> list[str]:
    """Everything in the data folder that belongs to runs and experiments."""
    return sorted(str(path.relative_to(home)) for name in ("runs", "experiments") for path in (home / name).glob("*"))


def test_an_experiment_comes_back_as_it_was_recorded(tmp_path: Path) -> None:
    store = Store(tmp_path)
    runs = [run_of(tmp_path, 1), run_of(tmp_path, 2)]
    experiment = experiment_of(runs, require_goal=True, parallel=3)
    record(experiment, runs, store)
    assert store.find_experiment("demo") == experiment
    assert store.experiments() == [experiment]
    assert store.find_experiment_of(runs[1]) == experiment
    assert store.find_experiment("other") is None
    for run in runs:
        assert (run.folder / "run.json").is_file()
        assert (row := store.find_run(run.id)) is not None
        assert (row.state, row.queue) == ("queued", ("iddemo", "demo"))
    store.forget_run(runs[0])
    found = store.find_experiment("demo")
    assert found is not None
    assert [member.run_id for member in found.members] == ["demo2"]
    store.forget_run(runs[1])
    assert store.find_experiment("demo") is None


def test_names_of_runs_and_experiments_exclude_each_other(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = [run_of(tmp_path, 1)]
    record(experiment_of(first), first, store)
    before = leftovers(tmp_path)
    twice = [Run("other", first[0].spec, tmp_path / "runs" / "other", CREATED)]
    with pytest.raises(UsageError, match='already a run "demo-1"'):
        record(experiment_of(twice, "again"), twice, store)
    with pytest.raises(UsageError, match='Another process has just started an experiment "demo"') as caught:
        record(replace(experiment_of(twice), id="other"), twice, store)
    assert "delete" not in str(caught.value.hint)  # what another one runs
    inner = [run_of(tmp_path, 1, "demo-1")]
    with pytest.raises(UsageError, match='already a run "demo-1"'):
        record(experiment_of(inner, "demo-1"), inner, store)
    shadowed = [Run("third", run_of(tmp_path, 7, "x").spec, tmp_path / "runs" / "third", CREATED)]
    record(experiment_of(shadowed, "x"), shadowed, store)
    assert leftovers(tmp_path) == [*before, "runs/third"]
    assert [item.name for item in store.experiments()] == ["demo", "x"]


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_all_or_nothing(tmp_path: Path) -> None:
    """The client dies at its first, second, ... file operation or statement; the next one finds all or nothing."""
    outcomes = set()
    for moment in range(200):
        home = tmp_path / str(moment)
        home.mkdir()
        Store(home).close()
        if finished := record_and_die(home, moment):
            break
        store = Store(home)
        runs = [row.run.name for row in store.runs()]
        assert runs in ([], ["demo-1", "demo-2"])
        outcomes.add(len(runs))
        found = store.find_experiment("demo")
        assert (found is not None) == bool(runs)
        if found is not None:
            assert [member.run_id for member in found.members] == ["demo1", "demo2"]
            for row in store.runs():
                assert (row.run.folder / "run.json").is_file()
                assert row.queue is not None
        # The next recording removes what the killed client has left without telling anybody.
        other = [run_of(home, 1, "next")]
        record(experiment_of(other, "next"), other, store)
        assert leftovers(home) == sorted([*(f"runs/demo{number + 1}" for number in range(len(runs))), "runs/next1"])
        store.close()
    assert finished
    assert outcomes == {0, 2}
    assert moment > 20


def record_and_die(home: Path, moment: int) -> bool:
    """Record in a child that kills itself at the given operation; whether it came to its end before."""
    child = os.fork()
    if child == 0:
        try:
            store = Store(home)
            runs = [run_of(home, 1), run_of(home, 2)]
            die = countdown(moment)
            events = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
            sys.addaudithook(lambda event, arguments: die() if event in events else None)
            store._db.set_trace_callback(lambda statement: die())
            record(experiment_of(runs), runs, store)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    return status == 0


def countdown(moment: int) -> Callable[[], None]:
    left = moment

    def die() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    return die


def test_what_another_client_is_recording_is_left_alone(tmp_path: Path) -> None:
    store, runs, other = Store(tmp_path), [run_of(tmp_path, 1)], [run_of(tmp_path, 1, "other")]

    def write(run: Run) -> None:
        write_run_document(run)
        record(experiment_of(other, "other"), other, store)
        assert (run.folder / "run.json").is_file()

    record(experiment_of(runs), runs, store, write)
    assert leftovers(tmp_path) == ["runs/demo1", "runs/other1"]


def test_folders_that_version_4_0_0_had_begun_are_removed(tmp_path: Path) -> None:
    """Its lists have the same form, and were locked themselves."""
    store, runs = Store(tmp_path), [run_of(tmp_path, 1)]
    for name in ("runs/abandoned", "experiments"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "experiments" / "recording-id-7.json").write_text('["abandoned", "never-begun"]')
    (tmp_path / "experiments" / "recording-id-8.json").write_text("")
    record(experiment_of(runs), runs, store)
    assert leftovers(tmp_path) == ["runs/demo1"]
