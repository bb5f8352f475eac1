"""What is decided about a run, and what is said of its progress: pure functions of exit codes and events."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbench_cli import model
from mlbench_cli.commands._report import to_go
from mlbench_cli.engines.base import Cursor, Engine, Fetched, LogLine, Submission
from mlbench_cli.errors import NotFoundError
from mlbench_cli.model import Finding, Observation, Run, WorkerState
from mlbench_cli.runs.progress import EventReader, Goal, Tracker, goal_of
from mlbench_cli.runs.supervise import Outcome, decide, exit_code_of
from mlbench_cli.spec import RunSpec
from task_images.contract import format_event

SPEC = RunSpec("r-2", "local", "local", "custom", "custom", ("prog",), "gloo", 2)
REACHED = {
    "outcome": "goal_reached",
    "goal": {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "kind": "full", "value": 81.5},
}


def ended(how: str, *codes: int | None, findings: tuple[Finding, ...] = (), started: float | None = 1.0) -> Observation:
    workers = tuple(WorkerState(rank, "succeeded", exit_code=code, started=started) for rank, code in enumerate(codes))
    return Observation(10.0, workers, findings, how)


def result(**goal: Any) -> dict[str, Any]:
    return {"outcome": "goal_reached", "goal": {**REACHED["goal"], **goal}}  # type: ignore[dict-item]


PERMANENT = Finding("image_not_found", "The image does not exist.", permanent=True)
FULL = Finding("disk_full", "The disk is full.")


@pytest.mark.parametrize(
    ("seen", "event", "word"),
    [
        (ended("exited", 0, 0), None, "completed"),
        (ended("exited", 0, 0), {"outcome": "completed"}, "completed"),
        (ended("exited", 0, 0), {"outcome": "goal_missed"}, "goal_missed"),
        (ended("exited", 0, 0), REACHED, "goal_reached"),
        (ended("exited", 0, 0), {"outcome": "splendid"}, "completed"),
        (ended("exited", 0, 0), {"outcome": ["goal_reached"]}, "completed"),
        (ended("exited", 0, 0), {"outcome": "budget_spent"}, "budget_spent"),
        (ended("exited", 0, 1), {"outcome": "budget_spent"}, "failed"),
        (ended("exited", 0, 0), result(value=79.9), "goal_missed"),
        (ended("exited", 0, 0), result(value="nan"), "goal_missed"),
        (ended("exited", 0, 0), result(value=None), "goal_missed"),
        (ended("exited", 0, 0), result(comparison="<=", value=81.5), "goal_missed"),
        (ended("exited", 0, 1), REACHED, "failed"),
        (ended("exited", 0, None), REACHED, "failed"),
        (ended("exited", 0), REACHED, "failed"),
        (ended("exited", 0, 0, findings=(FULL,)), REACHED, "failed"),
        (ended("failed", 0, 0), REACHED, "failed"),
        (ended("failed", 3, 143), None, "failed"),
        (ended("cancelled", 143, 143), None, "cancelled"),
        (ended("cancelled", None, None, findings=(PERMANENT,), started=None), None, "never_started"),
        (ended("cancelled", 143, 143, findings=(PERMANENT,)), None, "cancelled"),
        (ended("cancelled", None, None, started=None), None, "cancelled"),
        (ended("client_lost", 137, 137), REACHED, "cancelled"),
        (ended("deadline", 143, 143), REACHED, "deadline"),
        (ended("never_started"), None, "never_started"),
        (ended("lost", 0, 0), REACHED, "lost"),
    ],
)
def test_the_outcome_follows_from_exit_codes_before_anything_else(
    seen: Observation, event: dict[str, Any] | None, word: str
) -> None:
    assert decide(SPEC, seen, event) == word


@given(
    st.sampled_from(["exited", "failed", "cancelled", "deadline", "client_lost", "never_started", "lost"]),
    st.lists(st.one_of(st.none(), st.integers(0, 255)), min_size=0, max_size=4),
    st.sampled_from([None, REACHED, {"outcome": "goal_missed"}, {"outcome": "completed"}]),
)
def test_success_needs_the_exit_code_0_of_every_rank(
    how: str, codes: list[int | None], event: dict[str, Any] | None
) -> None:
    word = decide(SPEC, ended(how, *codes), event)
    assert word in [*model.Outcome]
    if word in ("goal_reached", "goal_missed", "completed"):
        assert how == "exited"
        assert codes
        assert set(codes) == {0}
        assert len(codes) >= SPEC.workers


def test_a_run_that_goes_on_has_no_outcome() -> None:
    with pytest.raises(ValueError, match="not ended"):
        decide(SPEC, Observation(1.0, ()), None)


@pytest.mark.parametrize(
    ("word", "code", "strict"),
    [
        ("goal_reached", 0, 0),
        ("completed", 0, 0),
        ("goal_missed", 0, 7),
        ("budget_spent", 0, 7),
        ("failed", 7, 7),
        ("cancelled", 7, 7),
        ("lost", 7, 7),
        ("never_started", 6, 6),
        ("deadline", 124, 124),
    ],
)
def test_exit_codes(word: str, code: int, strict: int) -> None:
    assert exit_code_of(word) == code
    assert exit_code_of(word, require_goal=True) == strict
    outcome = Outcome(word, code, "", (), ended("exited"))
    assert exit_code_of(outcome) == code
    unsealed = exit_code_of(replace(outcome, sealed=False))
    assert unsealed == (8 if code == 0 else code)


# --- progress -----------------------------------------------------------------------------------------------------

ACCURACY = Goal("Prec@1", ">=", 80.0)
RUNNING = Observation(100.0, (WorkerState(0, "running", started=40.0),))


def event(kind: str, time: float, rank: int = 0, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "event": kind, "rank": rank, "time": time, **fields}


def track(*events: dict[str, Any], goal: Goal | None = ACCURACY) -> Tracker:
    tracker = Tracker(goal)
    for one in events:
        tracker.take(one)
    return tracker


def test_progress_knows_the_last_of_everything() -> None:
    progress = track(
        event("phase", 41, phase="loading"),
        event("phase", 50, phase="training", epoch=1, epochs=10),
        event("metric", 55, name="train_loss", value=2.5),
        event("metric", 59, name="val_global_loss", value=9.0),
        event("metric", 60, name="val_global_Prec@1", value=55.0),
        event("metric", 70, name="val_global_Prec@1", value=50.0),
        event("phase", 71, phase="training", epoch=2, epochs=10, step=3, steps=4),
    ).progress(RUNNING, created=1.0)
    assert (progress.phase, progress.epoch, progress.epochs, progress.step, progress.steps) == ("training", 2, 10, 3, 4)
    assert (progress.loss, progress.metric, progress.value, progress.best) == (2.5, "Prec@1", 50.0, 55.0)
    assert (progress.comparison, progress.threshold, progress.elapsed) == (">=", 80.0, 60.0)


def test_eta_is_the_earlier_of_trend_and_epochs() -> None:
    begun = event("phase", 0, phase="training", epoch=1, epochs=10)
    half = event("phase", 50, phase="training", epoch=6, epochs=10, step=0, steps=10)
    assert track(begun, half).progress(RUNNING, 0.0).eta == 50.0
    rising = [event("metric", 10 + at, name="val_Prec@1", value=50.0 + at) for at in (0, 10, 20)]
    assert track(*rising).progress(RUNNING, 0.0).eta == 10.0
    assert track(begun, *rising, half).progress(RUNNING, 0.0).eta == 10.0
    falling = [event("metric", 10 + at, name="val_Prec@1", value=50.0 - at) for at in (0, 10)]
    assert track(*falling).progress(RUNNING, 0.0).eta is None
    assert track(begun, *falling, half).progress(RUNNING, 0.0).eta == 50.0
    assert track().progress(RUNNING, 0.0).eta is None
    assert track(begun, half).progress(replace(RUNNING, ended="exited"), 0.0).eta is None


def test_a_flattening_curve_takes_longer_than_its_last_slope_says() -> None:
    # 80 - 60 exp(-t / 50): the distance to a goal of 75 falls from 55 by an exponential whose end is known exactly.
    values = [event("metric", at, name="val_Prec@1", value=80 - 60 * math.exp(-at / 50)) for at in range(0, 80, 10)]
    progress = track(*values, goal=Goal("Prec@1", ">=", 75.0)).progress(RUNNING, 0.0)
    truth = 50 * math.log(60 / 5) - 70
    assert progress.eta is not None
    assert progress.eta_high is not None
    assert progress.eta < truth
    assert progress.eta_high == pytest.approx(truth, rel=0.1)
    # A goal above where it flattens out: only the last epoch bounds it.
    high = Goal("Prec@1", ">=", 81.0)
    assert track(*values, goal=high).progress(RUNNING, 0.0).eta_high is None
    begun, half = (event("phase", at, phase="training", epoch=1 + at // 14, epochs=10) for at in (0, 70))
    bounded = track(begun, *values, half, goal=high).progress(RUNNING, 0.0)
    assert bounded.eta is not None
    assert bounded.eta < 70 == bounded.eta_high


def test_under_a_budget_the_budget_is_what_is_left() -> None:
    events = [event("phase", 10, phase="training", epoch=1), event("metric", 30, name="val_Prec@1", value=79.0)]
    spec = replace(SPEC, task="digits_resnet", parameters={"budget_seconds": 60.0, "goal_full": 80.0})
    tracker = Tracker.of(spec)
    for one in events:
        tracker.take(one)
    progress = tracker.progress(RUNNING, 0.0)
    assert (progress.eta, progress.eta_high) == (40.0, 40.0)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (None, None, None),
        (40.0, 45.0, "40.0 s to go"),
        (40.0, 180.0, "40.0 s to 3 min to go"),
        (40.0, None, "40.0 s or more to go"),
        (0.0, 0.0, "0 ms to go"),
    ],
)
def test_what_is_left_in_words(low: float | None, high: float | None, words: str | None) -> None:
    assert to_go(low, high) == words


def test_a_goal_may_come_from_the_task_itself() -> None:
    goal = {"metric": "Perplexity", "comparison": "<=", "threshold": 70, "value": 90}
    tracker = track(event("phase", 1, phase="training", goal=goal), goal=None)
    tracker.take(event("metric", 2, name="val_global_Perplexity", value=75))
    progress = tracker.progress(RUNNING, 0.0)
    assert (progress.metric, progress.threshold, progress.value, progress.best) == ("Perplexity", 70, 75, 75)
    assert progress.eta is not None
    assert round(progress.eta, 2) == round(5 / 15, 1)


def test_results_count_from_rank_0_only() -> None:
    tracker = track(event("result", 1, rank=1, outcome="goal_reached"), event("result", 2, outcome="goal_missed"))
    assert tracker.result
    assert tracker.result["outcome"] == "goal_missed"


def test_elapsed_ends_with_the_run_and_begins_with_the_first_worker() -> None:
    done = WorkerState(0, "succeeded", exit_code=0, started=40.0, finished=45.0)
    assert track().progress(Observation(100.0, (done,), ended="exited"), created=1.0).elapsed == 5.0
    assert track().progress(Observation(100.0, (WorkerState(0),)), created=30.0).elapsed == 70.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(["Prec@1", "train_loss", ">=", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["metric", "comparison", "threshold", "value"]), inner)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(["name", "value", "phase", "epoch", "epochs", "step", "steps", "goal", "outcome"])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["metric", "phase", "result"]), st.floats(0, 1e9), st.dictionaries(FIELDS, JSON)),
        max_size=8,
    )
)
def test_no_event_of_a_task_can_break_the_tracker(events: list[tuple[str, float, dict[str, Any]]]) -> None:
    tracker = track(*(event(kind, time, **fields) for kind, time, fields in events))
    progress = tracker.progress(RUNNING, 0.0)
    assert progress.eta is None or progress.eta >= 0


def test_the_goal_of_a_custom_command_is_not_looked_for() -> None:
    assert goal_of(SPEC) is None
    assert goal_of(replace(SPEC, task="of-another-version", parameters={"goal_full": 80.0})) is None


# --- reading events through an engine -------------------------------------------------------------------------------


class Shelf:
    """An engine that has logs and nothing else; `broken` as when a cluster does not answer."""

    dies_with_client = False

    def __init__(self) -> None:
        self.lines: dict[int, list[bytes]] = {0: [], 1: []}
        self.broken = False

    def logs(self, run: Run, rank: int, since: Cursor | None = None, follow: bool = False) -> Iterator[LogLine]:
        for number, text in enumerate(self.lines[rank]):
            if number >= (since.offset if since else 0):
                if self.broken:
                    raise NotFoundError("The pod is gone.")
                yield LogLine(rank, text, Cursor(number + 1))

    def render(self, spec: RunSpec) -> Submission:
        raise NotImplementedError

    def submit(self, run: Run, submission: Submission, *, detach: bool = False) -> None:
        raise NotImplementedError

    def observe(self, run: Run) -> Iterator[Observation]:
        raise NotImplementedError

    def fetch(self, run: Run) -> Fetched:
        raise NotImplementedError

    def cancel(self, run: Run) -> None:
        raise NotImplementedError

    def delete(self, run: Run, *, force: bool = False) -> None:
        raise NotImplementedError


def test_events_are_read_once_and_in_order_however_often_the_log_fails() -> None:
    shelf = Shelf()
    engine: Engine = shelf
    reader = EventReader(engine, Run("id", SPEC, Path("/nowhere"), "2026-01-01T00:00:00Z"), ranks=(0, 1))
    lines = [format_event(event("metric", at, name="loss", value=at)).encode() + b"\n" for at in range(4)]
    shelf.lines[0] = [b"hello\n", lines[0], b"\xff\n"]
    shelf.lines[1] = [lines[1]]
    assert [one["value"] for one in reader.poll()] == [0, 1]
    shelf.lines[0].append(b"50%\r" + lines[2])
    shelf.broken = True
    assert reader.poll() == []
    shelf.broken = False
    shelf.lines[0].append(lines[3])
    assert [one["value"] for one in reader.poll()] == [2, 3]
    assert reader.poll() == []
