"""The documents of `mlbench status` about runs that have ended, and what their times tell of the next ones."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import LOCAL, Experiment, Member, Run, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.experiment_status import experiment_status
from mlbench_cli.runs.forecast import History, RunEstimate
from mlbench_cli.runs.snapshot import RunStatus, read_states
from mlbench_cli.runs.views import add_figures, run_details, runs_document
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import timestamp
from tests.fakes.engine import FakeEngine
from tests.unit.results.runs import START, record_sealed

ENGINE = FakeEngine()
NO_FIGURES = dict.fromkeys(("goal", "seconds", "conditions", "measured_network"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def states(store: Store, *names: str) -> list[RunStatus]:
    return list(read_states([store.run(name) for name in names], lambda _: ENGINE))


def described(run: Run, **more: Any) -> dict[str, Any]:
    """What every document says of a sealed run."""
    return {
        "name": run.name,
        "id": run.id,
        "cluster": "local",
        "engine": "local",
        "task": "unknown-task",
        "preset": "spec",
        "backend": "gloo",
        "device": "cpu",
        "method": "none",
        "network": None,
        "pin": False,
        "functional_only": None,
        "workers": 2,
        "world_size": 2,
        "seed": 42,
        "created": run.created,
        "folder": str(run.folder),
        "state": "finished",
        **more,
    }


def test_a_list_of_runs_has_their_figures(store: Store) -> None:
    good = record_sealed(store, "good-2", 2, 60.0)
    bad = record_sealed(store, "bad-2", 2, 30.0, "failed")
    document = runs_document(store, states(store, "good-2", "bad-2"))
    assert list(document) == ["runs", "repeats"]
    first, second = document["runs"]
    method = first["method"]
    assert first == {
        **described(good, outcome="goal_reached", problem=None, method=method),
        "goal": {
            "metric": "Prec@1",
            "comparison": ">=",
            "threshold": 80.0,
            "kind": "full",
            "wording": "Prec@1 >= 80",
            "value": 80.5,
            "last": None,
            "reached": True,
            "seconds": {"wall": 60.0, "training": pytest.approx(0.86 * 60)},
        },
        "seconds": 60.0,
        "conditions": first["conditions"],
        "measured_network": None,
    }
    assert isinstance(first["conditions"], list)
    assert second == {
        **described(bad, outcome="failed", problem=None, method=method),
        **NO_FIGURES,
        "conditions": second["conditions"],
    }
    assert document["repeats"] == []


def test_experiments_are_listed_only_if_they_were_asked_for(store: Store) -> None:
    run = record_sealed(store, "x-2", 2, 60.0)
    member = Member(0, run.id, run.spec.content_hash)
    experiment = Experiment("e", "x", run.created, {"name": "x"}, (member,), require_goal=True, parallel=2)
    store.record_experiment(experiment, ())
    known = states(store, "x-2")
    status = experiment_status(experiment, known, store, lambda _: ENGINE)
    (found,) = runs_document(store, known, [status])["experiments"]
    assert found == {
        "name": "x",
        "id": "e",
        "created": run.created,
        "state": "completed",
        "eta_seconds": None,
        "progress": {"finished": 1, "failed": 0, "total": 1},
        "queue": {"state": "ended", "text": None},
        "require_goal": True,
        "parallel": 2,
        "request": {"name": "x"},
        "members": [{"index": 0, "run": run.id, "content_hash": run.spec.content_hash, "point": {}}],
    }


def test_a_damaged_archive_is_a_row_that_says_so(store: Store) -> None:
    run = record_sealed(store, "x-2", 2, 60.0)
    known = states(store, "x-2")
    (run.folder / "result.json").write_text("{}")
    status, figures = add_figures(known[0])
    assert (status.state, status.outcome, figures) == ("damaged", None, NO_FIGURES)
    assert str(status.problem).startswith("result.json: ")


def test_a_run_without_results_has_no_figures(store: Store) -> None:
    store.record_run(RunSpec("x-2", "local", "local", "custom", "custom", ("true",), "gloo", 2))
    (status,) = states(store, "x-2")
    assert add_figures(status) == (status, NO_FIGURES)
    assert status.state == "created"


def test_a_run_in_detail(store: Store) -> None:
    run = record_sealed(store, "x-2", 2, 60.0, created=timestamp(START - 1))
    document = run_details(store.run("x-2"), lambda _: ENGINE)
    ranks, goal = document.pop("ranks"), document.pop("goal")
    method, conditions = document["method"], document["conditions"]
    assert document == {
        **described(run, outcome="goal_reached", method=method),
        "summary": "x-2 reached its goal: Prec@1 80.5 (>= 80) after 60.0 s.",
        "ended": "exited",
        "first_failed": None,
        "progress": {
            "phase": "training",
            "epoch": 0,
            "epochs": 3,
            "step": None,
            "steps": None,
            "elapsed": 63.0,
            "eta": None,
            "eta_high": None,
        },
        "metrics": document["metrics"],
        "conditions": conditions,
        "measured_network": None,
        "findings": [],
    }
    assert document["metrics"]["val_Prec@1"] == 80.5
    assert goal == {
        "metric": "Prec@1",
        "comparison": ">=",
        "threshold": 80.0,
        "value": 80.5,
        "best": 80.5,
        "distance": 0.0,
    }
    assert [(rank["rank"], rank["phase"], rank["exit_code"], rank["node"]) for rank in ranks] == [
        *((0, "succeeded", 0, "this-host"), (1, "succeeded", 0, "this-host"))
    ]
    assert (ranks[0]["started"], ranks[0]["finished"]) == ("2025-10-09T08:53:20.000Z", "2025-10-09T08:54:23.000Z")


# --- what the next run will take ------------------------------------------------------------------------------------


def test_the_history_of_a_store_is_that_of_its_successes(store: Store) -> None:
    """They took 60 and 90 s, and 3 s more each from the start to the end of their ranks."""
    runs = [record_sealed(store, f"x-2-r{number}", 2, seconds) for number, seconds in ((1, 60.0), (2, 90.0))]
    record_sealed(store, "failed-2", 2, 5.0, "failed")
    missed = record_sealed(store, "other-2", 2, 7.0)
    damaged = record_sealed(store, "damaged-2", 2, 9.0)
    (damaged.folder / "result.json").write_text("{}")
    store.update_run(missed, RunState.RUNNING)  # not recorded as ended: nothing is read of it
    assert History(store).estimate(runs[0].spec, LOCAL) == RunEstimate(78.0, 0.0)
