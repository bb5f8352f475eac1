"""What `status` shows of runs: documents of live and finished runs, and rows of those that give no answer."""

from pathlib import Path
from typing import Any, cast

import pytest

from mlbench_cli.errors import DamagedArchive, UnreachableError, UsageError
from mlbench_cli.model.run import Ending, Finding, Observation, Outcome, Run, RunRow, RunState, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.documents import ResultDocument
from mlbench_cli.runs import snapshot
from mlbench_cli.runs.finished import FinishedRun
from mlbench_cli.runs.snapshot import (
    RunStatus,
    condition_phrases,
    describe_run,
    find_metric,
    finished_snapshot,
    live_snapshot,
    read_states,
    run_conditions,
)
from task_images.contract import format_event
from tests.fakes.engine import FakeEngine

CREATED = "2027-01-15T08:00:00.000Z"
MOMENT = 1_800_000_000.0
SPEC = RunSpec(
    *("x-2", "far", "kubernetes", "digits_resnet", "tiny", ("true",), "gloo", 2),
    parameters={"goal_full": 98.0},
    processes_per_worker=2,
    seed=7,
    pin=True,
    network="1gbit",
)


def a_row(folder: Path, state: RunState = RunState.RUNNING, outcome: Outcome | None = None, **more: Any) -> RunRow:
    return RunRow(Run("abc", more.pop("spec", SPEC), folder, CREATED), state, outcome, **more)


def described(folder: Path, **more: object) -> dict[str, object]:
    return {
        "name": "x-2",
        "id": "abc",
        "cluster": "far",
        "engine": "kubernetes",
        "task": "digits_resnet",
        "preset": "tiny",
        "backend": "gloo",
        "device": "cpu",
        "method": "task's own",
        "network": "1gbit",
        "pin": True,
        "functional_only": None,
        "workers": 2,
        "world_size": 4,
        "seed": 7,
        "created": CREATED,
        "folder": str(folder),
        "state": "running",
        "outcome": None,
        **more,
    }


def test_a_run_is_described_by_its_spec(tmp_path: Path) -> None:
    assert describe_run(a_row(tmp_path)) == described(tmp_path)
    done = a_row(tmp_path, RunState.FINISHED, Outcome.GOAL_MISSED)
    assert describe_run(done) == described(tmp_path, state="finished", outcome="goal_missed")
    status = RunStatus(a_row(tmp_path), "ended", "failed", "why")
    assert status.to_dict() == described(tmp_path, state="ended", outcome="failed", problem="why")


# --- rows ------------------------------------------------------------------------------------------------------------


def state_of(row: RunRow, engine: FakeEngine) -> tuple[str, str | None, str | None]:
    (status,) = read_states([row], lambda run: engine)
    assert status.row is row
    return status.state, status.outcome, status.problem


@pytest.mark.parametrize(
    ("state", "outcome", "shown"),
    [
        (RunState.FINISHED, Outcome.FAILED, ("finished", "failed", None)),
        (RunState.FINISHED, None, ("finished", None, None)),
    ],
)
def test_a_finished_run_is_not_looked_at(
    tmp_path: Path, state: RunState, outcome: Outcome | None, shown: tuple[str, str | None, str | None]
) -> None:
    engine = FakeEngine()
    assert state_of(a_row(tmp_path, state, outcome), engine) == shown
    assert state_of(a_row(tmp_path, problem="is of a newer mlbench"), engine) == (
        "unknown",
        None,
        "is of a newer mlbench",
    )
    assert engine.calls == []


@pytest.mark.parametrize(
    ("observation", "shown"),
    [
        (Observation(1.0, ()), ("running", None, None)),
        (Observation(1.0, (), ended=Ending.EXITED), ("ended", None, None)),
        (Observation(1.0, (), (Finding("rank_crashed", "Rank 0 crashed."),)), ("running", None, None)),
        (
            Observation(1.0, (), (Finding("x", "x"), Finding("unknown_from_here", "Who knows?"))),
            ("running", None, "Who knows?"),
        ),
    ],
)
def test_a_run_that_is_under_way_is_looked_at(
    tmp_path: Path, observation: Observation, shown: tuple[str, str | None, str | None]
) -> None:
    assert state_of(a_row(tmp_path), FakeEngine([observation])) == shown


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (UnreachableError("No answer."), ("running", None, "No answer.")),
        (UsageError("Not now."), ("unknown", None, "Not now.")),
        (OSError("the disk"), ("unknown", None, "the disk")),
        (DamagedArchive("/runs/x", "result.json", "it was changed"), ("damaged", None, "result.json: it was changed")),
        (DamagedArchive("/runs/x", "", "it cannot be read"), ("damaged", None, "it cannot be read")),
    ],
)
def test_a_run_that_gives_no_answer_says_why(
    tmp_path: Path, error: Any, shown: tuple[str, str | None, str | None]
) -> None:
    engine = FakeEngine()
    engine.error = error
    assert state_of(a_row(tmp_path), engine) == shown


def test_a_cluster_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    silent, other = FakeEngine(), FakeEngine()
    silent.error = UnreachableError("No answer.")
    asked: list[str] = []

    def engine_of(run: Run) -> FakeEngine:
        asked.append(run.spec.cluster)
        return silent if run.spec.cluster == "far" else other

    near = RunSpec("y-1", "near", "kubernetes", "custom", "custom", ("true",), "gloo", 1)
    rows = [a_row(tmp_path), a_row(tmp_path), a_row(tmp_path, spec=near)]
    assert [status.problem for status in read_states(rows, engine_of)] == ["No answer.", "No answer.", None]
    assert asked == ["far", "near"]


# --- a live run ------------------------------------------------------------------------------------------------------


def test_a_live_run_as_a_document(tmp_path: Path) -> None:
    worker = WorkerState(0, "running", node="n1", started=MOMENT + 10)
    finding = Finding("log_gap", "A gap.")
    engine = FakeEngine([Observation(MOMENT + 40, (worker,), (finding,), first_failed=3)])
    events = [
        {"event": "phase", "phase": "training", "epoch": 2, "epochs": 4},
        {"event": "metric", "name": "val_global_Prec@1", "value": 90.0},
        {"event": "metric", "name": "val_global_Prec@1", "value": 80.0},
    ]
    engine.lines[0] = [
        format_event({"v": 1, "rank": 0, "time": MOMENT + 20 + number, **event}).encode() + b"\n"
        for number, event in enumerate(events)
    ]
    document = live_snapshot(a_row(tmp_path), engine)
    progress = document.pop("progress")
    assert (progress["elapsed"], progress["phase"], progress["epoch"], progress["value"]) == (30.0, "training", 2, 80.0)
    assert document == described(
        tmp_path,
        ended=None,
        first_failed=3,
        ranks=[worker.to_dict()],
        metrics={"val_global_Prec@1": 80.0},
        goal={
            "metric": "Prec@1",
            "comparison": ">=",
            "threshold": 98.0,
            "value": 80.0,
            "best": 90.0,
            "distance": 8.0,
        },
        findings=[finding.to_dict()],
    )


def test_a_live_run_without_goal_or_workers(tmp_path: Path) -> None:
    plain = RunSpec("y-1", "far", "kubernetes", "custom", "custom", ("true",), "gloo", 1)
    document = live_snapshot(a_row(tmp_path, spec=plain), FakeEngine([Observation(MOMENT + 5, (), ended=Ending.LOST)]))
    assert (document["state"], document["ended"], document["goal"]) == ("ended", "lost", None)
    assert document["progress"]["elapsed"] == 5.0


# --- a finished run --------------------------------------------------------------------------------------------------

RESULT: dict[str, Any] = {
    "ended": "exited",
    "first_failed": None,
    "worker_states": ({"rank": 0},),
    "progress": {"phase": "finished", "epoch": 3, "epochs": 3, "step": 5, "other": 1},
    "wall_seconds": 12.5,
    "metrics": {"loss": 0.5},
    "goal": {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "value": 85.0, "last": 70.0},
    "conditions": {"labels": ["shared"], "shared": {"reason": "of another run"}},
    "network": None,
}


def finished(
    folder: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome = Outcome.GOAL_REACHED, **changes: Any
) -> dict[str, Any]:
    row = a_row(folder)
    found = FinishedRun(
        row.run, outcome, "It is done.", (Finding("x", "y"),), cast("ResultDocument", {**RESULT, **changes})
    )
    monkeypatch.setattr(snapshot, "read_finished", lambda run: found)
    document = finished_snapshot(row)
    assert document is not None
    return document


def test_a_finished_run_as_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finished(tmp_path, monkeypatch) == described(
        tmp_path,
        state="finished",
        outcome="goal_reached",
        summary="It is done.",
        ended="exited",
        first_failed=None,
        ranks=[{"rank": 0}],
        progress={
            "phase": "finished",
            "epoch": 3,
            "epochs": 3,
            "step": 5,
            "steps": None,
            "elapsed": 12.5,
            "eta": None,
            "eta_high": None,
        },
        metrics={"loss": 0.5},
        goal={
            "metric": "Prec@1",
            "comparison": ">=",
            "threshold": 80.0,
            "value": 85.0,
            "best": 85.0,
            "distance": 0.0,
        },
        conditions=["shared: of another run"],
        measured_network=None,
        findings=[Finding("x", "y").to_dict()],
    )


def test_of_a_spent_budget_the_value_at_the_end_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goal = finished(tmp_path, monkeypatch, Outcome.BUDGET_SPENT)["goal"]
    assert (goal["value"], goal["best"], goal["distance"]) == (70.0, 85.0, 0.0)


def test_a_finished_run_that_reported_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = finished(tmp_path, monkeypatch, Outcome.FAILED, goal=None, progress=None, wall_seconds=None)
    assert (document["goal"], document["progress"]["phase"], document["progress"]["elapsed"]) == (None, None, 0.0)
    none = {**RESULT["goal"], "value": None, "last": None}
    assert finished(tmp_path, monkeypatch, Outcome.FAILED, goal=none)["goal"]["distance"] is None


def test_a_run_without_an_archive_has_no_finished_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = a_row(tmp_path)
    assert finished_snapshot(row) is None
    unsealed = FinishedRun(row.run, Outcome.FAILED, "x", (), None)
    monkeypatch.setattr(snapshot, "read_finished", lambda run: unsealed)
    assert finished_snapshot(row) is None


# --- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "phrases"),
    [
        (None, []),
        ([], []),
        ({"labels": None}, []),
        (
            {"labels": ["slow_network", "crowded"], "crowded": {"reason": "4 threads for 2 ranks"}},
            ["slow-network", "crowded: 4 threads for 2 ranks"],
        ),
        ({"labels": ["shared"], "shared": {"reason": ""}}, ["shared"]),
        ({"labels": ["shared"], "shared": "of another"}, ["shared"]),
    ],
)
def test_conditions_in_words(document: object, phrases: list[str]) -> None:
    assert list(condition_phrases(document)) == phrases


def test_the_measured_network_in_words() -> None:
    network = {
        "asked": "1gbit",
        "method": "netem",
        "networks": 1,
        "together_bits_per_second": 9.4e8,
        "alone_bits_per_second": None,
        "rtt_seconds": None,
        "held": True,
        "problems": [],
    }
    found = run_conditions({"network": network})
    assert found == {"conditions": [], "measured_network": "emulated 1gbit (got 940 Mbit/s)"}


@pytest.mark.parametrize(
    ("metrics", "value"),
    [
        ({"Prec@1": 1.0, "val_global_Prec@1": 2.0, "val_Prec@1": 3.0, "train_Prec@1": 4.0}, 1.0),
        ({"val_global_Prec@1": 2.0, "val_Prec@1": 3.0, "train_Prec@1": 4.0}, 2.0),
        ({"val_Prec@1": 3.0, "train_Prec@1": 4.0}, 3.0),
        ({"train_Prec@1": 4.0}, 4.0),
        ({"Prec@5": 4.0}, None),
    ],
)
def test_a_metric_is_found_by_its_plain_name(metrics: dict[str, float], value: float | None) -> None:
    assert find_metric(metrics, "Prec@1") == value
