"""The result event as a whole document, and which rank says what."""

import platform
import socket
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from task_images.harness import report as module
from task_images.harness.goals import GoalWatch, make_accuracy_goal
from task_images.harness.identity import DataIdentity
from task_images.harness.report import Reporter
from task_images.harness.tracker import Snapshot, Tracker

SECONDS = {"forward": 2.0, "other": 1.0}


class Rank:
    """One of two ranks."""

    size, backend, threads = 2, "gloo", 4

    def __init__(self, rank: int = 0, facts: dict[str, object] | None = None, backend: str = "gloo") -> None:
        self.rank, self.facts, self.backend = rank, facts or {}, backend
        self.contract = SimpleNamespace(first_rank=rank + 10, seed=7)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values), [2 * value for value in values]]

    def backend_facts(self) -> dict[str, object]:
        return self.facts

    def framework_facts(self) -> dict[str, Any]:
        return {"framework": "none", "device": "cpu"}


def make(monkeypatch: pytest.MonkeyPatch, world: Rank, **more: Any) -> tuple[Reporter, list[Any]]:
    events: list[Any] = []
    monkeypatch.setattr(module, "emit", lambda event, rank, **fields: events.append((event, rank, fields)))
    monkeypatch.setattr(module, "gather_timings", lambda world, end: {"wall": end.wall})
    return Reporter(world, "some data", **more), events  # type: ignore[arg-type]


def make_tracker(wall: float = 9.0) -> Any:
    snapshot = Snapshot(SECONDS, wall, 4.0, 20, 640, 3)
    return SimpleNamespace(snapshot=lambda: snapshot, timeline=SimpleNamespace(to_dict=lambda: None))


RESULT: dict[str, Any] = {
    "outcome": "completed",
    "goal": None,
    "budget_seconds": None,
    "wall_seconds": 9.0,
    "training_seconds": 4.0,
    "timings": {"wall": 9.0},
    "updates": 20,
    "samples": 640,
    "epochs": 3,
    "synthetic": False,
    "data": "some data",
    "data_identity": DataIdentity().to_dict(),
    "details": {},
}


def test_a_result_without_a_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    report, events = make(monkeypatch, Rank(), synthetic=True)
    report.result(make_tracker())
    assert events == [("result", 0, {**RESULT, "synthetic": True})]
    report, events = make(monkeypatch, Rank(1))
    report.result(make_tracker())
    assert events == []


def test_a_result_ends_at_the_given_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    report, events = make(monkeypatch, Rank())
    report.result(make_tracker(), end=Snapshot(SECONDS, 5.0, 2.0, 10, 320, 1), details={"own": 1})
    assert events[0][2] == {
        **RESULT,
        "wall_seconds": 5.0,
        "training_seconds": 2.0,
        "updates": 10,
        "samples": 320,
        "epochs": 1,
        "timings": {"wall": 5.0},
        "details": {"own": 1},
    }


def watch(reached: bool) -> GoalWatch:
    goal = make_accuracy_goal(80.0, 70.0, "validation", "full")
    early = SimpleNamespace(snapshot=lambda: Snapshot({"forward": 1.0}, 3.0, 1.5, 5, 160, 1))
    late = SimpleNamespace(snapshot=lambda: Snapshot({"forward": 2.0}, 6.0, 3.0, 10, 320, 2))
    goal.observe(72.0, 1, early)  # type: ignore[arg-type]
    goal.observe(85.0 if reached else 71.0, 2, late)  # type: ignore[arg-type]
    return goal


LIGHT = {
    "threshold": 70.0,
    "value": 72.0,
    "epoch": 1,
    "wall_seconds": 3.0,
    "training_seconds": 1.5,
    "updates": 5,
    "samples": 160,
    "seconds": {"forward": 1.0},
}
FULL = {
    "threshold": 80.0,
    "value": 85.0,
    "epoch": 2,
    "wall_seconds": 6.0,
    "training_seconds": 3.0,
    "updates": 10,
    "samples": 320,
    "seconds": {"forward": 2.0},
}


def test_a_reached_goal_stops_the_clock_and_keeps_both_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    report, events = make(monkeypatch, Rank())
    report.result(make_tracker(), watch(reached=True), end=make_tracker(8.0).snapshot())
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "kind": "full", "value": 85.0, "last": 85.0}
    assert events[0][2] == {
        **RESULT,
        "outcome": "goal_reached",
        "goal": goal,
        "wall_seconds": 6.0,
        "training_seconds": 3.0,
        "updates": 10,
        "samples": 320,
        "epochs": 2,
        "timings": {"wall": 6.0},
        "details": {"goals": {"light": LIGHT, "full": FULL}},
    }


def test_a_missed_goal_tells_the_best_value_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    report, events = make(monkeypatch, Rank())
    report.result(make_tracker(), watch(reached=False))
    found = events[0][2]
    assert (found["outcome"], found["wall_seconds"]) == ("goal_missed", 9.0)
    assert (found["goal"]["value"], found["goal"]["last"]) == (72.0, 71.0)
    assert found["details"] == {"goals": {"light": LIGHT}}


def test_a_spent_budget_counts_to_its_end_whatever_became_of_the_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    report, events = make(monkeypatch, Rank())
    report.result(make_tracker(), watch(reached=True), spent=60.0)
    found = events[0][2]
    assert (found["outcome"], found["budget_seconds"], found["wall_seconds"]) == ("budget_spent", 60.0, 9.0)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_every_rank_of_nccl_says_over_what_it_communicates(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    facts: dict[str, object] = {"network": "IB"}
    for rank in (0, 1):
        report, events = make(monkeypatch, Rank(rank, facts, backend))
        report.result(make_tracker())
        own = [("environment", rank + 10, {"nccl": facts})] if backend == "nccl" else []
        assert events[: len(own)] == own
        results = events[len(own) :]
        assert [event for event, _, _ in results] == (["result"] if rank == 0 else [])
        assert all(fields["details"] == {"backend": facts} for _, _, fields in results)


def test_a_timeline_is_a_part_of_the_details(monkeypatch: pytest.MonkeyPatch) -> None:
    report, events = make(monkeypatch, Rank())
    tracker = make_tracker()
    tracker.timeline.to_dict = lambda: {"spans": []}
    report.result(tracker)
    assert events[0][2]["details"] == {"timeline": {"spans": []}}


def test_only_rank_0_reports_metrics_phases_and_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        report, events = make(monkeypatch, Rank(rank))
        report.phase("validation", epoch=2)
        report.metric("loss", 0.5, step=3)
        report.say("a line")
        expected = [
            ("phase", 0, {"phase": "validation", "epoch": 2}),
            ("metric", 0, {"name": "loss", "value": 0.5, "step": 3}),
        ]
        assert events == (expected if rank == 0 else [])
        assert capsys.readouterr().out == ("a line\n" if rank == 0 else "")


def test_progress_is_reported_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    report, events = make(monkeypatch, Rank())
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for step, moment in enumerate((100.0, 100.9, 101.0, 101.5, 102.0), 1):
        now[0] = moment
        report.step(step, 5, epoch=1)
    assert events == [("phase", 0, {"phase": "training", "step": step, "steps": 5, "epoch": 1}) for step in (1, 3, 5)]
    other, silent = make(monkeypatch, Rank(1))
    other.step(1, 5)
    assert silent == []


def test_the_environment_is_each_ranks_and_code_that_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "machine_facts", lambda: {"cpu": "fast"})
    monkeypatch.setattr(module, "code_facts", lambda: {"code_digest": "abc"})
    monkeypatch.setattr(platform, "python_version", lambda: "3.11")
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    for rank in (0, 1):
        report, events = make(monkeypatch, Rank(rank))
        report.environment(tf32=True)
        [(event, first_rank, fields)] = events
        assert (event, first_rank) == ("environment", rank + 10)
        assert fields == {
            "framework": "none",
            "device": "cpu",
            "python": "3.11",
            "host": "here",
            "threads": 4,
            "backend": "gloo",
            "world_size": 2,
            "seed": 7,
            "cpu": "fast",
            "tf32": True,
            **({"code_digest": "abc"} if rank == 0 else {}),
        }


@pytest.mark.parametrize(
    ("reason", "synthetic", "said"),
    [(None, False, ""), ("other data", False, "data: other data\n"), ("made up", True, "")],
)
def test_why_data_are_not_official_is_said_unless_they_are_made_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: str | None, synthetic: bool, said: str
) -> None:
    report, events = make(monkeypatch, Rank(), synthetic=synthetic)
    identity = DataIdentity({"training": 5}, None, False, reason)
    report.data_identity(identity)
    assert capsys.readouterr().out == said
    report.result(make_tracker())
    assert events[0][2]["data_identity"] == identity.to_dict()


# --- goals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("goal_on", "metric"), [("validation", "Prec@1"), ("training", "train_Prec@1")])
def test_accuracy_is_that_of_the_samples_that_the_parameter_names(goal_on: str, metric: str) -> None:
    goal = make_accuracy_goal(80.0, 70.0, goal_on, "light")
    assert (goal.metric, goal.comparison, goal.threshold) == (metric, ">=", 70.0)
    assert goal.thresholds == {"full": 80.0, "light": 70.0}


def test_a_resumed_goal_keeps_only_passages_of_its_own_thresholds() -> None:
    state = watch(reached=True).state_dict()
    same = make_accuracy_goal(80.0, 70.0, "validation", "full")
    same.load_state_dict(state)
    assert same.state_dict() == state
    assert same.reached
    harder = make_accuracy_goal(90.0, 72.0, "validation", "full")
    harder.load_state_dict(state)
    assert (harder.reached, list(harder.passages), harder.best, harder.last) == (False, ["light"], 85.0, 85.0)
    lower = GoalWatch("loss", "<=", 72.0, 100.0, "full")
    lower.load_state_dict(state)
    assert list(lower.passages) == ["light"]  # 85 is above 72; 72 is below 100
    assert not lower.observe(72.1, 1, Tracker())
    assert lower.observe(72.0, 1, Tracker())
