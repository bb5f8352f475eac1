"""An experiment as an object: waiting with one deadline for all runs, stopping, canceling, and its table."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.api.experiments import ExperimentHandle
from mlbench_cli.api.workspace import Workspace
from mlbench_cli.model.run import Experiment, ExperimentState, Member
from mlbench_cli.results.analysis import experiment_table
from mlbench_cli.runs import queue
from mlbench_cli.storage.queue_folder import QueueFolder
from tests.unit.results.runs import spec


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    found = Workspace(tmp_path / "home", notice=lambda text: None)
    yield found
    found.close()


class Run:
    """A run that records the calls made on it."""

    def __init__(self, name: str, *, started: bool = True, finished: bool = False, sealed: bool = False) -> None:
        self.name, self.is_started, self.is_finished, self.is_sealed = name, started, finished, sealed
        self.done: list[Any] = []

    def wait(self, seconds: float | None) -> str:
        self.done.append(seconds)
        return f"end of {self.name}"

    def cancel(self) -> None:
        self.done.append("canceled")

    def archive(self) -> str:
        return f"archive of {self.name}"


def handle_of(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, *runs: Any, **request: Any) -> ExperimentHandle:
    members = []
    for number, run in enumerate(runs):
        point = {"runs": run.entry, "set.depth": run.depth} if hasattr(run, "entry") else {}
        members.append(Member(number, run.run.id if point else run.name, "h", point))
    monkeypatch.setattr(ExperimentHandle, "runs", lambda self: list(runs))
    return ExperimentHandle(workspace, Experiment("e1", "demo", "2026-01-01T00:00:00Z", request, tuple(members)))


def test_all_runs_share_the_time_to_wait(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter((100.0, 100.0, 104.0, 115.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    runs = [Run(name) for name in "abc"]
    handle = handle_of(workspace, monkeypatch, *runs)
    found: Any = handle.wait(10.0)
    assert found == ["end of a", "end of b", "end of c"]
    assert [run.done for run in runs] == [[10.0], [6.0], [0.0]]
    handle.wait()
    assert [run.done[-1] for run in runs] == [None, None, None]


def test_canceling_stops_the_queue_first_and_then_what_runs(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[Any] = []
    monkeypatch.setattr(queue, "stop", lambda experiment, folder, reason, notice: stopped.append((folder, reason)))
    runs = [Run("a", finished=True), Run("b"), Run("c", started=False)]
    handle = handle_of(workspace, monkeypatch, *runs)
    handle.cancel()
    assert stopped == [(workspace.store.folder, "the API stopped it")]
    assert [run.done for run in runs] == [[], ["canceled"], []]
    handle.stop("enough")
    assert stopped[1:] == [(workspace.store.folder, "enough")]


@pytest.mark.parametrize(
    ("finished", "state", "is_under_way"),
    [((False, True), "alive", True), ((True, True), "alive", False), ((False, True), "dead", False)],
)
def test_an_experiment_is_under_way_while_its_queue_has_something_to_do(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    finished: tuple[bool, ...],
    state: str,
    is_under_way: bool,
) -> None:
    monkeypatch.setattr(QueueFolder, "find_state", lambda self: state)
    runs = [Run(f"r{number}", finished=each) for number, each in enumerate(finished)]
    assert handle_of(workspace, monkeypatch, *runs).is_under_way is is_under_way


def test_archives_are_those_of_complete_runs(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = handle_of(workspace, monkeypatch, Run("a", sealed=True), Run("b"))
    found: Any = handle.archives()
    assert found == ["archive of a"]


def test_the_status_is_of_the_runs_as_they_are_now_unless_they_are_given(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []

    def read_states(rows: Any, engine_of: Any) -> list[str]:
        read.append(list(rows))
        return ["read"]

    monkeypatch.setattr("mlbench_cli.runs.snapshot.read_states", read_states)

    def experiment_status(experiment: Experiment, states: Any, store: Any, engine_of: Any) -> Any:
        return SimpleNamespace(states=states, to_dict=lambda: {"state": "running", "name": experiment.name})

    monkeypatch.setattr("mlbench_cli.runs.experiment_status.experiment_status", experiment_status)
    handle = handle_of(workspace, monkeypatch, SimpleNamespace(name="a", row="row"))
    given: Any = ["given"]
    found: Any = [handle.read_status(), handle.read_status(given), handle.read_status([])]
    assert [each.states for each in found] == [["read"], ["given"], []]
    assert read == [["row"]]
    assert handle.status() == {"state": "running", "name": "demo"}
    assert handle.state is ExperimentState.RUNNING


def test_rows_are_those_of_runs_with_results_in_the_order_of_their_entries(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs of a file alternate between its entries; its rows do not."""
    samples: list[Any] = []

    def read_sample(name: str, settings: Any, workers: int, result: Any, metric: Any) -> Any:
        samples.append((name, workers, metric))
        return SimpleNamespace(run=name, settings=settings)

    def make_rows(found: Any, published: Any) -> Any:
        return [sample.run for sample in found], published

    monkeypatch.setattr(experiment_table, "read_sample", read_sample)
    monkeypatch.setattr(experiment_table, "make_rows", make_rows)
    monkeypatch.setattr("mlbench_cli.results.analysis.rates.select_series", lambda names: list(names))

    def run(name: str, entry: str, depth: str, result: Any = "result") -> Any:
        finished = None if result is None else SimpleNamespace(result={} if result == "result" else None)
        record = SimpleNamespace(id=f"id-{name}", spec=spec(name, 2, task="mnist"))
        return SimpleNamespace(name=name, run=record, finished=finished, entry=entry, depth=depth)

    runs = [
        run("a-1", "first", "8"), run("b-1", "second", "8"), run("a-2", "first", "14"), run("c-1", "third", "8", None),
        run("d-1", "third", "8", "no archive"),
    ]  # fmt: skip
    handle = handle_of(workspace, monkeypatch, *runs, metric="seconds", published=("theirs",))
    found: Any = handle.table()
    assert found == (["a-1", "a-2", "b-1"], ["theirs"])
    assert samples == [("a-1", 2, "seconds"), ("b-1", 2, "seconds"), ("a-2", 2, "seconds")]
