"""Runs that have ended: exit codes for who waited, what their archive and their end say, and runs of other machines."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlbench_cli.engines.base import FoundRun, UnreadableRun
from mlbench_cli.errors import CapacityError, NotFoundError
from mlbench_cli.model.run import LOCAL, Cluster, Ending, Finding, Observation, Outcome, Run, RunState, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.documents import ResultDocument, write_run_document
from mlbench_cli.runs import connect, discovery, hooks
from mlbench_cli.runs.connect import EngineCache, connect_engine
from mlbench_cli.runs.discovery import Discovered
from mlbench_cli.runs.finalize import finalize
from mlbench_cli.runs.finished import FinishedRun
from mlbench_cli.storage.store import Store
from tests.fakes.engine import FakeEngine

SPEC = RunSpec("x-2", "far", "kubernetes", "custom", "custom", ("true",), "gloo", 2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def finished(outcome: Outcome, goal: Any = None, *findings: Finding, sealed: bool = True) -> FinishedRun:
    result = cast("ResultDocument", {"goal": goal, "task_seconds": {"wall": 12.5}})
    return FinishedRun(
        Run("abc", SPEC, Path("/runs/abc"), "2027"), outcome, "Done.", findings, result if sealed else None
    )


REACHED, MISSED = {"reached": True, "value": 81.0}, {"reached": False, "value": 61.0}


@pytest.mark.parametrize(
    ("run", "code", "required"),
    [
        (finished(Outcome.GOAL_REACHED, REACHED), 0, 0),
        (finished(Outcome.GOAL_MISSED, MISSED), 0, 7),
        (finished(Outcome.COMPLETED), 0, 7),
        (finished(Outcome.BUDGET_SPENT, REACHED), 0, 0),
        (finished(Outcome.FAILED, REACHED), 7, 7),
        (finished(Outcome.CANCELLED), 7, 7),
        (finished(Outcome.DEADLINE), 124, 124),
        (finished(Outcome.NEVER_STARTED), 6, 6),
        (finished(Outcome.COMPLETED, sealed=False), 8, 7),
        (finished(Outcome.NEVER_STARTED, None, Finding("network_not_as_asked", "x")), None, None),
        (finished(Outcome.FAILED, None, Finding("network_not_as_asked", "x")), 7, 7),
    ],
)
def test_exit_codes_of_runs(run: FinishedRun, code: int | None, required: int | None) -> None:
    assert run.exit_code() == (CapacityError.exit_code if code is None else code)
    assert run.exit_code(require_goal=True) == (CapacityError.exit_code if required is None else required)


def test_a_goal_is_reached_only_if_the_result_says_so() -> None:
    found = [finished(Outcome.COMPLETED, goal).goal_reached for goal in (REACHED, MISSED, None)]
    assert found == [True, False, False]
    assert not finished(Outcome.GOAL_REACHED, sealed=False).goal_reached


def test_facts_for_the_command_at_the_end_of_a_run() -> None:
    plain = {"name": "x-2", "id": "abc", "summary": "Done.", "task": "custom", "workers": 2, "cluster": "far"}
    assert hooks.describe_end(finished(Outcome.GOAL_REACHED, REACHED)) == {
        **plain,
        "outcome": "goal_reached",
        "seconds": 12.5,
        "goal_value": 81.0,
        "folder": "/runs/abc",
    }
    unsealed = hooks.describe_end(finished(Outcome.FAILED, sealed=False))
    assert (unsealed["seconds"], unsealed["goal_value"]) == (None, None)
    assert hooks.describe_end(finished(Outcome.FAILED))["goal_value"] is None


# --- runs of other machines ------------------------------------------------------------------------------------------

FAR = Cluster("here", "attached")


def test_runs_that_this_machine_does_not_know_are_recorded(store: Store) -> None:
    found = FoundRun("id1", "2027-01-15T08:00:00.000Z", SPEC, is_fetched=False)
    plain: dict[str, Any] = {"id": "id1", "created": found.created, "results": "on the cluster"}
    assert discovery._record(found, FAR, store) == Discovered("x-2", "recorded", **plain)
    row = store.find_run("id1")
    assert row is not None
    assert (row.run.spec, row.run.created, row.state) == (
        replace(SPEC, cluster="here"),
        found.created,
        RunState.RUNNING,
    )
    assert discovery._record(found, FAR, store) == Discovered("x-2", "known", **plain)
    other = discovery._record(replace(found, id="id2", is_fetched=True), FAR, store)
    assert (other.here, other.results) == ("name_taken", "fetched")
    assert "To record this one: mlbench delete x-2, then mlbench discover." in str(other.problem)
    unreadable = discovery._record(UnreadableRun("y", "of a newer mlbench"), FAR, store)
    assert unreadable.to_dict() == {
        "name": "y",
        "here": "unreadable",
        "id": None,
        "created": None,
        "results": None,
        "problem": "of a newer mlbench",
    }


def sealed_folder(store: Store) -> Path:
    run = store.record_run(SPEC)
    write_run_document(run, None)
    workers = tuple(WorkerState(rank, "succeeded", exit_code=0) for rank in (0, 1))
    finalize(run, FakeEngine([Observation(3.0, workers, ended=Ending.EXITED)]), store)
    store.forget_run(run)
    return run.folder


def test_a_sealed_folder_that_outlived_the_store_is_recorded(store: Store) -> None:
    folder = sealed_folder(store)
    assert discovery.list_unknown_folders(store) == [folder]
    (found,) = discovery.discover_runs(LOCAL, store)
    assert (found.name, found.here, found.id, found.results) == ("x-2", "recorded", folder.name, "fetched")
    row = store.find_run(folder.name)
    assert row is not None
    assert (row.state, row.outcome) == (RunState.FINISHED, Outcome.COMPLETED)
    assert discovery.list_unknown_folders(store) == []


def test_a_folder_that_was_renamed_or_damaged_says_so(store: Store) -> None:
    folder = sealed_folder(store)
    renamed = folder.rename(folder.with_name("other"))
    (found,) = discovery.discover_runs(LOCAL, store)
    assert found.here == "unreadable"
    assert "its name differs from that of the run" in str(found.problem)
    back = renamed.rename(folder)
    (back / "result.json").write_text("{}")
    (found,) = discovery.discover_runs(LOCAL, store)
    assert (found.here, found.results) == ("recorded", "damaged")
    store.forget_run(store.run("x-2").run)
    (back / "run.json").write_text("{}")
    (found,) = discovery.discover_runs(LOCAL, store)
    assert (found.name, found.here, found.id) == (folder.name, "unreadable", None)


def test_a_folder_whose_name_is_taken_is_not_recorded(store: Store) -> None:
    folder = sealed_folder(store)
    store.record_run(SPEC)
    (found,) = discovery.discover_runs(LOCAL, store)
    assert (found.here, found.id, found.results) == ("name_taken", folder.name, "fetched")


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "name"), [("local", "LocalEngine"), ("slurm", "SlurmEngine"), ("hosts", "HostsEngine")]
)
def test_the_engine_of_a_cluster_is_that_of_its_provider(provider: str, name: str) -> None:
    assert type(connect_engine(Cluster("c", provider, details={"folder": "/f"}))).__name__ == name


def test_an_engine_is_made_once_for_each_cluster(store: Store) -> None:
    made: list[str] = []

    def make(cluster: Cluster) -> FakeEngine:
        made.append(cluster.name)
        return FakeEngine()

    store.record_cluster(Cluster("far", "attached"))
    cache = EngineCache(store, connect=make)
    run = store.record_run(SPEC)
    assert cache(run) is cache(run) is cache.of_cluster("far")
    assert made == ["far"]
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "SHA256SUMS").touch()
    assert type(cache(run)).__name__ == "LocalEngine"
    with pytest.raises(NotFoundError):
        cache.of_cluster("unknown")


@pytest.mark.parametrize(
    "cluster", [Cluster("c", "kind"), Cluster("c", "gke", details={"namespace": "team"}), Cluster("c", "slurm")]
)
def test_rendering_reaches_nothing(cluster: Cluster) -> None:
    connect.connect_renderer(cluster)
